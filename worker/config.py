"""What one replica is told at start: plain values, so that Ray or a test can pass them on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvstore.groups import DEFAULT_BLOCK_TOKENS

REDIS_TTL_S = 24 * 3600


@dataclass(frozen=True)
class EngineConfig:
    """Limits of the engine. `blocks` per KV group; None fields are derived from the model."""

    blocks: tuple[int, ...]
    step_tokens_max: int = 512  # token budget of one step, decode first
    running_max: int = 64  # sequences with blocks at the same time
    decode_slowdown_max: float = 1.8  # of a step that decodes, by prompts in it; 0 = any
    waiting_max: int = 1024  # requests queued; more are Overloaded
    requests_max: int = 8192  # in all: those without credit do not queue, but take memory too
    cache: bool = True  # keep finished requests' blocks for others
    speculate: int = 0  # tokens guessed ahead of a sequence in a step, at most; 0 = none
    poison_freed: bool = False  # tests: fill freed blocks with what must never be read


@dataclass(frozen=True)
class ReplicaConfig:
    """One replica. Addresses are host:port; port 0 means any free one.

    `model` is a local folder, or fake:SHAPE for tests (worker/models/fake.py). `secret_file` holds
    the cluster secret (hex, mode 0600). `pool_gib` is KV memory over all groups; None = what the
    device has left after the weights, at most 1 GiB on CPU. `progress_file` is told, as a number
    from 0 to 1, how much of the model is loaded; nobody but a progress bar reads it.

    Tiers for KV that left the device: `host_gib` of host memory, `nvme_gib` of the disk in
    `nvme`/`replica`, and the Redis or Valkey server of the URL `redis` (@FILE: the URL is in that
    file), where a block vanishes `redis_ttl_s` seconds after it was stored. `namespace` keeps
    clusters apart that share a server. Tiers below host memory are reached through some of it:
    where `host_gib` is 0 as well, a little is taken all the same (worker/service/tiers.py).
    """

    replica: str
    model: str
    served_name: str
    routers: tuple[str, ...]  # internal addresses, or DNS names that resolve to all routers
    secret_file: str
    listen: str = "127.0.0.1:0"
    advertise: str = ""  # what routers dial, if not what is listened on
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # the checkpoint's (fp32 for torch on a CPU) | bf16 | fp16 | fp32
    compute: str = "auto"  # compiled on a CPU where that can be, else torch | compiled | torch
    threads: int = 0  # 0 = all cores
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    batch_invariant: bool = False  # refuse to serve where a batch could change a bit of an answer
    pool_gib: float | None = None
    context_tokens: int = 0  # 0 = the model's
    step_tokens_max: int = 512
    running_max: int = 64
    decode_slowdown_max: float = 1.8
    waiting_max: int = 1024
    cache: bool = True
    cache_domain: str = ""
    progress_file: str = ""
    speculate: int = 0  # tokens guessed ahead of a sequence in a step, at most; 0 = none
    adapters: tuple[str, ...] = ()  # NAME=FOLDER each: LoRA adapters, loaded at the start
    host_gib: float = 0.0  # 0 = none
    nvme: str = ""  # a directory; "" = none
    nvme_gib: float = 0.0
    redis: str = ""  # "" = none
    redis_ttl_s: int = REDIS_TTL_S
    cold_codec: str = "none"  # how blocks are written below the device: as they are
    kv_codec: str = "model"  # and on it: in the model's dtype (kernels/codecs/names.py)
    namespace: str = "default"
    retention: str = ""  # which tokens stay: a policy, "requests": what they ask for; "" = all stay
    calibration: str = ""  # a file of `banyan calibrate`, for policies and codecs that need one

    def as_dict(self) -> dict[str, Any]:
        """For `ReplicaConfig(**d)` on the other side."""
        return asdict(self)
