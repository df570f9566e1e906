"""`banyan simulate`: what a policy, one more replica or another tier would give, without a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from banyan import recording
from banyan.cli import output
from banyan.cli.talk import Target
from seams.bench import Report, Row
from seams.errors import InvalidRequest
from simulate.cluster import Setup
from simulate.engine import Shape
from simulate.experiment import Case, Figures, Runner, Summary, summarise
from simulate.fit import Fitted, fit, read_run
from simulate.grid import CAPACITIES, Fleet
from simulate.grid import cases as grid_cases
from simulate.grid import rows as grid_rows
from simulate.ideal import ideal_share
from simulate.outcome import Slo
from simulate.plot import write_page
from simulate.policies.cost import Wrong
from simulate.policies.registry import OURS, POLICIES, policy_of
from simulate.rows import rows_of
from simulate.traces import read_trace
from simulate.workload import Grain, Workload, chats


@dataclass(frozen=True)
class Asked:
    """The command's options. `capacity` is a share of the workload's different blocks, over the
    whole fleet; `loads` are shares of the saturation; both rates are requests a second."""

    trace: str = ""
    requests: int = 0
    replicas: int = 8
    routers: int = 1
    policies: str = OURS
    loads: tuple[float, ...] = ()
    rate: float = 0.0
    saturation: float = 0.0
    seeds: int = 1
    capacity: float = 0.2
    host: float = 0.0
    wrong_prefill: float = 1.0
    wrong_step: float = 1.0
    kill: tuple[str, ...] = ()
    join: tuple[float, ...] = ()
    what_if: bool = False
    grid: bool = False
    run: str = ""
    slo: Slo = field(default_factory=Slo)
    jobs: int = 1
    json_file: str = ""
    page: str = ""
    more: bool = False


def run(asked: Asked) -> None:
    """Simulate and print; write the JSON and the page that were asked for."""
    report = Report()
    if asked.run:
        _compare(asked, report)
    elif asked.grid:
        _grid(asked, report)
    else:
        _experiment(asked, report)
    report.show(Path(asked.json_file) if asked.json_file else None)


def record(target: Target, path: str) -> None:
    """Load the cluster, write what happened."""
    addresses, api_key = target.resolve()
    count = recording.record(addresses.split(","), api_key or None, recording.Load(), Path(path))
    output.console.print(f"{count} requests are in {path}")


def _experiment(asked: Asked, report: Report) -> None:
    began_s = time.monotonic()
    workload = _workload(asked)
    setup = _setup(asked, workload)
    runner = Runner(workload, asked.slo, asked.jobs)
    rates = _rates(asked, runner, setup, report)
    cases = _cases(asked, setup, rates)
    summaries = _all(runner, cases)
    blocks = setup.replicas * setup.shape.blocks
    report.add(Row("ideal_share", ideal_share(workload, blocks), "of prompt tokens", 1))
    plain = [summary for summary in summaries if "+" not in summary.policy]
    for row in rows_of(plain, more=asked.more):
        report.add(row)
    for row in _what_if_rows(summaries):
        report.add(row)
    report.add(Row("simulated", time.monotonic() - began_s, "s", len(cases)))
    if asked.page:
        write_page(Path(asked.page), summaries, report.as_json())


def _grid(asked: Asked, report: Report) -> None:
    """Capacities, routers and loads crossed: where our policy is first, and by how much."""
    if asked.loads or asked.rate or asked.saturation or asked.what_if or asked.page:
        raise InvalidRequest("The grid sets capacity, routers and loads itself, and has no page.")
    began_s = time.monotonic()
    workload, fleets = _workload(asked), {}
    runner = Runner(workload, asked.slo, asked.jobs)
    for capacity in CAPACITIES:
        setup = _setup(replace(asked, capacity=capacity, routers=1), workload)
        ideal = ideal_share(workload, setup.replicas * setup.shape.blocks)
        fleets[capacity] = fleet = Fleet(setup, runner.saturation(setup), ideal)
        of = f"c{100 * capacity:.0f}"
        report.add(Row(f"ideal_share_{of}", ideal, "of prompt tokens", 1))
        report.add(Row(f"saturation_{of}", fleet.saturation, "requests/s", 1))
    names = _names(asked)
    names = list(POLICIES) if names == [OURS] else list(dict.fromkeys([OURS, *names]))
    cases = grid_cases(fleets, names, asked.seeds)
    for row in grid_rows(fleets, _all(runner, cases)):
        report.add(row)
    report.add(Row("simulated", time.monotonic() - began_s, "s", len(cases)))


def _all(runner: Runner, cases: Sequence[Case]) -> list[Summary]:
    """Run every case, telling of each."""
    results: list[tuple[Case, Figures]] = []

    def done(case: Case, figures: Figures) -> None:
        results.append((case, figures))
        _say(case, figures, len(results), len(cases))

    runner.run(cases, done)
    return summarise(results)


def _say(case: Case, figures: Figures, number: int, of: int) -> None:
    said = ", ".join(
        f"{name} {figures[name][0]:.4g}" for name in ("ttft_mean", "ttft_p99", "cached_share")
    )
    output.errors.print(f"{number}/{of} {case.policy} {case.label} seed {case.seed}: {said}")


def _workload(asked: Asked) -> Workload:
    if asked.trace:
        return read_trace(Path(asked.trace).expanduser(), Grain(), asked.requests or None)
    made = chats(users=max(1, (asked.requests or 2000) // 4), groups=16, turns=4, seed=1)
    return made.first(asked.requests) if asked.requests else made


def _setup(asked: Asked, workload: Workload) -> Setup:
    if asked.replicas < 1 or asked.routers < 1 or asked.seeds < 1 or asked.capacity <= 0:
        raise InvalidRequest("Replicas, routers, seeds and the capacity must be above zero.")
    if asked.jobs < 1 or not all(load > 0 for load in asked.loads):
        raise InvalidRequest("Loads and the number of jobs must be above zero.")
    if not (asked.rate >= 0 and asked.saturation >= 0 and asked.host >= 0):
        raise InvalidRequest("A rate, the saturation and the host tier cannot be below zero.")
    unique = workload.unique_blocks()
    longest = max(request.prompt_tokens + request.output_tokens for request in workload.requests)
    least = -(-longest // workload.grain.block_tokens) + 2
    blocks = max(least, round(asked.capacity * unique / asked.replicas))
    host = round(asked.host * unique / asked.replicas)
    shape = Shape(blocks, workload.grain, host_blocks=host)
    deaths = tuple(_death(text, asked.replicas + len(asked.join)) for text in asked.kill)
    return Setup(shape, asked.replicas, asked.routers, deaths=deaths, joins=asked.join)


def _death(text: str, replicas: int) -> tuple[float, int]:
    at, _, number = text.partition(":")
    try:
        found = float(at), int(number)
    except ValueError:
        raise InvalidRequest(f"{text} is not SECONDS:REPLICA, as in 120:0.") from None
    if not (0 <= found[0] < math.inf and 0 <= found[1] < replicas):
        raise InvalidRequest(f"{text} names no moment, or none of {replicas} replicas.")
    return found


def _rates(asked: Asked, runner: Runner, setup: Setup, report: Report) -> list[tuple[str, float]]:
    """(label, requests a second) of every load."""
    if not asked.loads:
        return [("", asked.rate)]
    saturation = asked.saturation or runner.saturation(setup)
    report.add(Row("saturation", saturation, "requests/s", 1))
    return [(f"{100 * load:.0f}", load * saturation) for load in asked.loads]


def _names(asked: Asked) -> list[str]:
    names = list(POLICIES) if asked.policies == "all" else asked.policies.split(",")
    for name in names:
        policy_of(name)
    return names


def _cases(asked: Asked, setup: Setup, rates: Sequence[tuple[str, float]]) -> list[Case]:
    wrong = None
    if (asked.wrong_prefill, asked.wrong_step) != (1.0, 1.0):
        wrong = Wrong(asked.wrong_prefill, asked.wrong_step)
    cases = [
        Case(name, seed, setup, rate, label, wrong if name == OURS else None)
        for label, rate in rates
        for name in _names(asked)
        for seed in range(1, asked.seeds + 1)
    ]
    if asked.what_if:
        cases += [variant for case in cases for variant in _variants(case)]
    return cases


def _variants(case: Case) -> list[Case]:
    """One more replica; twice the host tier, or one as large as the device where there is none."""
    setup, shape = case.setup, case.setup.shape
    host = replace(shape, host_blocks=2 * shape.host_blocks or shape.blocks)
    return [
        replace(case, policy=f"{case.policy}+replica",
                setup=replace(setup, replicas=setup.replicas + 1)),
        replace(case, policy=f"{case.policy}+host", setup=replace(setup, shape=host)),
    ]  # fmt: skip


def _what_if_rows(summaries: Sequence[Summary]) -> list[Row]:
    """Each variant beside what it varies."""
    base = {(summary.policy, summary.label): summary for summary in summaries}
    several = len({summary.label for summary in summaries}) > 1
    rows = []
    for summary in summaries:
        policy, plus, what = summary.policy.partition("+")
        if plus:
            plain = base[policy, summary.label]
            suffix = f"_{summary.label}" if several else ""
            for name in ("goodput", "ttft_mean", "ttft_p99", "cached_share"):
                value, unit = summary.figures[name]
                row = f"{policy}_more_{what}_{name}{suffix}"
                rows.append(Row(row, value, unit, summary.samples, policy, plain.value(name)))
    return rows


def _compare(asked: Asked, report: Report) -> None:
    """`--fit RUN`: constants from a real run, and the simulation beside it."""
    found: Fitted = fit(read_run(Path(asked.run)))
    for row in found.rows():
        report.add(row)
