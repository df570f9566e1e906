"""A tier in a dict whose calls can be held, watched and told what to answer; it knows no time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstore.tiers.base import BlockName, Status, TierStats

WAIT_S = 30.0  # for what must come: far beyond what it takes


class ScriptedTier:
    """`calls` lists (call, its names) as they begin. `hold(call)` makes calls of that kind wait for
    `let(call)`; `entered(call, count)` waits until so many have begun, ever."""

    def __init__(self, name: str = "disk") -> None:
        self.name = name
        self.blocks: dict[BlockName, bytes] = {}
        self.calls: list[tuple[str, list[BlockName]]] = []
        self.during: Callable[[str, int], None] = lambda call, blocks: None
        self.kept: Callable[[BlockName], Status] = lambda name: Status.OK  # what a store says
        self.closed = 0
        self._held: set[str] = set()
        self._changed = threading.Condition()

    def hold(self, call: str) -> None:
        with self._changed:
            self._held.add(call)

    def let(self, call: str) -> None:
        with self._changed:
            self._held.discard(call)
            self._changed.notify_all()

    def entered(self, call: str, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(one == call for one, _ in self.calls) >= count, WAIT_S
            ), f"no {count} calls of {call}"

    def seen(self, call: str) -> list[BlockName]:
        """The names of all calls of a kind, in order."""
        with self._changed:
            return [name for one, names in self.calls if one == call for name in names]

    def _begin(self, call: str, names: Sequence[BlockName]) -> None:
        with self._changed:
            self.calls.append((call, list(names)))
            self._changed.notify_all()
            self._changed.wait_for(lambda: call not in self._held)
        self.during(call, len(names))

    # ---- the tier contract

    def lookup(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        self._begin("lookup", names)
        return [name in self.blocks for name in names]

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        self._begin("load", names)
        statuses = []
        for name, view in zip(names, into, strict=True):
            found = self.blocks.get(name)
            view[:] = b"\xee" * len(view) if found is None else found
            statuses.append(Status.MISS if found is None else Status.OK)
        return statuses

    def store(
        self, names: Sequence[BlockName], data: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        self._begin("store", names)
        statuses = [self.kept(name) for name in names]
        for name, view, status in zip(names, data, statuses, strict=True):
            if status is Status.OK:
                self.blocks[name] = bytes(view)
        return statuses

    def discard(self, names: Sequence[BlockName]) -> None:
        for name in names:
            self.blocks.pop(name, None)

    def names(self) -> list[BlockName]:
        return list(self.blocks)

    def clear(self) -> None:
        self.blocks.clear()

    def stats(self) -> TierStats:
        return TierStats(blocks=len(self.blocks))

    def close(self) -> None:
        self.closed += 1
