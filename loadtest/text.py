"""Text of a wanted length in tokens, the same for the same seed. Knows no request."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

from loadtest.tokens import Counter
from loadtest.workload import WORDS
from seams.errors import InvalidRequest

FILE_BYTES_MAX = 64 * 1024 * 1024
WORD_CHARACTERS_MAX = 64  # longer "words" of a file are cut: a base64 line is no text
FILLER = "a"

Words = Callable[[random.Random], Iterator[str]]
"""An endless line of words, drawn with the given generator alone."""


def rng_of(seed: int | str, *path: object) -> random.Random:
    """A generator for one place of a run, whatever was drawn elsewhere; equal on every machine."""
    return random.Random("/".join(map(str, (seed, *path))))


def made_up(rng: random.Random) -> Iterator[str]:
    """Common words that mean nothing together."""
    while True:
        yield rng.choice(WORDS)


def words_of(path: Path) -> Words:
    """The words of a file, from a random one on, round and round. Raises InvalidRequest."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InvalidRequest(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB.")
        found = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        raise InvalidRequest(f"{path} cannot be read as text.") from None
    if not found:
        raise InvalidRequest(f"{path} has no words.")
    words = [word[:WORD_CHARACTERS_MAX] for word in found]

    def from_somewhere(rng: random.Random) -> Iterator[str]:
        first = rng.randrange(len(words))
        yield from islice(cycle(words), first, None)

    return from_somewhere


class Writer:
    """Writes texts; keeps nothing between them."""

    def __init__(self, counter: Counter, words: Words = made_up) -> None:
        self._counter = counter
        self._words = words

    def write(self, rng: random.Random, tokens: int) -> str:
        """Words that have `tokens` tokens together, or as few less as the tokenizer allows.

        Counted as they stand inside a prompt, behind a blank. A shorter text of the same generator
        state starts like a longer one.
        """
        words = list(islice(self._words(rng), tokens))  # each has a token at least
        kept, had = self._below(words, tokens)
        room = range(kept, min(len(words), kept + tokens - had) + 1)
        kept = room[bisect_right(room, tokens, key=lambda n: self._count(words[:n])) - 1]
        return " ".join(self._filled(words[:kept], tokens))

    def _below(self, words: list[str], tokens: int) -> tuple[int, int]:
        """How many words are surely not too much, and their tokens."""
        kept = len(words)
        while (had := self._count(words[:kept])) > tokens:
            kept = min(kept - 1, kept * tokens // had)
        return kept, had

    def _filled(self, words: list[str], tokens: int) -> list[str]:
        for _ in range(tokens):
            if self._count([*words, FILLER]) > tokens:
                break
            words = [*words, FILLER]
        return words

    def _count(self, words: list[str]) -> int:
        return self._counter.count(f" {' '.join(words)}") if words else 0
