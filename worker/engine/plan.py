"""StepPlan: all a model needs for one step, flat, as rank 0 of a tensor-parallel group sends it.

Shapes: S sequences, N tokens of all sequences one after the other, G groups. Arrays of int32; no
object of the scheduler is reachable from a plan, so it may cross a process boundary unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from worker.engine.sampling import SamplingParams

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BlockCopy:
    """Copy the first `tokens` positions of block `source` to `target` before computing (COW)."""

    group: int
    source: int
    target: int
    tokens: int


@dataclass(slots=True)  # frozen takes five times as long, and one is made per token
class SampleRow:
    """Draw one token from the logits of flat token row `row`, keyed by (seed, choice, position).

    `position` counts generated tokens from 0. `sequence` is the scheduler's sequence id, echoed in
    the result. `history` are the prompt's ids and `output` those generated so far, for penalties;
    they are empty when no penalty is on. Never changed once made.
    """

    row: int
    sequence: int
    choice: int
    position: int
    params: SamplingParams
    history: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of the engine. Valid until the next plan is made: then its blocks may be reused. Its
    arrays are its own and never change.

    Sequence s computes token rows starts[s] .. starts[s+1]-1, at logical positions `positions`.
    Its keys and values of group g lie in blocks tables[g][s] (entry i holds physical positions
    i*block_tokens ...); a block that a window group no longer needs is -1, and so is what lies
    behind the sequence's last block. `lengths[s]` is how many physical positions are valid after
    the step, the new tokens included: attention of row r sees the positions up to and including
    its own. `slots[g][r]` is block*block_tokens+offset where row r writes.
    """

    step: int
    token_ids: Ints  # [N]
    positions: Ints  # [N] logical, for RoPE and masks
    starts: Ints  # [S+1]
    lengths: Ints  # [S] physical
    tables: list[Ints]  # [G] of [S, most blocks of a sequence], C-contiguous
    slots: list[Ints]  # [G] of [N]
    copies: list[BlockCopy] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    adapters: tuple[int, ...] = ()  # [S] from 1, 0 = the base model; () = nobody has one

    @property
    def sequences(self) -> int:
        """S, the number of sequences in this step."""
        return len(self.lengths)

    @classmethod
    def of_lists(
        cls,
        step: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[Sequence[int]]],
        slots: Sequence[Sequence[int]],
        copies: Iterable[BlockCopy] = (),
        samples: Iterable[SampleRow] = (),
        adapters: Sequence[int] = (),
    ) -> StepPlan:
        """A plan from plain lists; `tables` [G][S][blocks of s] may be ragged."""
        return cls(
            step,
            as_ints(token_ids),
            as_ints(positions),
            as_ints(starts),
            as_ints(lengths),
            [padded_table(rows) for rows in tables],
            [as_ints(row) for row in slots],
            list(copies),
            list(samples),
            tuple(adapters),
        )


def as_ints(values: Sequence[int]) -> Ints:
    """int32 [len(values)]."""
    return np.asarray(values, dtype=np.int32)


def padded_table(rows: Sequence[Sequence[int]]) -> Ints:
    """int32 [S, longest row], -1 behind the end of a row."""
    width = max((len(row) for row in rows), default=0)
    table = np.full((len(rows), width), -1, dtype=np.int32)
    for into, row in zip(table, rows, strict=True):
        into[: len(row)] = row
    return table
