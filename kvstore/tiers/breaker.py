"""A circuit breaker: whether to call something that has been failing. It knows no network.

It counts the seconds callers waited in vain. Once they are no longer bearable it opens and nobody
calls; after a while one call is let through as a probe, and its outcome closes it or opens it again
for twice as long. A closing by probe is on probation: the next failure opens it at once.

Calls take time, and one of before an opening may end during a probe or after it. Each is told the
era it began in, a new one with every opening, probe and closing; of an era that is over no outcome
counts, since it says nothing of how things are now.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import NamedTuple

from seams.clock import Clock

FAILURE_S = 0.2
"""What a failure weighs at least, however fast it came: three in a row open the default breaker."""
FORGIVING = 0.75
"""A success leaves this share of the trouble: half of all calls failing still opens it."""


class Verdict(Enum):
    """What a caller may do now."""

    CALL = "call"
    PROBE = "probe"  # one call, whose outcome must be told; nobody else gets this meanwhile
    REFUSED = "refused"


class Admission(NamedTuple):
    """The answer to one caller, who gives it back with the outcome of the call."""

    verdict: Verdict
    era: int


class Breaker:
    """Thread-safe. Open for `first_s` seconds, then twice as long each time, up to `longest_s`.

    `bearable_s` is the trouble it takes to open; 0 opens at the first failure. A probe that says
    nothing for `longest_s` is given up and another may go.
    """

    def __init__(
        self, clock: Clock, *, bearable_s: float = 0.5, first_s: float = 0.5, longest_s: float = 5.0
    ) -> None:
        assert bearable_s >= 0 and 0 < first_s <= longest_s
        self._clock = clock
        self._bearable_s = bearable_s
        self._first_s, self._longest_s = first_s, longest_s
        self._lock = threading.Lock()
        self._trouble_s = 0.0
        self._wait_s = first_s  # how long the next opening lasts
        self._retry_at: float | None = None  # None: closed
        self._era = 0

    @property
    def closed(self) -> bool:
        """Whether calls go through. Half open counts as open."""
        return self._retry_at is None

    @property
    def refusing(self) -> bool:
        """Whether `admit` would refuse now. Takes no probe away from anybody."""
        with self._lock:
            return self._retry_at is not None and self._clock.now() < self._retry_at

    def admit(self) -> Admission:
        """Ask before each call. After CALL and PROBE, tell `succeeded` or `failed`."""
        with self._lock:
            if self._retry_at is None:
                return Admission(Verdict.CALL, self._era)
            now = self._clock.now()
            if now < self._retry_at:
                return Admission(Verdict.REFUSED, self._era)
            self._era += 1
            self._retry_at = now + self._longest_s  # the probe's lease
            return Admission(Verdict.PROBE, self._era)

    def failed(self, call: Admission, waited_s: float) -> None:
        """A call failed after `waited_s` seconds. FAILURE_S is the caller's to add where even a
        fast failure is one."""
        assert call.verdict is not Verdict.REFUSED
        with self._lock:
            if call.era != self._era:
                return  # it began before an opening, or is a probe that was given up
            self._trouble_s += waited_s
            if call.verdict is Verdict.PROBE or self._trouble_s >= self._bearable_s:
                self._open()

    def succeeded(self, call: Admission) -> None:
        """A call did what it was for."""
        assert call.verdict is not Verdict.REFUSED
        with self._lock:
            if call.era != self._era:
                return
            if call.verdict is Verdict.PROBE:
                self._retry_at = None
                self._era += 1
                self._trouble_s = self._bearable_s  # on probation
                return
            self._trouble_s *= FORGIVING
            if self._trouble_s < self._bearable_s / 4:
                self._wait_s = self._first_s

    def _open(self) -> None:
        self._retry_at = self._clock.now() + self._wait_s
        self._era += 1
        self._wait_s = min(2 * self._wait_s, self._longest_s)
