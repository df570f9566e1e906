"""Drives a Model without a scheduler: block tables, chunks and shared prefixes, by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from kvstore.groups import GroupKind
from worker.engine.plan import BlockCopy, SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.base import Model

GREEDY = SamplingParams(seed=0, max_tokens=1)


@dataclass
class Stream:
    """Token ids of one sequence, how many of them are computed, its block tables per group."""

    token_ids: list[int]
    tables: list[list[int]]
    computed: int = 0
    adapter: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)  # float32 [vocab] per computed token


class Stepper:
    """Allocates pools of `blocks` blocks, hands them out in shuffled order, freed ones poisoned."""

    def __init__(self, model: Model, blocks: int, seed: int = 0) -> None:
        self.model = model
        model.allocate((blocks,) * len(model.spec.groups))
        self._free = [list(range(blocks)) for _ in model.spec.groups]
        for group, free in enumerate(self._free):
            random.Random(seed + group).shuffle(free)
            model.poison(group, free)
        self._steps = 0

    def add(self, token_ids: Sequence[int], adapter: int = 0) -> Stream:
        return Stream(list(token_ids), [[] for _ in self.model.spec.groups], adapter=adapter)

    def share(
        self, source: Stream, token_ids: Sequence[int], tokens: int
    ) -> tuple[Stream, list[BlockCopy]]:
        """A sequence that starts with `tokens` computed tokens of another: whole blocks by
        reference, the boundary block by copy.
        """
        made = self.add(token_ids)
        size = self.model.spec.block_tokens
        whole, rest = divmod(tokens, size)
        copies = []
        for group, table in enumerate(source.tables):
            made.tables[group] = table[:whole]
            if rest:
                made.tables[group].append(self._free[group].pop())
                copies.append(BlockCopy(group, table[whole], made.tables[group][-1], rest))
        made.computed = tokens
        return made, copies

    def take(self, group: int, blocks: Sequence[int]) -> None:
        """Never hand out these blocks: the test has put something into them."""
        self._free[group] = [block for block in self._free[group] if block not in blocks]

    def step(
        self, work: Sequence[tuple[Stream, int]], copies: Sequence[BlockCopy] = ()
    ) -> StepPlan:
        """Compute the next `count` tokens of each sequence at once; keeps logits of every row."""
        self._steps += 1
        groups = range(len(self.model.spec.groups))
        plan = StepPlan(
            self._steps, [], [], [0], [], [[] for _ in groups], [[] for _ in groups], list(copies),
            adapters=tuple(sequence.adapter for sequence, _ in work),
        )  # fmt: skip
        for number, (sequence, count) in enumerate(work):
            self._append(plan, number, sequence, count)
        plan = StepPlan.of_lists(**{f.name: getattr(plan, f.name) for f in fields(StepPlan)})
        logits = self.model.execute(plan).clone()
        assert logits.dtype is torch.float32
        assert logits.shape == (len(plan.samples), self.model.spec.vocab_tokens)
        for sample, row in zip(plan.samples, logits, strict=True):
            work[sample.sequence][0].logits.append(row)
        return plan

    def _append(self, plan: StepPlan, number: int, sequence: Stream, count: int) -> None:
        size = self.model.spec.block_tokens
        first, last = sequence.computed, sequence.computed + count
        assert count > 0 and last <= len(sequence.token_ids)
        for group, spec in enumerate(self.model.spec.groups):
            table = sequence.tables[group]
            while len(table) * size < last:
                table.append(self._free[group].pop())
            if spec.kind is GroupKind.WINDOW:
                sinks = spec.sink_blocks(size)
                self._release(group, table, sinks, first - spec.window_tokens + 1)
            plan.tables[group].append(list(table))
            plan.slots[group] += [table[p // size] * size + p % size for p in range(first, last)]
        for position in range(first, last):
            row = len(plan.token_ids)
            plan.samples.append(SampleRow(row, number, 0, position, GREEDY))
            plan.token_ids.append(sequence.token_ids[position])
            plan.positions.append(position)
        plan.starts.append(len(plan.token_ids))
        plan.lengths.append(last)
        sequence.computed = last

    def _release(self, group: int, table: list[int], sinks: int, first_visible: int) -> None:
        """Poison and reuse blocks that lie wholly before the first visible position, sinks kept."""
        for index in range(sinks, max(first_visible, 0) // self.model.spec.block_tokens):
            if table[index] >= 0:
                self.model.poison(group, [table[index]])
                self._free[group].insert(0, table[index])
                table[index] = -1

    def remove(self, stream: Stream) -> None:
        """Poison and reuse the blocks of a stream that shares none."""
        for group, table in enumerate(stream.tables):
            held = [block for block in table if block >= 0]
            self.model.poison(group, held)
            self._free[group] = held + self._free[group]
            table.clear()


def run_chunked(stepper: Stepper, token_ids: Sequence[int], chunk: int) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence computed `chunk` tokens at a time."""
    stream = stepper.add(token_ids)
    while stream.computed < len(token_ids):
        left = len(token_ids) - stream.computed
        stepper.step([(stream, min(chunk, left))])
    stepper.remove(stream)
    return torch.stack(stream.logits)
