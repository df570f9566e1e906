"""A tier that misbehaves on demand, within the contract: never a wrong byte under OK.

Wrap any tier and set what is wrong with it; every setting may change while calls are under way.
What a load does not say OK to is scribbled over, as the contract allows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvstore.tiers.base import BlockName, Status, Tier, TierStats

SCRIBBLE = 0xEE


class FaultyTier:
    """`inner`, but slow, failing, lying or frozen.

    - delay_s, slow_factor: each call takes that much longer, or that many times as long
    - overtime_s: a call comes back this long after its deadline, with true results (None: in time)
    - fail_every: every n-th block of loads and stores is FAILED and not done; 1 = all, 0 = none
    - phantom: lookup finds everything; the load then says MISS
    - load_status: what every load says instead of doing it
    - forgetful: a store says OK and is not done
    - freeze(), release(): calls begin to hang, and stop hanging
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.delay_s = 0.0
        self.slow_factor = 1.0
        self.overtime_s: float | None = None
        self.fail_every = 0
        self.phantom = False
        self.load_status: Status | None = None
        self.forgetful = False
        self.calls: dict[str, int] = {}
        self._lock = threading.Lock()
        self._blocks = 0  # seen by fail_every
        self._moving = threading.Event()
        self._moving.set()
        self._hanging = 0

    @property
    def name(self) -> str:
        return self.inner.name

    # ---- the faults

    def freeze(self) -> None:
        """Calls that come now hang until `release` (or `close`); those under way go on."""
        self._moving.clear()

    def release(self) -> None:
        """All hanging calls go on, and are done in full however late."""
        self._moving.set()

    @property
    def hanging(self) -> int:
        """Calls that hang now."""
        return self._hanging

    def _begin(self, call: str) -> float:
        with self._lock:
            self.calls[call] = self.calls.get(call, 0) + 1
            self._hanging += 1
        start = time.monotonic()
        self._moving.wait()
        with self._lock:
            self._hanging -= 1
        return start

    def _end(self, start: float, deadline_s: float) -> None:
        took = time.monotonic() - start
        time.sleep(self.delay_s + took * max(0.0, self.slow_factor - 1))
        if self.overtime_s is not None:
            time.sleep(max(0.0, start + deadline_s + self.overtime_s - time.monotonic()))

    def _failing(self, blocks: int) -> list[bool]:
        with self._lock:
            first, self._blocks = self._blocks + 1, self._blocks + blocks
        every = self.fail_every
        return [bool(every) and number % every == 0 for number in range(first, first + blocks)]

    # ---- the tier contract

    def lookup(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        start = self._begin("lookup")
        found = self.inner.lookup(names, deadline_s)
        self._end(start, deadline_s)
        return [True] * len(names) if self.phantom else found

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        start = self._begin("load")
        failing = self._failing(len(names))
        if self.load_status is not None:
            statuses = [self.load_status] * len(names)
        else:
            asked = [i for i, fails in enumerate(failing) if not fails]
            answers = self.inner.load(
                [names[i] for i in asked], [into[i] for i in asked], deadline_s
            )
            statuses = [Status.FAILED] * len(names)
            for i, answer in zip(asked, answers, strict=True):
                statuses[i] = answer
        for view, status in zip(into, statuses, strict=True):
            if status is not Status.OK:
                view.cast("B")[:] = bytes([SCRIBBLE]) * view.nbytes
        self._end(start, deadline_s)
        return statuses

    def store(
        self, names: Sequence[BlockName], data: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        start = self._begin("store")
        failing = self._failing(len(names))
        asked = [i for i, fails in enumerate(failing) if not fails]
        statuses = [Status.FAILED] * len(names)
        if self.forgetful:
            answers = [Status.OK] * len(asked)
        else:
            answers = self.inner.store(
                [names[i] for i in asked], [data[i] for i in asked], deadline_s
            )
        for i, answer in zip(asked, answers, strict=True):
            statuses[i] = answer
        self._end(start, deadline_s)
        return statuses

    def discard(self, names: Sequence[BlockName]) -> None:
        self._begin("discard")
        self.inner.discard(names)

    def names(self) -> list[BlockName]:
        return self.inner.names()

    def clear(self) -> None:
        self._begin("clear")
        self.inner.clear()

    def stats(self) -> TierStats:
        return self.inner.stats()

    def close(self) -> None:
        self.release()
        self.inner.close()
