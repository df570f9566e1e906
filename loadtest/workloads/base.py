"""Sessions of turns: what a workload makes before the clock starts. Knows no target and no time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Turn:
    """One request. Its prompt is the prompt and the answer of the turn that it `follows` (None: it
    begins anew), then `messages`, then the answers of the turns that it `quotes`, one after the
    other, at the end of the last message.

    It is sent `wait_s` after the last of these turns has ended: a user who thinks, a tool that
    runs. All are named by their index in the session, and stand before it.
    """

    messages: tuple[Message, ...]
    output_tokens: int
    follows: int | None = None
    quotes: tuple[int, ...] = ()
    wait_s: float = 0.0

    @property
    def needs(self) -> tuple[int, ...]:
        """The turns that have to have ended."""
        return self.quotes if self.follows is None else (self.follows, *self.quotes)


@dataclass(frozen=True)
class Session:
    """Turns that need each other. `group` names those that share a prefix; `at_s` is when a trace
    had it begin, in seconds after the trace's own beginning."""

    name: str
    turns: tuple[Turn, ...]
    group: str = ""
    at_s: float = 0.0

    def __post_init__(self) -> None:
        for number, turn in enumerate(self.turns):
            assert turn.messages and all(0 <= need < number for need in turn.needs)


@dataclass(frozen=True)
class Shape:
    """How large a workload is; each kind reads what it knows. Lengths are means: `spread` 0.5 draws
    from half to one and a half times as much. `skew` is the exponent of Zipf's law by which groups
    and documents are chosen; 0 = all alike."""

    turns: int = 3
    groups: int = 4
    branches: int = 3
    documents: int = 16
    documents_per_question: int = 1
    prefix_tokens: int = 256
    document_tokens: int = 512
    input_tokens: int = 64
    output_tokens: int = 32
    spread: float = 0.0
    skew: float = 0.0
    think_s: float = 0.0

    def input_of(self, rng: random.Random) -> int:
        """A length for what one turn says."""
        return self._drawn(rng, self.input_tokens)

    def output_of(self, rng: random.Random) -> int:
        """A length for an answer."""
        return self._drawn(rng, self.output_tokens)

    def chosen(self, rng: random.Random, count: int) -> int:
        """One of 0..count-1, the first ones more often if there is a skew."""
        weights = [1 / (number + 1) ** self.skew for number in range(count)]
        return rng.choices(range(count), weights)[0]

    def _drawn(self, rng: random.Random, mean: int) -> int:
        drawn = rng.uniform(mean * (1 - self.spread), mean * (1 + self.spread))
        return max(1, round(drawn))


class Workload(Protocol):
    """Makes sessions. Same seed and number, same session, whatever was made before."""

    sessions_max: int | None
    """How many there are; None: any number."""

    def session(self, number: int) -> Session:
        """The session number 0, 1, 2, ...; counts tokens, so it takes its time."""
        ...
