"""What a disk tier finds when it starts, and what it leaves when it ends.

A snapshot says which record is in which slot. One from a proper end is believed; one from before a
crash only as far as the headers were not read again, oldest use first, within a time limit. Either
way it is a hint: every load checks the record itself. Knows no deadlines and no statuses.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple

from kvstore.tiers import nvme_snapshot
from kvstore.tiers.nvme_index import Entry, group_of, name_of, record_id
from kvstore.tiers.nvme_snapshot import Listed, ListedSegment, Snapshot
from kvstore.tiers.segments import (
    SEGMENTS_MAX,
    Segment,
    SegmentSpace,
    parse_name,
    slot_bytes_for,
)
from kvstore.tiers.slot_io import SlotIO
from kvstore.tiers.slot_supply import SlotSupply
from seams.blockdevice import PAGE_BYTES
from seams.blockfolder import BlockFolder
from seams.clock import Clock

INDEX_NAME = "index"  # written now and then
CLOSED_NAME = "index-closed"  # written at a proper end; becomes INDEX_NAME at the next start
SCAN_THREADS = 8
SCAN_SLOTS = 64  # per step of a thread
SCAN_S_MAX = 10.0


class Found(NamedTuple):
    """What a start has learnt."""

    last_seq: int  # the highest of any record seen or listed
    listed_seq: int  # the highest when the snapshot was made: a later one in a slot is no damage
    unknown_files: int  # not ours; left alone, but part of what the directory takes


def snapshot_bytes_max(capacity_bytes: int, sizes: Mapping[int, int]) -> int:
    """How long the snapshot of a tier may be, in whole pages."""
    entries = capacity_bytes // min(slot_bytes_for(size) for size in sizes.values())
    return nvme_snapshot.snapshot_bytes_max(min(entries, 2 * SEGMENTS_MAX), entries)


def reserve_bytes(capacity_bytes: int, sizes: Mapping[int, int]) -> int:
    """What of the cap is kept for all that is no segment: two snapshots, lock, directory."""
    return 2 * (snapshot_bytes_max(capacity_bytes, sizes) + PAGE_BYTES) + 4 * PAGE_BYTES


def unknown_names(folder: BlockFolder) -> list[str]:
    """Names in the folder that no tier gave."""
    ours = (INDEX_NAME, CLOSED_NAME)
    return [name for name in folder.names() if name not in ours and parse_name(name) is None]


def open_segments(folder: BlockFolder, space: SegmentSpace) -> None:
    """Take over the segments of an earlier run; those of sizes no longer used are removed."""
    for name in folder.names():
        parsed = parse_name(name)
        if parsed is None:
            continue
        if parsed.slot_bytes not in space.slot_sizes:
            folder.remove(name)
            continue
        device = folder.open(name)
        slots = device.size_bytes // parsed.slot_bytes
        if slots == 0 or parsed.number in space.segments:
            device.close()
            folder.remove(name)
            continue
        space.add_found(Segment(*parsed, slots, device))


class Start:
    """One start: fills the index of `supply` from a snapshot and from headers."""

    def __init__(
        self,
        folder: BlockFolder,
        supply: SlotSupply,
        io: SlotIO,
        representation: str,
        sizes: Mapping[int, int],
        clock: Clock,
        scan_s_max: float = SCAN_S_MAX,
    ) -> None:
        self._folder = folder
        self._supply = supply
        self._io = io
        self._representation = representation
        self._sizes = sizes
        self._clock = clock
        self._scan_until = clock.now() + scan_s_max

    def run(self) -> Found:
        """Read what there is. Raises OSError if the folder itself cannot be read or written."""
        unknown = unknown_names(self._folder)
        space = self._supply.space
        space.budget_bytes -= sum(map(self._folder.footprint_bytes, unknown))
        open_segments(self._folder, space)
        snapshot, complete = self._read_snapshot()
        hints = {(row.segment, row.slot): row for row in self._plausible(snapshot)}
        unsure = self._unsure(snapshot, hints, complete)
        scanned = self._scan(unsure)
        self._fill(hints, scanned)
        self._supply.shrink()
        if CLOSED_NAME in self._folder.names():  # not complete any more after the first store
            self._folder.rename(CLOSED_NAME, INDEX_NAME)
        seqs = [row.seq for row in scanned.values() if row is not None]
        return Found(max([snapshot.last_seq, *seqs]), snapshot.last_seq, len(unknown))

    def _read_snapshot(self) -> tuple[Snapshot, bool]:
        names = self._folder.names()
        slots = sum(segment.slots for segment in self._supply.space.segments.values())
        for name in (CLOSED_NAME, INDEX_NAME):
            if name in names:
                # Twice: the cap may have been lowered between the runs.
                limit = 2 * nvme_snapshot.snapshot_bytes_max(2 * SEGMENTS_MAX, max(slots, 1024))
                with suppress(OSError):
                    content = self._folder.read(name, limit)
                    found = nvme_snapshot.decode(content, self._representation)
                    if found is not None:
                        return found, name == CLOSED_NAME
        return Snapshot((), (), 0), False

    def _plausible(self, snapshot: Snapshot) -> Iterator[Listed]:
        """The listed records whose slots exist, last used last."""
        segments = self._supply.space.segments
        for row in snapshot.entries:
            segment = segments.get(row.segment)
            size = self._sizes.get(group_of(row.id), 0)
            fits = segment is not None and row.slot < segment.slots and size > 0
            if segment is not None and fits and slot_bytes_for(size) == segment.slot_bytes:
                yield row

    def _unsure(
        self, snapshot: Snapshot, hints: Mapping[tuple[int, int], Listed], complete: bool
    ) -> Iterable[tuple[int, int]]:
        """Slots to be looked at: those nothing is known of, then those that may have changed."""
        segments = self._supply.space.segments
        known = {row.number for row in snapshot.segments if complete}
        unlisted = (
            (segment.number, slot)
            for segment in segments.values()
            if segment.number not in known
            for slot in range(segment.slots)
            if (segment.number, slot) not in hints
        )
        return chain(unlisted, () if complete else list(hints))

    def _scan(self, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Listed | None]:
        """What the headers say, per slot that was looked at in time; None: no record for us."""
        remaining = iter(places)
        steps = iter(lambda: list(islice(remaining, SCAN_SLOTS)), [])
        found: dict[tuple[int, int], Listed | None] = {}
        first = next(steps, None)
        if first is None:
            return found
        with ThreadPoolExecutor(SCAN_THREADS, "disk-scan") as threads:
            while first is not None and self._clock.now() < self._scan_until:
                batch = [first, *islice(steps, 8 * SCAN_THREADS - 1)]
                for rows in threads.map(self._scan_step, batch):
                    found.update(rows)
                first = next(steps, None)
        return found

    def _scan_step(self, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Listed | None]:
        if self._clock.now() >= self._scan_until:
            return {}
        return {place: self._look(*place) for place in places}

    def _look(self, number: int, slot: int) -> Listed | None:
        segment = self._supply.space.segments[number]
        try:
            header = self._io.read_header(segment.device, segment.offset(slot))
        except OSError:
            return None
        if header is None:
            return None
        size = self._sizes.get(header.name.group, 0)
        if header.payload_bytes != size or slot_bytes_for(size) != segment.slot_bytes:
            return None
        name = header.name
        return Listed(number, slot, header.seq, record_id(name), name.parent, name.tokens)

    def _fill(
        self,
        hints: Mapping[tuple[int, int], Listed],
        scanned: Mapping[tuple[int, int], Listed | None],
    ) -> None:
        """Insert every record once, oldest use first: those still where the snapshot has them in
        its order, then what was stored after it, in the order of storing."""
        new = [row for place, row in scanned.items() if row is not None and hints.get(place) != row]
        kept = [row for place, row in hints.items() if scanned.get(place, row) == row]
        ordered = [*kept, *sorted(new, key=lambda row: row.seq)]
        latest = {row.id: row for row in ordered}  # the last of equal ones
        index, space = self._supply.index, self._supply.space
        used: dict[int, set[int]] = {number: set() for number in space.segments}
        for row in ordered:
            if latest[row.id] is row:
                hinted = (row.segment, row.slot) not in scanned
                segment = space.segments[row.segment]
                name = name_of(row.id, row.parent, row.tokens)
                index.insert(Entry(name, segment, row.slot, row.seq, hinted=hinted))
                used[row.segment].add(row.slot)
        for number, slots in used.items():
            space.release_unused(space.segments[number], slots)


def save(
    folder: BlockFolder,
    supply: SlotSupply,
    representation: str,
    last_seq: int,
    *,
    bytes_max: int,
    floor_bytes: int,
    closed: bool,
) -> None:
    """Write a snapshot; `closed` if nothing is stored after it. Raises OSError (ENOSPC if the file
    system would have less than `floor_bytes` left)."""
    with supply.lock:
        entries = supply.index.entries()
        segments = [
            ListedSegment(s.number, s.slot_bytes, s.slots) for s in supply.space.segments.values()
        ]
    entries.sort(key=lambda entry: entry.used)
    rows = [Listed(e.segment.number, e.slot, e.seq, e.id, e.parent, e.tokens) for e in entries]
    content = nvme_snapshot.encode(representation, segments, rows, last_seq, bytes_max)
    if folder.free_bytes() - len(content) < floor_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    folder.replace(CLOSED_NAME if closed else INDEX_NAME, content)
    if closed:
        folder.remove(INDEX_NAME)
