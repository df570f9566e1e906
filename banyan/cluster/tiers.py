"""The tiers that `up` is asked for: checked before anything starts, and the shared one's server.

It knows options, files and one process; the tiers themselves are the replicas'.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import psutil

from banyan.cluster import processes, ray_head
from banyan.cluster.processes import Process
from banyan.cluster.spec import ClusterSpec
from banyan.home import write_private
from seams.errors import InvalidRequest, LaunchError
from seams.urls import FILE_MARK, has_password, port_is_valid, read_url, without_password
from worker.service.settings import check_cold_codec, check_kv_codec, check_oscar

EMBEDDED = "embedded"
URL_FILE = "redis"  # in the cluster's run folder: what replicas read the server's URL from
EMBEDDED_BYTES_MAX = 1 << 30
EMBEDDED_SHARE = 8  # of the memory available, at most one part in so many
SERVER_START_S_MAX = 20.0
SCHEMES = ("redis://", "rediss://", "unix://")


def check_tiers(spec: ClusterSpec) -> None:
    """Raise LaunchError for tiers that cannot be had, before anything is started."""
    for option, gib in (("--host-gib", spec.host_gib), ("--nvme-gib", spec.nvme_gib)):
        if not 0 <= gib < math.inf:  # nan too
            raise LaunchError(f"{option} must be at least 0.")
    if spec.nvme and not spec.nvme_gib:
        raise LaunchError("--nvme needs --nvme-gib: how much of the disk each replica may take.")
    if spec.nvme_gib and not spec.nvme:
        raise LaunchError("--nvme-gib needs --nvme: the directory to use.")
    if spec.nvme and Path(spec.nvme).expanduser().exists() and not _is_folder(spec.nvme):
        raise LaunchError(f"--nvme {spec.nvme} is no directory.")
    _check_memory(spec)
    _check_redis(spec)
    try:
        check_cold_codec(spec.cold_codec, batch_invariant=spec.batch_invariant)
    except InvalidRequest as error:
        raise LaunchError(f"--cold-codec: {error.message}") from None
    try:
        check_kv_codec(spec.kv_codec, spec.cold_codec, batch_invariant=spec.batch_invariant)
        check_oscar(spec.kv_codec, spec.calibration, spec.retention)
    except InvalidRequest as error:
        raise LaunchError(f"--kv-codec: {error.message}") from None


def _is_folder(path: str) -> bool:
    return Path(path).expanduser().is_dir()


def _check_memory(spec: ClusterSpec) -> None:
    available_gib = psutil.virtual_memory().available / 2**30
    if not spec.ray_address and spec.host_gib * spec.replicas > available_gib:
        raise LaunchError(
            f"--host-gib {spec.host_gib:g} for {spec.replicas} replicas is more than the "
            f"{available_gib:.1f} GiB of memory that this machine has left."
        )


def _check_redis(spec: ClusterSpec) -> None:
    if not spec.redis:
        return
    if spec.redis == EMBEDDED:
        if spec.ray_address:
            raise LaunchError(
                "--redis embedded serves this machine alone: with --ray-address say the URL of a "
                "server that every node reaches."
            )
        return
    url = read_url(spec.redis)
    if not url.startswith(SCHEMES):
        raise LaunchError(
            "--redis must be none, embedded, a redis://, rediss:// or unix:// URL, or @FILE with "
            "one in it."
        )
    if not port_is_valid(url):
        raise LaunchError("--redis: the URL's port must be a number from 1 to 65535.")


def refuse_password(url: str) -> None:
    """Raise LaunchError for a password among a command's arguments."""
    if not url.startswith(FILE_MARK) and has_password(url):
        raise LaunchError(
            "A password in --redis can be read by every user of this machine: put the URL in a "
            "file of mode 0600 and say --redis @FILE."
        )


def nvme_directory(spec: ClusterSpec) -> str:
    """Where replicas, which run elsewhere, find it; "" if none was asked for."""
    return str(Path(spec.nvme).expanduser().absolute()) if spec.nvme else ""


def shown_redis(spec: ClusterSpec) -> str:
    """What may be written and told of the shared tier's server."""
    plain = spec.redis in ("", EMBEDDED)
    return spec.redis if plain else without_password(read_url(spec.redis))


def redis_reference(spec: ClusterSpec, run: Path) -> str:
    """What replicas are told: a file that only this user reads, for the URL may hold a password."""
    return f"@{run / URL_FILE}" if spec.redis else ""


def begin_server(spec: ClusterSpec, run: Path, logs: Path) -> Process | None:
    """Write the URL for the replicas, or begin the server that will; None if it is not ours."""
    where = run / URL_FILE
    where.unlink(missing_ok=True)
    if spec.redis != EMBEDDED:
        if spec.redis:
            write_private(where, read_url(spec.redis) + "\n")
        return None
    size = min(EMBEDDED_BYTES_MAX, psutil.virtual_memory().available // EMBEDDED_SHARE)
    command = [sys.executable, "-m", "banyan.cluster.cache_server", str(where), str(size)]
    return processes.start("cache", command, logs / "cache.log", ray_head.environment())


def wait_server(server: Process | None, run: Path) -> None:
    """Return once the server answers. Raises LaunchError."""
    deadline = time.monotonic() + SERVER_START_S_MAX
    while server is not None and not (run / URL_FILE).is_file():
        if not server.alive():
            reason = processes.last_line(server.log) or "it said nothing"
            raise LaunchError(f"The cache server did not start: {reason}")
        if time.monotonic() > deadline:
            raise LaunchError(f"The cache server did not start within {SERVER_START_S_MAX:.0f} s.")
        time.sleep(0.02)
