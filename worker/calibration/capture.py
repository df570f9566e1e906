"""One pass of a model over a text, watched: what its queries are before and after RoPE, and what
attention makes of its values. It knows no file and no engine.

Source of the means: Mao et al., "TriAttention" (arXiv:2604.04921), calibrated as its authors do, on
queries after their norm. Of the rotations: kernels/codecs/oscar.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.codecs.oscar import fit_rotation
from worker.calibration.statistics import Statistics
from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.config import ModelConfig
from worker.models.llama import LlamaModel
from worker.models.rope import inverse_frequencies

WARM_UP_TOKENS = 6  # the first tokens draw attention whatever they are: left out
CHUNK_TOKENS = 512
TOKENS_MIN, TOKENS_MAX = 256, 32_768


class _Sums:
    """Running sums over rows, float64."""

    def __init__(self, config: ModelConfig) -> None:
        layers, heads, dim = config.layers, config.query_heads, config.head_dim
        self._kv_heads = config.kv_heads
        self.skip = WARM_UP_TOKENS
        self.rows = 0
        self.mean = torch.zeros(layers, heads, 2, dim // 2, dtype=torch.float64)
        self.size = torch.zeros(layers, heads, dim // 2, dtype=torch.float64)
        self.queries = torch.zeros(layers, config.kv_heads, dim, dim, dtype=torch.float64)
        self.attended = torch.zeros_like(self.queries)

    def add(
        self, layer: int, before: torch.Tensor, query: torch.Tensor, attended: torch.Tensor
    ) -> None:
        """Rows of one layer, [N, Hq, dim] each: queries before and after RoPE, and attention's
        output."""
        before, query, attended = (
            rows[self.skip :].double().cpu() for rows in (before, query, attended)
        )
        halves = before.reshape(*before.shape[:2], 2, -1)
        self.mean[layer] += halves.sum(0)
        self.size[layer] += halves.pow(2).sum(2).sqrt().sum(0)
        self.queries[layer] += self._outer(query)
        self.attended[layer] += self._outer(attended)

    def _outer(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, Hq, dim] -> [Hkv, dim, dim], query heads of a KV head together."""
        grouped = rows.reshape(len(rows), self._kv_heads, -1, rows.shape[2])
        pooled = grouped.transpose(0, 1).flatten(1, 2)
        return torch.matmul(pooled.transpose(1, 2), pooled)


def capture(model: LlamaModel, config: ModelConfig, token_ids: Sequence[int]) -> Statistics:
    """Statistics over TOKENS_MIN to TOKENS_MAX ids, no more than the model's context. Allocates
    the model's pools. Raises OutOfBlocks."""
    count = len(token_ids)
    assert TOKENS_MIN <= count <= min(TOKENS_MAX, model.spec.context_tokens)
    size = model.spec.block_tokens
    blocks = -(-count // size)
    model.allocate((blocks,) * len(model.spec.groups))
    sums = _Sums(config)
    model.tap = sums.add
    try:
        for first in range(0, count, CHUNK_TOKENS):
            ids = token_ids[first : first + CHUNK_TOKENS]
            model.execute(_plan(ids, first, blocks, size, len(model.spec.groups)))
            sums.skip = 0
    finally:
        model.tap = None
    rows = count - WARM_UP_TOKENS
    group = config.query_heads // config.kv_heads
    return Statistics(
        fingerprint=model.spec.fingerprint,
        tokens=count,
        query_mean=(sums.mean / rows).float(),
        query_size=(sums.size / rows).float(),
        frequencies=inverse_frequencies(config.rope, config.head_dim).double(),
        key_rotation=fit_rotation(sums.queries / (rows * group)),
        value_rotation=fit_rotation(sums.attended / (rows * group)),
    )


def _plan(ids: Sequence[int], first: int, blocks: int, size: int, groups: int) -> StepPlan:
    """The next chunk of the one sequence, which lies in blocks 0, 1, ... of every group."""
    last = first + len(ids)
    sample = SampleRow(len(ids) - 1, 0, 0, 0, SamplingParams(seed=0, max_tokens=1))
    return StepPlan.of_lists(
        step=1,
        token_ids=ids,
        positions=range(first, last),
        starts=[0, len(ids)],
        lengths=[last],
        tables=[[range(blocks)] for _ in range(groups)],
        slots=[range(first, last) for _ in range(groups)],
        samples=[sample],
    )
