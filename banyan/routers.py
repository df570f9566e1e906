"""Which router to talk to, and how long there is: shared by both clients. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from banyan.channel import addresses
from seams.clock import Clock, SystemClock
from seams.errors import DeadlineExceeded


class RouterList:
    """The addresses of one cluster's routers; all threads prefer the one that answered last."""

    def __init__(self, given: str | Sequence[str]) -> None:
        self.addresses = addresses(given)
        self._lock = threading.Lock()
        self._current = 0

    @property
    def current(self) -> str:
        """The preferred router."""
        return self.addresses[self._current]

    def turn_from(self, address: str) -> None:
        """Prefer the next one, unless another thread has turned from `address` already."""
        with self._lock:
            if self.current == address:
                self._current = (self._current + 1) % len(self.addresses)


class Deadline:
    """A total time limit, None = open."""

    def __init__(self, timeout_s: float | None, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._end_s = None if timeout_s is None else self._clock.now() + timeout_s

    def left(self) -> float | None:
        """Seconds left, None if there is no limit. Raises DeadlineExceeded when it is over."""
        if self._end_s is None:
            return None
        left = self._end_s - self._clock.now()
        if left <= 0:
            raise DeadlineExceeded("The deadline passed before the call ended.")
        return left

    def bound(self, seconds: float) -> float:
        """`seconds`, but no longer than what is left."""
        left = self.left()
        return seconds if left is None else min(seconds, left)
