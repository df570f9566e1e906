"""What the processes of a running cluster listen on: loopback only, and only what docs list."""

from __future__ import annotations

from pathlib import Path

import pytest

from banyan import Client
from banyan.cluster import processes

pytestmark = pytest.mark.timeout(280)
DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


def documented() -> set[str]:
    """The first column of the table of listening sockets, without those that no such cluster has:
    unix sockets (test_tiers_cluster.py) and the chart's own."""
    lines = DOCS.read_text().split("## Every listening socket", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1].strip() for line in lines.splitlines() if line.startswith("|")]
    return {cell.split(":")[0] for cell in cells[2:] if not cell.startswith("cache server")}


def listening(cluster) -> dict[int, tuple[str, str]]:
    """Port -> (address, role of the process group) of everything the cluster started."""
    found = {}
    for leader in cluster.record.processes():
        for process in processes.members(leader):
            for connection in process.net_connections(kind="inet"):
                if connection.status == "LISTEN":
                    found[connection.laddr.port] = (connection.laddr.ip, leader.role)
    return found


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_sockets_are_the_documented_ones(cluster) -> None:
    found = listening(cluster)
    assert {ip.removeprefix("::ffff:") for ip, _ in found.values()} == {"127.0.0.1"}
    kinds = {}
    for router in cluster.record.routers:
        kinds[port_of(router.listen)] = "router, `--listen`"
        kinds[port_of(router.internal)] = "router, `--internal`"
        kinds[port_of(router.http)] = "router, `--http`"
        kinds[port_of(router.metrics)] = "router, `--metrics`"
    with Client(cluster.record.addresses, timeout_s=30) as client:
        for replica in client.cluster_state().replicas:
            kinds[port_of(replica.address)] = "replica, `listen`"
    assert set(kinds) <= set(found)
    for port, (_, role) in found.items():
        if role == "ray":
            kinds.setdefault(port, "Ray head")
    assert set(found) == set(kinds), "something listens that no table lists"
    assert set(kinds.values()) == documented()
