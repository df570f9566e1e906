"""What is done to a step's logits before tokens are chosen: masks, penalties, bias.

In this order: tokens that are not allowed and, before the minimum length, end and stop tokens are
masked; repetition penalty (CTRL, Keskar et al. 2019: on prompt and output); frequency and presence
penalty (OpenAI's, on the output); bias, last, so that -100 bans and 100 forces a token whatever the
penalties are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from worker.engine.plan import SampleRow

REPETITION_MIN = 1e-20  # below, a division could overflow

Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Rows and token ids of some scores, each pair once."""


def adjusted(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int]
) -> torch.Tensor:
    """float32 [R, vocab] from float32 [R, vocab]; the same tensor where no row asks for anything.

    A row depends on nothing but its own logits and parameters.
    """
    allowed = [i for i, row in enumerate(rows) if row.params.allowed_token_ids]
    ends = [ends_masked(row, eos_token_ids, logits.shape[1]) for row in rows]
    penalised = [row.params.needs_history for row in rows]
    biased = [row.params.logit_bias for row in rows]
    if not (allowed or any(ends) or any(penalised) or any(biased)):
        return logits
    scores = logits.clone()
    if allowed:
        _mask_all_but(scores, allowed, [rows[i].params.allowed_array for i in allowed])
    if any(ends):
        at = [i for i, ids in enumerate(ends) for _ in ids]
        scores[_index(at, scores), _index([t for ids in ends for t in ids], scores)] = -math.inf
    if any(penalised):
        _repetition(scores, rows)
        _frequency(scores, rows)
    if any(biased):
        at = [i for i, bias in enumerate(biased) for _ in bias]
        ids, values = zip(*(pair for bias in biased for pair in bias), strict=True)
        scores[_index(at, scores), _index(ids, scores)] += _values(values, scores)
    return scores


def _index(values: Sequence[int] | npt.NDArray[np.int64], scores: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=scores.device)


def _values(
    values: Sequence[float] | npt.NDArray[np.float32], scores: torch.Tensor
) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32, device=scores.device)


def _mask_all_but(
    scores: torch.Tensor, numbers: list[int], allowed: list[npt.NDArray[np.int64]]
) -> None:
    """Leave only the allowed scores of the rows `numbers`."""
    index = _index(numbers, scores)
    masked = torch.ones(len(numbers), scores.shape[1], dtype=torch.bool, device=scores.device)
    for row, ids in zip(masked, allowed, strict=True):
        row[_index(ids, scores)] = False
    scores[index] = scores[index].masked_fill_(masked, -math.inf)


def ends_masked(row: SampleRow, eos_token_ids: Sequence[int], vocab: int) -> list[int]:
    """Tokens that would end the choice before min_tokens were generated."""
    if row.params.may_stop(row.position):
        return []
    ends = set(row.params.stop_token_ids)
    if not row.params.ignore_eos:
        ends.update(eos_token_ids)
    return sorted(token for token in ends if token < vocab)


def _seen(
    parts: Iterable[tuple[int, tuple[int, ...]]], vocab: int
) -> tuple[Places, npt.NDArray[np.int64]] | None:
    """The tokens of each (row, tokens), and how often; None if there are none."""
    keys = [np.array(tokens, dtype=np.int64) + row * vocab for row, tokens in parts if tokens]
    if not keys:
        return None
    once, times = np.unique(np.concatenate(keys), return_counts=True)
    return np.divmod(once, vocab), times


def _repetition(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    parts = (
        (i, tokens)
        for i, row in enumerate(rows)
        if row.params.repetition_penalty != 1.0
        for tokens in (row.history, row.output)
    )
    seen = _seen(parts, scores.shape[1])
    if seen is None:
        return
    (at, ids), _ = seen
    each = np.array([max(r.params.repetition_penalty, REPETITION_MIN) for r in rows], np.float32)
    penalties, index = _values(each[at], scores), (_index(at, scores), _index(ids, scores))
    values = scores[index]
    scores[index] = torch.where(values > 0, values / penalties, values * penalties)


def _frequency(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    seen = _seen(((i, row.output) for i, row in enumerate(rows)), scores.shape[1])
    if seen is None:
        return
    (at, ids), times = seen
    frequency = np.array([row.params.frequency_penalty for row in rows], np.float32)[at]
    presence = np.array([row.params.presence_penalty for row in rows], np.float32)[at]
    penalties = frequency * times.astype(np.float32) + presence
    scores[_index(at, scores), _index(ids, scores)] -= _values(penalties, scores)
