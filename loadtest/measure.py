"""Carries out a plan against a target, stage by stage, into a log. Knows no file and no plot."""

from __future__ import annotations

import asyncio
from typing import Any

from loadtest import arrivals
from loadtest.figures import holds
from loadtest.plan import TIMES_FASTER, Plan
from loadtest.records import Log, Stage
from loadtest.run import Player, Watch
from loadtest.search import greatest_rate
from loadtest.targets.base import OPEN_S_MAX, Target
from loadtest.text import Writer, rng_of
from loadtest.workloads.base import Session, Workload
from loadtest.workloads.catalog import Make
from seams.clock import Clock
from seams.errors import InvalidRequest, NoReplica

WARMUP_CONCURRENCY = 4
WARMUP = "warm-up"


async def opened(target: Target) -> None:
    """Open a target, but do not wait for ever. Raises BanyanError."""
    try:
        async with asyncio.timeout(OPEN_S_MAX):
            await target.open()
    except TimeoutError:
        raise NoReplica("The target does not answer.") from None


class Measurement:
    """One run of a plan. The target is open; `log` gets every stage and request."""

    def __init__(
        self,
        plan: Plan,
        target: Target,
        make: Make,
        writer: Writer,
        log: Log,
        watch: Watch,
        clock: Clock,
    ) -> None:
        self._plan, self._target, self._make, self._writer = plan, target, make, writer
        self._log, self._watch, self._clock = log, watch, clock
        self._origin_s = clock.now()

    async def run(self) -> None:
        """All of it. Raises InvalidRequest if there is nothing to send."""
        plan = self._plan
        if plan.search:
            (low_hz,) = plan.rates_hz
            high_hz = plan.rate_max_hz or low_hz * TIMES_FASTER
            await greatest_rate(self._holds, low_hz, high_hz, plan.precision)
            return
        for rate_hz in plan.rates_hz or (None,):
            await self._stage(rate_hz)

    async def _holds(self, rate_hz: float) -> bool:
        """Whether enough requests meet the objective at this rate. Below the first one it may be so
        low that no session begins in a stage: then there is nothing to find there."""
        plan = self._plan
        rng = rng_of(plan.seed, "arrivals", 0)
        if self._log.run.stages and not arrivals.times_s(
            plan.arrivals, rate_hz, rng, 1, plan.duration_s
        ):
            return False
        return holds(self._log.run, await self._stage(rate_hz))

    async def _stage(self, rate_hz: float | None) -> Stage:
        plan, number = self._plan, len(self._log.run.stages)
        workload = self._make(self._writer, f"{plan.seed}.{number}")
        times_s = self._times_s(rate_hz, number, workload)
        count = self._sessions_max(workload) if times_s is None else len(times_s)
        sessions = await asyncio.to_thread(_made, workload, count)
        if plan.arrivals.kind == arrivals.SCHEDULE:
            times_s = [session.at_s / plan.arrivals.speed for session in sessions]
        stage = Stage(number, self._load(rate_hz, number), rate_hz)
        self._log.stage(stage)
        if number == 0:
            await self._warm_up()
        self._watch.began(stage.load, sum(len(session.turns) for session in sessions))
        player = self._player(number)
        if times_s is None:
            await player.closed_loop(sessions, plan.arrivals.concurrency, plan.duration_s)
        else:
            await player.open_loop(sessions, times_s)
        return stage

    def _times_s(
        self, rate_hz: float | None, number: int, workload: Workload
    ) -> list[float] | None:
        """When sessions begin; None where no rate says so."""
        plan = self._plan
        if rate_hz is None:
            return None
        bounds = [n for n in (plan.sessions_max, workload.sessions_max) if n is not None]
        # A search tries one pattern at all its rates: if each had its own, luck would decide, since
        # few sessions often come at quite another rate than they should.
        rng = rng_of(plan.seed, "arrivals", 0 if plan.search else number)
        bound = min(bounds, default=None)
        found = arrivals.times_s(plan.arrivals, rate_hz, rng, bound, plan.duration_s)
        if plan.search and plan.duration_s is None:
            found = arrivals.evened(found, rate_hz)
        if not found:
            raise InvalidRequest("No session begins in so short a time at this rate.")
        return found

    def _sessions_max(self, workload: Workload) -> int:
        bounds = [n for n in (self._plan.sessions_max, workload.sessions_max) if n is not None]
        return min(bounds)

    async def _warm_up(self) -> None:
        """Other texts than those that follow: caches are as cold for these as before."""
        workload = self._make(self._writer, f"{self._plan.seed}.warm-up")
        count = min(self._plan.warmup, workload.sessions_max or self._plan.warmup)
        if count:
            sessions = await asyncio.to_thread(_made, workload, count)
            self._watch.began(WARMUP, sum(len(session.turns) for session in sessions))
            await self._player(0, warmup=True).closed_loop(sessions, WARMUP_CONCURRENCY)

    def _player(self, stage: int, *, warmup: bool = False) -> Player:
        return Player(
            self._target, self._clock, self._origin_s, self._log.add, self._watch,
            stage=stage, warmup=warmup, timeout_s=self._plan.timeout_s,
        )  # fmt: skip

    def _load(self, rate_hz: float | None, number: int) -> str:
        """The load in words, of which no two stages have the same."""
        words = _load_words(self._plan.arrivals, rate_hz)
        known = {stage.load for stage in self._log.run.stages}
        return f"{words} #{number}" if words in known else words


def _load_words(asked: arrivals.Arrivals, rate_hz: float | None) -> str:
    if rate_hz is not None:
        return f"{rate_hz:.3g}/s"
    if asked.kind == arrivals.SCHEDULE:
        return "schedule" if asked.speed == 1 else f"schedule x{asked.speed:g}"
    return f"{asked.concurrency} at once"


def _made(workload: Workload, count: int) -> list[Session]:
    return [workload.session(number) for number in range(count)]


def header(
    plan: Plan, target: Target, machine: dict[str, Any], command: str, started: str
) -> dict[str, Any]:
    """What a run's records begin with. Addresses and paths are in it where `command` names them; no
    key is."""
    return {
        "started": started,
        "command": command,
        "machine": machine,
        "target": target.facts,
        "slo": plan.slo,
        "plan": plan.as_json(),
    }
