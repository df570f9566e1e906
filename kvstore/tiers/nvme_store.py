"""StoreCall: one `store` of the disk tier. Blocks that get neighbouring slots share one write.

It goes through the call in steps of a few blocks: choose those to be written, take slots, write
what lies side by side at once, let it be found. If such a write fails, each block is tried alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.disk_health import is_refusal
from kvstore.tiers.nvme_index import Entry, record_id
from kvstore.tiers.nvme_state import DiskState
from kvstore.tiers.slot_io import Record
from kvstore.tiers.slot_runs import RUN_BLOCKS_MAX, Placed, runs


class _Chosen(NamedTuple):
    """A block to be written."""

    at: int  # which block of the call
    id: bytes
    spared: bytes  # its nearest ancestor that may be held already: not to be evicted for it


class StoreCall:
    """One call; `run` once."""

    def __init__(
        self,
        disk: DiskState,
        names: Sequence[BlockName],
        data: Sequence[memoryview],
        until: float,
    ) -> None:
        assert len(names) == len(data)
        self._disk = disk
        self._names = names
        self._data = [view.cast("B") for view in data]
        self._until = until
        self._next = 0
        self._statuses = [Status.DROPPED] * len(names)
        self._missing: set[bytes] = set()  # ids: children of these are of no use
        self._troubled = False  # something failed since the disk's health was asked
        self._kept: set[int] = set()  # blocks whose slots the index has

    def run(self) -> list[Status]:
        """What became of each block."""
        while self._next < len(self._names):
            chosen = self._choose()
            left = self._write_some(chosen)
            for block in left:  # with the others written there may be something to evict
                alone = block._replace(spared=_parent_id(self._names[block.at]))
                again = len(chosen) > 1 and self._refused(block.at) is None
                if not again or self._write_some([alone]):
                    late = self._disk.clock.now() >= self._until
                    self._end(block.at, Status.LATE if late else Status.DROPPED)
        return self._statuses

    def _end(self, at: int, status: Status) -> None:
        self._statuses[at] = status
        if status is not Status.OK:
            self._missing.add(record_id(self._names[at]))

    # ---- which

    def _choose(self) -> list[_Chosen]:
        """The next blocks to be written; a single one while the disk is not ok."""
        disk, chosen = self._disk, dict[bytes, _Chosen]()
        self._troubled = False
        with disk.lock:
            now = disk.clock.now()
            while self._next < len(self._names) and len(chosen) < RUN_BLOCKS_MAX:
                if chosen and disk.health.state != "ok":
                    break
                name = self._names[self._next]
                identity = record_id(name)
                if identity in chosen:
                    break  # the same again: the next step finds it
                status = self._known(name, identity, now)
                if status is None:
                    parent_id = _parent_id(name)
                    parent = chosen.get(parent_id)
                    spared = parent.spared if parent else parent_id
                    chosen[identity] = _Chosen(self._next, identity, spared)
                else:
                    self._end(self._next, status)
                self._next += 1
        return list(chosen.values())

    def _known(self, name: BlockName, identity: bytes, now: float) -> Status | None:
        """A block's status if it needs no write; with the lock held."""
        disk = self._disk
        assert len(self._data[self._next]) == disk.sizes[name.group], "not this group's size"
        if disk.closed or self._orphaned(name):
            return Status.DROPPED
        if now >= self._until:
            return Status.LATE
        entry = disk.index.get(identity)
        if entry is not None:
            disk.index.touch(entry)
            return Status.OK
        return None if disk.health.may_write(now) else Status.DROPPED

    # ---- where

    def _write_some(self, chosen: Sequence[_Chosen]) -> list[_Chosen]:
        """Write these; returns those for which there is no slot."""
        placed, left = self._place(chosen)
        try:
            for run in runs(placed):
                self._write(run)
        finally:
            supply = self._disk.supply
            with supply.lock:
                for block in placed:
                    if block.at not in self._kept:
                        supply.space.give_up(block.segment, block.slot)
            supply.release([(block.segment, block.slot) for block in placed])
        return left

    def _place(self, chosen: Sequence[_Chosen]) -> tuple[list[Placed], list[_Chosen]]:
        """Slots that ascend in the order of the call, so that neighbours are children; pinned."""
        disk, by_size = self._disk, dict[int, list[_Chosen]]()
        for block in chosen:
            by_size.setdefault(disk.slot_bytes[self._names[block.at].group], []).append(block)
        placed, left = list[Placed](), list[_Chosen]()
        for slot_bytes, blocks in by_size.items():
            spared = [block.spared for block in blocks]
            places = disk.supply.take(slot_bytes, spared, self._until)
            places.sort(key=lambda place: (place[0].number, place[1]))
            for block, place in zip(blocks, places, strict=False):
                joins = disk.io.joins(self._data[block.at])
                placed.append(Placed(block.at, *place, joins))
            left += blocks[len(places) :]
        return placed, left

    # ---- to the disk

    def _write(self, run: Sequence[Placed]) -> None:
        """All at once; if that fails or not all may be written, one by one."""
        orphaned = self._missing and any(self._orphaned(self._names[block.at]) for block in run)
        if len(run) > 1 and not orphaned and self._stopped() is None:
            records = self._transfer(run)
            if not isinstance(records, OSError):
                self._written(run, records)
                return
        for block in run:
            self._write_alone(block)

    def _write_alone(self, block: Placed) -> None:
        status = self._refused(block.at)
        if status is None:
            records = self._transfer([block])
            if not isinstance(records, OSError):
                self._written([block], records)
                return
            status = self._failed(records)
        self._end(block.at, status)

    def _refused(self, at: int) -> Status | None:
        """Why a block that was chosen is not written after all."""
        return Status.DROPPED if self._orphaned(self._names[at]) else self._stopped()

    def _orphaned(self, name: BlockName) -> bool:
        return bool(self._missing) and _parent_id(name) in self._missing

    def _stopped(self) -> Status | None:
        """Why nothing more of this call is written."""
        if self._disk.clock.now() >= self._until:
            return Status.LATE
        stopped = self._troubled and self._disk.health.state != "ok"
        return Status.DROPPED if stopped else None

    def _transfer(self, run: Sequence[Placed]) -> list[Record] | OSError:
        """One disk operation; the checksums come before it."""
        disk, first = self._disk, run[0]
        with disk.lock:
            seq = disk.seq
            disk.seq += len(run)
        records = [
            Record(self._names[block.at], self._data[block.at], seq + i)
            for i, block in enumerate(run, 1)
        ]
        try:
            disk.io.write(first.segment.device, first.segment.offset(first.slot), records)
        except OSError as error:
            return error
        return records

    def _failed(self, error: OSError) -> Status:
        self._troubled = True
        with self._disk.lock:
            self._disk.health.failed(error, self._disk.clock.now())
        return Status.DROPPED if is_refusal(error) else Status.FAILED

    def _written(self, run: Sequence[Placed], records: Sequence[Record]) -> None:
        """Let the records be found."""
        disk = self._disk
        with disk.lock:
            disk.health.wrote()
            for block, record in zip(run, records, strict=True):
                segment = block.segment
                if disk.closed or segment.retired:
                    self._end(block.at, Status.DROPPED)
                    continue
                self._statuses[block.at] = Status.OK
                if disk.index.get(record_id(record.name)) is None:  # else a thread was faster
                    disk.index.insert(Entry(record.name, segment, block.slot, record.seq))
                    disk.stats.stored += 1
                    disk.stats.stored_bytes += segment.slot_bytes
                    self._kept.add(block.at)


def _parent_id(name: BlockName) -> bytes:
    return name.parent + record_id(name)[16:]
