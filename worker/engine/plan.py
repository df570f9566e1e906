"""StepPlan: all a model needs for one step, flat, as rank 0 of a tensor-parallel group sends it.

Shapes: S sequences, N tokens of all sequences one after the other, G groups. All integers; no
object of the scheduler is reachable from a plan, so it may cross a process boundary unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.engine.sampling import SamplingParams


@dataclass(frozen=True)
class BlockCopy:
    """Copy the first `tokens` positions of block `source` to `target` before computing (COW)."""

    group: int
    source: int
    target: int
    tokens: int


@dataclass(frozen=True)
class SampleRow:
    """Draw one token from the logits of flat token row `row`, keyed by (seed, choice, position).

    `position` counts generated tokens from 0. `sequence` is the scheduler's sequence id, echoed in
    the result. `history` are the prompt's ids and `output` those generated so far, for penalties;
    they are empty when no penalty is on.
    """

    row: int
    sequence: int
    choice: int
    position: int
    params: SamplingParams
    history: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """One step of the engine. Valid until the next plan is made: then its blocks may be reused.

    Sequence s computes token rows starts[s] .. starts[s+1]-1, at logical positions `positions`.
    Its keys and values of group g lie in blocks tables[g][s] (entry i holds physical positions
    i*block_tokens ...); a block that a window group no longer needs is -1. `lengths[s]` is how many
    physical positions are valid after the step, the new tokens included: attention of row r sees
    the positions up to and including its own. `slots[g][r]` is block*block_tokens+offset where row
    r writes.
    """

    step: int
    token_ids: list[int]  # [N]
    positions: list[int]  # [N] logical, for RoPE and masks
    starts: list[int]  # [S+1]
    lengths: list[int]  # [S] physical
    tables: list[list[list[int]]]  # [G][S][blocks of s]
    slots: list[list[int]]  # [G][N]
    copies: list[BlockCopy] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    adapters: tuple[int, ...] = ()  # [S] from 1, 0 = the base model; () = nobody has one

    @property
    def sequences(self) -> int:
        """S, the number of sequences in this step."""
        return len(self.lengths)
