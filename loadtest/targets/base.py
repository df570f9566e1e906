"""The contract of a target: one request in, what its client hears out. Knows no clock."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from loadtest.tokens import Counter
from loadtest.workloads.base import Message

WORD_IDS = 200  # ids of words for models without text: below every vocabulary's end
OPEN_S_MAX = 30.0
ID_MARK = "#"  # before an id that stands for itself


class Form(Enum):
    """How a prompt goes out: as chat messages, as one text, or as token ids, one per word, for
    models that have no tokenizer."""

    CHAT = "chat"
    TEXT = "text"
    IDS = "ids"


@dataclass(frozen=True)
class Ask:
    """One request. `session` is an opaque label that a router may use for affinity."""

    messages: tuple[Message, ...]
    output_tokens: int
    session: str


@dataclass(frozen=True)
class Piece:
    """A message of the stream that brought tokens."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The answer is whole. Tokens as the server counted them; `cached_tokens` None if it did not
    say, `replica` "" likewise. `text` had been held back and brings no new tokens."""

    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    replica: str = ""
    request_id: str = ""
    moves: int = 0
    text: str = ""


Heard = Piece | Ended


class Target(Protocol):
    """An endpoint under load. One event loop uses it."""

    async def open(self) -> None:
        """Find the model. Raises BanyanError if there is nobody, or no such model."""
        ...

    @property
    def facts(self) -> dict[str, str]:
        """What it is, for the report: no address, no key. After `open`."""
        ...

    def counter(self) -> Counter:
        """Counts tokens as the model does; may block. After `open`. Raises InvalidRequest."""
        ...

    def ask(self, ask: Ask) -> AsyncGenerator[Heard, None]:
        """Pieces, then Ended. Raises BanyanError. Closing it early cancels the request."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


def as_text(messages: Sequence[Message]) -> str:
    """A prompt for a model without a chat template."""
    return "\n\n".join(message.content for message in messages)


def as_ids(messages: Sequence[Message]) -> list[int]:
    """A prompt of token ids: a word's own number, or one made of its letters, never 0."""
    words = [word for message in messages for word in message.content.split()]
    return [_id(word) for word in words]


def _id(word: str) -> int:
    if word.startswith(ID_MARK):
        return int(word.removeprefix(ID_MARK))
    return 1 + zlib.crc32(word.encode()) % WORD_IDS


def of_ids(ids: Sequence[int]) -> str:
    """Words that stand for the ids of an answer."""
    return "".join(f"{ID_MARK}{token_id} " for token_id in ids)
