"""Whether a disk is worth asking: what its errors mean and when to try again. It does no IO."""

from __future__ import annotations

import errno

FIRST_WAIT_S = 1.0
WAIT_S_MAX = 60.0
FAILURES_TO_BREAK = 3
"""Errors in a row that are neither "full" nor "read only" before the disk counts as broken."""

_STATES = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "readonly",
    errno.EACCES: "readonly",
    errno.EPERM: "readonly",
}


class DiskHealth:
    """ok | full | readonly | broken. One caller at a time; times are a monotonic clock's, seconds.

    While not ok, one try is let through after 1, 2, 4 .. 60 s; what works makes it ok again.
    """

    def __init__(self) -> None:
        self.state = "ok"
        self._failures = 0
        self._wait_s = FIRST_WAIT_S
        self._retry_at = 0.0

    def may_write(self, now: float) -> bool:
        """Whether to try; a try while not ok is the only one for a while."""
        if self.state == "ok":
            return True
        if now < self._retry_at:
            return False
        self._retry_at = now + self._wait_s
        return True

    def may_read(self, now: float) -> bool:
        """Whether to try: a disk that is full or read only can be read."""
        return self.state != "broken" or self.may_write(now)

    def failed(self, error: OSError, now: float) -> None:
        """An operation ended so."""
        state = _STATES.get(error.errno or 0)
        self._failures += 1
        if state is None and self._failures < FAILURES_TO_BREAK:
            return
        was_ok = self.state == "ok"
        self.state = state or "broken"
        self._wait_s = FIRST_WAIT_S if was_ok else min(WAIT_S_MAX, 2 * self._wait_s)
        self._retry_at = now + self._wait_s

    def wrote(self) -> None:
        """A write worked: all is well."""
        self.state, self._failures = "ok", 0

    def read(self) -> None:
        """A read worked: the disk is not broken, whatever else it may be."""
        self._failures = 0
        if self.state == "broken":
            self.state = "ok"


def is_refusal(error: OSError) -> bool:
    """Whether the disk takes nothing more, rather than having failed at one thing."""
    return (error.errno or 0) in _STATES
