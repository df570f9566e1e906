"""Clock: the only source of time for the synchronous core, so that tests and simulations own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time. Never the wall clock: a date set back must not expire or revive anything."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed point; never decreases. Mutates nothing."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (>= 0)."""
        assert seconds >= 0, "a monotonic clock cannot go back"
        self._now_s += seconds
