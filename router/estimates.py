"""What a replica's work costs in seconds, learnt online; it knows samples, never requests.

Every estimate is an exponentially weighted mean of logarithms: ratios count, not differences, a
sample may move it by a few deviations at most, and it can never turn negative. Replicas of one
numeric class share a second estimate, used until a replica's own is clearly another: noise alone
must not make one of several equal replicas look cheapest and draw everything to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

GAIN_MIN = 0.1
WARMUP_SAMPLES = 4
WARMUP_BOUND = math.log(8.0)
BOUND_DEVIATIONS = 3.0
DEVIATION_MIN = 0.05
OWN_SAMPLES_MIN = 8
OWN_DIFFERENCE_MIN = 0.7  # in logarithms, a factor of two: contexts and batches alone make less

PREFILL_S_PER_TOKEN_PRIOR = 5e-4
STEP_S_PRIOR = 0.03
STEP_S_PER_SEQUENCE_PRIOR = 0.001
OVERHEAD_S_PRIOR = 0.002
LEARN_TOKENS_MIN = 16  # a shorter prefill says more about the overhead than about the tokens


class LogEwma:
    """A positive quantity, smoothed; outliers are clipped. Starts at a prior worth one sample."""

    def __init__(self, prior: float) -> None:
        assert prior > 0
        self.log, self.value = math.log(prior), prior
        self.deviation = 0.3
        self.samples = 0

    def add(self, sample: float) -> None:
        """Learn from one sample; what is not a positive finite number teaches nothing."""
        if not (sample > 0 and math.isfinite(sample)):
            return
        bound = BOUND_DEVIATIONS * max(self.deviation, DEVIATION_MIN)
        if self.samples < WARMUP_SAMPLES:
            bound = WARMUP_BOUND
        error = max(-bound, min(bound, math.log(sample) - self.log))
        gain = max(GAIN_MIN, 1.0 / (self.samples + 2))
        self.log += gain * error
        self.value = math.exp(self.log)  # the present estimate
        self.deviation += gain * (abs(error) - self.deviation)
        self.samples += 1


@dataclass(frozen=True)
class Priors:
    """What a replica claims of itself before anything is measured; 0 = it does not know."""

    prefill_s_per_token: float = 0.0
    step_s: float = 0.0
    step_s_per_sequence: float = 0.0


class Rates:
    """The three estimates of one replica, or of one numeric class."""

    def __init__(self, priors: Priors) -> None:
        self.prefill = LogEwma(priors.prefill_s_per_token or PREFILL_S_PER_TOKEN_PRIOR)
        self.step_scale = LogEwma(1.0)  # of the step time the priors predict
        self.overhead = LogEwma(OVERHEAD_S_PRIOR)
        self.step_s = priors.step_s or STEP_S_PRIOR
        known = priors.step_s > 0
        self.step_s_more = priors.step_s_per_sequence if known else STEP_S_PER_SEQUENCE_PRIOR

    def shape_s(self, batch: int) -> float:
        """A decode step of `batch` sequences as the priors have it."""
        return self.step_s + self.step_s_more * max(0, batch - 1)


def _trusted(own: LogEwma, shared: LogEwma) -> float:
    """The shared value, unless the own one is clearly another."""
    if own.samples >= OWN_SAMPLES_MIN:
        difference = abs(own.log - shared.log)
        if difference > OWN_DIFFERENCE_MIN and difference > 2 * own.deviation:
            return own.value
    return shared.value


@dataclass
class Estimates:
    """One replica's predictions: its own rates beside those of its numeric class."""

    own: Rates
    shared: Rates

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds to compute one prompt token."""
        return _trusted(self.own.prefill, self.shared.prefill)

    @property
    def overhead_s(self) -> float:
        """Seconds from submit to first token that neither tokens nor queue explain: the wire."""
        return _trusted(self.own.overhead, self.shared.overhead)

    def step_s(self, batch: int) -> float:
        """Seconds of one decode step with `batch` sequences."""
        scale = _trusted(self.own.step_scale, self.shared.step_scale)
        return self.shared.shape_s(batch) * scale

    def learn_prefill_rate(self, seconds_per_token: float) -> None:
        """From the replica's own report."""
        for rates in (self.own, self.shared):
            rates.prefill.add(seconds_per_token)

    def learn_prefill(self, computed_tokens: int, seconds: float, queued_s: float) -> None:
        """From a finished request: submit to first token, and the queue predicted before it.

        A request that waited mostly for others teaches nothing about itself.
        """
        if seconds <= 0 or queued_s > seconds / 4:
            return
        if computed_tokens >= LEARN_TOKENS_MIN:
            own_s = max(seconds - queued_s - self.overhead_s, seconds / 2)
            self.learn_prefill_rate(own_s / computed_tokens)
        elif computed_tokens > 0:
            left_s = seconds - queued_s - computed_tokens * self.prefill_s_per_token
            for rates in (self.own, self.shared):
                rates.overhead.add(max(left_s, 1e-6))

    def learn_step(self, seconds: float, batch: int) -> None:
        """From a decode step of about `batch` sequences."""
        for rates in (self.own, self.shared):
            rates.step_scale.add(seconds / self.shared.shape_s(max(1, batch)))


@dataclass
class ClassEstimates:
    """The shared rates by numeric class; a class lives as long as the router (they are few)."""

    classes: dict[tuple[str, str], Rates] = field(default_factory=dict)

    def of(self, numeric_class: str, model: str, priors: Priors) -> Estimates:
        """Estimates of a new replica; the first of a class gives it its priors."""
        shared = self.classes.setdefault((numeric_class, model), Rates(priors))
        return Estimates(Rates(priors), shared)
