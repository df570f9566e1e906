"""NvmeTier: blocks in preallocated files of one directory, found again after a restart or a crash.

It knows records and slots; no model, no request, no other tier. Nothing is synced per block: a
record is believed only after every field and checksum of it was compared, so a torn, stale or
misplaced one is a miss. Blocks of a call that lie side by side share one disk operation; no lock is
held over any. The calls themselves are in nvme_store.py and nvme_load.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from kvstore.tiers import nvme_start
from kvstore.tiers.base import BlockName, Status, TierStats
from kvstore.tiers.nvme_index import Entry, record_id
from kvstore.tiers.nvme_load import LoadCall
from kvstore.tiers.nvme_state import DiskState
from kvstore.tiers.nvme_store import StoreCall
from kvstore.tiers.segments import (
    SegmentSpace,
    segment_cost_bytes,
    slot_bytes_for,
)
from kvstore.tiers.slot_io import SlotIO
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
        self._on_change: Callable[[bool, list[BlockName]], None] | None = None
        self._telling = threading.Lock()
        self._there = True  # the directory, when it was looked at last
        self._capacity_bytes = capacity_bytes
        self._representation = representation
        self._sizes = dict(sizes)
        budget_bytes = capacity_bytes - nvme_start.reserve_bytes(capacity_bytes, sizes)
        if budget_bytes < segment_cost_bytes(1, slot_bytes_for(max(sizes.values()))):
            raise LaunchError("The disk tier's capacity is too small for one block.")
        self._folder: BlockFolder = folder or open_folder(directory)
        space = SegmentSpace(budget_bytes, map(slot_bytes_for, sizes.values()))
        self._supply = SlotSupply(self._folder, space, self._clock, free_space_floor_bytes)
        self._floor_bytes = free_space_floor_bytes
        self._snapshot_bytes_max = nvme_start.snapshot_bytes_max(capacity_bytes, sizes)
        self._io = SlotIO(representation, max(sizes.values()), self._folder.memory_alignment)
        slot_bytes = {group: slot_bytes_for(size) for group, size in sizes.items()}
        self._disk = DiskState(self._supply, self._io, self._clock, self._sizes, slot_bytes)
        self._lock = self._supply.lock
        self._index = self._supply.index
        self._start()
        self._disk.seq = self._saved_seq = self._found.last_seq
        self._disk.listed_seq = self._found.listed_seq
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

    def hear(self, on_change: Callable[[bool, list[BlockName]], None]) -> None:
        """Tell `on_change` of every block that is there (True) or gone from now on, in the order in
        which it happened, whatever the reason; what goes with `close` is not told. It is called
        on any thread, outside the lock that other calls take, and must not call the tier."""
        self._on_change = on_change
        with self._lock:
            self._index.watch()

    def _tell(self) -> None:
        if self._on_change is None:
            return
        with self._telling:  # over both, or two threads would tell in the wrong order
            with self._lock:
                changes = self._index.drain_changes()
            for added, run in groupby(changes, key=itemgetter(0)):
                self._on_change(added, [name for _, name in run])

    # ---- the tier contract

    @property
    def name(self) -> str:
        return "disk"

    def lookup(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        with self._lock:
            there = not self._disk.closed
            return [there and self._index.get(record_id(name)) is not None for name in names]

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        began = self._clock.now()
        statuses = LoadCall(self._disk, names, into, began + deadline_s).run()
        with self._lock:
            self._disk.stats.load_s += self._clock.now() - began
        self._tell()
        return statuses

    def store(
        self, names: Sequence[BlockName], data: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        began = self._clock.now()
        statuses = StoreCall(self._disk, names, data, began + deadline_s).run()
        with self._lock:
            stats = self._disk.stats
            stats.store_s += self._clock.now() - began
            stats.dropped += statuses.count(Status.DROPPED)
            stats.failed += statuses.count(Status.FAILED) + statuses.count(Status.LATE)
        self._tell()
        return statuses

    def discard(self, names: Sequence[BlockName]) -> None:
        for name in names:
            with self._lock:
                entry = None if self._disk.closed else self._index.get(record_id(name))
                if entry is None:
                    continue
                self._supply.space.pin(entry.segment, entry.slot)
                self._supply.drop(entry)
                erases = self._disk.health.state == "ok"
            if erases:
                with suppress(OSError):  # at worst a later start finds it again
                    self._io.erase(entry.segment.device, entry.segment.offset(entry.slot))
            self._supply.release([(entry.segment, entry.slot)])
        self._tell()

    def names(self) -> list[BlockName]:
        with self._lock:
            return [entry.name for entry in self._index.entries()]

    def clear(self) -> None:
        with self._lock:
            if self._disk.closed:
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
        self._tell()

    def stats(self) -> TierStats:
        with self._lock:
            state = self._disk.health.state
            if state == "ok" and not self._supply.space.segments:
                state = self._supply.growth.state
            return replace(
                self._disk.stats,
                blocks=len(self._index),
                bytes=self._index.bytes,
                bytes_max=self._capacity_bytes,
                state=state if self._there else "broken",
                evicted=self._supply.evicted,
                corrupt=Counter(self._disk.stats.corrupt),
            )

    def close(self) -> None:
        with self._lock:
            if self._disk.closed:
                return
            self._disk.closed = True
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
                if self._disk.closed or not self._index.holds(entry):
                    continue
                self._supply.space.pin(entry.segment, entry.slot)
            fault = self._fault(entry)
            checked += 1
            with self._lock:
                if fault is not None and self._index.holds(entry):
                    corrupt[fault] += 1
                    self._supply.drop(entry)
            self._supply.release([(entry.segment, entry.slot)])
        self._tell()
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
        self._saved_at, seq = self._clock.now(), self._disk.seq
        nvme_start.save(
            self._folder, self._supply, self._representation, seq, closed=closed,
            bytes_max=self._snapshot_bytes_max, floor_bytes=self._floor_bytes,
        )  # fmt: skip
        self._saved_seq = seq

    def tend(self) -> None:
        """Do what is due: give room back that others need, write a snapshot."""
        self._supply.hold_floor()
        self._tell()
        there = self._folder.present()
        if self._there and not there:
            _log.error("the disk tier's directory is gone: what it holds ends with this process")
        self._there = there
        due = self._clock.now() - self._saved_at >= SNAPSHOT_S
        if due and self._saved_seq != self._disk.seq:
            self.snapshot()

    def _tend_on(self) -> None:
        while not self._ended.wait(TEND_S):
            self.tend()

    def check_integrity(self) -> None:
        """Assert what must be true whenever nothing is going on. Slow."""
        with self._lock:
            self._index.check_integrity()
            self._supply.space.check_integrity(len(self._index))
