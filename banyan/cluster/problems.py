"""What is wrong with a cluster's processes on this machine. It asks the system, no router."""

from __future__ import annotations

from contextlib import suppress

import psutil

from banyan.cluster import processes
from banyan.cluster.state import ClusterRecord, RayRecord

RAY_PROCESSES = {
    "gcs_server": "a replica that dies will not come back",
    "raylet": "the replicas die with it",
}


def problems(record: ClusterRecord) -> list[str]:
    """One sentence for each process that should run and does not; empty if all is well.

    Of a cluster that joined a foreign Ray only the routers are known here.
    """
    found = []
    if record.phase != "running" and not (record.launcher and record.launcher.alive()):
        found.append(
            f"The command that left it {record.phase} has ended: "
            f"`banyan down --name {record.name}` clears up."
        )
    for router in record.routers:
        if not router.process.alive():
            found.append(f"The process of {router.name} has ended.")
    if record.cache is not None and not record.cache.alive():
        found.append("The cache server has ended: the replicas go on without their shared tier.")
    if record.ray is not None and record.phase == "running":
        found += _of_ray(record.ray)
    return found


def _of_ray(ray: RayRecord) -> list[str]:
    if ray.head is None:
        return []
    names = set()
    for member in processes.members(ray.head):
        with suppress(psutil.NoSuchProcess):
            names.add(member.name())
    return [
        f"Ray's {name} has ended: {consequence}."
        for name, consequence in RAY_PROCESSES.items()
        if name not in names
    ]
