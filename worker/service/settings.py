"""What a replica is told and finds at start: configuration, secret, threads, address. No gRPC."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from seams.errors import InvalidRequest
from worker.config import ReplicaConfig

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_EVERY_INTERFACE = ("0.0.0.0", "[::]", "::", "*", "")


def parse_config(values: Mapping[str, Any]) -> ReplicaConfig:
    """A checked ReplicaConfig from plain values (JSON, Ray). Raises InvalidRequest: one sentence
    that names the field."""
    unknown = sorted(set(values) - set(ReplicaConfig.__dataclass_fields__))
    if unknown:
        raise InvalidRequest(f"The replica's configuration has an unknown field {unknown[0]!r}.")
    try:
        config = TypeAdapter(ReplicaConfig).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "a field"
        message = f"The replica's configuration is wrong at {field}: {first['msg'].lower()}."
        raise InvalidRequest(message) from None
    _check(config)
    return config


def _check(config: ReplicaConfig) -> None:
    for field in ("replica", "model", "served_name", "secret_file"):
        if not getattr(config, field):
            raise InvalidRequest(f"The replica's configuration needs a value for {field}.")
    for field in ("block_tokens", "step_tokens_max", "running_max", "waiting_max"):
        if getattr(config, field) < 1:
            raise InvalidRequest(f"The replica's configuration needs {field} of at least 1.")
    for field in ("threads", "context_tokens", "speculate"):
        if getattr(config, field) < 0:
            raise InvalidRequest(f"The replica's configuration needs {field} of at least 0.")
    if not (config.decode_slowdown_max == 0 or config.decode_slowdown_max > 1):
        raise InvalidRequest(
            "The replica's configuration needs decode_slowdown_max of 0 or above 1."
        )
    addresses = (config.listen, *config.routers, *filter(None, [config.advertise]))
    for address in addresses:
        _, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise InvalidRequest("Every address of the replica's configuration is host:port.")
    if config.listen.rpartition(":")[0] in _EVERY_INTERFACE and not config.advertise:
        raise InvalidRequest("A replica that listens on all interfaces needs advertise.")


def advertised(config: ReplicaConfig, port: int) -> str:
    """Where routers reach a replica whose socket has `port`."""
    host, _, asked = (config.advertise or config.listen).rpartition(":")
    return f"{host}:{int(asked) or port}"


def thread_count(threads: int) -> int:
    """`threads`, or as many as this process may use for 0."""
    return threads or len(os.sched_getaffinity(0))


def set_thread_variables(threads: int) -> None:
    """For libraries that read them when loaded: call before torch is imported."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(thread_count(threads))
