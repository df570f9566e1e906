"""How much memory the running sequences will need at their worst moment: integers only.

LightLLM's rule (Gong et al., "Past-Future Scheduler", ASPLOS 2025): sort what runs by the tokens
still to come, most first; when the i-th ends, the first i have all grown by as much as it had left.
Lengths to come are predicted from the lengths of outputs that ended lately.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from worker.engine.paging import PagedMemory, blocks_for
from worker.engine.request import Sequence

Demand = tuple[int, int]
"""One sequence: blocks it occupies alone once its tokens are computed, and tokens to come."""


def predicted_peak(demands: Seq[Demand], block_tokens: int) -> int:
    """Most blocks the demands occupy together at any time. O(n log n); an upper bound by at most
    one block each, since a sequence's last block may have room."""
    if not demands:
        return 0
    blocks, lefts = np.array(demands, dtype=np.int64).T
    order = np.argsort(-lefts)
    grown = np.arange(1, len(demands) + 1) * -(-lefts[order] // block_tokens)
    return int((np.cumsum(blocks[order]) + grown).max())


class LengthHistory:
    """Lengths of the last outputs that ended by themselves."""

    def __init__(self, kept: int = 128, trusted_from: int = 16, quantile: float = 0.9) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._kept, self._trusted_from, self._quantile = kept, trusted_from, quantile

    def record(self, generated: int) -> None:
        """An output ended after so many tokens."""
        if len(self._recent) == self._kept:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(generated)
        insort(self._sorted, generated)

    def predict_left(self, generated: int, left_max: int) -> int:
        """Tokens an output with `generated` behind it will still have, at most `left_max`: the
        quantile of the lengths that got that far; the maximum while too few are known."""
        at = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - at
        if len(self._sorted) < self._trusted_from or longer == 0:
            return left_max
        length = self._sorted[at + int(self._quantile * (longer - 1))]
        return min(left_max, length - generated)


class Forecast:
    """Whether one more sequence will fit beside those that run, at their worst moment."""

    def __init__(self, memory: PagedMemory, lengths: LengthHistory) -> None:
        self._memory, self._lengths = memory, lengths

    def fits(self, running: list[Sequence], head: Sequence) -> bool:
        """Whether the predicted peak of all that may run and `head`, which has its match, is within
        what there is; what waits for credit can be preempted. O(n log n)."""
        memory = self._memory
        everyone = [*running, head]
        active = [s for s in everyone if s.request.credit > s.emitted]
        lefts = [self._left(s) for s in active]
        bounded = sum(self._bounded(s, left) for s, left in zip(active, lefts, strict=True))
        for g, pool in enumerate(memory.pools):
            capacity = memory.available(g) + sum(memory.held_alone(s, g) for s in everyone)
            if pool.group.window_tokens:
                peak = sum(
                    memory.blocks_held(g, len(s.tokens) + left) * (1 + s.request.unforked)
                    for s, left in zip(active, lefts, strict=True)
                )
            else:
                demands = [
                    demand
                    for s, left in zip(active, lefts, strict=True)
                    if s.retained is None
                    for demand in self._demands(s, left)
                ]
                peak = predicted_peak(demands, memory.block_tokens) + bounded
            if peak > capacity:
                return False
        return True

    def _left(self, sequence: Sequence) -> int:
        """Tokens it is expected to generate yet."""
        left = sequence.left
        if sequence.preempted:  # once bitten: the prediction was too low
            return left
        return self._lengths.predict_left(sequence.generated, left)

    def _bounded(self, sequence: Sequence, left: int) -> int:
        """Blocks that one with a retention policy, and its choices still to fork, ever occupy."""
        retained, size = sequence.retained, self._memory.block_tokens
        if retained is None:
            return 0
        most = blocks_for(min(retained.limit, sequence.pending + sequence.stored + left), size)
        own = max(0, most - sequence.shared)
        prompt = min(retained.fixed, sequence.request.spec.prompt_tokens)
        return own + sequence.request.unforked * max(1, most - prompt // size)

    def _demands(self, sequence: Sequence, left: int) -> list[Demand]:
        """What it and its choices still to fork will occupy in a group without a window."""
        blocks = -(-len(sequence.tokens) // self._memory.block_tokens) - sequence.shared
        own = (max(0, blocks), left)
        unforked = sequence.request.unforked
        return [own, *[(1, left)] * unforked] if unforked else [own]
