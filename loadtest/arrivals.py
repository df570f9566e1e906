"""When sessions begin. Pure: chance comes from the caller, nothing is waited for.

Gaps of `constant` are all alike (coefficient of variation 0), those of `poisson` exponential (1),
those of `gamma` have the wanted one: above 1 sessions come in bursts. `schedule` is a trace's own,
`closed` has no times: a session begins when another ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile

from seams.errors import InvalidRequest

CLOSED, CONSTANT, POISSON, GAMMA, SCHEDULE = "closed", "constant", "poisson", "gamma", "schedule"
KINDS = (CLOSED, CONSTANT, POISSON, GAMMA, SCHEDULE)
WITH_RATE = (CONSTANT, POISSON, GAMMA)
SESSIONS_MAX = 1_000_000


@dataclass(frozen=True)
class Arrivals:
    """`cv` is gamma's coefficient of variation, `speed` divides a schedule's times, `concurrency`
    is how many sessions run at once in a closed loop."""

    kind: str
    cv: float = 1.0
    speed: float = 1.0
    concurrency: int = 8

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"--arrivals must be one of {', '.join(KINDS)}.")
        for name, value in (("--cv", self.cv), ("--speed", self.speed)):
            if not 0 < value < float("inf"):
                raise InvalidRequest(f"{name} must be more than 0.")
        if self.concurrency < 1:
            raise InvalidRequest("--concurrency must be at least 1.")

    @property
    def open(self) -> bool:
        """Sessions begin whether or not others have ended."""
        return self.kind != CLOSED


def times_s(
    arrivals: Arrivals,
    rate_hz: float,
    rng: random.Random,
    sessions_max: int | None,
    duration_s: float | None,
) -> list[float]:
    """When each session begins, from the start on: as many as there may be, or come in time.

    For kinds with a rate; one of the two bounds is given.
    """
    assert arrivals.kind in WITH_RATE and rate_hz > 0
    assert sessions_max is not None or duration_s is not None
    until_s = math.inf if duration_s is None else duration_s
    most = SESSIONS_MAX if sessions_max is None else min(sessions_max, SESSIONS_MAX)
    times = islice(accumulate(_gaps_s(arrivals, rate_hz, rng)), most)
    return list(takewhile(lambda at_s: at_s <= until_s, times))


def evened(times_s: Sequence[float], rate_hz: float) -> list[float]:
    """The same pattern at exactly this mean rate: the last session, the n-th, begins at n / rate.
    Poisson arrivals remain such, given the time of the last one."""
    if not times_s or times_s[-1] == 0:
        return list(times_s)
    factor = len(times_s) / rate_hz / times_s[-1]
    return [factor * at_s for at_s in times_s]


def _gaps_s(arrivals: Arrivals, rate_hz: float, rng: random.Random) -> Iterator[float]:
    shape = 1 / arrivals.cv**2
    while True:
        if arrivals.kind == CONSTANT:
            yield 1 / rate_hz
        elif arrivals.kind == POISSON:
            yield rng.expovariate(rate_hz)
        else:
            yield rng.gammavariate(shape, 1 / (shape * rate_hz))
