"""Traffic: what passed through one router, counted. It knows no socket and no exposition format.

One thread. Everything here only grows; a restart of the router begins at 0.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from banyan.v1 import api_pb2
from seams.clock import Clock
from seams.errors import BanyanError, StatusCode

# Upper bounds in seconds: a prefix in the cache on a small model, up to a long prompt in a queue.
FIRST_TOKEN_S = [0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75]
FIRST_TOKEN_S += [1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
DURATION_S = [0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0]
DURATION_S += [40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0]


class Histogram:
    """Counts of values by bucket: at most `bounds[i]`, and one bucket for all above."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert bounds and list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # of each bucket alone
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class Traffic:
    """Totals of all Generate calls since the start."""

    ended: dict[StatusCode, int] = field(default_factory=lambda: dict.fromkeys(StatusCode, 0))
    moves: int = 0
    tokens: int = 0  # given to clients, all choices together
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    duration_s: Histogram = field(default_factory=lambda: Histogram(DURATION_S))  # of those with OK


class Passage:
    """One Generate call, as a context around it: whatever leaves the context ends the call."""

    def __init__(self, traffic: Traffic, clock: Clock) -> None:
        self._traffic = traffic
        self._clock = clock
        self._began_s = clock.now()
        self._placements = 0
        self._first = True

    def placed(self) -> None:
        """It got a replica; each one after the first is a move."""
        self._traffic.moves += self._placements > 0
        self._placements += 1

    def deliver(self, response: api_pb2.GenerateResponse) -> None:
        """This is given to the client now."""
        if not response.HasField("delta"):
            return
        traffic = self._traffic
        traffic.tokens += len(response.delta.token_ids)
        if self._first:
            self._first = False
            traffic.first_token_s.observe(self._clock.now() - self._began_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        traffic, status = self._traffic, _status_of(error)
        traffic.ended[status] += 1
        if status is StatusCode.OK:
            traffic.duration_s.observe(self._clock.now() - self._began_s)


def _status_of(error: BaseException | None) -> StatusCode:
    if error is None:
        return StatusCode.OK
    if isinstance(error, BanyanError):
        return error.status
    return (
        StatusCode.CANCELLED if isinstance(error, asyncio.CancelledError) else StatusCode.INTERNAL
    )
