"""The production scheduler, told in cells: what had to be bent for it, and nothing else.

A running sequence decodes one cell, of many tokens, over many steps; the scheduler sees the same
pending cell each time and plans it again. Its budget is in cells too, and a sequence that decodes
takes next to nothing of a budget of tokens, so that much is added for each. It builds no plan: no
model is there to read one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from worker.config import EngineConfig
from worker.engine.paging import PagedMemory
from worker.engine.plan import StepPlan
from worker.engine.planning import Drafts, PlanBuilder
from worker.engine.promotion import Promoter
from worker.engine.request import Sequence
from worker.engine.scheduler import Scheduled, Scheduler
from worker.engine.timing import StepTimes

_NONE = np.zeros(0, dtype=np.int32)
_NO_PLAN = StepPlan(
    step=0,
    token_ids=_NONE,
    positions=_NONE,
    starts=_NONE,
    lengths=_NONE,
    tables=[],
    slots=[],
    copies=[],
    samples=[],
)


class CellTimes(StepTimes):
    """Step times in real tokens, as routers hear them; the scheduler asks in cells."""

    def __init__(self, cell_tokens: int) -> None:
        super().__init__()
        self._cell_tokens = cell_tokens

    def prefill_within(self, rows: int, slowdown: float) -> float:
        return super().prefill_within(rows, slowdown) / self._cell_tokens


class _NoBuilder(PlanBuilder):
    """Keeps no tables."""

    def build(self, step: int, rows: Seq[tuple[Sequence, int]], drafts: Drafts) -> StepPlan:
        return _NO_PLAN

    def check_integrity(self, sequences: Seq[Sequence]) -> None:
        assert all(s.slot < 0 for s in sequences)


class CellScheduler(Scheduler):
    """worker.engine.scheduler.Scheduler, with a budget that leaves decoding out."""

    def __init__(
        self,
        memory: PagedMemory,
        config: EngineConfig,
        times: CellTimes,
        tiers: Promoter | None = None,
    ) -> None:
        super().__init__(memory, config, times, tiers)
        self.builder = _NoBuilder(memory.block_tokens, len(memory.pools))

    def plan(self) -> Scheduled | None:
        decoding = sum([len(s.tokens) - s.computed == 1 for s in self.running])
        self._budget = self._config.step_tokens_max + decoding
        return super().plan()
