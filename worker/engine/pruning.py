"""Pruner: sequences that reached their policy's limit are asked what stays, and compacted. It
knows when and whom; the policy chooses, the compactor moves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import torch

from kernels.slots import Longs
from worker.engine.compaction import Compactor
from worker.engine.derived import DerivedStates
from worker.engine.paging import PagedMemory
from worker.engine.plan import StepPlan
from worker.engine.promotion import Promoter
from worker.engine.request import Sequence
from worker.engine.retention.base import Mask, PageView, Retained
from worker.models.base import Model

ROUNDS_MAX = 4  # in one step: more due ones wait for the next, and other requests do not for them

_log = logging.getLogger(__name__)


class Pruner:
    """Of one engine. Called between steps, when no row of a due sequence is under way.

    `failed` are sequences whose round failed: nothing of them can be trusted but what caches know,
    and the engine ends them. `derived` are states that outlive their sequences, where there are
    tiers for them.
    """

    def __init__(self, memory: PagedMemory, model: Model, tiers: Promoter | None = None) -> None:
        self._memory, self._model = memory, model
        self.compactor = Compactor(memory, model)
        objects = tiers.objects() if tiers is not None and memory.cache is not None else None
        self.derived: DerivedStates | None = None
        if tiers is not None and objects is not None:
            total = self.compactor.total
            self.derived = DerivedStates(model, memory, tiers, objects, total)
        self.failed: list[Sequence] = []
        self._rounds_left = ROUNDS_MAX

    def start(self, sequence: Sequence) -> None:
        """A sequence came into being; nothing of it is computed."""
        request = sequence.request
        if request.policy is not None:
            sequence.retained = Retained.of(request.policy, request.spec.prompt_tokens)

    def prune(self, running: Iterable[Sequence]) -> None:
        """Let all that are due have their round, where no block is lacking for it: what one gives
        back, another may need in this step. A step begins."""
        self._rounds_left = ROUNDS_MAX
        if self.derived is not None:
            self.derived.look()
        for sequence in running:
            if self._due(sequence) and self._rounds_left:
                self.room(sequence, 1)

    def stop(self, sequence: Sequence, *, keep: bool) -> None:
        """A running sequence is about to give its blocks back; `keep` its state, if it is whole."""
        if self.derived is not None:
            if keep and sequence not in self.failed:
                self.derived.keep(sequence)
            self.derived.forget(sequence)

    def postponed(self, sequence: Sequence) -> bool:
        """Whether its round is due and has to wait for the next step, as others had theirs."""
        return not self._rounds_left and self._due(sequence)

    def room(self, sequence: Sequence, want: int) -> int:
        """How many of `want` tokens a sequence may have before its next round; one that is due has
        its round first. 0 if blocks are lacking for that, or it failed."""
        retained = sequence.retained
        assert retained is not None and sequence.stored <= retained.limit
        if sequence.stored == retained.limit and not self._try(sequence, retained):
            return 0
        return min(want, retained.limit - sequence.stored)

    @staticmethod
    def _due(sequence: Sequence) -> bool:
        retained = sequence.retained
        return retained is not None and sequence.stored == retained.limit

    def take_failed(self) -> list[Sequence]:
        """`failed`, which is empty afterwards."""
        failed, self.failed = self.failed, []
        return failed

    def _try(self, sequence: Sequence, retained: Retained) -> bool:
        if sequence in self.failed:
            return False
        try:
            return self._round(sequence, retained)
        except Exception:
            _log.exception("a round of %s failed", retained.policy.state_hash)
            self.failed.append(sequence)
            return False

    def _round(self, sequence: Sequence, retained: Retained) -> bool:
        compactor = self.compactor
        plan = compactor.plan(sequence, self._choice(sequence, retained))
        if plan is None:
            return False
        try:
            compactor.execute(plan)
        except BaseException:
            compactor.abort(plan)
            raise
        compactor.commit(plan)
        self._rounds_left -= 1
        return True

    def _choice(self, sequence: Sequence, retained: Retained) -> Mask:
        view = PageView(
            block_tokens=self._memory.block_tokens,
            fixed=retained.fixed,
            kept=retained.kept,
            computed=sequence.computed,
            positions=retained.positions_of(sequence.computed, sequence.stored),
            keys=lambda: self._model.read_keys(0, self._slots(sequence, retained.fixed)),
            queries=lambda count: self._queries(sequence, count),
        )
        kept = retained.policy.select(view)
        assert (kept.sum(axis=1) == retained.kept).all() and kept[:, : retained.fixed].all()
        return kept

    def _queries(self, sequence: Sequence, count: int) -> torch.Tensor:
        """Of the newest tokens, which lie in the last slots, computed once more for it."""
        computed, stored = sequence.computed, sequence.stored
        slots = self._slots(sequence, stored - count).tolist()
        plan = StepPlan.of_lists(
            step=0,
            token_ids=sequence.tokens[computed - count : computed],
            positions=range(computed - count, computed),
            starts=[0, count],
            lengths=[stored],
            tables=[[sequence.tables[0]]],
            slots=[slots],
            adapters=(sequence.request.spec.adapter,) if sequence.request.spec.adapter else (),
        )
        return self._model.read_queries(plan)

    def _slots(self, sequence: Sequence, first: int) -> Longs:
        """Slots of group 0, from the sequence's `first` on."""
        size = self._memory.block_tokens
        page, offset = np.divmod(np.arange(first, sequence.stored, dtype=np.int64), size)
        return np.array(sequence.tables[0], dtype=np.int64)[page] * size + offset
