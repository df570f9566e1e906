"""What a generation yields and what it sums up to: frozen values, no gRPC, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class FinishReason(IntEnum):
    """Why a choice ended; the numbers are banyan.v1.FinishReason's."""

    UNSPECIFIED = 0
    STOP = 1
    STOP_STRING = 2
    LENGTH = 3
    CANCELLED = 4
    ERROR = 5


@dataclass(frozen=True)
class Usage:
    """cached_tokens + computed_tokens == prompt_tokens, always."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    moves: int = 0


@dataclass(frozen=True)
class Candidate:
    """One replica as the router saw it: predicted seconds, by term, and tokens it holds."""

    replica: str
    total_s: float
    terms: tuple[tuple[str, float], ...]
    matched_tokens: int


@dataclass(frozen=True)
class Decision:
    """Why a replica was picked. Tokens of the prompt: available at the best holder, held by the
    picked one, really reused (None until the replica has reported)."""

    request_id: str
    model: str
    replica: str
    prompt_tokens: int
    available_tokens: int
    chosen_tokens: int
    delivered_tokens: int | None
    reason: str
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """The chosen token's logprob and the most likely ones', as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Started:
    """First event. `seed` is the one in force; with it and the ids a stream can be resumed."""

    request_id: str
    seed: int
    model: str
    replica: str
    prompt_tokens: int
    label: str = ""


@dataclass(frozen=True)
class Delta:
    """New tokens of one choice. `position` is the first id's, from 0. `text` may lag behind."""

    choice: int
    position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Resumed:
    """The stream broke and goes on elsewhere, exactly where it was. `request_id` is the new one."""

    request_id: str
    replica: str
    position: int


@dataclass(frozen=True)
class ChoiceFinished:
    """Last event of one choice; `text` is what had been held back and is output after all."""

    choice: int
    reason: FinishReason
    text: str = ""
    stop: str = ""


@dataclass(frozen=True)
class Finished:
    """Last event. `decision` is None on a direct stream whose router has not told."""

    usage: Usage
    decision: Decision | None = None


Event = Started | Delta | Resumed | ChoiceFinished | Finished


@dataclass(frozen=True)
class Completion:
    """A whole answer. `texts`, `token_ids_all` and `reasons` have one entry per choice; the
    singular properties are the first choice's."""

    started: Started
    texts: tuple[str, ...]
    token_ids_all: tuple[tuple[int, ...], ...]
    reasons: tuple[FinishReason, ...]
    logprobs_all: tuple[tuple[TokenLogprob, ...], ...]
    usage: Usage
    decision: Decision | None
    replica: str
    resumes: int = 0

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.texts[0]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's token ids."""
        return self.token_ids_all[0]

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.reasons[0]


class Collector:
    """Adds events up to a Completion."""

    def __init__(self, choices: int) -> None:
        self._texts = [""] * choices
        self._ids: list[list[int]] = [[] for _ in range(choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        self._reasons = [FinishReason.UNSPECIFIED] * choices
        self._started: Started | None = None
        self._replica = ""
        self._resumes = 0
        self._finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Take the next event, in order."""
        if isinstance(event, Started):
            self._started, self._replica = event, event.replica
        elif isinstance(event, Resumed):
            self._replica = event.replica
            self._resumes += 1
        elif isinstance(event, Delta):
            self._texts[event.choice] += event.text
            self._ids[event.choice] += event.token_ids
            self._logprobs[event.choice] += event.logprobs
        elif isinstance(event, ChoiceFinished):
            self._texts[event.choice] += event.text
            self._reasons[event.choice] = event.reason
        else:
            self._finished = event

    def completion(self) -> Completion:
        """The sum; only after Finished."""
        assert self._started is not None and self._finished is not None
        decision = self._finished.decision
        return Completion(
            started=self._started,
            texts=tuple(self._texts),
            token_ids_all=tuple(map(tuple, self._ids)),
            reasons=tuple(self._reasons),
            logprobs_all=tuple(map(tuple, self._logprobs)),
            usage=self._finished.usage,
            decision=decision,
            replica=decision.replica if decision else self._replica,
            resumes=self._resumes,
        )
