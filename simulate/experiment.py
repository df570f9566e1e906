"""Experiments: many runs of one workload, and what they say together.

A case is one run; cases are independent, so several processes may share them. Figures of a policy
are means over seeds: a seed moves arrivals inside the trace's rounding, and every draw. It knows
no policy's insides.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from simulate.cluster import Setup, simulate
from simulate.outcome import Slo
from simulate.policies.cost import Wrong
from simulate.policies.registry import OURS, policy_of
from simulate.workload import Workload

SATURATING_PER_REPLICA = 64  # requests in flight, of the closed loop that finds the saturation

Figures = dict[str, tuple[float, str]]


@dataclass(frozen=True)
class Case:
    """One run: `rate` in requests a second, 0 = the workload's own. Behind a + in `policy` is what
    its setup varies."""

    policy: str
    seed: int
    setup: Setup
    rate: float = 0.0
    label: str = ""  # of the load
    wrong: Wrong | None = None


@dataclass
class Summary:
    """A policy under one load, over its seeds."""

    policy: str
    label: str
    figures: Figures = field(default_factory=dict)
    samples: int = 0

    def value(self, name: str) -> float:
        """A figure's mean."""
        return self.figures[name][0]


class Runner:
    """Runs cases of one workload."""

    def __init__(self, workload: Workload, slo: Slo, jobs: int = 1) -> None:
        self.workload, self.slo, self._jobs = workload, slo, jobs

    def run(self, cases: Sequence[Case], done: Callable[[Case, Figures], None]) -> None:
        """Every case; `done` hears of each as it ends, in the order given."""
        if self._jobs == 1 or len(cases) == 1:
            for case in cases:
                done(case, self.figures(case))
            return
        context = multiprocessing.get_context("fork")  # the workload is inherited, not sent
        with ProcessPoolExecutor(self._jobs, mp_context=context) as pool:
            global _inherited
            _inherited = self
            for case, figures in zip(cases, pool.map(_run_inherited, cases), strict=True):
                done(case, figures)

    def figures(self, case: Case) -> Figures:
        """One case."""
        workload = self.workload.spread(case.seed)
        if case.rate:
            workload = workload.at_rate(case.rate)
        make = policy_of(case.policy.partition("+")[0], case.wrong)
        return simulate(case.setup, workload, make, case.seed).figures(self.slo)

    def saturation(self, setup: Setup, seed: int = 0) -> float:
        """Requests a second that the fleet completes when there are always enough of them waiting:
        our own policy in a closed loop."""
        in_flight = SATURATING_PER_REPLICA * setup.replicas
        closed = replace(setup, in_flight_max=in_flight, routers=1, deaths=(), joins=())
        outcome = simulate(closed, self.workload, policy_of(OURS), seed)
        return len(outcome.good) / outcome.span_s


_inherited: Runner | None = None


def _run_inherited(case: Case) -> Figures:
    assert _inherited is not None
    return _inherited.figures(case)


def summarise(results: Iterable[tuple[Case, Figures]]) -> list[Summary]:
    """Means by policy and load, in the order in which they first came."""
    grouped: dict[tuple[str, str], list[Figures]] = {}
    for case, figures in results:
        grouped.setdefault((case.policy, case.label), []).append(figures)
    return [
        Summary(policy, label, _mean(several), len(several))
        for (policy, label), several in grouped.items()
    ]


def _mean(several: Sequence[Figures]) -> Figures:
    return {
        name: (sum(figures[name][0] for figures in several) / len(several), unit)
        for name, (_, unit) in several[0].items()
    }
