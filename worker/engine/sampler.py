"""Draws one token per sample row from logits; knows nothing of models, requests or blocks.

Order of what is applied to a row: minimum length (end and stop tokens masked), repetition penalty
(CTRL, Keskar et al. 2019: on prompt and output), frequency and presence penalty (on the output),
temperature, top-k, top-p (over what top-k left), min-p. Ties always go to the lowest token id, so
top_k = 1 and greedy agree.

Chance is counter based: one uniform number hashed from (seed, choice, position), and nothing else,
picks from the cumulative distribution in the order of token ids. A row's token depends neither on
its batch mates nor on what was drawn before, so another replica goes on exactly; and the order of
ids, unlike the order of probabilities, does not jump when two nearly equal logits change places.

Logprobs are those of the raw logits, before all of the above.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker.engine.messages import Logprobs
from worker.engine.plan import SampleRow

FAILED = -1
TEMPERATURE_MIN = 1e-5  # below: greedy
NUCLEUS_FIRST = 1024  # so many of the largest are looked at before a whole row is sorted


@dataclass(frozen=True)
class Sampled:
    """One row's outcome. token_id FAILED (-1): the row's logits hold NaN or infinity, or nothing
    may be chosen; that request alone must end, with InternalError.
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
    if not rows:
        return []
    scores = _adjusted(logits, rows, eos_token_ids)
    chosen = scores.argmax(dim=-1)  # the lowest id of equals; a NaN counts as the largest
    peaks = scores.gather(1, chosen.unsqueeze(1)).squeeze(1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature >= TEMPERATURE_MIN]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen[index] = _draw(scores[index], peaks[index], [rows[i] for i in drawn])
    usable = torch.isfinite(peaks).tolist()
    token_ids = [t if ok else FAILED for t, ok in zip(chosen.tolist(), usable, strict=True)]
    return [
        Sampled(row.sequence, row.choice, token, _logprobs(logits[i], row, token))
        for i, (row, token) in enumerate(zip(rows, token_ids, strict=True))
    ]


def _adjusted(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Sequence[int]
) -> torch.Tensor:
    """Logits after minimum length and penalties; the same tensor where no row has any."""
    masks = [_masked_ids(row, eos_token_ids, logits.shape[1]) for row in rows]
    if not any(masks) and not any(row.params.needs_history for row in rows):
        return logits
    scores = logits.clone()
    for i, row in enumerate(rows):
        if masks[i]:
            scores[i, torch.tensor(masks[i], device=scores.device)] = -math.inf
        if row.params.needs_history:
            _penalise(scores[i], row)
    return scores


def _masked_ids(row: SampleRow, eos_token_ids: Sequence[int], vocab: int) -> list[int]:
    """Tokens that would end the choice before min_tokens were generated."""
    if row.position >= row.params.min_tokens:
        return []
    ends = set(row.params.stop_token_ids)
    if not row.params.ignore_eos:
        ends.update(eos_token_ids)
    return sorted(token for token in ends if token < vocab)


def _penalise(scores: torch.Tensor, row: SampleRow) -> None:
    """Changes scores [vocab] in place."""
    params, device = row.params, scores.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.history, *row.output}), dtype=torch.int64, device=device)
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(row.output)
        tokens = torch.tensor(list(counts), dtype=torch.int64, device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        scores[tokens] -= params.frequency_penalty * times + params.presence_penalty


def _draw(scores: torch.Tensor, peaks: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Token ids [R]; scores [R, vocab] and peaks (their largest) [R] are not changed."""

    def column(of: Callable[[SampleRow], float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[of(row)] for row in rows], dtype=dtype, device=scores.device)

    temperatures = column(lambda row: row.params.temperature, torch.float32)
    # exp((score - peak) / temperature): never overflows, and the most likely token weighs 1.
    weights = ((scores - peaks.unsqueeze(1)) / temperatures).exp_()
    _keep_top_k(weights, rows)
    _keep_top_p(weights, rows)
    if any(row.params.min_p > 0 for row in rows):
        weights.masked_fill_(weights < column(lambda row: row.params.min_p, torch.float32), 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniforms = column(lambda r: uniform(r.params.seed, r.choice, r.position), torch.float64)
    # The product may round up to the total, which would point past the last token.
    targets = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


def _keep_top_k(weights: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Zeroes all but the top_k largest weights of each row, in place."""
    vocab = weights.shape[1]
    limited = [i for i, row in enumerate(rows) if 0 < row.params.top_k < vocab]
    if not limited:
        return
    index = torch.tensor(limited, device=weights.device)
    counts = torch.tensor([rows[i].params.top_k for i in limited], device=weights.device)
    chosen = weights[index]
    largest = chosen.topk(int(counts.max()), dim=-1).values
    weights[index] = chosen * _largest(chosen, largest, counts)


def _keep_top_p(weights: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Keeps the shortest run of largest weights that reaches top_p of the row's sum, in place."""
    limited = [i for i, row in enumerate(rows) if row.params.top_p < 1.0]
    if not limited:
        return
    index = torch.tensor(limited, device=weights.device)
    shares = torch.tensor([[rows[i].params.top_p] for i in limited], dtype=torch.float64)
    chosen = weights[index]
    needed = shares.to(weights.device) * chosen.sum(dim=-1, keepdim=True, dtype=torch.float64)
    largest = chosen.topk(min(NUCLEUS_FIRST, chosen.shape[1]), dim=-1).values
    short = (largest.sum(dim=-1, keepdim=True, dtype=torch.float64) < needed).squeeze(1)
    kept = torch.empty_like(chosen, dtype=torch.bool)
    for part, whole in ((~short, False), (short, True)):
        if bool(part.any()):
            ordered = chosen[part].sort(dim=-1, descending=True).values if whole else largest[part]
            before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
            counts = (before < needed[part]).sum(dim=-1).clamp_(min=1)
            kept[part] = _largest(chosen[part], ordered, counts)
    weights[index] = chosen * kept


def _largest(values: torch.Tensor, ordered: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mask of exactly counts[r] >= 1 largest of values [R, vocab]; ties go to the lowest ids.

    `ordered` [R, >= counts] holds the row's largest values, descending.
    """
    threshold = ordered.gather(1, counts.unsqueeze(1) - 1)
    above = values > threshold
    equal = values == threshold
    wanted = (counts - above.sum(dim=-1)).unsqueeze(1)
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
