"""The ideal: what one cache of the fleet's whole capacity would have had, were it everybody's.

Production radix cache and block pool, one request after the other in the order of arrival, none
waiting for another. Answers take blocks too, as on a replica. No replica, no time.
"""

from __future__ import annotations

from kvstore.groups import GroupKind, KVGroup
from kvstore.keys import extend
from simulate.workload import OUTPUT_CELLS_FROM, SimRequest, Workload
from worker.engine.block_pool import BlockPool
from worker.engine.radix import RadixCache


def ideal_share(workload: Workload, blocks: int) -> float:
    """Share of prompt tokens found in one cache of `blocks` blocks."""
    shared = _Shared(workload, blocks)
    cached = sum(shared.serve(request) for request in workload.requests)
    return cached / max(1, workload.prompt_tokens)


class _Shared:
    def __init__(self, workload: Workload, blocks: int) -> None:
        self._grain = workload.grain
        self._size = workload.grain.block_cells
        self._pool = BlockPool(KVGroup(0, GroupKind.FULL, (0,), 16), blocks)
        self._cache = RadixCache([self._pool], self._size)
        self._next_cell = OUTPUT_CELLS_FROM

    def serve(self, request: SimRequest) -> int:
        """Serve one request at once; returns the prompt tokens that were cached."""
        grain, size = self._grain, self._size
        match = self._cache.match(grain.chain, request.cells, len(request.cells) - 1)
        hold = self._cache.hold(match)
        tokens = [*request.cells, *self._answer(request)]
        whole = match.tokens // size
        needed = -(-len(tokens) // size) - whole
        held = list(hold.blocks[0])
        boundary = list(hold.boundary or ())
        if self._cache.evict([needed]):
            new = self._pool.allocate(needed)
            assert new is not None
            keys = [*request.keys]
            keys.extend(extend(grain.chain, keys, tokens))
            self._cache.insert(
                grain.chain, tokens, keys, [held + new], len(tokens), partial=True, hold=hold
            )
            held += new
        self._pool.release([*held, *boundary])
        self._cache.unlock(hold)
        return min(match.tokens * grain.cell_tokens, request.prompt_tokens - 1)

    def _answer(self, request: SimRequest) -> range:
        first, count = self._next_cell, self._grain.cells(request.output_tokens)
        self._next_cell += count
        return range(first, first + count)
