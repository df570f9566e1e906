"""A request inside an engine, and what is left of it when it leaves: values only."""

from __future__ import annotations

from dataclasses import dataclass

from seams.errors import BanyanError
from simulate.workload import SimRequest
from worker.engine.request import Sequence


@dataclass(eq=False, slots=True)
class Flight:
    """A request inside an engine. `produced` counts its real tokens, those from before it was
    moved here too; its last cell is full at `cell_end` of them."""

    request: SimRequest
    sequence: Sequence
    produced: int = 0
    resumed: int = 0  # of produced: came with it
    cell_end: int = 0
    error: BanyanError | None = None

    @property
    def context_tokens(self) -> int:
        """What its next token attends to."""
        return self.request.prompt_tokens + self.produced

    def chunk(self, count: int, cell_tokens: int) -> tuple[int, int]:
        """(tokens before, tokens) of its next cells: the last one of a prompt may not be full."""
        sequence = self.sequence
        start, prompt = sequence.computed, sequence.request.spec.prompt_tokens
        tokens = count * cell_tokens
        if start < prompt <= start + count:
            tokens -= prompt * cell_tokens - self.request.prompt_tokens
        return start * cell_tokens, tokens

    def quiet_steps(self, cell_tokens: int) -> int:
        """Steps until it ends or needs to be given a block."""
        sequence = self.sequence
        roomy = max(0, sequence.writable_to - sequence.computed - 1) * cell_tokens
        until = self.cell_end + roomy + 1  # the token whose step computes the one before it
        return min(self.request.output_tokens, until) - self.produced


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that left the engine. Tokens are real ones; `error` if it did not end well."""

    request: SimRequest
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int
    error: BanyanError | None = None
