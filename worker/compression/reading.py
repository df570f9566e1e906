"""A document read by one model, chunk by chunk, as a replica would compute one sequence; and what
two models say of it, compared. Knows no codec and no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.base import Model

GREEDY = SamplingParams(seed=0, max_tokens=1)
COMPARED_ROWS = 64  # at once: two distributions of each in float32


class Reader:
    """One sequence in blocks 0, 1, ... of every group; each document overwrites the last one.

    Windows keep their blocks: attention masks what they passed.
    """

    def __init__(self, model: Model, tokens_max: int, questions_max: int = 0) -> None:
        """Allocates the model's pools, for questions of a few blocks too. Raises OutOfBlocks."""
        self.model = model
        self._size = model.spec.block_tokens
        self._blocks = -(-tokens_max // self._size)
        self._groups = len(model.spec.groups)
        own = questions_max * self._question_blocks
        model.allocate((self._blocks + own,) * self._groups)

    @property
    def _question_blocks(self) -> int:
        """For 32 tokens."""
        return -(-32 // self._size)

    def read(self, ids: Sequence[int], first: int) -> torch.Tensor:
        """Compute these ids behind the `first` that were read: float32 logits [len(ids), vocab],
        valid until the next call."""
        places = range(first, first + len(ids))
        tables = [[range(self._blocks)]] * self._groups
        rows = [SampleRow(row, 0, 0, row, GREEDY) for row in range(len(ids))]
        plan = StepPlan.of_lists(
            1, ids, places, [0, len(ids)], [places.stop], tables, [places] * self._groups, (), rows
        )
        return self.model.execute(plan)

    def ask(self, read: int, questions: Sequence[Sequence[int]]) -> torch.Tensor:
        """Each question behind the document of `read` tokens, whole blocks of them, in a sequence
        of its own: float32 logits [questions, vocab] of the token that follows it."""
        shared, offset = divmod(read, self._size)
        assert offset == 0 and all(len(q) <= self._question_blocks * self._size for q in questions)
        ids: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        starts, lengths = [0], []
        for number, question in enumerate(questions):
            own = self._blocks + number * self._question_blocks
            ids += question
            places += range(read, read + len(question))
            slots += range(own * self._size, own * self._size + len(question))
            tables.append([*range(shared), *range(own, own + self._question_blocks)])
            starts.append(len(ids))
            lengths.append(read + len(question))
        rows = [SampleRow(end - 1, s, 0, 0, GREEDY) for s, end in enumerate(starts[1:])]
        groups = self._groups
        plan = StepPlan.of_lists(
            1, ids, places, starts, lengths, [tables] * groups, [slots] * groups, (), rows
        )
        return self.model.execute(plan)


@dataclass
class Tally:
    """Sums over rows: what one model says of the next token, beside another."""

    rows: int = 0
    kl_nats: float = 0.0
    told: float = 0.0  # log-likelihood of the text
    told_exact: float = 0.0  # the other's
    differ: int = 0  # rows whose likeliest token is another

    def add(self, exact: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> None:
        """Log-probabilities float32 [rows, vocab] each, and int64 [rows] what really followed."""
        for first in range(0, len(exact), COMPARED_ROWS):
            rows = slice(first, first + COMPARED_ROWS)
            e, f, followed = exact[rows], found[rows], targets[rows].unsqueeze(1)
            self.kl_nats += float((e.exp() * (e - f)).sum())
            self.told += float(f.gather(1, followed).sum())
            self.told_exact += float(e.gather(1, followed).sum())
            self.differ += int((e.argmax(-1) != f.argmax(-1)).sum())
        self.rows += len(exact)

    @property
    def kl(self) -> float:
        """Mean KL(exact || found), nats."""
        return self.kl_nats / self.rows

    @property
    def perplexity_more(self) -> float:
        """By how much the perplexity is larger, as a share."""
        return math.exp((self.told_exact - self.told) / self.rows) - 1.0

    @property
    def other_share(self) -> float:
        """Of rows whose likeliest token is another."""
        return self.differ / self.rows
