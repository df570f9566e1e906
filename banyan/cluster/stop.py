"""`down`: ends exactly what `up` started, checks that nothing is left, forgets the cluster."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from banyan.cluster import processes, ray_head, state
from banyan.cluster.spec import split_address
from banyan.cluster.state import ClusterRecord
from banyan.home import locked
from seams.errors import LaunchError

ROUTER_GRACE_S = 5.0
CACHE_GRACE_S = 5.0
FLEET_S_MAX = 60.0


def _silent(stage: str) -> None:
    """No report wanted."""


def down(
    name: str,
    *,
    drain: bool = True,
    everything: bool = False,
    report: Callable[[str], None] = _silent,
    waiting: Callable[[], None] | None = None,
) -> bool:
    """Stop cluster `name`; False if there was none. Safe to repeat.

    `drain` lets running requests finish first (at most 20 s). `everything` removes its secret and
    logs too. `waiting` is called if another command has the cluster in hand, as `up` does until it
    ends: then that comes first. Raises LaunchError if a process would not end.
    """
    path = state.folder(name)
    if not path.is_dir():
        return False
    with locked(path / "lock", waiting):
        record = state.load(name)
        if record is not None:
            if drain:
                report("draining replicas")
                _order_fleet(record, drain=True)
            report("stopping processes")
            clear(record, replicas_stopped=drain)
    if everything:
        state.remove(name, everything=True)
    return record is not None


def clear(record: ClusterRecord, *, replicas_stopped: bool = False) -> None:
    """End every process of `record` without draining, and forget the cluster."""
    state.save(replace(record, phase="stopping"))
    if record.ray is not None and record.ray.head is None and not replicas_stopped:
        _order_fleet(record, drain=False)
    left = [r.name for r in record.routers if not processes.stop(r.process, ROUTER_GRACE_S)]
    ray = record.ray
    if ray is not None and ray.head is not None and not ray_head.stop_head(ray):
        left.append("ray")
    if record.cache is not None and not processes.stop(record.cache, CACHE_GRACE_S):
        left.append("cache")
    if left:
        raise LaunchError(f"These processes would not end: {', '.join(left)}.")
    state.remove(record.name, everything=False)


def _answers(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=5.0).close()
    except OSError:
        return False
    return True


def _order_fleet(record: ClusterRecord, *, drain: bool) -> None:
    """Have the replicas' actors drained and ended through Ray, where Ray still answers."""
    ray = record.ray
    if ray is None or not ray.address or not _answers(ray.address):
        return
    order = {
        "address": ray.address,
        "namespace": ray.namespace,
        "replicas": list(record.replicas),
        "drain": drain,
    }
    try:
        subprocess.run(
            [sys.executable, "-m", "banyan.cluster.fleet", "stop"],
            input=json.dumps(order),
            text=True,
            capture_output=True,
            cwd="/",
            timeout=FLEET_S_MAX,
            env=ray_head.environment(ray),
        )
    except subprocess.TimeoutExpired:
        return  # the processes are ended next, whatever they were doing
