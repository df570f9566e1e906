"""The grid: which cases it makes, who counts as first, and the command that prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated_world import small_setup
from typer.testing import CliRunner

from banyan.cli.app import app
from seams.errors import InvalidRequest
from simulate.experiment import Summary
from simulate.grid import CAPACITIES, FIGURES, WRONG, Fleet, cases, corners, is_first, rows

FLEETS = {capacity: Fleet(small_setup(), 10.0, 0.5) for capacity in CAPACITIES}
CORNERS = len(corners())
TOLD = [corner for corner in corners() if corner.routers == 1]  # where ours is told wrong times too


def summary(policy: str, label: str, ttft: float, share: float = 0.49) -> Summary:
    figures = dict.fromkeys(FIGURES, (1.0, ""))
    figures |= {"ttft_mean": (ttft, "s"), "cached_share": (share, "of prompt tokens")}
    return Summary(policy, label, figures, 5)


def test_every_corner_has_every_policy_and_ours_told_wrong_times() -> None:
    made = cases(FLEETS, ["cost", "preble"], seeds=3)
    assert len(made) == (2 * CORNERS + len(WRONG) * len(TOLD)) * 3 == len(set(made))
    assert {case.rate for case in made} == {5.0, 8.0, 9.5}
    assert {case.setup.routers for case in made} == {1, 4}
    assert all((case.wrong is not None) == ("+" in case.policy) for case in made)


def test_within_a_hundredth_of_the_best_is_first() -> None:
    others = [summary("a", "", 1.0), summary("b", "", 2.0)]
    assert is_first("ttft_mean", summary("cost", "", 1.009), others)
    assert not is_first("ttft_mean", summary("cost", "", 1.02), others)


def test_corners_won_are_counted_and_the_worst_is_told() -> None:
    summaries = []
    for number, corner in enumerate(corners()):
        lost = number == 4
        share = 0.3 if number == 7 else 0.49
        summaries += [
            summary("cost", corner.label, 3.0 if lost else 1.0, share),
            summary("preble", corner.label, 2.0),
            summary("cost+slow", corner.label, 1.5),
            summary("cost+fast", corner.label, 2.5),
        ]
    found = {row.name: row for row in rows(FLEETS, summaries)}
    assert found["first_ttft_mean"].value == CORNERS - 1
    assert found["first_ttft_mean"].against_value == CORNERS
    assert found["first_ttft_p99"].value == CORNERS, "equals are first"
    assert found["first_told_slow_ttft_mean"].value == len(TOLD)
    assert found["first_told_fast_ttft_mean"].value == 0
    assert found["share_of_ideal_min"].value == pytest.approx(0.6)
    lost_row = found[f"ttft_mean_{corners()[4].label}"]
    assert (lost_row.against, lost_row.against_value, lost_row.value) == ("preble", 2.0, 3.0)
    assert set(lost_row.others) == {"preble"}, "ours told wrong is none of the others"


def test_the_command_prints_the_grid(tmp_path: Path) -> None:
    written = tmp_path / "grid.json"
    answer = CliRunner().invoke(
        app,
        ["simulate", "--grid", "--requests", "24", "--replicas", "2", "--policies", "least_loaded",
         "--json", str(written)],
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    found = {row["name"]: row for row in json.loads(written.read_text())["rows"]}
    assert found["simulated"]["samples"] == 2 * CORNERS + len(WRONG) * len(TOLD)
    for corner in corners():
        row = found[f"ttft_mean_{corner.label}"]
        assert row["against"] == "least_loaded" and row["value"] > 0
    assert 0 <= found["first_ttft_mean"]["value"] <= CORNERS
    assert 0 < found["ideal_share_c10"]["value"] <= found["ideal_share_c20"]["value"] < 1


def test_the_grid_takes_no_load_of_its_own() -> None:
    answer = CliRunner().invoke(app, ["simulate", "--grid", "--load", "0.5", "--requests", "20"])
    assert isinstance(answer.exception, InvalidRequest)
    assert "itself" in answer.exception.message
