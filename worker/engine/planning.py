"""StepDraft, what a step will compute, and PlanBuilder: rows of sequences to a flat StepPlan. They
decide nothing and own no block.

A block table is kept as an array too, one row of a matrix per running sequence, and only entries
that changed since the last plan are written again: a decode step costs the same at any context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from worker.engine.plan import Ints, SampleRow, StepPlan, as_ints
from worker.engine.request import CLEAN, Sequence

Drafts = Mapping[Sequence, list[int]]

ROWS_FIRST, WIDTH_FIRST = 16, 32  # of the matrices; both double when they are too small


@dataclass
class StepDraft:
    """A step in the making."""

    budget: int
    prefill: int  # of the budget, at most so many for prompts
    rows: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False  # something that could run on; then nothing is admitted in its stead

    @property
    def room(self) -> int:
        """Tokens left for prompts."""
        return min(self.budget, self.prefill)

    def add(self, sequence: Sequence, count: int, *, prefill: bool) -> None:
        """`count` more tokens of a sequence."""
        self.rows[sequence] = self.rows.get(sequence, 0) + count
        self.budget -= count
        if prefill:
            self.prefill -= count

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """One token of each."""
        self.rows.update(dict.fromkeys(sequences, 1))
        self.budget -= len(sequences)

    def drop(self, sequence: Sequence) -> None:
        """None of a sequence after all."""
        self.budget += self.rows.pop(sequence, 0)


class PlanBuilder:
    """Builds the plans of one scheduler, whose sequences name their rows here (`Sequence.slot`)."""

    def __init__(self, block_tokens: int, groups: int) -> None:
        self._size = block_tokens
        shape = (ROWS_FIRST, WIDTH_FIRST)
        self._matrices: list[Ints] = [np.full(shape, -1, np.int32) for _ in range(groups)]
        self._free = list(range(ROWS_FIRST - 1, -1, -1))
        self.pruned = False  # whether sequences may have dropped tokens

    def drop(self, sequence: Sequence) -> None:
        """A sequence gave its blocks back; its row is somebody else's from here on."""
        if sequence.slot >= 0:
            self._free.append(sequence.slot)
            sequence.slot = -1
        sequence.stale_from = 0

    def build(self, step: int, rows: Seq[tuple[Sequence, int]], drafts: Drafts) -> StepPlan:
        """The plan in which each sequence computes its next `count` tokens, those of its draft
        included; all have blocks."""
        sequences = [sequence for sequence, _ in rows]
        counts = as_ints([count for _, count in rows])
        first = as_ints([s.computed for s in sequences])
        adapters = tuple([s.request.spec.adapter for s in sequences])
        stored = first - as_ints([s.dropped for s in sequences]) if self.pruned else first
        lengths = stored + counts
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        at = np.arange(len(rows))
        if starts[-1] == len(rows):  # all decode
            positions, places = first, stored
            token_ids = as_ints([s.tokens[s.computed] for s in sequences])
        else:
            at = np.repeat(at, counts)
            positions = np.arange(starts[-1], dtype=np.int32) + (first - starts[:-1])[at]
            places = positions - (first - stored)[at] if self.pruned else positions
            token_ids = _token_ids(rows, drafts)
        tables = self._tables(sequences, -(-int(lengths.max()) // self._size))
        blocks, offsets = np.divmod(places, np.int32(self._size))
        return StepPlan(
            step=step,
            token_ids=token_ids,
            positions=positions,
            starts=starts,
            lengths=lengths,
            tables=tables,
            slots=[table[at, blocks] * np.int32(self._size) + offsets for table in tables],
            copies=[copy for s in sequences if s.copies for copy in s.copies],
            samples=_samples(rows, starts, drafts),
            adapters=adapters if any(adapters) else (),
        )

    def _tables(self, sequences: list[Sequence], width: int) -> list[Ints]:
        self._refresh(sequences, width)
        slots = np.array([s.slot for s in sequences])
        return [matrix[slots, :width] for matrix in self._matrices]

    def _refresh(self, sequences: list[Sequence], width: int) -> None:
        """Write what changed in the tables of these sequences since they were last planned."""
        stale = [s for s in sequences if s.stale_from < CLEAN]
        if not stale:
            return
        self._widen(width)
        for sequence in stale:
            if sequence.slot < 0:
                sequence.slot = self._row()
            for matrix, table in zip(self._matrices, sequence.tables, strict=True):
                row = matrix[sequence.slot]
                row[sequence.stale_from : len(table)] = table[sequence.stale_from :]
                row[len(table) :] = -1
            sequence.stale_from = CLEAN

    def _row(self) -> int:
        if not self._free:
            rows = len(self._matrices[0])
            self._grow(rows, 0)
            self._free.extend(range(2 * rows - 1, rows - 1, -1))
        return self._free.pop()

    def _widen(self, width: int) -> None:
        known = self._matrices[0].shape[1]
        if width > known:
            self._grow(0, max(width, 2 * known) - known)

    def _grow(self, rows: int, columns: int) -> None:
        more = ((0, rows), (0, columns))
        self._matrices = [np.pad(m, more, constant_values=-1) for m in self._matrices]

    def check_integrity(self, sequences: Seq[Sequence]) -> None:
        """Assert that what counts as written is what the tables of these sequences say."""
        used = [s.slot for s in sequences if s.slot >= 0]
        assert len(set(used)) == len(used) and not set(used) & set(self._free)
        assert len(used) + len(self._free) == len(self._matrices[0])
        for sequence in sequences:
            assert sequence.slot >= 0 or sequence.stale_from == 0
            for matrix, table in zip(self._matrices, sequence.tables, strict=True):
                known = min(sequence.stale_from, len(table))
                row = matrix[sequence.slot]
                assert row[:known].tolist() == table[:known], "a change of a table was not noted"
                assert sequence.stale_from < CLEAN or (row[known:] == -1).all()


def _token_ids(rows: Seq[tuple[Sequence, int]], drafts: Drafts) -> Ints:
    ids: list[int] = []
    for sequence, count in rows:
        if count == 1:
            ids.append(sequence.tokens[sequence.computed])
        else:
            ids += sequence.tokens[sequence.computed : sequence.computed + count]
            ids += drafts.get(sequence, ())
    return as_ints(ids)


def _samples(rows: Seq[tuple[Sequence, int]], starts: Ints, drafts: Drafts) -> list[SampleRow]:
    """The draws from the last rows of the sequences that have no more to compute, and from all rows
    of those with a draft."""
    samples: list[SampleRow] = []
    for (sequence, count), end in zip(rows, starts[1:].tolist(), strict=True):
        if drafts and (draft := drafts.get(sequence)):
            samples.extend(_draft_rows(sequence, draft, end - count))
            continue
        if sequence.computed + count != len(sequence.tokens):
            continue
        request = sequence.request
        spec = request.spec
        if not request.forked or spec.sampling.needs_history:
            samples.extend(_sample_rows(sequence, end - 1))
            continue
        generated = len(sequence.tokens) - spec.prompt_tokens
        samples.append(SampleRow(end - 1, sequence.id, sequence.choice, generated, spec.sampling))
    return samples


def _sample_rows(sequence: Sequence, row: int) -> Iterator[SampleRow]:
    """The draws from a sequence's last row: its own, and the first of every choice to fork."""
    spec = sequence.request.spec
    history: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    if spec.sampling.needs_history:
        history = spec.token_ids[: spec.prompt_tokens]
        output = tuple(sequence.tokens[spec.prompt_tokens :])
    choices = [sequence.choice, *range(1, 1 + sequence.request.unforked)]
    for choice in choices:
        yield SampleRow(
            row, sequence.id, choice, sequence.generated, spec.sampling, history, output
        )


def _draft_rows(sequence: Sequence, draft: list[int], row: int) -> Iterator[SampleRow]:
    """The draws from the row of a sequence's last token and from those of its draft, each as it
    would be if all before it were drawn already."""
    spec = sequence.request.spec
    history: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    if spec.sampling.needs_history:
        history = spec.token_ids[: spec.prompt_tokens]
        output = (*sequence.tokens[spec.prompt_tokens :], *draft)
    first = sequence.generated
    for at in range(first, first + len(draft) + 1):
        yield SampleRow(
            row + at - first, sequence.id, sequence.choice, at, spec.sampling, history, output[:at]
        )
