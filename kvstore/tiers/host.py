"""HostTier: blocks in host memory, in an arena made once. It knows no lower tier; whoever stages
loads through its slots and demotes from them calls begin/finish, pin/unpin and coldest_dirty.

The lock is held for index work only; a slot is pinned while bytes move, and numpy's copy lets other
threads run. Memory is touched by a thread in the background, so that a start does not wait for it
and a later store does not pay for it; CUDA registration, where there is a GPU, is the caller's, on
`arena`.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kernels.native.copying import streaming_copy
from kvstore.tiers.base import BlockName, Status, TierStats
from kvstore.tiers.host_slots import Slot, SlotTable

DIRTY_MAX_SHARE = 0.5
STREAM_BYTES_MIN = 64 << 10  # of a block that is copied past the caches, if it can be
PREFAULT_BYTES = 4 << 20  # a step of the background thread: the longest that `close` waits for it
MADV_POPULATE_WRITE = 23  # Linux 5.14; elsewhere a first store touches the memory itself

_OK, _MISS, _CORRUPT = Status.OK, Status.MISS, Status.CORRUPT  # to look one up takes 0.1 us
_LATE, _DROPPED = Status.LATE, Status.DROPPED

OnChange = Callable[[bool, list[BlockName]], None]


class HostTier:
    """Blocks of `sizes` (group -> bytes of one block on one rank) in at most `capacity_bytes`.

    A slot is rounded up to 4 KiB. `write_back`: a stored block is dirty until `mark_clean`, that
    is, some lower tier is meant to get it; False where there is none. `verify` keeps an xxh3 of
    each block and checks it at each load. `on_change` hears, outside the lock and in order, of all
    blocks that are there now (True) or gone, whatever the reason; it must not store or load.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        capacity_bytes: int,
        *,
        write_back: bool = True,
        dirty_max_share: float = DIRTY_MAX_SHARE,
        verify: bool = False,
        prefault: bool = True,
        on_change: OnChange | None = None,
    ) -> None:
        self._sizes = dict(sizes)
        self._write_back = write_back
        self._verify = verify
        self._on_change = on_change
        self._telling = threading.Lock()
        self._lock = threading.Lock()
        self._table = SlotTable(sizes, capacity_bytes, dirty_max_share)
        assert self._table.arena_bytes > 0, "not even one block fits"
        self._arena = _arena(self._table.arena_bytes)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._arena, np.uint8)
        self._start = self._bytes.ctypes.data
        self._stream = streaming_copy()  # what leaves the device is not read soon
        self._stats = TierStats(bytes_max=self._table.arena_bytes)
        self._closed = threading.Event()
        self._prefault = threading.Thread(
            target=_prefault, args=(self._bytes, self._closed), name="host-prefault", daemon=True
        )
        if prefault:
            self._prefault.start()

    @property
    def name(self) -> str:
        return "host"

    @property
    def arena(self) -> memoryview:
        """All of the memory, to be registered with a device. Not to be written to."""
        return self._arena

    @property
    def lost(self) -> int:
        """Evicted blocks that no lower tier had."""
        return self._table.lost

    @property
    def dirty_bytes(self) -> int:
        """Of slots that no lower tier has."""
        return self._table.dirty_bytes

    def hear(self, on_change: OnChange) -> None:
        """Tell `on_change`, and nobody else, of what comes and leaves from now on, in order."""
        self._on_change = on_change

    # ---- the tier contract

    def lookup(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        with self._lock:
            return self._table.present(names)

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        start = time.monotonic()
        self._check_sizes(names, into)
        with self._lock:
            memory, table = self._bytes, self._table
            slots = table.find_all(names)
            for slot in slots:
                if slot is not None:
                    slot.pins += 1
        until = start + deadline_s
        statuses = [
            _MISS if slot is None else self._copy_out(slot, memory, view, until)
            for slot, view in zip(slots, into, strict=True)
        ]
        with self._lock:
            for i, slot in enumerate(slots):
                if slot is None and (cause := table.clash(names[i])):
                    statuses[i] = _CORRUPT
                    self._stats.corrupt[cause] += 1
            self._end_load(slots, statuses)
            self._stats.load_s += time.monotonic() - start
        self._tell()
        return statuses

    def store(
        self, names: Sequence[BlockName], data: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        start = time.monotonic()
        self._check_sizes(names, data)
        with self._lock:
            memory, table = self._bytes, self._table
            found = table.find_all(names)
            there = [slot for slot in found if slot is not None]
            table.touch(there)
            for slot in there:
                slot.pins += 1  # not to be evicted for the rest of the call
            roomy = deadline_s > 0 and not self._closed.is_set()
            taken = [
                table.take(name) if slot is None and roomy else None
                for slot, name in zip(found, names, strict=True)
            ]
        otherwise, until = _DROPPED if deadline_s > 0 else _LATE, start + deadline_s
        statuses = [
            self._copy_in(slot, memory, view, until)
            if slot is not None
            else (otherwise if old is None else _OK)
            for slot, old, view in zip(taken, found, data, strict=True)
        ]
        with self._lock:
            self._end_store(taken, there, statuses)
            self._stats.store_s += time.monotonic() - start
        self._tell()
        return statuses

    def discard(self, names: Sequence[BlockName]) -> None:
        with self._lock:
            self._table.discard(names)
        self._tell()

    def names(self) -> list[BlockName]:
        with self._lock:
            return self._table.names()

    def clear(self) -> None:
        with self._lock:
            self._table.clear()
        self._tell()

    def stats(self) -> TierStats:
        with self._lock:
            return replace(
                self._stats,
                blocks=len(self._table),
                bytes=self._table.held_bytes,
                evicted=self._table.evicted,
                corrupt=Counter(self._stats.corrupt),
            )

    def close(self) -> None:
        """The memory goes with the last view of it that is still about."""
        with self._lock:
            self._closed.set()
            self._table.clear()
            self._table.drain_changes()
            self._bytes, self._arena = np.empty(0, np.uint8), memoryview(b"")
        if self._prefault.is_alive():
            self._prefault.join()

    # ---- staging

    def begin(self, name: BlockName) -> memoryview | None:
        """A slot to fill with `name` from elsewhere, to be `finish`ed; nobody finds it before.
        None if there is no room, or if it is there or being filled already."""
        with self._lock:
            slot = None if self._closed.is_set() else self._table.take(name)
            view = None if slot is None else self._view(slot)
        self._tell()
        return view

    def finish(self, name: BlockName, ok: bool) -> None:
        """End what `begin` began: a clean block that is found from now on, or nothing."""
        with self._lock:
            slot = self._table.find_filling(name)
            view = None if slot is None else self._view(slot)  # empty after `close`
        if slot is None or view is None:
            return
        if ok and self._verify:
            slot.xxh3 = xxh3_64_intdigest(view)
        with self._lock:
            self._table.finish(slot, ok, dirty=False)
        self._tell()

    def touch(self, names: Sequence[BlockName]) -> None:
        """These were used just now, parents first; those that are not here are ignored."""
        with self._lock:
            slots = self._table.find_all(names)
            self._table.touch([slot for slot in slots if slot is not None])

    def pin(self, name: BlockName) -> memoryview | None:
        """The bytes of `name`, to be read only, which stay until `unpin`; None on a miss. A use.
        Pins are counted. Not verified: whoever copies from here trusts this memory."""
        with self._lock:
            slot = self._table.find(name)
            if slot is None:
                return None
            slot.pins += 1
            self._table.touch([slot])
            return self._view(slot)

    def unpin(self, name: BlockName) -> None:
        """End one `pin`. Safe after `discard`, `clear` and `close`."""
        with self._lock:
            self._table.unpin_name(name)

    # ---- demotion

    def coldest_dirty(self, limit: int) -> list[BlockName]:
        """Up to `limit` blocks that no lower tier has and nobody uses, least recently used first;
        of those used by one call the child first, the other way round than a store wants them."""
        with self._lock:
            return self._table.coldest_dirty(limit)

    def mark_clean(self, name: BlockName) -> None:
        """A lower tier has `name` now."""
        with self._lock:
            self._table.mark_clean(name)

    def check_integrity(self) -> None:
        """Assert that no slot is lost or in two places. For tests; slow."""
        with self._lock:
            self._table.check_integrity()

    # ---- the parts

    def _view(self, slot: Slot) -> memoryview:
        return self._arena[slot.at : slot.at + slot.bytes]

    def _check_sizes(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            assert view.nbytes == self._sizes[name.group], "not a block of this group"

    def _copy_out(
        self, slot: Slot, memory: NDArray[np.uint8], view: memoryview, until: float
    ) -> Status:
        """The bytes of `slot`, which is pinned, into `view`."""
        if time.monotonic() >= until:
            return _LATE
        np.frombuffer(view, np.uint8)[:] = memory[slot.at : slot.at + slot.bytes]
        if self._verify and xxh3_64_intdigest(view) != slot.xxh3:
            return _CORRUPT
        return _OK

    def _copy_in(
        self, slot: Slot, memory: NDArray[np.uint8], view: memoryview, until: float
    ) -> Status:
        """`view` into `slot`, which is FILLING. The caller keeps `memory`, the arena."""
        if time.monotonic() >= until:
            return _LATE
        if self._stream is None or slot.bytes < STREAM_BYTES_MIN or view.readonly:
            memory[slot.at : slot.at + slot.bytes] = np.frombuffer(view, np.uint8)
        else:
            source = ctypes.addressof(ctypes.c_char.from_buffer(view))
            self._stream(self._start + slot.at, source, slot.bytes)
        if self._verify:
            slot.xxh3 = xxh3_64_intdigest(view)
        return _OK

    def _end_load(self, slots: Sequence[Slot | None], statuses: Sequence[Status]) -> None:
        stats, table = self._stats, self._table
        used = [s for s, status in zip(slots, statuses, strict=True) if s and status is _OK]
        table.touch(used)
        stats.hits += len(used)
        stats.loaded_bytes += sum(slot.bytes for slot in used)
        for slot, status in zip(slots, statuses, strict=True):
            if slot is None:
                stats.misses += 1
                continue
            if status is _CORRUPT:
                stats.corrupt["payload"] += 1
                table.forget(slot)
            stats.failed += status is _LATE
            table.unpin(slot)

    def _end_store(
        self, taken: Sequence[Slot | None], there: Sequence[Slot], statuses: Sequence[Status]
    ) -> None:
        stats, table, dirty = self._stats, self._table, self._write_back
        table.touch([slot for slot in taken if slot is not None])
        for slot, status in zip(taken, statuses, strict=True):
            if status is not _OK:
                stats.dropped += status is _DROPPED
                stats.failed += status is _LATE
            elif slot is not None:
                stats.stored += 1
                stats.stored_bytes += slot.bytes
            if slot is not None:
                table.finish(slot, status is _OK, dirty=dirty)
        for slot in there:
            table.unpin(slot)

    def _tell(self) -> None:
        with self._telling:  # over both, or two threads would tell in the wrong order
            with self._lock:
                changes = self._table.drain_changes()
            if self._on_change is not None:
                for added, run in groupby(changes, key=itemgetter(0)):
                    self._on_change(added, [name for _, name in run])


def _arena(size: int) -> memoryview:
    """`size` bytes of our own memory, in huge pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _prefault(memory: NDArray[np.uint8], closed: threading.Event) -> None:
    """Have the system back all of `memory` now; what lies in it stays as it is."""
    madvise = ctypes.CDLL(None).madvise  # lets other threads run, which mmap.madvise does not
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for at in range(0, memory.nbytes, PREFAULT_BYTES):
        step = min(PREFAULT_BYTES, memory.nbytes - at)
        if closed.is_set() or madvise(memory.ctypes.data + at, step, MADV_POPULATE_WRITE):
            return
