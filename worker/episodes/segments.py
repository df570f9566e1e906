"""Where a conversation's segments begin and end: windows of utterances. It knows places of tokens,
no token and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from worker.episodes.base import Segment

UTTERANCE_TOKENS_MAX = 128
"""A longer one counts as several, as EpiCache's authors cut long answers into sentences."""


def segments(ends: Sequence[int], tokens: int, window_utterances: int) -> list[Segment]:
    """Windows of so many utterances, one behind the other, over all of `tokens`.

    `ends` are the places behind utterances, in any order; those outside of the conversation are
    left out, and what follows the last one is an utterance too. At least one token. Pure.
    """
    assert tokens > 0 and window_utterances > 0
    cuts = _cut(sorted({0, tokens, *(end for end in ends if 0 < end < tokens)}))
    starts = [*cuts[:-1:window_utterances], tokens]
    return [Segment(first, last) for first, last in pairwise(starts)]


def _cut(edges: Sequence[int]) -> list[int]:
    """The same edges, and more of them inside of what is too long."""
    found = [edges[0]]
    for first, last in pairwise(edges):
        parts = -(-(last - first) // UTTERANCE_TOKENS_MAX)
        found += [first + (last - first) * part // parts for part in range(1, parts + 1)]
    return found
