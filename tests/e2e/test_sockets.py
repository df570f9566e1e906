"""What the processes of a running cluster listen on: loopback only, and only what docs list."""

from __future__ import annotations

import pytest

from banyan.cluster import processes

pytestmark = pytest.mark.timeout(280)


def test_everything_listens_on_loopback(cluster) -> None:
    found = {}
    for leader in cluster.record.processes():
        for process in processes.members(leader):
            for connection in process.net_connections(kind="inet"):
                if connection.status == "LISTEN":
                    found[connection.laddr.port] = (connection.laddr.ip, leader.role)
    hosts = {ip.removeprefix("::ffff:") for ip, _ in found.values()}
    assert hosts == {"127.0.0.1"}
    for router in cluster.record.routers:
        ports = {port for port, (_, role) in found.items() if role == router.name}
        listed = {int(a.rpartition(":")[2]) for a in (router.listen, router.internal)}
        assert ports == listed
