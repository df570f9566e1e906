"""LoadCall: one `load` of the disk tier. Blocks that lie side by side share one read.

It goes through the call in steps of a few blocks: look them up and pin their slots, read what lies
side by side at once, judge each record. If such a read is not whole, each block is read alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.nvme_index import Entry, record_id
from kvstore.tiers.nvme_state import DiskState
from kvstore.tiers.slot_io import Reading
from kvstore.tiers.slot_runs import RUN_BLOCKS_MAX, Placed, runs


class LoadCall:
    """One call; `run` once."""

    def __init__(
        self,
        disk: DiskState,
        names: Sequence[BlockName],
        into: Sequence[memoryview],
        until: float,
    ) -> None:
        assert len(names) == len(into)
        self._disk = disk
        self._names = names
        self._into = [view.cast("B") for view in into]
        self._until = until
        self._next = 0
        self._statuses = [Status.MISS] * len(names)
        self._entries: dict[int, Entry] = {}
        self._troubled = False  # something failed since the disk's health was asked

    def run(self) -> list[Status]:
        """What became of each block."""
        while self._next < len(self._names):
            found = self._find()
            try:
                for run in runs(found):
                    self._read(run)
            finally:
                self._disk.supply.release([(block.segment, block.slot) for block in found])
        return self._statuses

    def _find(self) -> list[Placed]:
        """The next blocks to be read, pinned; a single one while the disk is broken."""
        disk, found = self._disk, list[Placed]()
        self._troubled = False
        with disk.lock:
            now = disk.clock.now()
            while self._next < len(self._names) and len(found) < RUN_BLOCKS_MAX:
                if found and disk.health.state == "broken":
                    break
                at, self._next = self._next, self._next + 1
                name, into = self._names[at], self._into[at]
                entry = None if disk.closed else disk.index.get(record_id(name))
                if entry is None:
                    disk.stats.misses += 1
                elif now >= self._until or not disk.health.may_read(now):
                    disk.stats.failed += 1
                    self._statuses[at] = Status.LATE if now >= self._until else Status.FAILED
                else:
                    assert len(into) == disk.sizes[name.group], "not as long as was stored"
                    disk.index.touch(entry)
                    disk.supply.space.pin(entry.segment, entry.slot)
                    self._entries[at] = entry
                    found.append(Placed(at, entry.segment, entry.slot, disk.io.joins(into)))
        return found

    def _read(self, run: Sequence[Placed]) -> None:
        """All at once; if that fails or is cut short, one by one."""
        if len(run) > 1 and self._refused() is None:
            readings = self._transfer(run)
            if readings is not None and not isinstance(readings, OSError):
                self._judge(run, readings)
                return
        for block in run:
            self._read_alone(block)

    def _read_alone(self, block: Placed) -> None:
        status = self._refused()
        if status is not None:
            self._statuses[block.at] = status
            with self._disk.lock:
                self._disk.stats.failed += 1
            return
        readings = self._transfer([block])
        assert readings is not None, "of one there is always something to judge"
        if isinstance(readings, OSError):
            self._failed(block.at, readings)
        else:
            self._judge([block], readings)

    def _refused(self) -> Status | None:
        """Why a block that was found is not read after all."""
        if self._disk.clock.now() >= self._until:
            return Status.LATE
        stopped = self._troubled and self._disk.health.state == "broken"
        return Status.FAILED if stopped else None

    def _transfer(self, run: Sequence[Placed]) -> list[Reading] | OSError | None:
        """One disk operation, and the checksums after it."""
        segment = run[0].segment
        wanted = [(self._names[block.at], self._into[block.at]) for block in run]
        try:
            return self._disk.io.read(segment.device, segment.offset(run[0].slot), wanted)
        except OSError as error:
            return error

    def _failed(self, at: int, error: OSError) -> None:
        disk = self._disk
        self._troubled = True
        self._statuses[at] = Status.FAILED
        with disk.lock:
            disk.health.failed(error, disk.clock.now())
            disk.supply.drop(self._entries[at])
            disk.stats.failed += 1

    def _judge(self, run: Sequence[Placed], readings: Sequence[Reading]) -> None:
        with self._disk.lock:
            self._disk.health.read()
            for block, reading in zip(run, readings, strict=True):
                self._statuses[block.at] = self._loaded(self._entries[block.at], reading)

    def _loaded(self, entry: Entry, reading: Reading) -> Status:
        """What a read means for its record; with the lock held."""
        disk = self._disk
        if reading.fault is None:
            disk.stats.hits += 1
            disk.stats.loaded_bytes += entry.segment.slot_bytes
            return Status.OK
        later = reading.header is not None and reading.header.seq > disk.listed_seq
        gone = not disk.index.holds(entry)
        disk.supply.drop(entry)
        if gone or (entry.hinted and later):
            # Discarded while it was read, or overwritten after the snapshot a crash left us.
            disk.stats.misses += 1
            return Status.MISS
        disk.stats.corrupt[reading.fault] += 1
        return Status.CORRUPT
