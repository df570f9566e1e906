"""EpisodeBuilder: one conversation computed once per episode, under a fixed peak, in a pool of its
own. It knows token ids and the model; no text, no cluster of segments, no store.

Source: EpiCache's block prefill. A block of the conversation is computed over what was kept so far,
the patched prompt on top of it; of each layer and KV head what the prompt looks at most stays. The
prompt's own keys and values are written over. Keys keep the rotation of their own positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.slots import Longs
from seams.errors import LaunchError, PromptTooLong
from worker.engine.derived_state import DerivedState
from worker.engine.packing import pack
from worker.engine.plan import StepPlan
from worker.engine.retention.selection import Scores, choose
from worker.episodes.base import EpisodeOptions, Ints
from worker.episodes.scoring import looked_at
from worker.models.base import Model, ModelSpec


class EpisodeBuilder:
    """Of one conversation. Allocates the model's pool: budget + block tokens, or fewer if the
    conversation with a prompt is shorter, so more can never be stored. Raises OutOfBlocks for it.

    After `build` the episode is `pages`, until the next one: its `stored` tokens, a whole number of
    pages of the pool, and `positions` of the token in each slot of each row, int32
    [layers * KV heads, stored]. `peak_tokens` is the most that was ever stored, prompts included.
    """

    def __init__(self, model: Model, history: Sequence[int], options: EpisodeOptions) -> None:
        """`history` is whole pages. Raises LaunchError for a model that cannot be pruned so, and
        PromptTooLong."""
        _check(model.spec, len(history), options)
        self._model, self._history, self._options = model, list(history), options
        self._size = model.spec.block_tokens
        longest = options.budget_tokens + options.block_tokens
        room = min(longest, len(history) + options.patch_tokens_max)
        count = -(-room // self._size)
        model.allocate((count,))
        self._table = np.arange(count, dtype=np.int32)
        layers, heads = model.read_keys(0, np.zeros(1, dtype=np.int64)).shape[:2]
        slots = count * self._size
        self._held = np.full((layers * heads, slots), -1, dtype=np.int32)  # by pool slot
        self.stored = self.peak_tokens = 0

    def build(self, patch: Sequence[int]) -> None:
        """Compute the conversation with this patched prompt. Raises what the model does."""
        options, history = self._options, self._history
        assert 0 < len(patch) <= options.patch_tokens_max
        self._held.fill(-1)
        self.stored = 0
        step = options.block_tokens - len(patch)
        for first in range(0, len(history), step):
            ids = history[first : first + step]
            plan = self._plan(ids, first)
            self._model.execute(plan)
            self._held[:, plan.slots[0]] = plan.positions
            self.stored += len(ids)
            if self.stored > options.budget_tokens:
                self._prune(patch, first + len(ids))
        assert self.stored == min(options.budget_tokens, len(history))

    @property
    def state(self) -> DerivedState:
        """What the episode is beside its pages: what a sequence goes on from."""
        computed, sinks = len(self._history), self._options.sink_tokens
        return DerivedState(computed, sinks, plain_blocks=0, tail=(), positions=self.positions)

    @property
    def episode_bytes(self) -> int:
        """What the blocks of one episode take, on all ranks."""
        (group,) = self._model.spec.groups
        tokens = min(self._options.budget_tokens, len(self._history))
        return -(-tokens // self._size) * group.block_bytes * group.ranks

    @property
    def pages(self) -> list[int]:
        """Blocks of the pool that hold the episode, in order."""
        return [int(block) for block in self._table[: -(-self.stored // self._size)]]

    @property
    def positions(self) -> Ints:
        """int32 [layers * KV heads, stored]."""
        return self._held[:, self._slots(0, self.stored)]

    def _plan(self, ids: Sequence[int], position: int) -> StepPlan:
        """The ids behind what is stored, from this logical position on."""
        last = self.stored + len(ids)
        self.peak_tokens = max(self.peak_tokens, last)
        assert last <= self._options.budget_tokens + self._options.block_tokens
        return StepPlan.of_lists(
            step=0,
            token_ids=ids,
            positions=range(position, position + len(ids)),
            starts=[0, len(ids)],
            lengths=[last],
            tables=[[self._table.tolist()]],
            slots=[self._slots(self.stored, last).tolist()],
        )

    def _prune(self, patch: Sequence[int], position: int) -> None:
        """Keep the budget: what the patched prompt, from this position on, looks at most."""
        queries = self._model.read_queries(self._plan(patch, position))
        keys = self._model.read_keys(0, self._slots(0, self.stored + len(patch)))
        self._keep(looked_at(keys, queries))

    def _keep(self, scores: Scores) -> None:
        options, size = self._options, self._size
        forced = np.zeros((1, self.stored), dtype=np.bool_)
        forced[:, : options.sink_tokens] = True
        count = options.budget_tokens - options.sink_tokens
        kept = choose(scores, forced, count, size, 0.0)
        packing = pack(kept, options.sink_tokens, size)
        sources = self._at(packing.sources)
        gone = np.setdiff1d(np.arange(len(self._table)), packing.order)
        self._table = self._table[np.concatenate([packing.order, gone])]
        targets = self._at(packing.targets)
        self._model.move_slots(0, sources, targets, packing.rows)
        self._held[packing.rows, targets] = self._held[packing.rows, sources]
        self.stored = packing.kept

    def _slots(self, first: int, last: int) -> Longs:
        """Slots of the pool of the stored tokens first .. last - 1."""
        return self._at(np.arange(first, last, dtype=np.int64))

    def _at(self, places: Longs) -> Longs:
        page, offset = np.divmod(places, self._size)
        return self._table[page].astype(np.int64) * self._size + offset


def _check(spec: ModelSpec, tokens: int, options: EpisodeOptions) -> None:
    assert tokens > 0 and tokens % spec.block_tokens == 0
    for whole in (options.budget_tokens, options.block_tokens):
        assert whole % spec.block_tokens == 0
    if any(group.window_tokens for group in spec.groups) or len(spec.groups) > 1:
        raise LaunchError("Episodes need a model without sliding windows.")
    if not (spec.reads_keys and spec.reads_queries):
        raise LaunchError("Episodes need a model that torch computes (--compute torch).")
    pruned = tokens > options.budget_tokens
    if tokens + (options.patch_tokens_max if pruned else 0) >= spec.context_tokens:
        raise PromptTooLong(
            f"The conversation has {tokens} tokens, and with a patched prompt it does not fit the "
            f"model's context of {spec.context_tokens}."
        )
