"""StepTimes: smoothed durations of steps, for heartbeats and push-back. It reads no clock."""

from __future__ import annotations

WEIGHT = 0.1  # of the newest step
RETRY_AFTER_S_MIN = 0.05
RETRY_AFTER_S_MAX = 60.0


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)


class StepTimes:
    """Exponential averages; 0 = not measured."""

    def __init__(self) -> None:
        self.step_s = 0.0  # of steps that only decode
        self.prefill_s_per_token = 0.0  # what a prefill token adds to that

    def record(self, elapsed_s: float, prefill_tokens: int) -> None:
        """One step took `elapsed_s` and computed so many tokens of prefill chunks."""
        if prefill_tokens == 0:
            self.step_s = _smooth(self.step_s, elapsed_s)
            return
        added_s = max(0.0, elapsed_s - self.step_s)
        self.prefill_s_per_token = _smooth(self.prefill_s_per_token, added_s / prefill_tokens)

    def estimate_s(self, prefill_tokens: int) -> float:
        """How long so many queued tokens will take, within sensible bounds for a retry."""
        estimate_s = self.step_s + prefill_tokens * self.prefill_s_per_token
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, estimate_s))
