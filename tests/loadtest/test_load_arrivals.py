"""Arrivals have the rate and burstiness asked for; objectives and plans are checked."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import pytest
from load_rig import plan_of

from loadtest.arrivals import CLOSED, CONSTANT, GAMMA, POISSON, SCHEDULE, Arrivals, times_s
from loadtest.slo import parse_slo, shown
from loadtest.text import rng_of
from loadtest.workloads.base import Shape
from seams.errors import InvalidRequest

RATE_HZ = 5.0


def gaps(arrivals: Arrivals, count: int = 20_000) -> list[float]:
    times = times_s(arrivals, RATE_HZ, rng_of(9), count, None)
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Arrivals(CONSTANT), 0.0),
        (Arrivals(POISSON), 1.0),
        (Arrivals(GAMMA, cv=0.5), 0.5),
        (Arrivals(GAMMA, cv=3.0), 3.0),
    ],
)
def test_mean_and_coefficient_of_variation(arrivals: Arrivals, cv: float) -> None:
    found = gaps(arrivals)
    mean = statistics.fmean(found)
    print("seed 9")
    assert min(found) >= 0
    assert mean == pytest.approx(1 / RATE_HZ, rel=0.05 if cv < 3 else 0.08)
    assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.06, abs=1e-6)


def test_a_duration_bounds_them() -> None:
    times = times_s(Arrivals(POISSON), 50.0, rng_of(1), None, 4.0)
    assert 150 < len(times) < 250 and times == sorted(times) and times[-1] <= 4.0
    assert times_s(Arrivals(POISSON), 50.0, rng_of(1), 10, 4.0) == times[:10]
    assert times_s(Arrivals(CONSTANT), 1.0, rng_of(1), None, 0.5) == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kind": "often"}, "--arrivals must be one of closed"),
        ({"kind": GAMMA, "cv": 0.0}, "--cv must be more than 0."),
        ({"kind": GAMMA, "cv": float("nan")}, "--cv must be more than 0."),
        ({"kind": SCHEDULE, "speed": -1.0}, "--speed must be more than 0."),
        ({"kind": CLOSED, "concurrency": 0}, "--concurrency must be at least 1."),
    ],
)
def test_arrivals_are_checked(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        Arrivals(**given)


def test_objectives_are_read() -> None:
    assert parse_slo("ttft:500ms,tpot:50ms") == {"ttft": 0.5, "tpot": pytest.approx(0.05)}
    assert parse_slo(" e2e:2.5s , itl:900us ") == {"e2e": 2.5, "itl": pytest.approx(9e-4)}
    assert parse_slo("") == {}
    assert parse_slo(shown({"ttft": 0.5, "e2e": 12.0})) == {"ttft": 0.5, "e2e": 12.0}


@pytest.mark.parametrize(
    "text",
    ["ttft", "ttft:500", "ttft:ms", "speed:5ms", "ttft:-5ms", "ttft:0ms", "ttft:1s,ttft:2s", "a b"],
)
def test_what_is_no_objective_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_slo(text)
    bad = text.split(",")[-1]
    assert caught.value.message.startswith(f"--slo: {bad} is no objective such as ttft:500ms;")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workload": "none"}, "There is no workload none"),
        ({"rates_hz": (1.0,)}, "--rate is needed with --arrivals constant, poisson, gamma and"),
        ({"arrivals": Arrivals(POISSON)}, "--rate is needed with"),
        ({"arrivals": Arrivals(POISSON), "rates_hz": (0.0,)}, "--rate must be more than 0."),
        ({"arrivals": Arrivals(SCHEDULE)}, "--arrivals schedule needs the workload trace."),
        ({"search": True}, "--search needs --slo and one --rate to begin with."),
        ({"sessions": 0}, "--sessions must be from 1 to"),
        ({"duration_s": -1.0}, "--duration-s must be more than 0."),
        ({"timeout_s": float("nan")}, "--timeout-s must be more than 0."),
        ({"warmup": -1}, "--warmup must be from 0 to"),
        ({"attainment": 1.5}, "--attainment must be more than 0 and at most 1."),
        ({"shape": Shape(turns=0)}, "--turns must be from 1 to"),
        ({"shape": Shape(documents_per_question=0)}, "--documents-per-question must be from 1"),
        ({"shape": Shape(spread=1.0)}, "--spread must be at least 0 and less than 1."),
        ({"shape": Shape(skew=-1.0)}, "--skew must be from 0 to 10."),
        ({"shape": Shape(think_s=-1.0)}, "--think-s must be at least 0."),
    ],
)
def test_plans_are_checked(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        plan_of(**changes)
