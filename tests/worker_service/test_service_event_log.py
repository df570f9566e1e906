"""EventLog and Cursor: bounded, numbered, and a router's view that ends up equal to the truth."""

from __future__ import annotations

import hashlib
import random

import pytest

from banyan.v1 import internal_pb2
from kvstore.keys import KEY_BYTES
from seams.clock import VirtualClock
from seams.rng import SeededRng
from seams.transport import Faults, MemoryTransport
from worker.engine.messages import CacheOp, CacheOpKind
from worker.service.event_log import Cursor, EventLog, digest_of

GROUPS = 2


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[:KEY_BYTES]


def stored(*numbers: int, group: int = 0) -> CacheOp:
    return CacheOp(CacheOpKind.STORED, group, tuple(key(n) for n in numbers))


def removed(*numbers: int, group: int = 0) -> CacheOp:
    return CacheOp(CacheOpKind.REMOVED, group, tuple(key(n) for n in numbers))


def split_keys(op: internal_pb2.BlockOp) -> list[bytes]:
    assert len(op.keys) % KEY_BYTES == 0
    return [op.keys[i : i + KEY_BYTES] for i in range(0, len(op.keys), KEY_BYTES)]


class View:
    """What a router does with batches: apply in sequence, ask for a snapshot otherwise."""

    def __init__(self) -> None:
        self.held: list[set[bytes]] = [set() for _ in range(GROUPS)]
        self.building: list[set[bytes]] | None = None
        self.building_seq = -1
        self.seq: int | None = None

    def apply(self, batch: internal_pb2.EventBatch) -> bool:
        """True = wants a snapshot."""
        if batch.snapshot:
            return self._part(batch)
        if self.seq is None or batch.seq > self.seq + 1:
            self.seq = None
            return True
        if batch.seq <= self.seq:
            return False  # a duplicate
        self._ops(batch, self.held)
        self.seq = batch.seq
        return bool(batch.digest) and self._digest() != batch.digest

    def _part(self, batch: internal_pb2.EventBatch) -> bool:
        if self.seq is not None and batch.seq < self.seq:
            return False  # late
        if batch.seq != self.building_seq:
            self.building, self.building_seq = [set() for _ in range(GROUPS)], batch.seq
        assert self.building is not None
        self._ops(batch, self.building)
        if not batch.snapshot_last:
            return False
        self.held, self.building, self.building_seq = self.building, None, -1
        self.seq = batch.seq
        if self._digest() != batch.digest:  # a part was lost on the way
            self.seq = None
            return True
        return False

    def _ops(self, batch: internal_pb2.EventBatch, held: list[set[bytes]]) -> None:
        for op in batch.ops:
            keys = split_keys(op)
            if op.kind == internal_pb2.BlockOp.KIND_STORED:
                held[op.group].update(keys)
            else:
                held[op.group].difference_update(keys)

    def _digest(self) -> bytes:
        value = 0
        for held in self.held[0]:
            value ^= int.from_bytes(held, "little")
        return value.to_bytes(KEY_BYTES, "little")


class Truth:
    """A cache that changes at random; its ops are always true of it. Group 0 only: what the digest
    covers, and so what a lost part of a snapshot can be told from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: list[set[int]] = [set() for _ in range(GROUPS)]

    def change(self) -> list[CacheOp]:
        ops = []
        for _ in range(self.rng.randrange(1, 4)):
            group = 0
            numbers = {self.rng.randrange(400) for _ in range(self.rng.randrange(1, 12))}
            if self.rng.random() < 0.6:
                new = sorted(numbers - self.held[group])
                self.held[group].update(new)
                ops.append(stored(*new, group=group))
            else:
                gone = sorted(numbers & self.held[group])
                self.held[group].difference_update(gone)
                ops.append(removed(*gone, group=group))
        return ops

    def snapshot(self) -> list[CacheOp]:
        return [stored(*sorted(held), group=group) for group, held in enumerate(self.held)]

    def keys(self) -> list[set[bytes]]:
        return [{key(n) for n in held} for held in self.held]


def drain(cursor: Cursor) -> list[internal_pb2.EventBatch]:
    return list(iter(cursor.take, None))


def test_a_new_cursor_sends_nothing_before_its_snapshot() -> None:
    log = EventLog("r", 7)
    log.append([stored(1)])
    cursor = Cursor(log)
    assert cursor.wants_snapshot and cursor.take() is None
    cursor.begin([stored(1)])
    (part,) = drain(cursor)
    assert (part.replica, part.epoch, part.seq) == ("r", 7, 1)
    assert part.snapshot and part.snapshot_last and part.digest == log.digest == key(1)


def test_live_batches_follow_the_snapshot_without_gap_or_repeat() -> None:
    log = EventLog("r", 1)
    cursor = Cursor(log)
    log.append([stored(1)])
    cursor.begin([stored(1)])
    log.append([stored(2)])
    log.append([removed(1)])
    seqs = [(batch.snapshot, batch.seq) for batch in drain(cursor)]
    assert seqs == [(True, 1), (False, 2), (False, 3)]
    log.mark()
    (mark,) = drain(cursor)
    assert (mark.seq, mark.digest, len(mark.ops)) == (4, key(2), 0)


def test_an_empty_cache_still_sends_one_closed_snapshot() -> None:
    cursor = Cursor(EventLog("r", 1))
    cursor.begin([])
    (part,) = drain(cursor)
    assert part.snapshot_last and part.seq == 0 and part.digest == bytes(KEY_BYTES)


@pytest.mark.parametrize("keys_max", [1, 3, 16])
def test_parts_are_bounded_and_keep_order(keys_max: int) -> None:
    log = EventLog("r", 1, part_keys_max=keys_max)
    cursor = Cursor(log)
    ops = [stored(*range(10)), stored(*range(10, 17), group=1), stored(*range(17, 18))]
    cursor.begin(ops)
    parts = drain(cursor)
    sent = [k for part in parts for op in part.ops for k in split_keys(op)]
    assert sent == [key(n) for n in range(18)]
    assert all(sum(len(op.keys) for op in part.ops) <= keys_max * KEY_BYTES for part in parts)
    assert [part.snapshot_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.seq for part in parts} == {0}


def test_a_large_step_becomes_several_batches() -> None:
    log = EventLog("r", 1, part_keys_max=4)
    cursor = Cursor(log)
    cursor.begin([])
    log.append([stored(*range(10))])
    assert [batch.seq for batch in drain(cursor)] == [0, 1, 2, 3]


def test_a_cursor_that_falls_behind_starts_over() -> None:
    log = EventLog("r", 1, kept_keys_max=4)
    slow, quick = Cursor(log), Cursor(log)
    slow.begin([])
    quick.begin([])
    taken = drain(quick)
    for number in range(8):
        log.append([stored(number)])
        taken += drain(quick)
    assert [batch.seq for batch in taken] == list(range(9))
    first = slow.take()
    assert first is not None and first.snapshot
    assert slow.take() is None and slow.wants_snapshot
    slow.begin([stored(*range(8))])
    assert [(batch.seq, batch.snapshot) for batch in drain(slow)] == [(8, True)]


def test_what_is_kept_is_bounded() -> None:
    log = EventLog("r", 1, kept_keys_max=10)
    for number in range(100):
        log.append([stored(number)])
    assert log.seq - log.first_kept + 1 == 10


def test_a_wrong_digest_is_set_right_after_a_snapshot() -> None:
    log = EventLog("r", 1)
    log.append([stored(1, 2)])
    cursor = Cursor(log)
    cursor.begin([stored(1)])
    log.mark()
    assert [batch.digest for batch in drain(cursor)] == [key(1), b""]
    log.append([stored(3), removed(1)])
    assert log.digest == key(3) and log.digest_repairs == 1
    log.mark()
    assert drain(cursor)[-1].digest == key(3)


def test_a_snapshot_ahead_of_the_events_contradicts_nobody() -> None:
    """The engine may have changes that its next step's output will tell; followers of the events
    and of the snapshot must never see a digest that is wrong for them, and agree afterwards."""
    log = EventLog("r", 1)
    log.append([stored(1, 2)])
    follower, fresh = View(), View()
    old, new = Cursor(log), Cursor(log)
    old.begin([stored(1, 2)])
    new.begin([stored(2, 3)])  # 1 went, 3 came
    log.mark()
    log.append([removed(1), stored(3), stored(4)])
    log.mark()
    assert log.digest_repairs == 0
    assert [follower.apply(batch) for batch in drain(old)] == [False] * 4
    assert [fresh.apply(batch) for batch in drain(new)] == [False] * 4
    assert follower.held == fresh.held == [{key(2), key(3), key(4)}, set()]


def test_only_group_zero_enters_the_digest() -> None:
    assert digest_of([stored(1, group=1)]) == 0
    assert digest_of([stored(1), removed(1)]) == 0 != digest_of([stored(1)])


def test_equal_steps_append_nothing() -> None:
    log = EventLog("r", 1)
    log.append([stored()])
    log.append([])
    assert log.seq == 0


@pytest.mark.parametrize("seed", range(40))
def test_the_view_ends_up_true_over_a_lossy_transport(seed: int) -> None:
    """10 % loss, duplication and reordering; then quiet: equal within 2 s of virtual time."""
    rng, clock = random.Random(seed), VirtualClock()
    faults = Faults(loss=0.1, duplication=0.1, delay_s_max=0.2)
    network = MemoryTransport(clock, SeededRng(seed), faults)
    truth, view = Truth(rng), View()
    log = EventLog("r", 1, part_keys_max=16, kept_keys_max=200)
    cursor = Cursor(log)
    up, down = network.sender("replica"), network.sender("router")

    def at_router(_: str, payload: bytes) -> None:
        if view.apply(internal_pb2.EventBatch.FromString(payload)):
            down.send("replica", b"snapshot")

    network.bind("router", at_router)
    network.bind("replica", lambda *_: cursor.want_snapshot())

    def tick(live: bool) -> None:
        if live:
            log.append(truth.change())
        if rng.random() < 0.2:
            log.mark()
        if cursor.wants_snapshot:
            cursor.begin(truth.snapshot())
        for batch in drain(cursor):
            up.send("router", batch.SerializeToString())
        clock.advance(0.02)
        network.deliver()

    for _ in range(300):
        tick(live=True)
    network.faults = Faults()
    for _ in range(100):
        tick(live=False)
    assert view.seq is not None, f"seed {seed}"
    assert view.held == truth.keys(), f"seed {seed}"
    assert log.digest_repairs == 0, f"seed {seed}"
