"""The order of block events: repetitions, gaps, epochs, snapshots, digests, bad batches."""

from __future__ import annotations

import pytest
from router_core_world import (
    BLOCK,
    MOVED,
    REMOVED,
    STORED,
    attach_ready,
    batch_of,
    hello_of,
    keys_of,
    new_core,
    op_of,
    prompt,
    request_of,
    snapshot_of,
    xor_of,
)

from banyan.v1 import internal_pb2
from router import events as events_module
from router.core import RouterCore
from router.index import prefix
from seams.clock import VirtualClock

KEYS = keys_of(prompt(1, 12))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def core(clock: VirtualClock) -> RouterCore:
    core = new_core(clock)
    attach_ready(core, "r1")
    return core


def held(core: RouterCore, replica: str = "r1") -> set[int]:
    return set(core.held_blocks(replica))


def names(keys: list[bytes]) -> set[int]:
    return {prefix(key) for key in keys}


def test_batches_in_order_are_applied(core: RouterCore) -> None:
    assert not core.events(batch_of("r1", 1, op_of(STORED, KEYS[:5])))
    assert not core.events(batch_of("r1", 2, op_of(REMOVED, KEYS[4:5]), op_of(STORED, KEYS[5:6])))
    assert held(core) == names(KEYS[:4] + KEYS[5:6])
    core.check_integrity()


def test_repeated_and_stale_batches_change_nothing(core: RouterCore) -> None:
    stored, removed = (
        batch_of("r1", 1, op_of(STORED, KEYS[:5])),
        batch_of("r1", 2, op_of(REMOVED, KEYS[3:5])),
    )
    core.events(stored)
    core.events(removed)
    assert not core.events(stored), "a replayed store"
    assert held(core) == names(KEYS[:3])
    core.events(batch_of("r1", 3, op_of(STORED, KEYS[3:5])))
    assert not core.events(removed), "a replayed removal"
    assert not core.events(batch_of("r1", 3, op_of(REMOVED, KEYS[:1]))), "the last number again"
    assert held(core) == names(KEYS[:5])
    counts = core.event_counts()
    assert (counts["applied"], counts["ignored"], counts["gaps"]) == (3, 3, 0)


def test_an_unknown_replica_or_a_later_epoch_has_to_send_a_snapshot(core: RouterCore) -> None:
    assert core.events(batch_of("r9", 1, op_of(STORED, KEYS)))
    assert core.events(batch_of("r1", 1, op_of(STORED, KEYS), epoch=2))
    assert held(core) == set(), "nothing of an epoch that is not attached is believed"


def test_an_older_epoch_is_ignored(core: RouterCore) -> None:
    core.attach(hello_of("r1", epoch=2))
    assert not core.events(batch_of("r1", 1, op_of(STORED, KEYS), epoch=1))
    assert not core.events(snapshot_of("r1", 5, KEYS, epoch=1))
    assert held(core) == set()


def test_a_replica_restarted_in_place_starts_from_sequence_zero(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, KEYS)))
    core.events(batch_of("r1", 2, op_of(STORED, keys_of(prompt(2, 3)))))
    assert core.attach(hello_of("r1", epoch=2)) == ["r1"]
    assert held(core) == set(), "ghosts of the old epoch"
    assert not core.events(snapshot_of("r1", 0, KEYS[:2], epoch=2))
    assert not core.events(batch_of("r1", 1, op_of(STORED, KEYS[2:4]), epoch=2))
    assert held(core) == names(KEYS[:4])
    core.check_integrity()


def test_a_live_batch_before_any_snapshot_asks_for_one_and_is_kept(clock: VirtualClock) -> None:
    core = new_core(clock)
    core.attach(hello_of("r1"))
    assert core.events(batch_of("r1", 8, op_of(REMOVED, KEYS[1:3])))
    assert held(core) == set()
    assert not core.events(snapshot_of("r1", 7, KEYS[:3]))
    assert held(core) == names(KEYS[:1])


def test_a_gap_asks_for_a_snapshot_and_what_follows_it_is_held_back(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:2])))
    assert core.events(batch_of("r1", 3, op_of(STORED, KEYS[4:5]))), "seq 2 is missing"
    assert not core.events(batch_of("r1", 4, op_of(REMOVED, KEYS[4:5]))), "asked already"
    assert held(core) == names(KEYS[:2]), "the old view serves meanwhile"
    assert not core.events(snapshot_of("r1", 3, KEYS[:5]))
    assert held(core) == names(KEYS[:4]), "batch 4 follows the snapshot, batch 3 is in it"
    assert not core.events(batch_of("r1", 5, op_of(STORED, KEYS[4:5])))
    assert held(core) == names(KEYS[:5])


def test_a_missing_batch_that_was_only_late_closes_the_gap(core: RouterCore) -> None:
    core.events(batch_of("r1", 3, op_of(REMOVED, KEYS[2:3])))
    core.events(batch_of("r1", 2, op_of(STORED, KEYS[2:3])))
    assert not core.events(batch_of("r1", 1, op_of(STORED, KEYS[:2])))
    assert held(core) == names(KEYS[:2])
    assert not core.events(batch_of("r1", 4, op_of(STORED, KEYS[2:3])))
    assert held(core) == names(KEYS[:3])


def test_a_lost_request_for_a_snapshot_is_repeated(core: RouterCore, clock: VirtualClock) -> None:
    assert core.events(batch_of("r1", 5))
    assert not core.events(batch_of("r1", 6))
    clock.advance(events_module.ASK_AGAIN_S)
    assert core.events(batch_of("r1", 7))


def test_a_snapshot_in_parts_takes_over_when_it_is_complete(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, keys_of(prompt(9, 4)))))
    before = held(core)
    core.events(batch_of("r1", 3, op_of(STORED, KEYS[6:7])))
    parts = [
        batch_of("r1", 2, op_of(STORED, KEYS[at : at + 2]), snapshot=True, last=at == 4)
        for at in (0, 2, 4)
    ]
    for part in parts[:2]:
        assert not core.events(part)
        assert held(core) == before
    assert not core.events(batch_of("r1", 4, op_of(REMOVED, KEYS[5:6])))
    assert not core.events(parts[2])
    assert held(core) == names(KEYS[:5] + KEYS[6:7])
    core.check_integrity()


def test_removals_replayed_after_a_snapshot_do_not_resurrect_or_kill(core: RouterCore) -> None:
    stored = batch_of("r1", 1, op_of(STORED, KEYS[:4]))
    removed = batch_of("r1", 2, op_of(REMOVED, KEYS[2:4]))
    core.events(stored)
    core.events(removed)
    core.events(batch_of("r1", 9))  # a gap
    assert not core.events(snapshot_of("r1", 9, KEYS[:3]))
    for replay in (stored, removed, batch_of("r1", 9, op_of(REMOVED, KEYS[:1]))):
        assert not core.events(replay)
    assert held(core) == names(KEYS[:3])


def test_the_last_part_sent_twice_does_not_replace_the_view(core: RouterCore) -> None:
    core.events(batch_of("r1", 5))
    last = batch_of("r1", 5, op_of(STORED, KEYS[2:4]), snapshot=True)
    core.events(batch_of("r1", 5, op_of(STORED, KEYS[:2]), snapshot=True, last=False))
    core.events(last)
    core.events(last)
    assert held(core) == names(KEYS[:4])


def test_an_older_snapshot_does_not_set_the_view_back(core: RouterCore) -> None:
    for seq in range(1, 5):
        core.events(batch_of("r1", seq, op_of(STORED, KEYS[seq : seq + 1])))
    assert not core.events(snapshot_of("r1", 2, KEYS[1:3]))
    assert held(core) == names(KEYS[1:5])


def test_a_newer_snapshot_restarts_one_that_broke_off(core: RouterCore) -> None:
    core.events(batch_of("r1", 4))
    core.events(batch_of("r1", 4, op_of(STORED, KEYS[:6]), snapshot=True, last=False))
    core.events(batch_of("r1", 6, op_of(STORED, KEYS[:1]), snapshot=True, last=False))
    core.events(batch_of("r1", 4, op_of(STORED, KEYS[6:8]), snapshot=True))  # of the first: late
    core.events(batch_of("r1", 6, op_of(STORED, KEYS[1:2]), snapshot=True))
    assert held(core) == names(KEYS[:2])
    core.check_integrity()


def test_a_wrong_digest_asks_for_a_snapshot_and_is_counted(core: RouterCore) -> None:
    assert not core.events(batch_of("r1", 1, op_of(STORED, KEYS[:3]), digest=xor_of(KEYS[:3])))
    assert core.events(batch_of("r1", 2, digest=xor_of(KEYS[:4])))
    assert core.event_counts()["digest_mismatches"] == 1
    assert not core.events(snapshot_of("r1", 2, KEYS[:4]))
    assert not core.events(batch_of("r1", 3, digest=xor_of(KEYS[:4])))
    assert held(core) == names(KEYS[:4])


def test_booked_blocks_are_not_in_the_digest(core: RouterCore) -> None:
    core.place(request_of("q1", prompt(1, 12)))
    assert held(core) == names(KEYS)
    assert not core.events(batch_of("r1", 1, digest=xor_of([])))
    assert not core.events(batch_of("r1", 2, op_of(STORED, KEYS[:3]), digest=xor_of(KEYS[:3])))


def test_a_lasting_difference_does_not_become_a_stream_of_snapshots(
    core: RouterCore, clock: VirtualClock
) -> None:
    asked = 0
    for seq in range(1, 601):  # a minute of digests that can never agree
        clock.advance(0.1)
        if core.events(batch_of("r1", seq, digest=b"\x01" * 16)):
            asked += 1
            core.events(batch_of("r1", seq, op_of(STORED, KEYS), snapshot=True, digest=b"\2" * 16))
        core.heartbeat("r1", 1, internal_pb2.Heartbeat())
    assert 4 <= asked <= 24, asked
    assert held(core) == names(KEYS), "in the end the replica's own word is taken"


def test_a_snapshot_that_lost_a_part_is_refused_by_its_digest(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:2])))
    core.events(batch_of("r1", 5))
    broken = batch_of("r1", 5, op_of(STORED, KEYS[3:6]), snapshot=True, digest=xor_of(KEYS[:6]))
    assert core.events(broken), "ask again"
    assert held(core) == names(KEYS[:2]), "the old view is better"
    whole = batch_of("r1", 5, op_of(STORED, KEYS[:6]), snapshot=True, digest=xor_of(KEYS[:6]))
    assert not core.events(whole)
    assert held(core) == names(KEYS[:6])


@pytest.mark.parametrize(
    "op",
    [
        internal_pb2.BlockOp(kind=STORED, keys=b"short"),
        internal_pb2.BlockOp(kind=STORED, group=16, keys=KEYS[0]),
        internal_pb2.BlockOp(kind=0, keys=KEYS[0]),
    ],
    ids=["cut keys", "group", "kind"],
)
def test_a_malformed_operation_is_left_out_and_costs_a_snapshot(
    core: RouterCore, op: internal_pb2.BlockOp
) -> None:
    assert core.events(batch_of("r1", 1, op_of(STORED, KEYS[1:2]), op))
    assert held(core) == names(KEYS[1:2])
    assert core.event_counts()["malformed_ops"] == 1
    core.check_integrity()


def test_an_unknown_tier_touches_no_other_replica(core: RouterCore) -> None:
    attach_ready(core, "r2")
    op = internal_pb2.BlockOp(kind=STORED, keys=KEYS[0])
    wire = op.SerializeToString() + b"\x10\x06"  # tier = 6, as a later version might send
    assert core.events(batch_of("r1", 1, internal_pb2.BlockOp.FromString(wire)))
    assert held(core) == held(core, "r2") == set()


def test_what_is_held_back_is_bounded(core: RouterCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "HELD_BATCHES_MAX", 10)
    for seq in range(5, 105):
        core.events(batch_of("r1", seq, op_of(STORED, KEYS[:1])))
    core.events(snapshot_of("r1", 99, KEYS[:1]))
    assert not core.events(batch_of("r1", 105, op_of(STORED, KEYS[1:2]))), "95..104 were kept"
    assert held(core) == names(KEYS[:2])
    monkeypatch.setattr(events_module, "HELD_BYTES_MAX", 500)
    for seq in range(107, 207):
        core.events(batch_of("r1", seq, op_of(STORED, KEYS[2:12])))
    core.events(snapshot_of("r1", 150, KEYS[:2]))
    assert held(core) == names(KEYS[:2]), "151 was dropped: a gap again, not a wrong view"


def test_moved_blocks_change_tier(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:4])))
    core.events(batch_of("r1", 2, op_of(MOVED, KEYS[2:4], tier=internal_pb2.TIER_HOST)))
    assert {lanes for key, lanes in core.held_blocks("r1").items()} == {1, 2}
    assert core.preview(request_of("q", prompt(1, 4))).available_tokens == 4 * BLOCK - 1


def test_an_event_with_an_unknown_parent_is_not_a_root(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[5:9])))
    assert core.preview(request_of("q", prompt(1, 12))).available_tokens == 0
    assert core.preview(request_of("q", prompt(1, 12)[5 * BLOCK :])).available_tokens == 0
