"""How far one generation has come, and what to do when its stream breaks. No I/O, no clock.

A router's death and a replica's look alike here: UNAVAILABLE. Before the first token the request is
sent again; after it the stream is resumed with the seed and the ids so far, so that nothing is
doubled or missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from banyan.events import ChoiceFinished, Delta, Event, Finished, Resumed, Started
from banyan.v1 import api_pb2
from seams.errors import BanyanError, InternalError, ReplicaLost, StatusCode

ATTEMPTS_MAX = 6  # without progress in between
BACKOFF_S = 0.05
BACKOFF_S_MAX = 2.0


class Retries:
    """Counts failures in a row; decides whether and when to try again."""

    def __init__(self) -> None:
        self.count = 0

    def failed(self, error: BanyanError) -> float:
        """Seconds to wait before the next attempt. Raises `error` if there is none to make."""
        self.count += 1
        if error.status != StatusCode.UNAVAILABLE or self.count >= ATTEMPTS_MAX:
            raise error
        backoff_s = min(BACKOFF_S * 2.0 ** (self.count - 1), BACKOFF_S_MAX)
        return max(backoff_s, error.retry_after_s or 0.0)


@dataclass
class Progress:
    """Mutated by `accept` and `failed`; `request` itself never changes."""

    request: api_pb2.GenerateRequest
    started: Started | None = None
    token_ids: list[int] = field(default_factory=list)  # of choice 0: what a resume needs
    _retries: Retries = field(default_factory=Retries)  # since a token last arrived
    resumes: int = 0
    finished: bool = False
    _began: bool = False  # a token has arrived
    _choice_ended: ChoiceFinished | None = None

    @property
    def choices(self) -> int:
        """How many answers were asked for."""
        return max(1, self.request.sampling.n)

    def next_request(self) -> api_pb2.GenerateRequest:
        """What to send now: the request, with `resume` if tokens have arrived."""
        if not self._began:
            return self.request
        assert self.started is not None
        again = api_pb2.GenerateRequest()
        again.CopyFrom(self.request)
        again.resume.seed = self.started.seed
        again.resume.token_ids.extend(self.token_ids)
        return again

    def accept(self, event: Event) -> Iterator[Event]:
        """Take an event of the current attempt; yields what the caller should see."""
        if isinstance(event, Started):
            yield from self._accept_started(event)
            return
        if isinstance(event, Delta):
            self._accept_delta(event)
        elif isinstance(event, ChoiceFinished):
            if self._choice_ended is not None and self.choices == 1:
                return  # told before the stream broke; the resumed one says it again
            self._choice_ended = event
        elif isinstance(event, Finished):
            self.finished = True
        yield event

    def _accept_started(self, event: Started) -> Iterator[Event]:
        if self._began:
            self.resumes += 1
            yield Resumed(event.request_id, event.replica, len(self.token_ids))
            return
        first = self.started is None
        self.started = event
        if first:
            yield event
        else:
            yield Resumed(event.request_id, event.replica, 0)

    def _accept_delta(self, event: Delta) -> None:
        self._began = True
        self._retries.count = 0
        if self.choices > 1:
            return
        if event.position != len(self.token_ids):
            raise InternalError("The stream skipped or repeated a token.")
        self.token_ids.extend(event.token_ids)

    def failed(self, error: BanyanError) -> float:
        """Seconds to wait before the next attempt. Raises `error` if there is none to make."""
        if self.finished:
            raise error
        if error.status == StatusCode.UNAVAILABLE and self._began and self.choices > 1:
            raise ReplicaLost("The stream broke; one with several choices cannot be resumed.")
        return self._retries.failed(error)
