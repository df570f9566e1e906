"""NvmeTier: blocks in preallocated files of one directory, found again after a restart or a crash.

It knows records and slots; no model, no request, no other tier. Nothing is synced per block: a
record is believed only after every field and checksum of it was compared, so a torn, stale or
misplaced one is a miss. One disk operation per block, no lock held over any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvstore.tiers import nvme_start
from kvstore.tiers.base import BlockName, Status, TierStats
from kvstore.tiers.disk_health import DiskHealth, is_refusal
from kvstore.tiers.nvme_index import Entry, record_id
from kvstore.tiers.segments import (
    Segment,
    SegmentSpace,
    segment_cost_bytes,
    slot_bytes_for,
)
from kvstore.tiers.slot_io import Reading, SlotIO
from kvstore.tiers.slot_supply import SlotSupply
from seams.blockfolder import BlockFolder, FileBlockFolder
from seams.clock import Clock, SystemClock
from seams.errors import LaunchError

FREE_SPACE_FLOOR_BYTES = 1 << 30
SNAPSHOT_S = 60.0
TEND_S = 1.0
CLOSE_S = 10.0  # what `close` waits for reads and writes going on

_log = logging.getLogger(__name__)
_IN_USE = "The disk tier's directory is in use by another process."


def open_folder(directory: Path) -> FileBlockFolder:
    """The directory, locked for us. Raises LaunchError."""
    try:
        return FileBlockFolder(directory)
    except BlockingIOError:
        raise LaunchError(_IN_USE) from None
    except OSError as error:
        raise LaunchError(f"The disk tier's directory cannot be used: {_reason(error)}.") from None


def _reason(error: OSError) -> str:
    return error.strerror or "unknown error"


class NvmeTier:
    """Blocks of `sizes` (group -> bytes of one block on one rank) in at most `capacity_bytes` of
    `directory`, everything in it counted; always leaving `free_space_floor_bytes` to others.

    Records of another representation are not found and make room. Raises LaunchError if the
    directory is in use or cannot be used, or not one block fits.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        representation: str,
        sizes: Mapping[int, int],
        *,
        free_space_floor_bytes: int = FREE_SPACE_FLOOR_BYTES,
        clock: Clock | None = None,
        folder: BlockFolder | None = None,
        tended: bool = True,
    ) -> None:
        """`folder` replaces the directory's; without `tended` the caller calls `tend` itself."""
        assert sizes and all(size > 0 for size in sizes.values())
        self._clock: Clock = clock or SystemClock()
        self._capacity_bytes = capacity_bytes
        self._representation = representation
        self._sizes = dict(sizes)
        self._slot_bytes = {group: slot_bytes_for(size) for group, size in sizes.items()}
        budget_bytes = capacity_bytes - nvme_start.reserve_bytes(capacity_bytes, sizes)
        if budget_bytes < segment_cost_bytes(1, max(self._slot_bytes.values())):
            raise LaunchError("The disk tier's capacity is too small for one block.")
        self._folder: BlockFolder = folder or open_folder(directory)
        space = SegmentSpace(budget_bytes, self._slot_bytes.values())
        self._supply = SlotSupply(self._folder, space, self._clock, free_space_floor_bytes)
        self._floor_bytes = free_space_floor_bytes
        self._snapshot_bytes_max = nvme_start.snapshot_bytes_max(capacity_bytes, sizes)
        self._io = SlotIO(representation, max(sizes.values()), self._folder.memory_alignment)
        self._lock = self._supply.lock
        self._index = self._supply.index
        self._health = DiskHealth()
        self._stats = TierStats()
        self._closed = False
        self._start()
        self._seq, self._saved_seq = self._found.last_seq, self._found.last_seq
        self._saved_at = self._clock.now()
        self._ended = threading.Event()
        self._tending = threading.Thread(target=self._tend_on, name="disk-tier", daemon=True)
        if tended:
            self._tending.start()

    def _start(self) -> None:
        start = nvme_start.Start(
            self._folder, self._supply, self._io, self._representation, self._sizes, self._clock
        )
        try:
            self._found = start.run()
        except OSError as error:
            self._close_files()
            reason = _reason(error)
            raise LaunchError(f"The disk tier's directory cannot be used: {reason}.") from None
        if self._found.unknown_files:
            _log.warning(
                "%d files in the disk tier's directory are not its own", self._found.unknown_files
            )

    # ---- the tier contract

    @property
    def name(self) -> str:
        return "disk"

    def lookup(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        with self._lock:
            there = not self._closed
            return [there and self._index.get(record_id(name)) is not None for name in names]

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        began = self._clock.now()
        until = began + deadline_s
        statuses = [self._load(name, view, until) for name, view in zip(names, into, strict=True)]
        with self._lock:
            self._stats.load_s += self._clock.now() - began
        return statuses

    def _load(self, name: BlockName, into: memoryview, until: float) -> Status:
        with self._lock:
            entry = None if self._closed else self._index.get(record_id(name))
            if entry is None:
                self._stats.misses += 1
                return Status.MISS
            now = self._clock.now()
            if now >= until or not self._health.may_read(now):
                self._stats.failed += 1
                return Status.LATE if now >= until else Status.FAILED
            assert into.nbytes == self._sizes[name.group], "not as long as was stored"
            self._index.touch(entry)
            self._supply.space.pin(entry.segment, entry.slot)
        try:
            reading = self._read(entry, name, into.cast("B"))
            with self._lock:
                return self._loaded(entry, reading)
        finally:
            self._supply.release(entry.segment, entry.slot)

    def _read(self, entry: Entry, name: BlockName, into: memoryview) -> Reading | OSError:
        try:
            offset = entry.segment.offset(entry.slot)
            return self._io.read(entry.segment.device, offset, name, into)
        except OSError as error:
            return error

    def _loaded(self, entry: Entry, reading: Reading | OSError) -> Status:
        """What a read means for its record; with the lock held."""
        if isinstance(reading, OSError):
            self._health.failed(reading, self._clock.now())
            self._supply.drop(entry)
            self._stats.failed += 1
            return Status.FAILED
        self._health.read()
        if reading.fault is None:
            self._stats.hits += 1
            self._stats.loaded_bytes += entry.segment.slot_bytes
            return Status.OK
        later = reading.header is not None and reading.header.seq > self._found.listed_seq
        if not self._index.holds(entry) or (entry.hinted and later):
            # Discarded while it was read, or overwritten after the snapshot a crash left us.
            self._supply.drop(entry)
            self._stats.misses += 1
            return Status.MISS
        self._supply.drop(entry)
        self._stats.corrupt[reading.fault] += 1
        return Status.CORRUPT

    def store(
        self, names: Sequence[BlockName], data: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        began = self._clock.now()
        until = began + deadline_s
        statuses, missing = list[Status](), set[bytes]()
        for name, view in zip(names, data, strict=True):
            identity = record_id(name)
            orphaned = name.parent + identity[16:] in missing  # of no use without its parent
            status = Status.DROPPED if orphaned else self._store(name, view, until)
            if status is not Status.OK:
                missing.add(identity)
            statuses.append(status)
        with self._lock:
            self._stats.store_s += self._clock.now() - began
            self._stats.dropped += statuses.count(Status.DROPPED)
            self._stats.failed += statuses.count(Status.FAILED) + statuses.count(Status.LATE)
        return statuses

    def _store(self, name: BlockName, data: memoryview, until: float) -> Status:
        assert data.nbytes == self._sizes[name.group], "not this group's size"
        identity = record_id(name)
        with self._lock:
            if self._closed:
                return Status.DROPPED
            now = self._clock.now()
            if now >= until:
                return Status.LATE
            entry = self._index.get(identity)
            if entry is not None:
                self._index.touch(entry)
                return Status.OK
            if not self._health.may_write(now):
                return Status.DROPPED
        parent_id = name.parent + identity[16:]
        place = self._supply.take(self._slot_bytes[name.group], parent_id, until)
        if place is None:
            return Status.DROPPED
        try:
            return self._write(name, data, *place)
        finally:
            self._supply.release(*place)

    def _write(self, name: BlockName, data: memoryview, segment: Segment, slot: int) -> Status:
        """Fill a slot that nobody can find, then let it be found."""
        with self._lock:
            self._seq += 1
            seq = self._seq
        try:
            self._io.write(segment.device, segment.offset(slot), name, data.cast("B"), seq)
        except OSError as error:
            with self._lock:
                self._health.failed(error, self._clock.now())
                self._supply.space.give_up(segment, slot)
            return Status.DROPPED if is_refusal(error) else Status.FAILED
        identity = record_id(name)
        with self._lock:
            self._health.wrote()
            if self._closed or segment.retired:
                self._supply.space.give_up(segment, slot)
                return Status.DROPPED
            if self._index.get(identity) is not None:  # another thread was faster
                self._supply.space.give_up(segment, slot)
                return Status.OK
            self._index.insert(Entry(name, segment, slot, seq))
            self._stats.stored += 1
            self._stats.stored_bytes += segment.slot_bytes
        return Status.OK

    def discard(self, names: Sequence[BlockName]) -> None:
        for name in names:
            with self._lock:
                entry = None if self._closed else self._index.get(record_id(name))
                if entry is None:
                    continue
                self._supply.space.pin(entry.segment, entry.slot)
                self._supply.drop(entry)
                erases = self._health.state == "ok"
            if erases:
                with suppress(OSError):  # at worst a later start finds it again
                    self._io.erase(entry.segment.device, entry.segment.offset(entry.slot))
            self._supply.release(entry.segment, entry.slot)

    def names(self) -> list[BlockName]:
        with self._lock:
            return [entry.name for entry in self._index.entries()]

    def clear(self) -> None:
        with self._lock:
            if self._closed:
                return
            segments = list(self._supply.space.segments.values())
            evicted = self._supply.evicted
        for segment in segments:
            self._supply.retire(segment)
        with self._lock:
            for entry in self._index.entries():
                self._supply.drop(entry)
            self._supply.evicted = evicted
        with suppress(OSError):
            self._folder.remove(nvme_start.INDEX_NAME)

    def stats(self) -> TierStats:
        with self._lock:
            state = self._health.state
            if state == "ok" and not self._supply.space.segments:
                state = self._supply.growth.state
            return replace(
                self._stats,
                blocks=len(self._index),
                bytes=self._index.bytes,
                bytes_max=self._capacity_bytes,
                state=state,
                evicted=self._supply.evicted,
                corrupt=Counter(self._stats.corrupt),
            )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ended.set()
        if self._tending.is_alive():
            self._tending.join(CLOSE_S)
        idle = self._supply.stop(CLOSE_S) and self._wait_idle()
        if not idle:  # a disk that does not answer: keep files and lock rather than lend them twice
            _log.error("the disk tier's files stay open: the disk does not answer")
            return
        with suppress(OSError):
            self._save(closed=True)
        with self._lock:
            for entry in self._index.entries():
                self._supply.drop(entry)
        self._close_files()

    def _wait_idle(self) -> bool:
        end = time.monotonic() + CLOSE_S
        while True:
            with self._lock:
                if not self._supply.space.pinned:
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(0.002)

    def _close_files(self) -> None:
        for segment in self._supply.space.segments.values():
            with suppress(OSError):
                segment.device.close()
        with suppress(OSError):
            self._folder.close()

    # ---- beyond the contract

    @property
    def unknown_files(self) -> int:
        """Files in the directory at the start that are not ours; they count against the cap."""
        return self._found.unknown_files

    def verify(self) -> tuple[int, Counter[str]]:
        """Read everything; returns how many records, and the damaged ones by cause (one of
        record.FAULTS, or "unreadable"). Those are forgotten."""
        checked, corrupt = 0, Counter[str]()
        with self._lock:
            entries = self._index.entries()
        for entry in entries:
            with self._lock:
                if self._closed or not self._index.holds(entry):
                    continue
                self._supply.space.pin(entry.segment, entry.slot)
            fault = self._fault(entry)
            checked += 1
            with self._lock:
                if fault is not None and self._index.holds(entry):
                    corrupt[fault] += 1
                    self._supply.drop(entry)
            self._supply.release(entry.segment, entry.slot)
        return checked, corrupt

    def _fault(self, entry: Entry) -> str | None:
        segment = entry.segment
        try:
            found = self._io.read_whole(
                segment.device, segment.offset(entry.slot), segment.slot_bytes
            )
        except OSError:
            return "unreadable"
        if found.header is None or found.fault is not None:
            return found.fault or "magic"
        if found.header.representation != self._representation:
            return "representation"
        return None if record_id(found.header.name) == entry.id else "key"

    def snapshot(self) -> bool:
        """Write the index down, so that a start after a crash knows more; whether it worked."""
        try:
            self._save(closed=False)
        except OSError:
            return False
        return True

    def _save(self, *, closed: bool) -> None:
        self._saved_at, seq = self._clock.now(), self._seq
        nvme_start.save(
            self._folder, self._supply, self._representation, seq, closed=closed,
            bytes_max=self._snapshot_bytes_max, floor_bytes=self._floor_bytes,
        )  # fmt: skip
        self._saved_seq = seq

    def tend(self) -> None:
        """Do what is due: give room back that others need, write a snapshot."""
        self._supply.hold_floor()
        due = self._clock.now() - self._saved_at >= SNAPSHOT_S
        if due and self._saved_seq != self._seq:
            self.snapshot()

    def _tend_on(self) -> None:
        while not self._ended.wait(TEND_S):
            self.tend()

    def check_integrity(self) -> None:
        """Assert what must be true whenever nothing is going on. Slow."""
        with self._lock:
            self._index.check_integrity()
            self._supply.space.check_integrity(len(self._index))
