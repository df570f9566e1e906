"""Blocks of one call that share a disk operation: how many operations, and what happens when one
fails, is cut short or holds a damaged record. Each block is still judged by itself."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_blocks import SIZES, SOON, block_bytes, block_name, open_tier

from kvstore.record import HEADER_BYTES
from kvstore.tiers.base import Status
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.nvme_index import Entry, record_id
from kvstore.tiers.segments import Plan, Segment, SegmentSpace, slot_bytes_for
from kvstore.tiers.slot_runs import RUN_BLOCKS_MAX, RUN_BYTES_MAX, Placed, runs
from seams.blockdevice import BlockDevice, MemoryBlockDevice
from seams.blockfolder import MemoryBlockFolder
from seams.clock import VirtualClock

NOWHERE = Path("unused")
BLOCKS = 160  # ten slots and more to a segment
SLOT_BYTES = slot_bytes_for(SIZES[0])
OK, MISS, FAILED, DROPPED = Status.OK, Status.MISS, Status.FAILED, Status.DROPPED


class SpottedDevice(MemoryBlockDevice):
    """Counts its operations; those that touch a bad spot fail, or reads end before it."""

    def __init__(self, size_bytes: int, folder: SpottedFolder) -> None:
        super().__init__(size_bytes)
        self.folder = folder

    def _strikes(self, kind: str, offset: int, length: int) -> int | None:
        """How far the operation gets, None: all the way."""
        self.folder.operations.append((kind, length))
        self.folder.gate(kind)
        touched = [bad for bad in self.folder.bad if offset <= bad < offset + length]
        if not touched or kind not in self.folder.kinds:
            return None
        if self.folder.error is not None:
            raise OSError(self.folder.error, os.strerror(self.folder.error))
        return min(touched) - offset

    def writev(self, offset: int, parts: Sequence[memoryview]) -> None:
        self._strikes("write", offset, sum(map(len, parts)))
        super().writev(offset, parts)

    def readv(self, offset: int, into: Sequence[memoryview]) -> int:
        end = self._strikes("read", offset, sum(map(len, into)))
        done = super().readv(offset, into)
        return done if end is None else min(done, end)


class SpottedFolder(MemoryBlockFolder):
    """Of devices with the same bad spots."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: set[int] = set()
        self.kinds: tuple[str, ...] = ("write", "read")
        self.error: int | None = errno.EIO
        self.operations: list[tuple[str, int]] = []
        self.reached, self.open_gate = threading.Event(), threading.Event()
        self.gated = ""

    def gate(self, kind: str) -> None:
        if kind == self.gated and not self.reached.is_set():
            self.reached.set()
            assert self.open_gate.wait(SOON)

    def create(self, name: str, size_bytes: int) -> BlockDevice:
        super().create(name, size_bytes)
        self.devices[name] = SpottedDevice(size_bytes, self)
        return self.devices[name]

    def count(self, kind: str) -> int:
        """Operations of a kind since the last time."""
        kinds = Counter(kind for kind, _ in self.operations)
        self.operations.clear()
        return kinds[kind]


class Opened:
    """A tier on such a folder."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.folder = SpottedFolder()
        self.clock = VirtualClock()
        self.tier: NvmeTier = open_tier(NOWHERE, blocks, folder=self.folder, clock=self.clock)

    def store(self, numbers: Sequence[int]) -> list[Status]:
        names = [block_name(number) for number in numbers]
        return self.tier.store(names, [memoryview(block_bytes(n)) for n in numbers], SOON)

    def load(self, numbers: Sequence[int]) -> list[Status]:
        """Every OK is held to the byte."""
        into = [bytearray(SIZES[block_name(number).group]) for number in numbers]
        names = [block_name(number) for number in numbers]
        statuses = self.tier.load(names, [memoryview(view) for view in into], SOON)
        for number, view, status in zip(numbers, into, statuses, strict=True):
            assert status is not OK or view == block_bytes(number), f"wrong bytes for {number}"
        return statuses

    def entry(self, number: int) -> Entry:
        entry = self.tier._index.get(record_id(block_name(number)))
        assert entry is not None
        return entry

    def spoil_slot(self, slot: int) -> None:
        """A bad spot in the middle of it, in every segment."""
        self.folder.bad = {slot * SLOT_BYTES + SLOT_BYTES // 2}


# ---- how many


@pytest.mark.parametrize("order", ["stored", "reversed", "shuffled"])
def test_neighbours_are_written_and_read_at_once(order: str) -> None:
    opened = Opened()
    assert opened.store(range(8)) == [OK] * 8
    assert opened.folder.count("write") == 1
    assert [opened.entry(number).slot for number in range(8)] == list(range(8))
    numbers = list(range(8))
    if order != "stored":
        numbers.reverse() if order == "reversed" else random.Random(3).shuffle(numbers)
    assert opened.load(numbers) == [OK] * 8
    assert opened.folder.count("read") == 1
    opened.tier.check_integrity()


def test_only_what_is_stored_and_side_by_side_shares() -> None:
    opened = Opened()
    opened.store(range(8))
    opened.folder.count("read")
    assert opened.load([0, 1, 99, 2, 5, 6]) == [OK, OK, MISS, OK, OK, OK]
    assert opened.folder.count("read") == 2
    assert opened.load([3, 3]) == [OK, OK]
    assert opened.folder.count("read") == 2


def test_blocks_that_do_not_fill_their_slots_go_alone() -> None:
    opened = Opened()
    assert SIZES[1] % HEADER_BYTES
    assert opened.store(range(32, 40)) == opened.load(range(32, 40)) == [OK] * 8
    assert opened.folder.operations.count(("read", HEADER_BYTES + SIZES[1])) == 8


def test_groups_in_turns_share_with_their_own() -> None:
    opened = Opened()
    numbers = [number for pair in zip(range(4), range(32, 36), strict=True) for number in pair]
    assert opened.store(numbers) == [OK] * 8
    assert opened.folder.count("write") == 1 + 4
    assert opened.load(numbers) == [OK] * 8
    assert opened.folder.count("read") == 1 + 4


def test_a_full_tier_still_shares() -> None:
    """A chain that was stored at once goes at once, and leaves its slots to the next one."""
    opened = Opened()
    for turn in range(40):
        opened.store(range(40 * turn, 40 * turn + 8))
    assert opened.tier.stats().evicted > 0
    opened.folder.count("write")
    opened.store(range(2000, 2008))
    assert opened.folder.count("write") <= 2
    opened.tier.check_integrity()


def test_a_name_twice_and_a_name_held() -> None:
    opened = Opened()
    opened.store([1])
    assert opened.store([0, 1, 2, 2, 0, 3]) == [OK] * 6
    assert opened.tier.stats().stored == 4
    assert opened.load(range(4)) == [OK] * 4
    opened.tier.check_integrity()


# ---- a write that fails


def test_a_failed_shared_write_is_judged_block_by_block() -> None:
    """Chains of one block: only the one on the bad spot fails."""
    opened = Opened()
    opened.spoil_slot(3)
    numbers = [0, 8, 16, 24, 40, 48, 56, 64]
    assert opened.store(numbers) == [OK] * 3 + [FAILED] + [OK] * 4
    assert opened.folder.count("write") == 1 + 8
    assert opened.load(numbers) == [OK] * 3 + [MISS] + [OK] * 4
    stats = opened.tier.stats()
    assert (stats.failed, stats.stored, stats.blocks, stats.state) == (1, 7, 7, "ok")
    opened.tier.check_integrity()


def test_children_of_a_failed_block_are_not_written() -> None:
    opened = Opened()
    opened.spoil_slot(3)
    assert opened.store([*range(6), 8, 9]) == [OK] * 3 + [FAILED] + [DROPPED] * 2 + [OK] * 2
    assert opened.folder.count("write") == 1 + 6
    assert opened.tier.stats().blocks == 5
    opened.tier.check_integrity()


def test_children_of_a_failed_block_in_the_next_run_are_not_written() -> None:
    """A call whose slots lie in two segments."""
    opened = Opened()
    slots = opened.tier._supply.space.plan(SLOT_BYTES, 1 << 30)
    assert slots is not None and slots.slots == 11
    opened.tier._supply.space.abandon(slots)
    assert opened.store(range(40, 48)) == [OK] * 8  # leaves three
    opened.folder.count("write")
    opened.spoil_slot(9)
    assert opened.store(range(8)) == [OK, FAILED] + [DROPPED] * 6
    assert opened.folder.count("write") == 1 + 2
    assert opened.tier.stats().blocks == 8 + 1
    opened.tier.check_integrity()


@pytest.mark.parametrize(("error", "state"), [(errno.ENOSPC, "full"), (errno.EROFS, "readonly")])
def test_a_refused_shared_write_ends_the_writing(error: int, state: str) -> None:
    opened = Opened()
    opened.spoil_slot(1)
    opened.folder.error = error
    numbers = [0, 8, 16, 24]
    assert opened.store(numbers) == [OK] + [DROPPED] * 3
    assert opened.folder.count("write") == 1 + 2, "nobody asks after a refusal"
    assert opened.tier.stats().state == state
    opened.folder.bad.clear()
    assert opened.store(numbers) == [OK] + [DROPPED] * 3
    opened.clock.advance(1.0)
    assert opened.store(numbers) == [OK] * 4
    opened.tier.check_integrity()


def test_a_disk_that_broke_is_tried_with_one_block() -> None:
    opened = Opened()
    opened.folder.bad = set(range(0, 1 << 20, 4096))
    assert opened.store([0, 8, 16, 24, 40]) == [FAILED] * 3 + [DROPPED] * 2
    opened.clock.advance(1.0)
    opened.folder.count("write")
    assert opened.store([0, 8, 16, 24, 40]) == [FAILED] + [DROPPED] * 4
    assert opened.folder.operations == [("write", SLOT_BYTES)]
    opened.tier.check_integrity()


# ---- a read that fails


@pytest.mark.parametrize("error", [errno.EIO, None], ids=["error", "short"])
def test_a_failed_shared_read_is_judged_block_by_block(error: int | None) -> None:
    opened = Opened()
    assert opened.store(range(8)) == [OK] * 8
    opened.spoil_slot(3)
    opened.folder.error = error
    bad = FAILED if error else Status.CORRUPT
    assert opened.load(range(8)) == [OK] * 3 + [bad] + [OK] * 4
    assert opened.folder.count("read") == 1 + 8
    assert opened.load(range(8)) == [OK] * 3 + [MISS] + [OK] * 4
    assert opened.tier.stats().corrupt == (Counter() if error else Counter(length=1))
    opened.tier.check_integrity()


def test_a_damaged_record_among_sound_ones() -> None:
    opened = Opened()
    opened.store(range(8))
    for number, at in ((2, 5), (5, HEADER_BYTES + 77)):
        entry = opened.entry(number)
        device = entry.segment.device
        assert isinstance(device, MemoryBlockDevice)
        device._bytes[entry.segment.offset(entry.slot) + at] ^= 1
    expected = [OK, OK, Status.CORRUPT, OK, OK, Status.CORRUPT, OK, OK]
    assert opened.load(range(8)) == expected
    assert opened.folder.count("read") == 1
    assert opened.tier.stats().corrupt == Counter(magic=1, payload=1)
    opened.tier.check_integrity()


# ---- slots in use


def test_all_slots_of_a_shared_read_are_kept_from_reuse() -> None:
    opened = Opened()
    first = range(8)
    opened.store(first)
    places = [(opened.entry(n).segment, opened.entry(n).slot) for n in first]
    opened.folder.gated = "read"
    loaded: list[Status] = []
    reader = threading.Thread(target=lambda: loaded.extend(opened.load(first)))
    reader.start()
    assert opened.folder.reached.wait(SOON)
    opened.tier.discard([block_name(number) for number in (1, 2)])  # erased under the reader
    for turn in range(1, 80):
        numbers = range(40 * turn, 40 * turn + 8)
        assert opened.store(numbers) == [OK] * 8
        for number in numbers:
            entry = opened.entry(number)
            assert (entry.segment, entry.slot) not in places
    assert opened.tier.stats().evicted > 300
    opened.folder.open_gate.set()
    reader.join()
    assert loaded == [OK, MISS, MISS, OK, OK, OK, OK, OK]
    opened.tier.check_integrity()


def test_cleared_under_a_shared_write() -> None:
    opened = Opened()
    opened.folder.gated = "write"
    stored: list[Status] = []
    writer = threading.Thread(target=lambda: stored.extend(opened.store(range(8))))
    writer.start()
    assert opened.folder.reached.wait(SOON)
    opened.tier.clear()
    opened.folder.open_gate.set()
    writer.join()
    assert stored == [DROPPED] * 8
    opened.tier.check_integrity()
    assert opened.store(range(8)) == opened.load(range(8)) == [OK] * 8


# ---- runs, and where slots come from


def test_runs_are_whole_ascending_and_bounded() -> None:
    device = MemoryBlockDevice(1)
    segments = [Segment(i, SLOT_BYTES, 64, device) for i in range(2)]
    rng = random.Random(9)
    for _ in range(200):
        places = [(segment, slot) for segment in segments for slot in range(64)]
        chosen = rng.sample(places, rng.randrange(1, 100))
        placed = [Placed(i, *place, rng.random() < 0.9) for i, place in enumerate(chosen)]
        made = runs(placed)
        assert sorted(block for run in made for block in run) == sorted(placed)
        firsts = [min(block.at for block in run) for run in made]
        assert firsts == sorted(firsts)
        for run in made:
            slots = [block.slot for block in run]
            assert slots == list(range(slots[0], slots[0] + len(run)))
            assert len({block.segment for block in run}) == 1 and len(run) <= RUN_BLOCKS_MAX
            assert len(run) == 1 or all(block.joins for block in run)
    large = Segment(2, RUN_BYTES_MAX // 2, 8, device)
    made = runs(Placed(i, large, i, True) for i in range(5))
    assert [len(run) for run in made] == [2, 2, 1]


def test_free_slots_are_taken_side_by_side() -> None:
    """With every second slot of one part free and a stretch of another, the stretch."""
    space = SegmentSpace(1 << 30, [SLOT_BYTES])
    segment = space.add_planned(Plan(0, SLOT_BYTES, 64), MemoryBlockDevice(64 * SLOT_BYTES))
    assert [slot for _, slot in space.take(SLOT_BYTES, 64)] == list(range(64))
    free = [*range(20, 25), *range(0, 20, 2), *range(40, 48)]
    random.Random(4).shuffle(free)
    for slot in range(64):
        space.unpin(segment, slot)
    for slot in free:
        space.give_up(segment, slot)
    assert [slot for _, slot in space.take(SLOT_BYTES, 5)] == list(range(20, 25))
    assert [slot for _, slot in space.take(SLOT_BYTES, 6)] == list(range(40, 46))
    rest = space.take(SLOT_BYTES, 64)
    assert sorted(slot for _, slot in rest) == [*range(0, 20, 2), 46, 47]
    assert space.take(SLOT_BYTES, 1) == []
