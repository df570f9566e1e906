"""What `banyan up` is asked for, checked before anything starts. It knows no process."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seams.errors import InvalidRequest, LaunchError
from worker.service.settings import check_retention

DEFAULT_LISTEN = "127.0.0.1:7600"


@dataclass(frozen=True)
class ClusterSpec:
    """One cluster to start. `listen` is the first router's; further ones take the next ports, or
    any free one for port 0; `http` and `metrics` as well. `ray_address` joins a running Ray cluster
    instead of starting one."""

    model: str
    name: str = "default"
    replicas: int = 1
    routers: int = 1
    listen: str = DEFAULT_LISTEN
    http: str = ""  # HOST:PORT, or a port of the loopback; "" = none
    metrics: str = ""  # as well
    device: str = "auto"
    dtype: str = "auto"
    compute: str = "auto"
    batch_invariant: bool = False
    pool_gib: float | None = None
    context_tokens: int = 0
    speculate: int = 0  # EngineConfig.speculate
    ray_address: str = ""
    timeout_s: float = 300.0
    api_keys: dict[str, str] = field(default_factory=dict)  # key -> tenant; empty: no keys
    adapters: tuple[str, ...] = ()  # NAME=FOLDER each; clients ask for MODEL:NAME
    host_gib: float = 0.0  # per replica, as the next
    nvme: str = ""  # a directory; each replica takes a folder in it
    nvme_gib: float = 0.0
    redis: str = ""  # "" = none, "embedded" = a server of the cluster's own, a URL, or @FILE
    cold_codec: str = "none"
    kv_codec: str = "model"
    retention: str = ""  # ReplicaConfig.retention
    calibration: str = ""  # a file; every replica's machine has it there


def read_api_keys(path: Path) -> dict[str, str]:
    """A JSON object of keys and their tenants. Raises LaunchError."""
    try:
        keys = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LaunchError(f"The file of API keys {path} cannot be read as JSON.") from error
    if not isinstance(keys, dict) or not all(isinstance(v, str) and v for v in keys.values()):
        raise LaunchError(f"The file of API keys {path} is no object of keys and tenant names.")
    if not keys or not all(keys):
        raise LaunchError(f"The file of API keys {path} has no key, or an empty one.")
    return keys


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT, taken apart. Raises LaunchError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise LaunchError(f"{address} is no HOST:PORT.")
    return host.strip("[]"), int(port)


def router_addresses(spec: ClusterSpec) -> list[str]:
    """Where each router will listen. Raises LaunchError if a fixed port is not free."""
    return _free_addresses(spec.listen, spec.routers)


def http_addresses(spec: ClusterSpec, listens: list[str]) -> list[str]:
    """Where each router will answer OpenAI clients, "" for nowhere; `listens` are taken. Raises
    LaunchError."""
    return _optional_addresses(spec, "http", spec.http, {"listen": listens})


def metrics_addresses(spec: ClusterSpec, listens: list[str], web: Sequence[str] = ()) -> list[str]:
    """Where each router will answer Prometheus, "" for nowhere; `listens` and `web` (for HTTP) are
    taken. Raises LaunchError."""
    return _optional_addresses(spec, "metrics", spec.metrics, {"listen": listens, "http": web})


def _optional_addresses(
    spec: ClusterSpec, option: str, wanted: str, taken: Mapping[str, Sequence[str]]
) -> list[str]:
    if not wanted:
        return [""] * spec.routers
    first = f"127.0.0.1:{wanted}" if wanted.isdecimal() else wanted
    try:
        addresses = _free_addresses(first, spec.routers)
    except LaunchError as error:
        raise LaunchError(f"--{option} {wanted}: {error.message}") from error
    for other, others in taken.items():
        both = [a for a in addresses if a in others and split_address(a)[1]]
        if both:
            raise LaunchError(f"--{option} and --{other} both need {both[0]}.")
    return addresses


def _free_addresses(first: str, count: int) -> list[str]:
    host, port = split_address(first)
    addresses = [f"{host}:{port + i if port else 0}" for i in range(count)]
    for address in addresses:
        _check_free(address)
    return addresses


def _check_free(address: str) -> None:
    host, port = split_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        reason = "is in use already" if error.errno == 98 else "is not an address of this machine"
        raise LaunchError(f"Cannot listen on {address}: it {reason}.") from error


def adapter_folders(adapters: tuple[str, ...]) -> tuple[str, ...]:
    """NAME=FOLDER texts with whole paths: replicas run elsewhere. Raises LaunchError."""
    found = []
    for text in adapters:
        name, equals, given = text.partition("=")
        folder = Path(given).expanduser()
        if not (name and equals and given):
            raise LaunchError(f"--adapter {text} is no NAME=FOLDER.")
        if not (folder / "adapter_config.json").is_file():
            raise LaunchError(f"--adapter {name}: {given} holds no adapter_config.json.")
        found.append(f"{name}={folder.resolve()}")
    return tuple(found)


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> int:
    """NVIDIA devices on this machine, counted without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return count if visible is None else min(count, len([v for v in visible.split(",") if v]))


def check(spec: ClusterSpec) -> None:
    """Raise LaunchError for what cannot work, before anything is started."""
    if not 1 <= spec.replicas <= 256:
        raise LaunchError("--replicas must be from 1 to 256.")
    if not 1 <= spec.routers <= 16:
        raise LaunchError("--routers must be from 1 to 16.")
    if spec.device not in ("auto", "cpu", "cuda"):
        raise LaunchError("--device must be auto, cpu or cuda.")
    if spec.dtype not in ("auto", "bf16", "fp16", "fp32"):
        raise LaunchError("--dtype must be auto, bf16, fp16 or fp32.")
    if spec.compute not in ("auto", "compiled", "torch"):
        raise LaunchError("--compute must be auto, compiled or torch.")
    if spec.pool_gib is not None and not 0 < spec.pool_gib < math.inf:
        raise LaunchError("--pool-gib must be more than 0.")
    adapter_folders(spec.adapters)
    if spec.context_tokens < 0:
        raise LaunchError("--context-tokens must not be negative.")
    if spec.speculate < 0:
        raise LaunchError("--speculate must not be negative.")
    try:
        check_retention(spec.retention, tiered=bool(spec.host_gib or spec.nvme or spec.redis))
    except InvalidRequest as error:
        raise LaunchError(f"--retention: {error.message}") from None
    if spec.calibration and not Path(spec.calibration).is_file():
        raise LaunchError(f"--calibration: there is no file {spec.calibration}.")
    if not spec.timeout_s > 0:  # nan too; inf is no limit
        raise LaunchError("--timeout-s must be more than 0.")
    if uses_gpu(spec) and not spec.ray_address and spec.replicas > gpus():
        raise LaunchError(
            f"{spec.replicas} replicas need a GPU each and this machine has {gpus()}: "
            "ask for fewer, or for --device cpu."
        )


def uses_gpu(spec: ClusterSpec) -> bool:
    """True if replicas get one GPU each."""
    return spec.device == "cuda" or (spec.device == "auto" and gpus() > 0)
