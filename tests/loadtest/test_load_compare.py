"""Two runs beside each other: ratios, and intervals that hold what they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from load_rig import QueueTarget, header_of, plan_of

from loadtest.compare import compare, differing
from loadtest.figures import all_figures, rows
from loadtest.records import Record, Run, Stage
from seams.errors import InvalidRequest

PLAN = plan_of(slo={"ttft": 0.15})


def run_of(seed: int, scale: float = 1.0, sessions: int = 60, load: str = "8 at once") -> Run:
    """Sessions of three requests whose TTFT is exponential around 0.1 s times `scale`; what one
    session gets is alike, as it is where sessions differ in length."""
    rng = np.random.default_rng(seed)
    run = Run(header_of(PLAN, QueueTarget()), [Stage(0, load)])
    for number in range(sessions):
        own = float(rng.exponential(0.1)) * scale
        for turn in range(3):
            ttft_s = own * float(rng.uniform(0.9, 1.1))
            run.records.append(
                Record(
                    0, f"s{number}", turn, "", False, number * 1.0, number * 1.0,
                    number + ttft_s + 0.2, (ttft_s, ttft_s + 0.1, ttft_s + 0.2), 100, 50, 3,
                )
            )  # fmt: skip
    return run


def ratios(a: Run, b: Run, **options: Any) -> dict[str, Any]:
    return {ratio.name: ratio for ratio in compare(a, b, **({"resamples": 300} | options))}


def test_a_run_beside_itself() -> None:
    run = run_of(1)
    shown = {row.name: row.value for row in rows(all_figures(run))}
    for ratio in ratios(run, run).values():
        assert ratio.ratio == 1.0 and not ratio.differs
        assert ratio.low is None or ratio.low <= 1.0 <= ratio.high
        if ratio.name != "answered":
            assert ratio.a == pytest.approx(shown[ratio.name]), ratio.name


def test_twice_as_slow_is_seen() -> None:
    found = ratios(run_of(2, sessions=200), run_of(3, 2.0, sessions=200))
    ttft = found["ttft_p50"]
    print(ttft)
    assert ttft.differs and ttft.low < 2.0 < ttft.high and ttft.low > 1.2
    assert found["itl_p50"].ratio == pytest.approx(1.0) and not found["itl_p50"].differs
    assert found["attainment"].ratio < 1 and found["attainment"].differs
    assert found["cached_share"].ratio == 1.0
    assert found["output_rate"].low is None  # no interval: a run has but one
    assert (
        ttft.row().ratio == pytest.approx(ttft.ratio) and ttft.row().others["ratio_low"] == ttft.low
    )


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 40 pairs of runs that differ by chance alone, about 2 should seem to differ. Drawing
    requests in place of sessions would make it far more: a session's requests are alike."""
    wrong = sum(
        ratios(run_of(2 * n, sessions=40), run_of(2 * n + 1, sessions=40))["ttft_p50"].differs
        for n in range(40)
    )
    print(f"{wrong} of 40 seem to differ")
    assert wrong <= 6


def test_the_same_seed_gives_the_same_intervals() -> None:
    a, b = run_of(4), run_of(5)
    assert ratios(a, b, seed=7) == ratios(a, b, seed=7)
    assert ratios(a, b, seed=7) != ratios(a, b, seed=8)


def test_stages_meet_by_their_load() -> None:
    def swept(seed: int, loads: list[str]) -> Run:
        run = run_of(seed, load=loads[0])
        for number, load in enumerate(loads[1:], 1):
            run.stages.append(Stage(number, load))
            run.records += [replace(r, stage=number) for r in run_of(seed + number).records]
        return run

    found = ratios(swept(1, ["1/s", "2/s", "4/s"]), swept(5, ["2/s", "4/s"]))
    assert {name.partition("@")[2] for name in found} == {"2/s", "4/s"}
    with pytest.raises(InvalidRequest, match=r"The runs have no load in common\."):
        compare(swept(1, ["1/s", "2/s"]), swept(1, ["3/s", "5/s"]))
    assert ratios(run_of(1, load="1/s"), run_of(1, load="2/s"))  # one of each: they are meant


def test_one_session_is_too_few_for_an_interval() -> None:
    found = ratios(run_of(1, sessions=1), run_of(2, sessions=1))["ttft_p50"]
    assert found.low is None and not found.differs and found.row().others == {}


def test_different_objectives_are_refused() -> None:
    other = run_of(1)
    other.header = other.header | {"slo": {}}
    with pytest.raises(InvalidRequest, match="different objectives"):
        compare(run_of(1), other)


def test_settings_that_differ_are_named() -> None:
    a, b = run_of(1), run_of(2)
    assert differing(a, b) == {}
    b.header = b.header | {"plan": b.header["plan"] | {"seed": 9}, "target": {"protocol": "HTTP"}}
    assert differing(a, b) == {
        "protocol": ("none", "HTTP"), "model": ("queue", None), "seed": (1, 9),
    }  # fmt: skip
