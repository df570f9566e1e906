"""OpLog: the changes of a radix cache as few CacheOps; it knows keys and groups, no tree."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.keys import BlockKey
from worker.engine.messages import CacheOp, CacheOpKind


class OpLog:
    """Collects full blocks stored and removed, in order per group, runs of one kind merged."""

    def __init__(self, groups: int) -> None:
        self._runs: list[list[tuple[CacheOpKind, list[bytes]]]] = [[] for _ in range(groups)]

    def record(
        self, kind: CacheOpKind, group: int, keys: Sequence[BlockKey], blocks: Sequence[int]
    ) -> None:
        """Note the keys whose block is there (not -1)."""
        assert len(keys) == len(blocks)
        there = [key for key, block in zip(keys, blocks, strict=True) if block >= 0]
        if not there:
            return
        runs = self._runs[group]
        if runs and runs[-1][0] is kind:
            runs[-1][1].extend(there)
        else:
            runs.append((kind, list(there)))

    def take(self) -> list[CacheOp]:
        """All ops since the last call, group by group; forgets them."""
        ops = [
            CacheOp(kind, group, tuple(keys))
            for group, runs in enumerate(self._runs)
            for kind, keys in runs
        ]
        for runs in self._runs:
            runs.clear()
        return ops
