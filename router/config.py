"""What one router is told at start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RouterConfig:
    """One router. Addresses are host:port; port 0 means any free one.

    `listen` is for clients, `internal` for replicas, `http` for OpenAI's clients, `metrics` for
    Prometheus; the latter two are off while empty, the default. `api_keys` maps key -> tenant;
    empty means one tenant, "default", without keys. `ready_file` gets {"listen": ..., "internal":
    ..., "http": ..., "metrics": ..., "pid": ...} as JSON once all listen. `grace_s`: what running
    streams get to end in once the router is told to stop; those left are sent to another router.
    """

    router: str
    secret_file: str
    listen: str = "127.0.0.1:0"
    internal: str = "127.0.0.1:0"
    http: str = ""
    metrics: str = ""
    ready_file: str = ""
    api_keys: dict[str, str] = field(default_factory=dict)
    heartbeat_ms: int = 500
    lease_ms: int = 5000
    streams_max: int = 4096
    queue_wait_s_max: float = 30.0  # how long a request may wait for any replica to appear
    credit_tokens: int = 256
    decisions_kept: int = 4096
    grace_s: float = 20.0  # under the 30 s that Kubernetes gives by default
