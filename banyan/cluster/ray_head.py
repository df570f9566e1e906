"""One Ray head of our own: lean, on loopback, with its own token; it knows nothing of replicas.

Ray's data never passes here: the head places, watches and restarts the replicas' processes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import banyan
from banyan.cluster import processes
from banyan.cluster.leftovers import remove_leftovers
from banyan.cluster.spec import cores
from banyan.cluster.state import RayRecord
from seams.errors import LaunchError

OBJECT_STORE_BYTES = 80 * 1024 * 1024
START_S_MAX = 60.0
STOP_GRACE_S = 4.0
TEMP_PARENT = Path("/tmp")  # short: Ray keeps unix sockets below it

# Off, the name notwithstanding, lets Ray bind and connect to loopback on Linux too.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",  # replicas outlive a dead head
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "10",
    "RAY_enable_worker_prestart": "0",  # idle Python workers nobody asked for
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
}


def environment(ray: RayRecord | None = None) -> dict[str, str]:
    """The variables of a process that imports our packages and, given `ray`, speaks to it."""
    env = dict(os.environ)
    roots = [str(Path(banyan.__file__).parent.parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(part for part in roots if part)
    if ray is None:
        return env
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
        env.pop(name, None)
    if ray.head is not None or ray.address.startswith(("127.", "localhost:")):
        env |= LOOPBACK
    if ray.token:
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray.token}
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_head(logs: Path, namespace: str) -> RayRecord:
    """Begin starting a head; returns at once. Its address is known when `wait_head` returns."""
    token = secrets.token_hex(32)
    remove_leftovers(TEMP_PARENT)
    temp_dir = tempfile.mkdtemp(prefix="banyan-", dir=TEMP_PARENT)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    command += ["--port=0", "--node-ip-address=127.0.0.1", f"--temp-dir={temp_dir}"]
    command += [f"--num-cpus={cores()}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    command += ["--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"]
    command += ["--disable-usage-stats", f"--ray-client-server-port={_free_port()}"]
    env = environment() | LOOPBACK | SETTINGS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    env.pop("RAY_ADDRESS", None)
    # No --block: that would end the replicas' node as soon as one of Ray's own processes dies.
    try:
        process = processes.start("ray", command, logs / "ray.log", env, daemon=True)
    except OSError:
        shutil.rmtree(temp_dir)
        raise
    return RayRecord("", namespace, token, temp_dir, process)


def wait_head(record: RayRecord) -> str:
    """The head's address once it answers. Raises LaunchError."""
    assert record.head is not None
    where = Path(record.temp_dir) / "ray_current_cluster"
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline:
        log = Path(record.head.log).read_text(errors="replace")
        if "Ray runtime started" in log and where.is_file():
            return where.read_text().strip()
        if not record.head.alive():
            reason = processes.last_line(record.head.log)
            raise LaunchError(f"Ray did not start: {reason or 'it said nothing'}")
        time.sleep(0.05)
    raise LaunchError(f"Ray did not start within {START_S_MAX:.0f} s.")


def stop_head(record: RayRecord) -> bool:
    """End the head with all that runs under it and remove its folder; True if nothing is left.

    Safe to repeat, and after parts of it were killed."""
    assert record.head is not None
    ended = processes.stop(record.head, STOP_GRACE_S)
    shutil.rmtree(record.temp_dir, ignore_errors=True)
    return ended
