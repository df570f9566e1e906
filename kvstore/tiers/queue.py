"""TierQueue: one blocking tier behind threads of its own, so that nobody else ever waits for it.

Loads go before stores; both queues are bounded and refuse what does not fit at once. It measures
how long a block takes, from which callers decide whether to wait. It knows no requests, no policy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.tiers.base import BlockName, Status, Tier

BATCH_BLOCKS = 8  # of one call to the tier: what is queued behind it can still be called off
LOADS_MAX = 8192
STORES_MAX = 256
LOOKUPS_MAX = 256
BATCH_S = 0.01  # of a batch of loads, at most: the engine may compute its blocks sooner
CALL_S = 5.0  # for one batch
WEIGHT = 0.3  # of the newest measurement
PRIOR_S_PER_BYTE = 1e-9  # before the first

_log = logging.getLogger(__name__)


class LoadJob(NamedTuple):
    """One block wanted. `place` is asked for the destination when its turn comes (None: not wanted
    any more, or no room); `done` is told what came of it. Both are called on the queue's threads
    and must not block; `done` also by `load` itself, with DROPPED, if the queue is full."""

    name: BlockName
    place: Callable[[BlockName], memoryview | None]
    done: Callable[[BlockName, Status], None]


class StoreJob(NamedTuple):
    """One block to be kept. `source` is asked for the bytes when its turn comes (None: gone);
    `done` as in LoadJob."""

    name: BlockName
    source: Callable[[BlockName], memoryview | None]
    done: Callable[[BlockName, Status], None]


class LookupJob(NamedTuple):
    """Names to look for; `done` gets the answer, nothing found if the tier could not tell or is
    asked too much, or if they are not `wanted` any more when their turn comes."""

    names: list[BlockName]
    done: Callable[[list[BlockName], list[bool]], None]
    wanted: Callable[[], bool] = lambda: True


class TierQueue:
    """Owns `tier`. Calls return at once and may come from any thread."""

    def __init__(self, tier: Tier, *, threads: int = 2, call_s: float = CALL_S) -> None:
        assert threads > 0
        self.tier = tier
        self._call_s = call_s
        self._ready = threading.Condition()
        self._lookups: deque[LookupJob] = deque()
        self._loads: deque[LoadJob] = deque()
        self._stores: deque[StoreJob] = deque()
        self._closing = False
        self._looking = 0  # lookups in calls now: never on all threads, or no load would run
        self._loading = 0  # blocks in calls now
        self._storing = 0
        self._busy = 0  # threads that load
        self._ended = 0  # loads that came to an end, ever
        self.after_batch: Callable[[], None] = lambda: None  # after the `done` of some loads
        self._s_per_byte = PRIOR_S_PER_BYTE
        self._block_s = 0.0  # of one load in its call; 0 = none came yet
        self._lookup_s = 0.001
        self._progress_s = time.monotonic()  # when a load last came back, or began after none
        self.dropped_loads = 0
        self.dropped_stores = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"tier-{tier.name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- asking ------------------------------------------------------------------------------

    def lookup(self, job: LookupJob) -> None:
        """Ask the tier for names, before any load."""
        with self._ready:
            if not self._closing and len(self._lookups) < LOOKUPS_MAX:
                self._lookups.append(job)
                self._ready.notify_all()
                return
        _tell_nothing(job)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Queue loads in this order."""
        with self._ready:
            room = 0 if self._closing else max(0, LOADS_MAX - len(self._loads))
            if not self._loads and not self._loading:
                self._progress_s = time.monotonic()
            self._loads.extend(jobs[:room])
            self.dropped_loads += len(jobs[room:])
            self._ready.notify_all()
        _drop(jobs[room:])

    def store(self, jobs: Sequence[StoreJob]) -> None:
        """Queue stores in this order."""
        with self._ready:
            room = 0 if self._closing else max(0, STORES_MAX - len(self._stores))
            self._stores.extend(jobs[:room])
            self.dropped_stores += len(jobs[room:])
            self._ready.notify_all()  # not one: it could be somebody who drains
        _drop(jobs[room:])

    def stores_free(self) -> int:
        """How many stores would be taken now."""
        return 0 if self._closing else STORES_MAX - len(self._stores)

    def due(self) -> int:
        """A mark for `estimate_s`: what is queued now has ended once so many loads have."""
        return self._ended + self._loading + len(self._loads)

    def estimate_s(self, blocks: int, due: int, block_bytes: int) -> float:
        """Seconds until the last of `blocks` loads that were queued before `due` has come: others'
        before them count. A tier from which nothing has come for longer than expected is believed
        to be as slow as that looks."""
        with self._ready:
            expected_s = self._s_per_byte * block_bytes
            if self._loading or self._loads:
                silent_s = time.monotonic() - self._progress_s
                expected_s = max(expected_s, silent_s / max(1, self._loading))
            return max(blocks, due - self._ended) * expected_s

    @property
    def lookup_s(self) -> float:
        """Seconds that a lookup takes, smoothed."""
        return self._lookup_s

    @property
    def bytes_per_s(self) -> float:
        """Of loads, smoothed over all threads."""
        return 1.0 / self._s_per_byte

    def depth(self) -> tuple[int, int]:
        """Loads and stores queued or being made."""
        return len(self._loads) + self._loading, len(self._stores) + self._storing

    def drain(self, timeout_s: float) -> bool:
        """Wait until all loads and stores queued are done and told; False if it took longer."""
        end = time.monotonic() + timeout_s
        with self._ready:
            while self._loads or self._stores or self._loading or self._storing:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._ready.wait(min(left, 0.05))
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Drop what is queued, wait for the calls under way, close the tier. A thread that a tier
        does not let go in time is left behind. Safe to repeat."""
        with self._ready:
            self._closing = True
            loads, stores, lookups = list(self._loads), list(self._stores), list(self._lookups)
            for queue in (self._loads, self._stores, self._lookups):
                queue.clear()
            self._ready.notify_all()
        _drop(loads)
        _drop(stores)
        for asked in lookups:
            _tell_nothing(asked)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.tier.close()

    # --- on the queue's threads --------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._ready:
                while not (self._may_look() or self._loads or self._stores or self._closing):
                    self._ready.wait()
                if self._closing:
                    return
                work = self._take()
            try:
                work()
            except Exception:  # a tier must not raise; if it does, nobody may wait for it forever
                _log.exception("the %s tier failed", self.tier.name)

    def _may_look(self) -> bool:
        """Whether there is a lookup to make and a thread is left for loads all the while."""
        spare = len(self._threads) == 1 or self._looking < len(self._threads) - 1
        return bool(self._lookups) and spare

    def _take(self) -> Callable[[], None]:
        """The next call to make; with the lock held."""
        if self._may_look():
            asked = self._lookups.popleft()
            self._looking += 1
            return lambda: self._look(asked)
        if self._loads:
            soon = int(BATCH_S / self._block_s) if self._block_s else BATCH_BLOCKS
            count = max(1, min(BATCH_BLOCKS, soon, len(self._loads) // len(self._threads)))
            loads = [self._loads.popleft() for _ in range(min(count, len(self._loads)))]
            self._loading += len(loads)
            self._busy += 1
            return lambda: self._load(loads)
        stores = [self._stores.popleft() for _ in range(min(BATCH_BLOCKS, len(self._stores)))]
        self._storing += len(stores)
        return lambda: self._store(stores)

    def _look(self, asked: LookupJob) -> None:
        found = [False] * len(asked.names)
        began_s = time.monotonic()
        try:
            if asked.wanted():
                found = self.tier.lookup(asked.names, self._call_s)
                self._lookup_s += WEIGHT * (time.monotonic() - began_s - self._lookup_s)
        finally:
            with self._ready:
                self._looking -= 1
                self._ready.notify_all()
            asked.done(asked.names, found)

    def _load(self, jobs: list[LoadJob]) -> None:
        statuses = [Status.DROPPED] * len(jobs)
        came_bytes, began_s = 0, time.monotonic()
        try:
            places = [_asked(job.place, job.name) for job in jobs]
            wanted = [(i, place) for i, place in enumerate(places) if place is not None]
            if wanted:
                names = [jobs[i].name for i, _ in wanted]
                came = self.tier.load(names, [place for _, place in wanted], self._call_s)
                for (i, place), status in zip(wanted, came, strict=True):
                    statuses[i] = status
                    came_bytes += len(place) if status is Status.OK else 0
        finally:
            took_s = time.monotonic() - began_s
            _answer(jobs, statuses)
            self._loaded(len(jobs), came_bytes, took_s)
            self.after_batch()

    def _loaded(self, count: int, size: int, took_s: float) -> None:
        with self._ready:
            self._progress_s = time.monotonic()
            if size:
                weight = WEIGHT if self._block_s else 1.0
                self._block_s += weight * (took_s / count - self._block_s)
                self._s_per_byte += weight * (took_s / size / self._busy - self._s_per_byte)
            self._loading -= count
            self._ended += count
            self._busy -= 1
            self._ready.notify_all()

    def _store(self, jobs: list[StoreJob]) -> None:
        statuses = [Status.DROPPED] * len(jobs)
        try:
            sources = [_asked(job.source, job.name) for job in jobs]
            there = [(i, source) for i, source in enumerate(sources) if source is not None]
            if there:
                names = [jobs[i].name for i, _ in there]
                kept = self.tier.store(names, [source for _, source in there], self._call_s)
                for (i, _), status in zip(there, kept, strict=True):
                    statuses[i] = status
        finally:
            _answer(jobs, statuses)  # first, so that nothing is pinned once it counts as drained
            with self._ready:
                self._storing -= len(jobs)
                self._ready.notify_all()


def _asked(
    for_bytes: Callable[[BlockName], memoryview | None], name: BlockName
) -> memoryview | None:
    """A job's place or source; one that raises has none, and the others of its batch go on."""
    try:
        return for_bytes(name)
    except Exception:
        _log.exception("no place or source could be had for a block")
        return None


def _answer(jobs: Sequence[LoadJob | StoreJob], statuses: Sequence[Status]) -> None:
    """Tell each job; one that raises does not keep the others waiting."""
    for job, status in zip(jobs, statuses, strict=True):
        try:
            job.done(job.name, status)
        except Exception:
            _log.exception("what came of a block could not be told")


def _drop(jobs: Sequence[LoadJob | StoreJob]) -> None:
    _answer(jobs, [Status.DROPPED] * len(jobs))


def _tell_nothing(asked: LookupJob) -> None:
    """Answer a lookup that is not made."""
    try:
        asked.done(asked.names, [False] * len(asked.names))
    except Exception:
        _log.exception("that nothing was looked for could not be told")
