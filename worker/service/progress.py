"""Health is progress: does the engine step while there is work it could do? Pure, with a Clock."""

from __future__ import annotations

from seams.clock import Clock


class ProgressWatch:
    """Compares the step counter over time. Stalled: work pending and no step for `stall_s`.

    `stall_s` must be longer than the longest legal step, or a long prefill raises a false alarm.
    """

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._steps = -1
        self._since_s = clock.now()

    def stalled(self, steps: int, pending: bool) -> bool:
        """Take a reading; call it a few times per `stall_s`. Mutates the watch."""
        if steps != self._steps or not pending:
            self._steps = steps
            self._since_s = self._clock.now()
            return False
        return self._clock.now() - self._since_s >= self._stall_s
