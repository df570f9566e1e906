"""Rows computed over the pages of an episode, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.llama import LlamaModel


def logits(
    model: LlamaModel, pages: Sequence[int], stored: int, ids: Sequence[int], first: int
) -> torch.Tensor:
    """[len(ids), vocab] of ids at logical positions first .., behind `stored` tokens of a table
    that begins with these pages; what follows goes to pages that are not among them."""
    blocks = len(model._pools.pools[0])
    table = [*pages, *(block for block in range(blocks) if block not in set(pages))]
    places = range(stored, stored + len(ids))
    slots = [table[at // 16] * 16 + at % 16 for at in places]
    params = SamplingParams(seed=0, max_tokens=1)
    plan = StepPlan.of_lists(
        1, ids, range(first, first + len(ids)), [0, len(ids)], [stored + len(ids)], [[table]],
        [slots], samples=[SampleRow(row, 0, 0, row, params) for row in range(len(ids))],
    )  # fmt: skip
    return model.execute(plan).clone()
