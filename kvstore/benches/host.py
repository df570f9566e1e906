"""The host tier beside plain copies of the same bytes by one thread, both by its CPU time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from kvstore.benches.measure import (
    CALL_BLOCKS,
    Pair,
    Race,
    chain_names,
    cut,
    load,
    memory,
    overhead_row,
    store,
)
from kvstore.tiers.host import HostTier
from seams.bench import Row

TOTAL_BYTES = 64 << 20  # twice a large CPU's cache
AGAINST = "memcpy"


def _copy(into: Sequence[memoryview], source: Sequence[memoryview]) -> None:
    for target, view in zip(into, source, strict=True):
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(view, np.uint8)


class HostBench:
    """A tier as large as what one pass stores, so that each pass pushes the one before out. The raw
    copy is of other blocks of the same memory: neither finds in the CPU's cache what the other has
    read or written."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.count = TOTAL_BYTES // block_bytes
        self.source = cut(memory(TOTAL_BYTES, 1), block_bytes)
        self.target = cut(memory(TOTAL_BYTES), block_bytes)
        self.plain = cut(memory(TOTAL_BYTES), block_bytes)
        self.tier = HostTier({0: block_bytes}, TOTAL_BYTES)
        self.names = [chain_names(at, CALL_BLOCKS) for at in range(0, self.count, CALL_BLOCKS)]

    def stores(self, turn: int) -> Iterator[Pair]:
        """Calls of CALL_BLOCKS, as a demotion makes them."""
        for call in range(len(self.names)):
            names = self.names[call] = chain_names((turn, call), CALL_BLOCKS)
            here, there = self._spans(call * CALL_BLOCKS, CALL_BLOCKS)
            yield Pair(
                partial(store, self.tier, names, self.source[here]),
                partial(_copy, self.plain[there], self.source[there]),
            )

    def loads(self, _: int, blocks: int = CALL_BLOCKS) -> Iterator[Pair]:
        """Calls of `blocks` each."""
        names = [name for chain in self.names for name in chain]
        for at in range(0, self.count, blocks):
            here, there = self._spans(at, blocks)
            yield Pair(
                partial(load, self.tier, names[here], self.target[here]),
                partial(_copy, self.target[there], self.plain[there]),
            )

    def _spans(self, at: int, blocks: int) -> tuple[slice, slice]:
        far = (at + self.count // 2) % self.count
        return slice(at, at + blocks), slice(far, far + blocks)


def rows(label: str, block_bytes: int, rounds: int) -> list[Row]:
    """Storing and loading in calls of a few blocks, and loading one by one, as promotion does."""
    bench = HostBench(block_bytes)
    stored = Race(f"host_store_{label}", AGAINST, block_bytes)
    loaded = Race(f"host_load_{label}", AGAINST, block_bytes)
    single = Race(f"host_load_single_{label}", AGAINST, block_bytes, 1)
    stored.run(bench.stores, rounds)
    loaded.run(bench.loads, rounds)
    single.run(partial(bench.loads, blocks=1), rounds)
    bench.tier.close()
    overhead = overhead_row(f"host_overhead_us_{label}", [stored, loaded])
    return [*(race.row(of_cpu=True) for race in (stored, loaded, single)), overhead]
