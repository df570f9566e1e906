"""TieredStore: host memory over slower tiers, as one place that blocks go to and come back from.

Blocks leave the device into host memory (one copy, never any IO) and sink from there to the lower
tiers in the background; they come back by way of host memory too, so the device is only ever read
and written by the engine's own thread. It knows block names and bytes; no request, no model.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Protocol, runtime_checkable

from kernels.cold import ColdCodec
from kvstore.fetch import FETCH_S_MAX, LEVELS, Fetch, Level, Place, Row, TierOp
from kvstore.groups import KVGroup
from kvstore.objectnames import is_meta, is_part
from kvstore.sinking import Sinker
from kvstore.tiers.base import BlockName, Status, Tier, TierStats
from kvstore.tiers.host import HostTier
from kvstore.tiers.queue import LoadJob, LookupJob, TierQueue
from seams.errors import NoReplica

_Slot = tuple[bytes, int, int]


@runtime_checkable
class Telling(Protocol):
    """A tier that says itself what it gained and lost."""

    def hear(self, on_change: Callable[[bool, list[BlockName]], None]) -> None:
        """(gained, names) in order from now on, on any thread, outside its locks."""
        ...


class TieredStore:
    """One replica's blocks outside the device. `demote`, `fetch` and `promote` are the engine
    thread's and never wait for IO; `wake`, which whoever uses it sets, is called on any thread
    whenever a fetch has moved.

    A block is read from the fastest tier that has it. What a lower tier cannot give is a block that
    will be computed: a fetch never fails.
    """

    def __init__(
        self,
        host: HostTier,
        lower: Sequence[TierQueue] = (),
        codecs: Mapping[int, ColdCodec] | None = None,
    ) -> None:
        """`codecs` by KV group: how blocks are written below the device; as they are without."""
        self.host = host
        self._codecs = codecs or {}
        self.lower = {LEVELS[queue.tier.name]: queue for queue in lower}
        self.wake: Callable[[], None] = lambda: None
        self.loaded_blocks: Counter[Level] = Counter()  # promoted, by where they came from
        self.moves = 0  # changes of any fetch so far
        self._lock = threading.Lock()
        self._coming: dict[_Slot, list[tuple[Fetch, int, int]]] = {}
        self._ops: list[TierOp] = []
        self._filling: set[_Slot] = set()  # slots of ours in the host tier
        self._paused = False
        self._sinker = Sinker(host, self.lower, self._sank)
        host.hear(partial(self._note, Level.HOST))
        for level, queue in self.lower.items():
            queue.after_batch = self._moved
            if isinstance(queue.tier, Telling):
                queue.tier.hear(partial(self._note, level))

    # --- down --------------------------------------------------------------------------------

    def demote(self, names: Sequence[BlockName], blocks: Sequence[memoryview]) -> None:
        """Keep copies of blocks that leave the device, as far as there is room. Parents first."""
        if self._paused:
            return
        there = self.host.lookup(names, 0.0)
        known = [name for name, found in zip(names, there, strict=True) if found]
        new = [(n, b) for n, b, found in zip(names, blocks, there, strict=True) if not found]
        self.host.touch(known)
        encoded = [self._encoded(name, block) for name, block in new]
        self.host.store([name for name, _ in new], encoded, FETCH_S_MAX)
        self._sinker.sink()

    def record_bytes(self, group: KVGroup) -> int:
        """What one block of a group on one rank takes below the device, without headers."""
        codec = self._codecs.get(group.id)
        return group.block_bytes if codec is None else codec.encoded_bytes

    def _codec(self, name: BlockName) -> ColdCodec | None:
        return None if is_meta(name) else self._codecs.get(name.group)

    def _encoded(self, name: BlockName, block: memoryview) -> memoryview:
        codec = self._codec(name)
        if codec is None:
            return block
        encoded = memoryview(bytearray(codec.encoded_bytes))
        codec.encode(block, encoded)
        return encoded

    def flush(self, timeout_s: float) -> bool:
        """Let everything sink that only host memory has; False if that took longer."""
        return self._sinker.flush(timeout_s)

    def _sank(self, name: BlockName, level: Level) -> None:
        if not isinstance(self.lower[level].tier, Telling):
            self._note(level, True, [name])

    # --- up ----------------------------------------------------------------------------------

    def fetch(self, first: int, rows: Sequence[Row]) -> Fetch:
        """Look for blocks `first`.. of a prompt and bring up what slower tiers have, last first:
        the engine computes from the front until the two meet."""
        fetch = Fetch(first, rows)
        self.refresh(fetch, first)
        return fetch

    def refresh(self, fetch: Fetch, block: int) -> None:
        """Look again, from `block` on, for what is not on its way. O(blocks), no IO."""
        fetch.began_s = time.monotonic()
        if self._paused:
            return
        end = len(fetch.places[0])
        near: list[int] = []  # per group: where its window begins
        for group, row in enumerate(fetch.rows):
            near.append(end - row.window if row.window else 0)
            self._seek(fetch, group, max(0, block - fetch.first), near[-1])
            if group == 0:  # windows reach back from the last block that there is
                held = [at for at, place in enumerate(fetch.places[0]) if place]
                end = held[-1] + 1 if held else 0
        self._ask(fetch, near)

    def _seek(self, fetch: Fetch, group: int, start: int, near: int) -> None:
        """Where the blocks of a row from entry `start` on are; those that are read and that a disk
        has start their way up, last first."""
        row, places = fetch.rows[group], fetch.places[group]
        looked = [
            at
            for at in range(start, len(places))
            if places[at] == Place.ABSENT or places[at] == Place.READY
        ]
        missing = self._missing(self.host, row, looked)
        for at in looked:
            places[at] = Place.ABSENT if at in missing else Place.READY
            if at not in missing:
                fetch.sources[group][at] = fetch.sources[group][at] or Level.HOST
        disk = self.lower.get(Level.DISK)
        wanted = [at for at in looked if at in missing and fetch.is_read(group, at, near)]
        if disk is None or not wanted:
            return
        nowhere = self._missing(disk.tier, row, wanted)
        found = [at for at in wanted if not set(nowhere.get(at, ())) & set(missing[at])]
        self._bring(fetch, group, {at: missing[at] for at in reversed(found)}, Level.DISK)

    @staticmethod
    def _missing(tier: Tier, row: Row, entries: Sequence[int]) -> dict[int, list[BlockName]]:
        """Of these entries of a row those that the tier has not, or not on all ranks: what it has
        not. One call to the tier, which answers from memory."""
        names = [name for at in entries for name in row.names[at]]
        there = iter(tier.lookup(names, 0.0))
        absent = {at: [name for name in row.names[at] if not next(there)] for at in entries}
        return {at: found for at, found in absent.items() if found}

    def _ask(self, fetch: Fetch, near: Sequence[int]) -> None:
        """Ask the shared tier for all that is absent and worth a load, in one call."""
        shared = self.lower.get(Level.SHARED)
        absent = [
            (group, at)
            for group, places in enumerate(fetch.places)
            for at, place in enumerate(places)
            if place == Place.ABSENT and fetch.is_read(group, at, near[group])
        ]
        if shared is None or not absent or fetch.asking:
            return
        names = [name for group, at in absent for name in fetch.rows[group].names[at]]
        for group, at in absent:
            fetch.places[group][at] = Place.ASKED
        fetch.asking, fetch.asked_s = True, time.monotonic()

        def answered(_: list[BlockName], found: list[bool]) -> None:
            answers = iter(found)
            there = {
                (group, at): all(list(islice(answers, len(fetch.rows[group].names[at]))))
                for group, at in absent
            }
            for group, row in enumerate(fetch.rows):
                mine = [at for one, at in absent if one == group]
                held = [at for at in mine if there[group, at] and not fetch.cancelled]
                for at in set(mine).difference(held):  # the others go on at once to COMING
                    fetch.places[group][at] = Place.ABSENT
                missing = self._missing(self.host, row, held)
                wanted = {at: missing.get(at, []) for at in reversed(held)}
                self._bring(fetch, group, wanted, Level.SHARED)
            fetch.asking = False
            self._moved()

        shared.lookup(LookupJob(names, answered, lambda: not fetch.cancelled))

    def _bring(
        self, fetch: Fetch, group: int, wanted: Mapping[int, list[BlockName]], level: Level
    ) -> None:
        """Queue the loads of entries' missing names in this order, or wait for those of another
        fetch."""
        begun: list[BlockName] = []
        with self._lock:
            for at, names in wanted.items():
                fetch.sources[group][at] = level
                fetch.places[group][at] = Place.COMING if names else Place.READY
                fetch.missing[group][at] = len(names)
                for name in names:
                    waiting = self._coming.setdefault(name.slot, [])
                    if not waiting:
                        begun.append(name)
                    waiting.append((fetch, group, at))
        self.lower[level].load([LoadJob(name, self._placed, self._came) for name in begun])
        fetch.due[level] = self.lower[level].due()

    def _placed(self, name: BlockName) -> memoryview | None:
        """Room in host memory for a block whose turn it is, if anybody still wants it."""
        with self._lock:
            wanted = any(
                not fetch.cancelled and fetch.first + at >= fetch.front
                for fetch, _, at in self._coming[name.slot]
            )
        place = self.host.begin(name) if wanted else None
        if place is not None:
            with self._lock:
                self._filling.add(name.slot)
        return place

    def _came(self, name: BlockName, status: Status) -> None:
        ok = status is Status.OK
        with self._lock:
            filling = name.slot in self._filling
            self._filling.discard(name.slot)
        if filling:
            self.host.finish(name, ok)
        ok = ok or self.host.lookup((name,), 0.0)[0]
        with self._lock:
            for fetch, group, at in self._coming.pop(name.slot, []):
                fetch.missing[group][at] -= 1
                if not ok:
                    fetch.places[group][at] = Place.ABSENT
                elif not fetch.missing[group][at] and fetch.places[group][at] == Place.COMING:
                    fetch.places[group][at] = Place.READY

    def _moved(self) -> None:
        self.moves += 1
        self.wake()

    def wait_s(self, fetch: Fetch, block: int) -> tuple[int, float]:
        """How many blocks of the prompt, from `block` on, are still to come, and in what time
        they will have, in seconds. What is only asked for counts as coming with the answer."""
        coming: set[int] = set()
        asked: set[int] = set()
        total_s = 0.0
        for group, row in enumerate(fetch.rows):
            codec = self._codecs.get(group)
            size = (codec.encoded_bytes if codec else row.block_bytes) * len(row.names[0])
            counts: Counter[int] = Counter()
            places, sources = fetch.places[group], fetch.sources[group]
            for at in range(max(0, block - fetch.first), len(places)):
                if places[at] == Place.COMING:
                    counts[sources[at]] += 1
                    coming.add(at)
                elif places[at] == Place.ASKED:
                    asked.add(at)
            for level, count in counts.items():
                due = fetch.due.get(level, 0)
                total_s += self.lower[Level(level)].estimate_s(count, due, size)
        if asked:
            silent_s = time.monotonic() - fetch.asked_s
            total_s += max(self.lower[Level.SHARED].lookup_s, silent_s)
        if time.monotonic() - fetch.began_s > FETCH_S_MAX:
            fetch.cancel()
        return len(coming | asked), total_s

    @contextmanager
    def pinned(self, fetch: Fetch, block: int, stop: int) -> Iterator[None]:
        """Keep what is in host memory of blocks `block` .. `stop` - 1 from being evicted."""
        names = [
            name
            for row in fetch.rows
            for ranks in row.names[block - fetch.first : stop - fetch.first]
            for name in ranks
        ]
        pinned = [name for name in names if self.host.pin(name) is not None]
        try:
            yield
        finally:
            for name in pinned:
                self.host.unpin(name)

    def promote(
        self, fetch: Fetch, group: int, block: int, into: Sequence[Sequence[memoryview]]
    ) -> int:
        """Copy ready blocks from `block` on to the device, one view per block and rank; returns how
        many leading ones came. The first that was not there any more counts as absent."""
        at = block - fetch.first
        names = [name for ranks in fetch.rows[group].names[at : at + len(into)] for name in ranks]
        statuses = self.load(names, [view for ranks in into for view in ranks])
        bad = next((i for i, status in enumerate(statuses) if status is not Status.OK), None)
        came = len(into) if bad is None else bad // len(into[0])
        if bad is not None:
            fetch.places[group][at + came] = Place.ABSENT
        if group == 0:
            for source in fetch.sources[0][at : at + came]:
                self.loaded_blocks[Level(source)] += 1
        return came

    def load(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[Status]:
        """Copy what host memory has to where it is wanted, one view per name; undefined where the
        status is not OK. Bytes of a block are as on the device, those of a meta as they were."""
        if self._paused:
            return [Status.MISS] * len(names)
        codecs = [self._codec(name) for name in names]
        places = [
            view if codec is None else memoryview(bytearray(codec.encoded_bytes))
            for codec, view in zip(codecs, into, strict=True)
        ]
        statuses = self.host.load(names, places, FETCH_S_MAX)
        for codec, place, view, status in zip(codecs, places, into, statuses, strict=True):
            if codec is not None and status is Status.OK:
                codec.decode(place, view)
        return statuses

    # --- saying ------------------------------------------------------------------------------

    def take_ops(self) -> list[TierOp]:
        """What the tiers gained and lost since the last call, in order."""
        with self._lock:
            ops, self._ops = self._ops, []
        return ops

    def has_ops(self) -> bool:
        """Whether `take_ops` would have something."""
        return bool(self._ops)

    def snapshot(self) -> list[TierOp]:
        """Every block that host memory and disk hold now; the shared tier tells nobody what it has
        kept, and nobody is told of objects."""
        ops = []
        held: list[tuple[Level, Iterable[BlockName]]] = [(Level.HOST, self.host.names())]
        disk = self.lower.get(Level.DISK)
        if disk is not None:
            held.append((Level.DISK, disk.tier.names()))
        for level, names in held:
            keys: dict[int, list[bytes]] = {}
            for name in names:
                if name.rank == 0 and not is_part(name):
                    keys.setdefault(name.group, []).append(name.key)
            ops += [TierOp(level, True, group, tuple(found)) for group, found in keys.items()]
        return ops

    def stats(self) -> dict[Level, TierStats]:
        """Per tier."""
        lower = {level: queue.tier.stats() for level, queue in self.lower.items()}
        return {Level.HOST: self.host.stats(), **lower}

    def pause(self) -> None:
        """Until `resume` nothing more goes down and nothing comes up: blocks that leave the device
        are lost, and sequences find nothing. Once the engine's thread is between two steps, what it
        had begun is over. From any thread, as `resume`."""
        self._paused = True

    def resume(self) -> None:
        """The end of a `pause`."""
        self._paused = False

    def clear(self, timeout_s: float) -> int:
        """Forget all blocks and objects of every tier; how many host memory and disk held. Waits
        for what is under way, so it is for a thread that may; what comes all the time makes it fail
        unless there is a `pause`. Of a shared tier as much goes as its server and the time allow.
        Raises NoReplica if a tier does not answer or come to rest."""
        held = sum(stats.blocks for stats in self.stats().values())
        self.host.clear()  # first: what was to sink from it has no source any more
        until_s = time.monotonic() + timeout_s
        for level, queue in self.lower.items():
            if queue.tier.stats().state == "broken" or not queue.drain(until_s - time.monotonic()):
                tier = level.name.lower()
                raise NoReplica(f"The {tier} tier does not answer and keeps its blocks.")
            queue.tier.clear()
        self.host.clear()  # what had come up meanwhile
        return held

    def close(self, flush_s: float = 0.0) -> None:
        """Sink what is dirty, within `flush_s`, and close every tier. Safe to repeat."""
        if flush_s > 0:
            self.flush(flush_s)
        for queue in self.lower.values():
            queue.close()
        self.host.close()

    def _note(self, level: Level, stored: bool, names: Sequence[BlockName]) -> None:
        """One op per group; a block is said to be there by its first rank. Wakes whoever tells. Of
        objects nobody hears: they stand for no prefix."""
        told = [name for name in names if name.rank == 0 and not is_part(name)]
        with self._lock:
            first = not self._ops
            for group in {name.group for name in told}:
                keys = tuple(name.key for name in told if name.group == group)
                if keys:
                    self._ops.append(TierOp(level, stored, group, keys))
            first = first and bool(self._ops)
        if first:
            self.wake()
