"""A lower tier for engine tests: a dict of bytes that can be slow, lose, fail or lie."""

import random
import threading
import time
from collections.abc import Sequence

from kvstore.tiers.base import BlockName, Status, TierStats


class DictTier:
    """Implements kvstore.tiers.base.Tier. `losing` is the share of loads and stores that fail."""

    def __init__(self, name: str, *, load_s: float = 0.0, losing: float = 0.0, seed: int = 0):
        self.name = name
        self.blocks: dict[BlockName, bytes] = {}
        self.load_s = load_s  # of one block
        self.losing = losing
        self.loaded = 0
        self.frozen = threading.Event()  # set: every call hangs until it is cleared
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _thaw(self) -> None:
        while self.frozen.is_set():
            time.sleep(0.005)

    def lookup(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        if self.name != "disk":  # a disk tier's index is in memory
            self._thaw()
        return [name in self.blocks for name in names]

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        statuses = []
        self._thaw()
        for name, view in zip(names, into, strict=True):
            time.sleep(self.load_s)
            found = self.blocks.get(name)
            view[:] = b"\xee" * len(view)  # undefined unless OK
            if found is None:
                statuses.append(Status.MISS)
            elif self._random.random() < self.losing:
                statuses.append(self._random.choice([Status.FAILED, Status.CORRUPT, Status.LATE]))
            else:
                view[:] = found
                self.loaded += 1
                statuses.append(Status.OK)
        return statuses

    def store(
        self, names: Sequence[BlockName], data: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        statuses = []
        self._thaw()
        for name, view in zip(names, data, strict=True):
            lost = self._random.random() < self.losing
            if not lost:
                self.blocks[name] = bytes(view)
            statuses.append(Status.FAILED if lost else Status.OK)
        return statuses

    def names(self) -> list[BlockName]:
        return list(self.blocks)

    def discard(self, names: Sequence[BlockName]) -> None:
        for name in names:
            self.blocks.pop(name, None)

    def clear(self) -> None:
        self.blocks.clear()

    def stats(self) -> TierStats:
        return TierStats(blocks=len(self.blocks))

    def close(self) -> None:
        pass
