"""From scores to a set: standardised per head, united over heads, chosen with an eye on pages. Rows
are layer * KV heads + head; it knows neither what a score means nor where a page lies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.engine.retention.base import Mask

Scores = npt.NDArray[np.float64]


def standardised(scores: Scores, candidates: Mask) -> Scores:
    """scores [R, group, n] -> the same with mean 0 and deviation 1 of each head's candidates
    [1 | R, n]; -inf for all others."""
    among = np.broadcast_to(candidates[:, None], scores.shape)
    count = among.sum(axis=2, keepdims=True)
    assert count.min() > 0
    values = np.where(among, scores, 0.0)
    mean = values.sum(axis=2, keepdims=True) / count
    deviation = np.sqrt(
        (np.where(among, scores - mean, 0.0) ** 2).sum(axis=2, keepdims=True) / count
    )
    return np.where(among, (scores - mean) / np.maximum(deviation, 1e-12), -np.inf)


def united(scores: Scores, count: int) -> Scores:
    """[R, n] -> [1, n]: each row nominates its `count` best; of the nominated the largest score of
    any row, of all others -inf."""
    nominated = np.zeros(scores.shape, dtype=np.bool_)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    np.put_along_axis(nominated, best, True, axis=1)
    return np.where(nominated.any(axis=0), scores.max(axis=0), -np.inf)[None]


def choose(scores: Scores, forced: Mask, count: int, block_tokens: int, band: float) -> Mask:
    """[R, n]: the forced ones [1 | R, n] and of the others, in each row, the `count` best.

    Scores within `band` of the last one that stays count as equal: of those, whatever lies on the
    pages that hold most that stays anyway. Pages that go are emptier then, and less is moved. Of
    equals the first slot.
    """
    slots = scores.shape[1]
    kept = np.broadcast_to(forced, scores.shape).copy()
    if count == 0:
        return kept
    open_scores = np.where(kept, -np.inf, scores)
    last = -np.partition(-open_scores, count - 1, axis=1)[:, count - 1 : count]
    sure = open_scores > last + band
    near = ~sure & (open_scores >= last - band) & ~kept
    pages = np.arange(slots) // block_tokens
    filled = np.bincount(pages, weights=(sure | kept).sum(axis=0))[pages]
    kind = np.where(sure, 0, np.where(near, 1, 2))
    fullness = np.where(near & (band > 0), -filled, 0.0)
    slot = np.broadcast_to(np.arange(slots), scores.shape)
    order = np.lexsort((slot, -open_scores, fullness, kind), axis=1)
    np.put_along_axis(kept, order[:, :count], True, axis=1)
    assert (kept.sum(axis=1) == count + np.broadcast_to(forced, scores.shape).sum(axis=1)).all()
    return kept
