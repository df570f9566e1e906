"""What a replica is told and finds at start: configuration, secret, threads, address. No gRPC."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kernels.codecs.names import MODEL, OSCAR, parse_codec
from seams.errors import InvalidRequest
from worker.config import ReplicaConfig
from worker.engine.retention.options import EPICACHE, NONE, POLICIES, RESUME, Options

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
COLD_CODECS = ("none", "fp8", "turboquant4")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of a folder, a Redis key, an ACL
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
    check_retention(config.retention, tiered=bool(config.host_gib or config.nvme or config.redis))
    _check_tiers(config)


def check_retention(policy: str, *, tiered: bool = True) -> None:
    """Raise InvalidRequest for what is no retention policy, or one that keeps turns in tiers where
    there are none; the replica checks its options."""
    options = Options(policy or NONE)
    if options.name not in POLICIES:
        raise InvalidRequest(f"A retention policy is one of {', '.join(POLICIES)}.")
    if options.name == EPICACHE and not tiered:
        raise InvalidRequest(
            "epicache finds episodes in tiers, and there are none: --host-gib, --nvme or --redis."
        )
    if options.has(RESUME) and not tiered:
        raise InvalidRequest(
            f"{options.name}'s resume keeps turns in tiers, and there are none: --host-gib, --nvme "
            "or --redis."
        )


def _check_tiers(config: ReplicaConfig) -> None:
    for field in ("host_gib", "nvme_gib"):
        if not 0 <= getattr(config, field) < math.inf:  # nan too
            raise InvalidRequest(f"The replica's configuration needs {field} of at least 0.")
    if bool(config.nvme) != (config.nvme_gib > 0):
        raise InvalidRequest("The replica's configuration has one of nvme and nvme_gib alone.")
    if config.nvme and not _PLAIN_NAME.fullmatch(config.replica):
        raise InvalidRequest("With nvme the replica's name must be one that a folder can have.")
    if config.redis and not _PLAIN_NAME.fullmatch(config.namespace):
        raise InvalidRequest("With redis namespace must be letters, digits, '.', '_' and '-'.")
    if config.redis_ttl_s < 1:
        raise InvalidRequest("The replica's configuration needs redis_ttl_s of at least 1.")
    if (config.host_gib or config.nvme or config.redis) and not config.cache:
        raise InvalidRequest("Tiers keep what leaves the prefix cache, and cache is off.")
    check_cold_codec(config.cold_codec, batch_invariant=config.batch_invariant)
    check_kv_codec(config.kv_codec, config.cold_codec, batch_invariant=config.batch_invariant)
    check_oscar(config.kv_codec, config.calibration, config.retention)


def check_kv_codec(codec: str, cold_codec: str, *, batch_invariant: bool) -> None:
    """Raise InvalidRequest for a way to keep blocks on the device that is not to be had."""
    name = parse_codec(codec)
    if name is None:
        raise InvalidRequest(
            "The KV codec must be model, fp8, turboquant:kAvB (keys of 1, 2, 3, 4 or 8 bits, "
            "values of 1 to 4), which may be followed by ,boundary=N, or oscar, which may be "
            "followed by :sinks=N,window=N."
        )
    if codec == MODEL:
        return
    if batch_invariant and name.kind == OSCAR:
        raise InvalidRequest(
            f"The KV codec {codec} is computed by torch, whose batches can change a bit of an "
            "answer: not with batch-invariant serving."
        )
    if cold_codec != "none":
        raise InvalidRequest(
            f"With the KV codec {codec} blocks go to the tiers as they are: the cold codec must be "
            "none."
        )


def check_oscar(codec: str, calibration: str, retention: str) -> None:
    """Raise InvalidRequest if OSCAR is asked for without what it needs, or with what it excludes;
    `codec` is one that there is."""
    name = parse_codec(codec)
    if name is None or name.kind != OSCAR:
        return
    if not calibration:
        raise InvalidRequest(
            f"The KV codec {codec} needs a calibration of the model: make one with banyan "
            "calibrate and give it as calibration."
        )
    if retention not in ("", NONE):
        raise InvalidRequest(
            f"The KV codec {codec} keeps the newest tokens in a window, and retention moves tokens "
            "to other places: one of the two, not both."
        )


def check_cold_codec(codec: str, *, batch_invariant: bool) -> None:
    """Raise InvalidRequest for a way to write cold blocks that is not to be had."""
    if codec not in COLD_CODECS:
        raise InvalidRequest("The cold codec must be none, fp8 or turboquant4.")
    if codec != "none" and batch_invariant:
        raise InvalidRequest(
            f"The cold codec {codec} rounds what it stores, so a block that comes back changes "
            "bits of an answer: not with batch-invariant serving."
        )


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
