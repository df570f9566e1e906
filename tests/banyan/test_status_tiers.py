"""What `banyan status` makes of tiers: rows for people, and a problem for each that is missing."""

from __future__ import annotations

from banyan.cli import clusters
from banyan.cluster.state import ClusterRecord
from banyan.v1 import api_pb2, common_pb2

HOST = common_pb2.TierLoad(
    tier="host", state="ok", blocks=3, bytes=3 << 20, bytes_max=64 << 20,
    logical_bytes=6 << 20, hit_tokens=480, load_bytes_per_s=5.5e9, dropped=2, failed=1,
    corrupt=[common_pb2.CorruptCount(cause="payload", records=4)],
)  # fmt: skip
SHARED = common_pb2.TierLoad(tier="shared", state="broken", hit_tokens=16)


def replica(name: str, *tiers: common_pb2.TierLoad) -> api_pb2.ReplicaState:
    return api_pb2.ReplicaState(replica=name, blocks_total=9, tiers=tiers)


def test_a_row_per_tier() -> None:
    host, shared = clusters._tier_rows(replica("r", HOST, SHARED))
    held = ["3.0 (6.0)", "64", 3]
    assert host == ["r", "host", "[green]ok", *held, 480, "5.50", "", "2+1", "4 payload"]
    assert shared == ["r", "shared", "[yellow]broken", "", "", "", 16, "", "", "0+0", "none"]


def test_a_tier_that_was_asked_for_and_is_not_there_is_a_problem() -> None:
    record = ClusterRecord("c", "m", "m", nvme="/disk", redis="embedded")
    starting = api_pb2.ReplicaState(replica="starting")  # has not reported yet
    found = {r.replica: r for r in (replica("a", HOST, SHARED), replica("b"), starting)}
    broken, *absent = clusters._missing_tiers(record, found)
    assert broken.startswith("a goes on without its shared tier: the server does not answer")
    assert absent == [
        "a runs without its disk tier: its log says why.",
        "b runs without its disk tier: its log says why.",
        "b runs without its shared tier: its log says why.",
    ]
    assert clusters._missing_tiers(ClusterRecord("c", "m", "m"), found) == []
