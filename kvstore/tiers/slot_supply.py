"""Where the next slot comes from: free, of a new segment, another size's, the oldest record's.

It keeps the budget and the file system's free-space floor, and closes files when their last reader
is gone. It knows records by their index entries only. `lock` guards `space`, `index` and `growth`;
it is never held over a disk operation.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvstore.tiers.disk_health import DiskHealth
from kvstore.tiers.nvme_index import Entry, SlotIndex
from kvstore.tiers.segments import Place, Plan, Segment, SegmentSpace
from seams.blockfolder import BlockFolder
from seams.clock import Clock

VICTIMS_MAX = 8
"""Records evicted at most for one slot: more than one only where they are being read."""


class SlotSupply:
    """The slots of one folder. Thread-safe; raises nothing for what a disk does."""

    def __init__(
        self, folder: BlockFolder, space: SegmentSpace, clock: Clock, floor_bytes: int
    ) -> None:
        self.lock = threading.Lock()
        self.space = space
        self.index = SlotIndex()
        self.growth = DiskHealth()
        self.evicted = 0
        self._folder = folder
        self._clock = clock
        self._floor_bytes = floor_bytes
        self._making = threading.Lock()  # one new segment at a time
        self._closed = threading.Event()

    def take(self, slot_bytes: int, spared: Sequence[bytes], until: float) -> list[Place]:
        """A slot for each of several records, pinned; fewer if there are no more to be had. May
        make files, and waits for another thread that does, at most `until`. For the i-th nothing
        is evicted that it needs: the record `spared[i]`."""
        places = list[Place]()
        while len(places) < len(spared) and (not places or self._clock.now() < until):
            more = self._take_some(slot_bytes, spared[len(places) :], until)
            if not more:
                break
            places += more
        return places

    def _take_some(self, slot_bytes: int, spared: Sequence[bytes], until: float) -> list[Place]:
        """Free ones, else of a new segment, else evicted ones, else another size's segment."""
        with self.lock:
            if self._closed.is_set():
                return []
            places = self.space.take(slot_bytes, len(spared))
            grows = not places and self._can_grow(slot_bytes)
        if grows:
            places = self._take_grown(slot_bytes, len(spared), until, any_other=False)
        if not places:
            with self.lock:
                if self._closed.is_set():
                    return []
                places = self.space.take(slot_bytes, len(spared))
                places = places or self._evict_for(slot_bytes, spared)
                grows = not places and self._can_grow(slot_bytes, any_other=True)
            if grows:
                places = self._take_grown(slot_bytes, len(spared), until, any_other=True)
        return places

    def _can_grow(self, slot_bytes: int, *, any_other: bool = False) -> bool:
        room = self.space.has_room(slot_bytes)
        possible = room or bool(self.space.giving(slot_bytes, any_other=any_other))
        return possible and self.growth.may_write(self._clock.now())

    def _take_grown(
        self, slot_bytes: int, count: int, until: float, *, any_other: bool
    ) -> list[Place]:
        if not self._making.acquire(timeout=max(0.0, until - self._clock.now())):
            return []
        try:
            with self.lock:
                places = self.space.take(slot_bytes, count)
                giving = None
                if not self.space.has_room(slot_bytes):
                    others = self.space.giving(slot_bytes, any_other=any_other)
                    giving = self.index.stalest(others)
            if not places:
                if giving is not None:
                    self.retire(giving)
                self._grow(slot_bytes)
                with self.lock:
                    places = self.space.take(slot_bytes, count)
            return places
        finally:
            self._making.release()

    def _grow(self, slot_bytes: int) -> None:
        """Make one more segment if budget, floor and disk allow it."""
        plan: Plan | None = None
        try:
            above_floor = self._folder.free_bytes() - self._floor_bytes
            with self.lock:
                if self._closed.is_set() or not self.space.has_room(slot_bytes):
                    return
                plan = self.space.plan(slot_bytes, above_floor)
            if plan is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            device = self._folder.create(plan.name, plan.slots * slot_bytes)
        except OSError as error:
            with self.lock:
                self.growth.failed(error, self._clock.now())
                if plan is not None:
                    self.space.abandon(plan)
            return
        with self.lock:
            self.growth.wrote()
            self.space.add_planned(plan, device)

    def _evict_for(self, slot_bytes: int, spared: Sequence[bytes]) -> list[Place]:
        """One slot for each as long as there is one; with the lock held."""
        places = list[Place]()
        for one in spared:
            victims = 0
            while not (freed := self.space.take(slot_bytes, 1)):
                victim = self.index.oldest(slot_bytes, one)
                if victim is None or victims == VICTIMS_MAX:
                    return places
                self.drop(victim)
                self.evicted += 1
                victims += 1
            places += freed
        return places

    def drop(self, entry: Entry) -> None:
        """Forget a record, if it is still there; with the lock held."""
        if self.index.holds(entry):
            self.index.remove(entry)
            self.space.give_up(entry.segment, entry.slot)

    def release(self, places: Iterable[Place]) -> None:
        """End reads or writes: the opposite of `take` and `space.pin`."""
        with self.lock:
            closing = [
                segment for segment, slot in places if self.space.unpin(segment, slot) is not None
            ]
        for segment in closing:
            self._close(segment)

    def retire(self, segment: Segment) -> int:
        """Remove a segment's file and forget its records; returns how many.

        The file goes first: what is read or written meanwhile still works, and the room counts as
        taken until the last of it is over. A file that cannot be removed stays as it is.
        """
        try:
            self._folder.remove(segment.name)
        except OSError as error:
            with self.lock:
                self.growth.failed(error, self._clock.now())
            return 0
        with self.lock:
            if segment.retired:
                return 0
            entries = self.index.of_segment(segment)
            for entry in entries:
                self.index.remove(entry)
            self.evicted += len(entries)
            closing = self.space.retire(segment) is not None
        if closing:
            self._close(segment)
        return len(entries)

    def _close(self, segment: Segment) -> None:
        with suppress(OSError):
            segment.device.close()
        with self.lock:
            self.space.closed(segment)

    def hold_floor(self) -> None:
        """Give a segment back if others have filled the file system below the floor."""
        try:
            short = self._folder.free_bytes() < self._floor_bytes
        except OSError:
            return
        if not short:
            return
        with self.lock:
            unread = [s for s in self.space.segments.values() if not s.pins]
            stalest = self.index.stalest(unread)
        if stalest is not None:
            self.retire(stalest)

    def shrink(self) -> None:
        """Give segments back until the budget is held: after a start with a lower one."""
        while self.space.committed_bytes > self.space.budget_bytes:
            stalest = self.index.stalest(self.space.segments.values())
            if stalest is None or (not self.retire(stalest) and not stalest.retired):
                return

    def stop(self, wait_s: float) -> bool:
        """Give no more slots, make no more files; False if one still is made after `wait_s`."""
        with self.lock:
            self._closed.set()
        if not self._making.acquire(timeout=wait_s):
            return False
        self._making.release()
        return True
