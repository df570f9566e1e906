"""Which keys were named lately: as many as fit, in generations, the oldest forgotten first.

It knows keys as numbers; no replica, no tier and no index.

A shared tier never says what it lost, to age or to its own eviction, so what was said to lie there
has to be forgotten some time, or the index would grow for ever. Keys are forgotten a few with each
call, not a generation at once: the router's loop carries the streams meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

GENERATION_KEYS = 16_384
"""A sixteenth of all: what was named again lately is never among the forgotten."""
GENERATIONS_MAX = 16
"""With 16,384 keys each 4 million tokens of blocks of 16, a working set; 9 MiB a replica."""
FORGOTTEN_PER_KEY = 2  # more than one: a generation is through before the next has filled


class Generations:
    """At most GENERATIONS_MAX of them, and what is left of those too many."""

    def __init__(self) -> None:
        self._kept: deque[set[int]] = deque([set()])

    def __len__(self) -> int:
        """Keys in all generations; one in several counts in each."""
        return sum(map(len, self._kept))

    def note(self, keys: Sequence[int]) -> list[int]:
        """`keys` were named now; returns those to forget, which no call since has named again.
        O(1) a key, over all calls; at most twice as many as `keys` are returned."""
        for start in range(0, len(keys), GENERATION_KEYS):
            self._kept[-1].update(keys[start : start + GENERATION_KEYS])
            if len(self._kept[-1]) >= GENERATION_KEYS:
                self._kept.append(set())
        return self._forget(FORGOTTEN_PER_KEY * len(keys))

    def _forget(self, keys_max: int) -> list[int]:
        gone: list[int] = []
        for _ in range(keys_max):
            if len(self._kept) <= GENERATIONS_MAX:
                break
            oldest = self._kept[0]
            if not oldest:
                self._kept.popleft()
                continue
            key = oldest.pop()
            if not any(key in younger for younger in islice(self._kept, 1, None)):
                gone.append(key)
        return gone
