"""Needles: sentences that give a name a secret word, planted in a document, and whether a model
finds the word again. Knows tokens and logits; no model and no codec.

Every word is one token, so one row of logits holds the likelihood of the true word and of all
others: words that other names have in the same document, and words that nobody has.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from seams.errors import InvalidRequest

CANDIDATES = 16  # words that a needle's is told from, itself included
NAMES = (
    "Ada", "Bruno", "Clara", "David", "Emma", "Frank", "Greta", "Henry", "Irene", "James", "Karen",
    "Louis", "Maria", "Nina", "Oscar", "Paula", "Robert", "Sarah", "Thomas", "Victor",
)  # fmt: skip
WORDS = (
    "apple", "bridge", "castle", "diamond", "eagle", "forest", "garden", "honey", "island",
    "jacket", "kitchen", "lemon", "mountain", "needle", "ocean", "paper", "queen", "river",
    "silver", "tiger", "window", "bread", "candle", "desert", "engine", "flower", "guitar",
    "hammer", "iron", "market", "orange", "piano", "rabbit", "stone", "train", "winter",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """A sentence to plant, and the question whose next token is `answer`."""

    sentence: tuple[int, ...]
    question: tuple[int, ...]
    answer: int  # token id
    candidates: tuple[int, ...]  # ids, the answer's among them


@dataclass(frozen=True)
class Document:
    """Token ids with needles in them. `planted[i]` says whether id i belongs to a needle."""

    name: str
    ids: list[int]
    planted: list[bool]
    needles: tuple[Needle, ...]


def make_needles(tokenizer: Tokenizer, count: int, seed: int) -> tuple[Needle, ...]:
    """So many, with names and words of their own. Raises InvalidRequest if the tokenizer has too
    few of the words as one token."""
    drawn = random.Random(seed)
    names = drawn.sample(NAMES, min(count, len(NAMES)))
    words = list(_one_token_words(tokenizer))
    if count > len(names) or len(words) < max(count, CANDIDATES):
        raise InvalidRequest(
            f"{count} needles need as many names and {max(count, CANDIDATES)} words of one token "
            f"each; there are {len(NAMES)} and {len(words)}."
        )
    drawn.shuffle(words)
    candidates = tuple(token for _, token in words[: max(count, CANDIDATES)])
    return tuple(
        Needle(
            tuple(_encode(tokenizer, f"\n{_question(name)} {word}.\n")),
            tuple(_encode(tokenizer, f"\n{_question(name)}")),
            token,
            candidates,
        )
        for name, (word, token) in zip(names, words, strict=False)
    )


def _question(name: str) -> str:
    return f"The secret word of {name} is"


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _one_token_words(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    asked = _encode(tokenizer, f"\n{_question(NAMES[0])}")
    for word in WORDS:
        ids = _encode(tokenizer, f"\n{_question(NAMES[0])} {word}")
        if len(ids) == len(asked) + 1 and ids[:-1] == asked:
            yield word, ids[-1]


def plant(
    name: str, text: str, tokenizer: Tokenizer, needles: Sequence[Needle], tokens: int
) -> Document:
    """Exactly `tokens` ids of the text, the needles among them at even depths, each behind a line's
    end where there is one. Raises InvalidRequest if the text is too short."""
    room = tokens - sum(len(needle.sentence) for needle in needles)
    whole = tokenizer.encode(text)
    if room < 2 or len(whole.ids) < room:
        raise InvalidRequest(
            f"The text {name} has {len(whole.ids)} tokens, and {max(room, 2)} are wanted."
        )
    starts = [first for first, _ in whole.offsets]
    ids: list[int] = []
    planted: list[bool] = []
    begin = 0
    for number, needle in enumerate(needles):
        depth = int(room * (number + 0.5) / len(needles))
        end = min(room, max(begin, _behind_line(text, starts, depth)))
        ids += [*whole.ids[begin:end], *needle.sentence]
        planted += [False] * (end - begin) + [True] * len(needle.sentence)
        begin = end
    ids += whole.ids[begin:room]
    planted += [False] * (room - begin)
    assert len(ids) == len(planted) == tokens
    return Document(name, ids, planted, tuple(needles))


def _behind_line(text: str, starts: list[int], place: int) -> int:
    """The first token from `place` on that begins a line."""
    found = text.find("\n", starts[place])
    return bisect_left(starts, found + 1) if found >= 0 else place


@dataclass
class Retrieval:
    """Sums over needles: found by likelihood, by the likeliest token of all, and by how much."""

    asked: int = 0
    found: int = 0
    greedy: int = 0
    lead_nats: float = 0.0

    def add(self, needles: Sequence[Needle], logits: torch.Tensor) -> None:
        """float32 [needles, vocab]: of the token behind each question."""
        for needle, row in zip(needles, logits, strict=True):
            others = [token for token in needle.candidates if token != needle.answer]
            lead = float(row[needle.answer] - row[others].max())
            self.asked += 1
            self.found += lead > 0
            self.greedy += int(row.argmax()) == needle.answer
            self.lead_nats += lead
