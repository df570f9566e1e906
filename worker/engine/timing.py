"""StepTimes: smoothed durations of steps, for heartbeats and push-back. It reads no clock."""

from __future__ import annotations

import math

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
        self._added_s = self._added_tokens = 0.0  # by prefill, of late
        self._decode_s: dict[int, float] = {}  # by the bit length of the number of decode rows

    def record(self, elapsed_s: float, decode_rows: int, prefill_tokens: int) -> None:
        """One step took `elapsed_s` and computed so many decode rows and tokens of prefill."""
        if prefill_tokens == 0:
            size = decode_rows.bit_length()
            self.step_s = _smooth(self.step_s, elapsed_s)
            self._decode_s[size] = _smooth(self._decode_s.get(size, 0.0), elapsed_s)
            return
        # A quotient of sums: what a few tokens seem to add is mostly noise, and weighs little.
        self._added_s += elapsed_s - self.decode_s(decode_rows) - WEIGHT * self._added_s
        self._added_tokens += prefill_tokens - WEIGHT * self._added_tokens
        self.prefill_s_per_token = max(0.0, self._added_s) / self._added_tokens

    def decode_s(self, rows: int) -> float:
        """A step that only decodes `rows`: of that size, else of the nearest one measured."""
        if not self._decode_s:
            return 0.0
        size = rows.bit_length()
        return self._decode_s[min(self._decode_s, key=lambda known: (abs(known - size), known))]

    def prefill_within(self, rows: int, slowdown: float) -> float:
        """Tokens of prefill beside which a step of `rows` decode rows takes at most `slowdown`
        times as long as without; no bound while that is not known."""
        if not self._decode_s or self.prefill_s_per_token == 0.0:
            return math.inf
        return (slowdown - 1.0) * self.decode_s(rows) / self.prefill_s_per_token

    def estimate_s(self, prefill_tokens: int) -> float:
        """How long so many queued tokens will take, within sensible bounds for a retry."""
        estimate_s = self.step_s + prefill_tokens * self.prefill_s_per_token
        return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, estimate_s))
