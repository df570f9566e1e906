"""Sinker: what only host memory has goes down to the lower tiers, in the background, coldest first.

It knows block names and tiers; no request, no device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from kvstore.fetch import Level
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.host import HostTier
from kvstore.tiers.queue import STORES_MAX, StoreJob, TierQueue

PAUSE_S = 1.0  # before blocks are offered again that nobody took


class Sinker:
    """Writes dirty blocks of `host` to every tier of `lower` that has room for them now. Calls may
    come from any thread; none waits for IO but `flush`.

    `kept(name, level)` hears of each block that a tier took.
    """

    def __init__(
        self,
        host: HostTier,
        lower: Mapping[Level, TierQueue],
        kept: Callable[[BlockName, Level], None],
    ) -> None:
        self._host, self._lower, self._kept = host, lower, kept
        self._lock = threading.Lock()
        self._under_way: dict[tuple[bytes, int, int], list[int]] = {}  # answers to come, taken
        self._again_s = 0.0

    def sink(self) -> None:
        """Queue what is dirty, as far as the tiers take it; for a while after nobody took a block,
        nothing. A slow tier gets what it has room for and holds up no other."""
        if not self._lower or time.monotonic() < self._again_s:
            return
        room = {level: queue.stores_free() for level, queue in self._lower.items()}
        most = max(room.values())
        coldest = self._host.coldest_dirty(most + len(self._under_way))
        with self._lock:
            names = [name for name in coldest if name.slot not in self._under_way][:most]
            names.reverse()  # parents first
            for i, name in enumerate(names):
                self._under_way[name.slot] = [sum(i < count for count in room.values()), 0]
        for level, queue in self._lower.items():
            sinking = _Sinking(self, self._host, level)
            jobs = [StoreJob(name, sinking.source, sinking.done) for name in names[: room[level]]]
            queue.store(jobs)

    def answered(self, name: BlockName, level: Level, status: Status) -> None:
        """A lower tier has answered for a block. Clean once one has it: it may then leave host
        memory without being lost."""
        taken = status is Status.OK
        if taken:
            self._host.mark_clean(name)
            self._kept(name, level)
        with self._lock:
            answers = self._under_way[name.slot]
            answers[0] -= 1
            answers[1] += taken
            if answers[0] == 0:
                del self._under_way[name.slot]
                if answers[1] == 0 and self._host.lookup((name,), 0.0)[0]:  # refused, not gone
                    self._again_s = time.monotonic() + PAUSE_S
        if self._lower[level].stores_free() > STORES_MAX // 2:
            self.sink()

    def flush(self, timeout_s: float) -> bool:
        """Sink everything that is dirty; False if that took longer."""
        end = time.monotonic() + timeout_s
        while True:
            self.sink()
            if not all(q.drain(end - time.monotonic()) for q in self._lower.values()):
                return False
            if not self._lower or self._all_sunk():
                return True
            if time.monotonic() >= end:
                return False
            if time.monotonic() < self._again_s:  # nobody takes anything now
                time.sleep(min(0.05, timeout_s))

    def _all_sunk(self) -> bool:
        """Nothing is dirty, on its way (and pinned, so that the host does not name it) or not."""
        with self._lock:
            return not self._under_way and not self._host.coldest_dirty(1)


class _Sinking:
    """Blocks on their way from host memory to one lower tier, pinned while it reads them."""

    def __init__(self, sinker: Sinker, host: HostTier, level: Level) -> None:
        self._sinker, self._host, self._level = sinker, host, level
        self._pinned: set[tuple[bytes, int, int]] = set()

    def source(self, name: BlockName) -> memoryview | None:
        view = self._host.pin(name)
        if view is not None:
            self._pinned.add(name.slot)
        return view

    def done(self, name: BlockName, status: Status) -> None:
        slot = name.slot
        if slot in self._pinned:
            self._pinned.discard(slot)
            self._host.unpin(name)
        self._sinker.answered(name, self._level, status)
