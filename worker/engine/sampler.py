"""Draws one token per sample row from logits; knows nothing of models, requests or blocks.

Order of what is applied to a row: masks, penalties and bias (adjusting.py), temperature, top-k,
top-p (over what top-k left), min-p. Ties always go to the lowest token id, so top_k = 1 and greedy
agree.

Chance is counter based: one uniform number hashed from (seed, choice, position), and nothing else,
picks from the cumulative distribution in the order of token ids. A row's token depends neither on
its batch mates nor on what was drawn before, so another replica goes on exactly; and the order of
ids, unlike the order of probabilities, does not jump when two nearly equal logits change places.

Logprobs are those of the raw logits, before all of the above.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.engine.adjusting import adjusted
from worker.engine.messages import Logprobs
from worker.engine.plan import SampleRow
from worker.engine.sampling import TEMPERATURE_MIN, SamplingParams

FAILED = -1
NARROW = 1024  # so many of the largest are looked at before a whole row is sorted


@dataclass(slots=True)  # frozen takes five times as long, and one is made per token
class Sampled:
    """One row's outcome. token_id FAILED (-1): the row's logits hold NaN or infinity, or nothing
    may be chosen; that request alone must end, with InternalError. Never changed once made.
    """

    sequence: int
    choice: int
    token_id: int
    logprobs: Logprobs | None = None


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1), a multiple of 2^-53, that belongs to a token of a stream."""
    counter = b"".join(
        (value & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little") for value in (seed, choice, position)
    )
    digest = hashlib.blake2b(counter, digest_size=8, person=b"banyan-sample-1").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@torch.inference_mode()
def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int]
) -> list[Sampled]:
    """logits float32 [len(rows), vocab], on any device, not changed; results in the rows' order."""
    assert logits.dtype is torch.float32 and logits.shape[0] == len(rows)
    special = [i for i, row in enumerate(rows) if not row.params.is_plain]
    if len(special) == len(rows):
        token_ids = _choose(logits, rows, eos_token_ids) if rows else []
    else:
        token_ids = _largest_ids(logits)
        if special:
            part = logits[torch.tensor(special, device=logits.device)]
            chosen = _choose(part, [rows[i] for i in special], eos_token_ids)
            for i, token in zip(special, chosen, strict=True):
                token_ids[i] = token
    results = [
        Sampled(row.sequence, row.choice, token) for row, token in zip(rows, token_ids, strict=True)
    ]
    for i in special:
        results[i].logprobs = _logprobs(logits[i], rows[i], token_ids[i])
    return results


def _choose(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int]
) -> list[int]:
    """Token ids, or FAILED, of rows that ask for more than the largest of their logits."""
    scores = adjusted(logits, rows, eos_token_ids)
    token_ids = _largest_ids(scores)
    warm = [i for i, row in enumerate(rows) if row.params.temperature >= TEMPERATURE_MIN]
    drawn = [i for i in warm if token_ids[i] != FAILED]
    if drawn:
        index = torch.tensor(drawn, device=scores.device)
        chosen = _draw(scores[index], [rows[i] for i in drawn])
        for i, token in zip(drawn, chosen.tolist(), strict=True):
            token_ids[i] = token
    return token_ids


def _largest_ids(scores: torch.Tensor) -> list[int]:
    """Of each row the id of its largest score, the lowest of equals; FAILED if that is no number.

    On a CPU by numpy, whose argmax takes a tenth of torch's time over a row.
    """
    if scores.device.type == "cpu":
        array = scores.numpy()
        ids = array.argmax(axis=1)  # a NaN counts as the largest
        peaks = array[np.arange(len(ids)), ids]
        found: list[int] = np.where(np.isfinite(peaks), ids, FAILED).tolist()
        return found
    largest = scores.argmax(dim=-1)
    tops = scores.gather(1, largest.unsqueeze(1)).squeeze(1)
    return torch.where(torch.isfinite(tops), largest, FAILED).tolist()


def _draw(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Token ids [R]; scores [R, vocab], whose largest are finite, are not changed."""
    vocab, device = scores.shape[1], scores.device
    temperatures = _column([row.params.temperature for row in rows], torch.float32, device)
    # exp((score - peak) / temperature): never overflows, and the most likely token weighs 1.
    weights = ((scores - scores.amax(dim=-1, keepdim=True)) / temperatures).exp_()
    chances = [uniform(row.params.seed, row.choice, row.position) for row in rows]
    uniforms = _column(chances, torch.float64, device)
    picked = torch.empty(len(rows), dtype=torch.int64, device=device)
    limited = [i for i, row in enumerate(rows) if _is_limited(row.params)]
    # The few largest nearly always hold all that is kept; the rest is sorted in full.
    for width in (min(_narrow_width(rows[i] for i in limited), vocab), vocab):
        if limited:
            limited = _draw_limited(weights, uniforms, rows, limited, width, picked)
    free = [i for i, row in enumerate(rows) if not _is_limited(row.params)]
    if free:
        index = torch.tensor(free, device=device)
        picked[index] = _pick(weights[index], uniforms[index])
    return picked


def _column(values: list[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def _is_limited(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _narrow_width(rows: Iterable[SampleRow]) -> int:
    """How many of the largest to look at first; any number gives the same tokens."""
    widths = [2 * row.params.top_k or NARROW for row in rows]
    return min(max(widths, default=NARROW), NARROW)


def _pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Place [R] at which the running sum of weights [R, n] passes uniforms [R, 1] of the total."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # A uniform is at most 1 - 2^-53, which leaves the rounded product below the total.
    targets = uniforms * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


def _draw_limited(
    weights: torch.Tensor,
    uniforms: torch.Tensor,
    rows: Sequence[SampleRow],
    numbers: list[int],
    width: int,
    picked: torch.Tensor,
) -> list[int]:
    """Draws for the rows `numbers` out of their `width` largest weights, into picked [R].

    Returns the rows for which so few do not decide; none if width is the vocabulary's.
    """
    index = torch.tensor(numbers, device=weights.device)
    chosen = weights[index]
    ordered, ids = chosen.topk(width, dim=-1)
    counts, decided = _kept_counts(ordered, chosen, [rows[i].params for i in numbers])
    ids = ids[decided].sort(dim=-1).values
    values = chosen[decided].gather(1, ids)
    values = values * _largest(values, ordered[decided], counts[decided])
    done = index[decided]
    places = _pick(values, uniforms[done])
    picked[done] = ids.gather(1, places.clamp(max=width - 1).unsqueeze(1)).squeeze(1)
    return [i for i, ok in zip(numbers, decided.tolist(), strict=True) if not ok]


def _kept_counts(
    ordered: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the largest weights each row keeps, int64 [R], and whether that is certain.

    All three limits keep a run of the largest: top-k by count, top-p up to a share of what top-k
    left, min-p down to a share of the largest, which is 1. `ordered` [R, W] are a row's largest
    `weights` [R, vocab], descending.
    """
    (width, vocab), device = (ordered.shape[1], weights.shape[1]), ordered.device
    top_k = _column([p.top_k or vocab for p in params], torch.int64, device).clamp_(max=vocab)
    top_p = _column([p.top_p if p.top_p < 1 else math.inf for p in params], torch.float64, device)
    min_p = _column([p.min_p for p in params], torch.float32, device)
    inside = torch.arange(width, device=device) < top_k
    running = ordered.cumsum(dim=-1, dtype=torch.float64)
    whole = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    some = running.gather(1, top_k.clamp(max=width) - 1)
    needed = top_p * torch.where(top_k < vocab, some, whole)
    kept = inside & (running - ordered < needed) & (ordered >= min_p)
    counts = kept.sum(dim=-1).clamp_(min=1)
    if width == vocab:
        return counts, torch.ones_like(counts, dtype=torch.bool)
    # Certain if the last one kept is larger than the last one seen (no equal lies beyond), and
    # top-p knew the sum that it is a share of.
    last = ordered.gather(1, counts.unsqueeze(1) - 1)
    summed = (top_k <= width) | (top_k == vocab)
    return counts, ((last > ordered[:, -1:]) & summed).squeeze(1)


def _largest(values: torch.Tensor, ordered: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mask of exactly counts[r] >= 1 largest of values [R, vocab]; ties go to the lowest ids.

    `ordered` [R, >= counts] holds the row's largest values, descending.
    """
    threshold = ordered.gather(1, counts.unsqueeze(1) - 1)
    kept = values >= threshold
    if torch.equal(kept.sum(dim=-1), counts):
        return kept  # no tie at the threshold of any row, the usual case: no need to count
    above = values > threshold
    wanted = (counts - above.sum(dim=-1)).unsqueeze(1)
    equal = values == threshold
    return above | (equal & (equal.cumsum(dim=-1) <= wanted))


def _logprobs(logits: torch.Tensor, row: SampleRow, token: int) -> Logprobs | None:
    """Of raw logits [vocab]: the chosen token's and the k most likely (ties: lowest id first)."""
    if row.params.logprobs is None or token == FAILED:
        return None
    logprobs = logits.log_softmax(dim=-1)
    chosen = (token, float(logprobs[token]))
    count = min(row.params.logprobs, len(logprobs))
    if count == 0:
        return Logprobs(chosen)
    # Chosen by logit: rounding in the softmax must not make ties of what was none.
    values = logits.unsqueeze(0)
    ordered = values.topk(count, dim=-1).values
    mask = _largest(values, ordered, torch.tensor([count], device=logits.device))
    ids = mask.squeeze(0).nonzero().squeeze(1)
    ranked = ids[logits[ids].sort(descending=True, stable=True).indices]
    top = zip(ranked.tolist(), logprobs[ranked].tolist(), strict=True)
    return Logprobs(chosen, tuple(top))
