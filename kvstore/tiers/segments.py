"""Segments: preallocated files of equal slots, and what all of them cost. It does no locking and
knows no records; only `make` and what `unpin` and `retire` hand back to be closed touch the disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.record import HEADER_BYTES, PAYLOAD_BYTES_MAX
from seams.blockdevice import PAGE_BYTES, BlockDevice

SEGMENT_BYTES_MAX = 256 << 20
SEGMENTS_MAX = 512
"""About as many files as one tier keeps open: above 128 GiB the segments get longer instead."""
_SLOTS_PER_MAP_PAGE = 128
_FREE_WINDOW = 8  # so many times the wanted slots are looked at for neighbours
_NAME = re.compile(r"segment-(\d{6,9})-(\d{4,10})")

assert HEADER_BYTES == PAGE_BYTES


def slot_bytes_for(block_bytes: int) -> int:
    """Header and payload, each in whole pages."""
    return HEADER_BYTES + -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def segment_cost_bytes(slots: int, slot_bytes: int) -> int:
    """What a segment takes at most: its slots and the file system's map of them, which grows as
    slots are written one by one."""
    return slots * slot_bytes + PAGE_BYTES * (1 + slots // _SLOTS_PER_MAP_PAGE)


class SegmentName(NamedTuple):
    """What a segment file's name says."""

    number: int
    slot_bytes: int

    def __str__(self) -> str:
        return f"segment-{self.number:06d}-{self.slot_bytes}"


def parse_name(name: str) -> SegmentName | None:
    """None for what is no segment of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    parsed = SegmentName(int(found[1]), int(found[2]))
    sound = HEADER_BYTES < parsed.slot_bytes <= slot_bytes_for(PAYLOAD_BYTES_MAX)
    sound = sound and parsed.slot_bytes % PAGE_BYTES == 0
    return parsed if sound and str(parsed) == name else None


class Segment:
    """One file. `pins` counts the reads and writes going on per slot; a slot given up while it is
    pinned is `leaving`: nobody can find it, and nobody may have it before the last pin goes.
    """

    def __init__(self, number: int, slot_bytes: int, slots: int, device: BlockDevice) -> None:
        assert slots > 0
        self.number = number
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.device = device
        self.pins: dict[int, int] = {}
        self.leaving: set[int] = set()
        self.used = 0  # slots that are not free
        self.retired = False

    @property
    def name(self) -> str:
        """Its file's."""
        return str(SegmentName(self.number, self.slot_bytes))

    @property
    def cost_bytes(self) -> int:
        """What it takes of the budget."""
        return segment_cost_bytes(self.slots, self.slot_bytes)

    def offset(self, slot: int) -> int:
        """Where a slot begins, in bytes."""
        assert 0 <= slot < self.slots
        return slot * self.slot_bytes


Place = tuple[Segment, int]
"""A slot."""


def _order(place: Place) -> tuple[int, int]:
    return place[0].number, place[1]


def _neighbours(places: list[Place]) -> list[list[Place]]:
    """Ascending places, cut where the next is not the neighbour of the one before."""
    cut: list[list[Place]] = []
    for segment, slot in places:
        if cut and cut[-1][-1] == (segment, slot - 1):
            cut[-1].append((segment, slot))
        else:
            cut.append([(segment, slot)])
    return cut


def _side_by_side(free: list[Place], count: int) -> list[Place]:
    """Take up to `count` places off `free`, ascending, in as few pieces as its end allows."""
    if count == 1:
        return [free.pop()] if free else []
    last = sorted(free[-count:], key=_order)
    if len(free) <= count or len(_neighbours(last)) == 1:
        del free[-count:]
        return last
    window = sorted(free[-_FREE_WINDOW * count :], key=_order)
    del free[-len(window) :]
    pieces, taken = sorted(_neighbours(window), key=len), list[Place]()
    while len(taken) < count:
        missing = count - len(taken)
        at = next((i for i, piece in enumerate(pieces) if len(piece) >= missing), -1)
        piece = pieces.pop(at)  # the shortest that is enough, else the longest
        taken += piece[:missing]
        if piece[missing:]:
            pieces.append(piece[missing:])
    free += sorted((place for piece in pieces for place in piece), key=_order, reverse=True)
    return sorted(taken, key=_order)


class Plan(NamedTuple):
    """A segment to be made, its cost already taken from the budget."""

    number: int
    slot_bytes: int
    slots: int

    @property
    def name(self) -> str:
        """Of the file to be made."""
        return str(SegmentName(self.number, self.slot_bytes))

    @property
    def cost_bytes(self) -> int:
        """What it will take of the budget."""
        return segment_cost_bytes(self.slots, self.slot_bytes)


class SegmentSpace:
    """All segments of a tier: which slots are free, and a budget that is never overdrawn."""

    def __init__(self, budget_bytes: int, slot_sizes: Iterable[int]) -> None:
        self.budget_bytes = budget_bytes
        self.committed_bytes = 0  # of segments made, being made, and retired but still open
        self.segments: dict[int, Segment] = {}
        self._free: dict[int, list[Place]] = {size: [] for size in slot_sizes}
        self._next_number = 0

    @property
    def slot_sizes(self) -> list[int]:
        """Those this tier uses."""
        return list(self._free)

    def of_size(self, slot_bytes: int) -> list[Segment]:
        """The segments with slots of that size."""
        return [s for s in self.segments.values() if s.slot_bytes == slot_bytes]

    def plan(self, slot_bytes: int, room_bytes: int) -> Plan | None:
        """Take the cost of one more segment from the budget, at most `room_bytes` of it; None if
        there is not room for one slot."""
        room = min(room_bytes, self.budget_bytes - self.committed_bytes)
        usual = min(SEGMENT_BYTES_MAX, max(self.budget_bytes // 16, slot_bytes))
        usual = max(usual, self.budget_bytes // SEGMENTS_MAX)
        slots = min(max(1, usual // slot_bytes), room // slot_bytes)
        while slots > 0 and segment_cost_bytes(slots, slot_bytes) > room:
            slots -= 1
        if slots <= 0:
            return None
        plan = Plan(self._next_number, slot_bytes, slots)
        self._next_number += 1
        self.committed_bytes += plan.cost_bytes
        return plan

    def abandon(self, plan: Plan) -> None:
        """The planned segment could not be made."""
        self.committed_bytes -= plan.cost_bytes

    def add_planned(self, plan: Plan, device: BlockDevice) -> Segment:
        """The planned segment is there; all its slots are free."""
        segment = Segment(*plan, device)
        self.segments[segment.number] = segment
        self._free[segment.slot_bytes] += [(segment, i) for i in reversed(range(segment.slots))]
        return segment

    def add_found(self, segment: Segment) -> None:
        """A segment of an earlier run: none of its slots is free until `release_unused`."""
        assert segment.number not in self.segments and segment.slot_bytes in self._free
        self.segments[segment.number] = segment
        self.committed_bytes += segment.cost_bytes
        self._next_number = max(self._next_number, segment.number + 1)

    def release_unused(self, segment: Segment, used: set[int]) -> None:
        """Free the slots of a found segment that are not in `used`."""
        free = self._free[segment.slot_bytes]
        free += [(segment, slot) for slot in reversed(range(segment.slots)) if slot not in used]
        segment.used = len(used)

    def take(self, slot_bytes: int, count: int) -> list[Place]:
        """Up to `count` free slots, pinned for their writer: side by side where there are such
        among those that became free last, and ascending."""
        places = _side_by_side(self._free[slot_bytes], count)
        for segment, slot in places:
            segment.used += 1
            self.pin(segment, slot)
        return places

    def pin(self, segment: Segment, slot: int) -> None:
        """Keep a slot from being reused, and its file from being closed, until `unpin`."""
        segment.pins[slot] = segment.pins.get(slot, 0) + 1

    def unpin(self, segment: Segment, slot: int) -> BlockDevice | None:
        """A read or write is over. The device, if the caller must close it now (`closed`)."""
        segment.pins[slot] -= 1
        if segment.pins[slot] == 0:
            del segment.pins[slot]
            if slot in segment.leaving:
                segment.leaving.discard(slot)
                self.give_up(segment, slot)
        return segment.device if segment.retired and not segment.pins else None

    def give_up(self, segment: Segment, slot: int) -> None:
        """Free a slot, as soon as nobody has it pinned."""
        if slot in segment.pins:
            segment.leaving.add(slot)
        elif not segment.retired:
            segment.used -= 1
            self._free[segment.slot_bytes].append((segment, slot))

    def retire(self, segment: Segment) -> BlockDevice | None:
        """Use a segment no more. The device, if the caller must close it now (`closed`)."""
        del self.segments[segment.number]
        segment.retired = True
        free = self._free[segment.slot_bytes]
        free[:] = [place for place in free if place[0] is not segment]
        return None if segment.pins else segment.device

    def closed(self, segment: Segment) -> None:
        """A retired segment's file is removed and closed: its room is back."""
        assert segment.retired and not segment.pins
        self.committed_bytes -= segment.cost_bytes

    @property
    def pinned(self) -> bool:
        """Whether any read or write is going on in a segment in use."""
        return any(segment.pins for segment in self.segments.values())

    def has_room(self, slot_bytes: int) -> bool:
        """Whether the budget allows a segment of at least one slot."""
        return self.budget_bytes - self.committed_bytes >= segment_cost_bytes(1, slot_bytes)

    def giving(self, slot_bytes: int, *, any_other: bool = False) -> list[Segment]:
        """Segments of other sizes that one of this size may replace: those with nothing in them;
        else, if this size has less than a quarter of its share, those of the size that has most.
        `any_other` is for one that can evict nothing of its own."""
        if len(self._free) == 1:
            return []
        others = [s for s in self.segments.values() if s.slot_bytes != slot_bytes and not s.pins]
        unused = [segment for segment in others if not segment.used]
        if unused or any_other:
            return unused or others
        held = dict.fromkeys(self._free, 0)
        for segment in self.segments.values():
            held[segment.slot_bytes] += segment.cost_bytes
        share = self.budget_bytes // len(held)
        richest = max(held, key=lambda size: held[size])
        if held[slot_bytes] * 4 >= share or held[richest] <= share:
            return []
        return [segment for segment in others if segment.slot_bytes == richest]

    def check_integrity(self, taken: int) -> None:
        """Assert that free + taken + pinned for writing = all, and the budget adds up."""
        free = sum(len(places) for places in self._free.values())
        total = sum(segment.slots for segment in self.segments.values())
        assert not self.pinned, "ask when nothing is going on"
        assert free + taken == total, f"{free} free + {taken} taken != {total} slots"
        assert taken == sum(segment.used for segment in self.segments.values())
        costs = sum(segment.cost_bytes for segment in self.segments.values())
        assert costs == self.committed_bytes <= self.budget_bytes
