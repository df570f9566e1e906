"""The search for the greatest rate under an objective, against servers whose capacity is known."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from load_rig import QueueTarget, measured, plan_of, virtually

from loadtest import figures
from loadtest.arrivals import CONSTANT, POISSON, Arrivals, evened
from loadtest.page import page, verdict
from loadtest.plan import Plan
from loadtest.report import as_json
from loadtest.search import greatest_rate
from loadtest.workloads.base import Shape
from seams.errors import InvalidRequest


def searched(
    limit_hz: float, low_hz: float, high_hz: float, precision: float = 0.1
) -> tuple[float | None, list[float]]:
    """What a search finds if the rates up to `limit_hz` meet it, and what it tried."""
    tried: list[float] = []

    async def probe(rate_hz: float) -> bool:
        tried.append(rate_hz)
        return rate_hz <= limit_hz

    return asyncio.run(greatest_rate(probe, low_hz, high_hz, precision)), tried


@pytest.mark.parametrize("limit_hz", [1.0, 1.7, 3.0, 10.0, 63.9])
@pytest.mark.parametrize("precision", [0.01, 0.1, 0.5])
def test_it_ends_within_the_precision(limit_hz: float, precision: float) -> None:
    found, tried = searched(limit_hz, 1.0, 64.0, precision)
    assert found is not None and found <= limit_hz
    failed = [rate for rate in tried if rate > limit_hz]
    assert min(failed) <= found * (1 + precision)
    assert len(tried) == len(set(tried)) <= 16


def test_its_ends() -> None:
    assert searched(0.2, 1.0, 64.0) == (None, [1.0, 0.5, 0.25])
    found, tried = searched(0.6, 1.0, 64.0)
    assert found is not None and 0.54 < found <= 0.6 and tried[:2] == [1.0, 0.5]
    assert searched(0.25, 1.0, 64.0, 1.0) == (0.25, [1.0, 0.5, 0.25])
    found, tried = searched(1e9, 1.0, 50.0)
    assert found == 50.0 and tried == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 50.0]
    assert searched(9.0, 4.0, 4.0) == (4.0, [4.0])


@pytest.mark.parametrize("low_hz", [0.0, -1.0, float("nan"), 5.0])
def test_its_bounds_are_checked(low_hz: float) -> None:
    with pytest.raises(InvalidRequest, match="A search needs rates above 0"):
        searched(1.0, low_hz, 4.0)


def plan(ttft_s: float) -> Plan:
    return plan_of(
        arrivals=Arrivals(CONSTANT), search=True, slo={"ttft": ttft_s}, sessions=200,
        rates_hz=(2.0,), precision=0.05, shape=Shape(input_tokens=5, output_tokens=10),
    )  # fmt: skip


def test_it_finds_the_capacity_of_a_server() -> None:
    target = QueueTarget(token_s=0.01, servers=2)  # 0.1 s a request, two at a time: 20/s
    run = virtually(measured(plan(0.3), target))
    found = figures.rate_found_hz(run)
    tried = [stage.rate_hz or 0.0 for stage in run.stages]
    print(found, tried)
    assert tried[:5] == [2.0, 4.0, 8.0, 16.0, 32.0]
    # 200 sessions are over before a queue that grows slowly fails a tenth of them
    assert found is not None and 19.0 <= found <= 21.2
    assert as_json(run)["rate_found_hz"] == found
    assert f"{found:.3g} sessions/s" in verdict(run) and verdict(run) in page(run)
    at_it = next(f for f in figures.all_figures(run) if f.rate_hz == found)
    assert at_it.attainment is not None and at_it.attainment >= 0.9
    assert at_it.goodput_hz is not None and at_it.goodput_hz <= 20.2


def test_an_objective_that_nothing_meets() -> None:
    run = virtually(measured(plan(0.001), QueueTarget()))
    assert [stage.rate_hz for stage in run.stages] == [2.0, 1.0, 0.5]
    assert figures.rate_found_hz(run) is None
    assert as_json(run)["rate_found_hz"] is None
    assert "none that was tried, down to 0.5 sessions/s." in verdict(run)


def test_a_rate_too_low_for_any_session_ends_the_search() -> None:
    short = replace(plan(0.001), sessions=None, duration_s=0.75)
    run = virtually(measured(short, QueueTarget()))
    assert [stage.rate_hz for stage in run.stages] == [2.0], "at 1/s the first would come too late"
    assert figures.rate_found_hz(run) is None and "down to 2 sessions/s." in verdict(run)
    with pytest.raises(InvalidRequest, match="No session begins"):
        virtually(measured(replace(short, duration_s=0.4), QueueTarget()))


def test_a_sweep_shows_throughput_against_latency() -> None:
    sweep = plan_of(
        arrivals=Arrivals(POISSON), rates_hz=(4.0, 8.0, 16.0), sessions=60,
        shape=Shape(input_tokens=5, output_tokens=10),
    )  # fmt: skip
    run = virtually(measured(sweep, QueueTarget(token_s=0.01, servers=1)))
    found = figures.all_figures(run)
    points = figures.throughput_latency(found)
    assert len(points) == 3
    assert points[0][0] < points[1][0] <= 100 * 1.01  # tokens/s that the server can do
    assert points[0][1] < points[2][1]
    names = [row["name"] for row in as_json(run)["rows"]]
    assert len(names) == len(set(names)) and "ttft_p50@16/s" in names


def test_all_rates_of_a_search_have_one_pattern_and_are_exact() -> None:
    poisson = replace(plan(0.3), arrivals=Arrivals(POISSON), sessions=24)
    run = virtually(measured(poisson, QueueTarget(token_s=0.01, servers=2)))
    assert len(run.stages) > 4
    patterns = []
    for stage in run.stages:
        assert stage.rate_hz is not None
        at_s = sorted(record.intended_s for record in run.of(stage))
        patterns.append([(later - at_s[0]) * stage.rate_hz for later in at_s])
        assert patterns[-1] == pytest.approx(patterns[0], abs=1e-3)
    gaps = {round(b - a, 3) for a, b in pairwise(patterns[0])}
    assert len(gaps) > 12, "no pattern of chance"


def test_evened_times_have_the_rate() -> None:
    assert evened([1.0, 2.0, 8.0], 1.5) == [0.25, 0.5, 2.0]
    assert evened([], 1.0) == [] and evened([0.0], 1.0) == [0.0]
