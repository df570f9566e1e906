"""SlotIndex against a list that is searched from end to end, and the budget of segments."""

from __future__ import annotations

import random

import pytest

from kvstore.tiers.nvme_index import Entry, SlotIndex, name_of
from kvstore.tiers.segments import (
    Segment,
    SegmentName,
    SegmentSpace,
    parse_name,
    segment_cost_bytes,
    slot_bytes_for,
)
from seams.blockdevice import MemoryBlockDevice

SIZES = (8192, 12288)


def identity(number: int) -> bytes:
    return number.to_bytes(16, "little") + bytes(8)


class NaiveIndex:
    """number -> [parent, slot size, last use]; the same rules, every time from scratch."""

    def __init__(self) -> None:
        self.records: dict[int, list[int]] = {}
        self.uses = 0

    def touch(self, number: int) -> None:
        self.uses += 1
        self.records[number][2] = self.uses

    def remove(self, number: int) -> None:
        parent, _, used = self.records.pop(number)
        if parent in self.records:
            self.records[parent][2] = max(self.records[parent][2], used)

    def oldest(self, size: int, spared: int) -> set[int]:
        """More than one only where a parent is as old as a child that left."""
        parents = {parent for parent, _, _ in self.records.values()}
        leaves = {
            number: used
            for number, (_, its_size, used) in self.records.items()
            if its_size == size and number not in parents and number != spared
        }
        least = min(leaves.values(), default=0)
        return {number for number, used in leaves.items() if used == least}


@pytest.mark.parametrize("seed", range(5))
def test_eviction_order_is_that_of_a_naive_list(seed: int) -> None:
    rng = random.Random(seed)
    index, naive = SlotIndex(), NaiveIndex()
    entries: dict[int, Entry] = {}
    segments = {size: Segment(i, size, 10**6, MemoryBlockDevice(1)) for i, size in enumerate(SIZES)}
    parent_of = {n: rng.randrange(n) if n and rng.random() < 0.8 else 1000 + n for n in range(60)}
    for slot in range(4000):
        number = rng.randrange(60)
        match rng.randrange(4):
            case 0 | 1 if number not in entries:
                size = SIZES[number % 7 == 0]
                name = name_of(identity(number), parent_of[number].to_bytes(16, "little"), b"")
                entry = Entry(name, segments[size], slot, slot)
                entries[number] = entry
                index.insert(entry)
                naive.records[number] = [parent_of[number], size, 0]
                naive.touch(number)
            case 0 | 1:
                index.touch(entries[number])
                naive.touch(number)
            case 2 if number in entries and rng.random() < 0.3:
                index.remove(entries.pop(number))
                naive.remove(number)
            case _:
                size = rng.choice(SIZES)
                found = index.oldest(size, identity(number))
                expected = {identity(n) for n in naive.oldest(size, number)}
                assert (found.id if found else None) in (expected or {None})
                if found is not None and len(entries) > 30:
                    gone = int.from_bytes(found.id[:16], "little")
                    index.remove(entries.pop(gone))
                    naive.remove(gone)
        if slot % 50 == 0:
            index.check_integrity()
    assert len(index) == len(entries) > 10


def test_segment_names_are_exact() -> None:
    name = str(SegmentName(12, 28672))
    assert parse_name(name) == (12, 28672)
    odd_sizes = (28673, 4096, "028672", 1 << 31)
    odd_names = [f"segment-000012-{size}" for size in odd_sizes]
    for odd in (name + "~", "x" + name, "segment-12-28672", "", *odd_names):
        assert parse_name(odd) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_is_never_overdrawn(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [slot_bytes_for(rng.randrange(1, 50_000)) for _ in range(3)]
    space = SegmentSpace(rng.randrange(200_000, 5_000_000), sizes)
    taken = []
    for _ in range(500):
        size = rng.choice(sizes)
        places = space.take(size, rng.randrange(1, 5))
        if not places:
            room = rng.choice([1 << 40, rng.randrange(-5000, 100_000)])
            plan = space.plan(size, room)
            assert plan is None or plan.cost_bytes <= room
            if plan is not None and rng.random() < 0.2:
                space.abandon(plan)
            elif plan is not None:
                space.add_planned(plan, MemoryBlockDevice(plan.slots * size))
        else:
            taken += places
            for place in places:
                space.unpin(*place)
        if taken and rng.random() < 0.3:
            space.give_up(*taken.pop(rng.randrange(len(taken))))
        if space.segments and rng.random() < 0.03:
            segment = rng.choice(list(space.segments.values()))
            taken = [place for place in taken if place[0] is not segment]
            assert space.retire(segment) is segment.device
            space.closed(segment)
        assert space.committed_bytes <= space.budget_bytes
        space.check_integrity(len(taken))
    assert space.has_room(sizes[0]) == (
        space.budget_bytes - space.committed_bytes >= segment_cost_bytes(1, sizes[0])
    )
