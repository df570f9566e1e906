"""What a few token ids are about, as a vector: cheap enough for the engine's own thread. It knows
ids, no text and no model.

EpiCache uses a sentence encoder here. Ours needs no second model on a replica: the counts of the
conversation's own tokens, weighed by how few segments have them (tf-idf), hashed with signs into a
fixed number of places (Weinberger et al., "Feature Hashing", ICML 2009). Its limit: it knows words,
not what they mean, so a question must share words with its episode; and a word's tokens differ with
its case and with a space before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker.episodes.base import Floats, Ints, Words

DIMENSIONS = 1024

_Longs = npt.NDArray[np.uint64]


def learn(segments: Sequence[Sequence[int]], having_min: int = 1) -> Words:
    """Weights of the tokens that so many segments have: the logarithm of 1 + all segments by those.
    At least one segment. Pure."""
    assert segments
    seen = [np.unique(np.asarray(ids, dtype=np.int32)) for ids in segments]
    ids, having = np.unique(np.concatenate(seen), return_counts=True)
    ids, having = ids[having >= having_min], having[having >= having_min]
    return Words(ids.astype(np.int32), np.log1p(len(segments) / having).astype(np.float32))


def embed(words: Words, token_ids: Sequence[int]) -> Floats:
    """[DIMENSIONS], of length 1, or all zero if no token is known. O(tokens); pure."""
    ids, counts = np.unique(np.asarray(token_ids, dtype=np.int32), return_counts=True)
    at = np.searchsorted(words.ids, ids).clip(max=max(0, len(words.ids) - 1))
    known = words.ids[at] == ids if len(words.ids) else np.zeros(len(ids), dtype=np.bool_)
    amounts = (1 + np.log(counts[known])) * words.weights[at[known]]
    places, signs = _hashed(ids[known])
    vector = np.bincount(places, weights=amounts * signs, minlength=DIMENSIONS)
    length = float(np.sqrt((vector**2).sum()))
    return (vector / length if length else vector).astype(np.float32)


def _hashed(ids: Ints) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Place and sign of each id; the same on every machine (splitmix64)."""
    mixed: _Longs = ids.astype(np.uint64) + np.uint64(1)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    signs = np.where(mixed >> np.uint64(63), 1.0, -1.0)
    return (mixed % np.uint64(DIMENSIONS)).astype(np.int64), signs
