"""The command, the trace, fitting, rows and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated_world import GRAIN, small_chats
from typer.testing import CliRunner

from banyan.cli.app import app
from seams.errors import InvalidRequest
from simulate.cluster import Setup, simulate
from simulate.engine import Shape
from simulate.experiment import Summary
from simulate.fit import constants, fit, read_run
from simulate.policies.registry import policy_of
from simulate.rows import rows_of
from simulate.steptime import StepTime
from simulate.workload import Grain, Workload, chats, request_of

RUNNER = CliRunner()


def test_the_command_prints_rows_and_writes_them(tmp_path: Path) -> None:
    written, page = tmp_path / "rows.json", tmp_path / "page.html"
    answer = RUNNER.invoke(
        app,
        ["simulate", "--requests", "120", "--replicas", "3", "--policies", "cost,least_loaded",
         "--load", "0.8", "--seeds", "2", "--what-if", "--json", str(written),
         "--plot", str(page)],
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    rows = {row["name"]: row for row in json.loads(written.read_text())["rows"]}
    for name in ("ttft_mean", "ttft_p99", "goodput", "cached_share", "imbalance"):
        assert rows[f"cost_{name}"]["samples"] == 2
        assert rows[f"cost_{name}"]["against"] == "least_loaded"
        assert f"least_loaded_{name}" in rows
    assert 0 < rows["ideal_share"]["value"] < 1 and rows["saturation"]["value"] > 0
    assert rows["cost_more_replica_ttft_mean"]["against"] == "cost"
    assert page.read_text().count("<svg") == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policies", "fastest"], "no policy fastest"),
        (["--trace", "nowhere.jsonl"], "cannot be read"),
        (["--kill", "soon"], "SECONDS:REPLICA"),
        (["--kill", "120:9"], "none of 8 replicas"),
        (["--kill", "nan:0"], "no moment"),
        (["--replicas", "0"], "above zero"),
        (["--load", "-1"], "above zero"),
        (["--jobs", "0"], "above zero"),
        (["--rate", "-1"], "below zero"),
        (["--fit", "nowhere.json"], "no recorded run"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(options: list[str], said: str) -> None:
    answer = RUNNER.invoke(app, ["simulate", "--requests", "20", *options])
    assert isinstance(answer.exception, InvalidRequest)
    assert said in answer.exception.message


def test_a_block_is_whole_cells() -> None:
    with pytest.raises(InvalidRequest, match="whole number"):
        Grain(512, 100)


def recorded(times: StepTime, overhead_s: float, beside: float = 0.0) -> dict[str, object]:
    """A run as a cluster with these times would record it."""
    grain = Grain(16, 1)
    load = chats(
        30, 3, 3, 2, grain=grain, rate=1.0, system_tokens=300, turn_tokens=40, output_tokens=20
    )
    alone = [
        request_of(grain, i, 20.0 * i, range(20_000 + 2000 * i, 20_000 + 2000 * i + n), n, 20)
        for i, n in enumerate((40, 90, 160, 250, 400, 600, 900, 1300, 1800, 120))
    ]
    later = [
        request_of(grain, 10 + i, 300.0 + r.at_s, r.cells, r.prompt_tokens, r.output_tokens)
        for i, r in enumerate(load.requests)
    ]
    workload = Workload(grain, (*alone, *later), 80)
    shape = Shape(3000, grain, times, step_tokens_max=512)
    setup = Setup(shape, 2, hop_s=overhead_s / 2, beside=beside)
    outcome = simulate(setup, workload, policy_of("cost"), 1)
    requests = [
        {
            "at_s": r.arrived_s, "token_ids": r.request.cells, "replica": r.replica,
            "output_tokens": r.request.output_tokens, "cached_tokens": r.cached_tokens,
            "ttft_s": r.ttft_s, "total_s": r.e2e_s, "alone": r.request.number < 10,
        }
        for r in outcome.records
    ]  # fmt: skip
    return {"replicas": 2, "blocks": 3000, "block_tokens": 16, "requests": requests}


@pytest.mark.parametrize("beside", [0.0, 0.8])
def test_constants_are_found_again_and_the_simulation_meets_its_run(
    tmp_path: Path, beside: float
) -> None:
    times, path = StepTime(0.012, 0.002, 2e-6, 9e-4, 2e-8), tmp_path / "run.json"
    path.write_text(json.dumps(recorded(times, 0.004, beside)))
    found, _, slower = constants(read_run(path))
    assert slower == pytest.approx(beside, abs=0.2)
    assert found.prompt_s == pytest.approx(times.prompt_s, rel=0.1)
    assert found.decode_s(4, 2000) == pytest.approx(times.decode_s(4, 2000), rel=0.15)
    for name, (simulated, real, _) in fit(read_run(path)).figures.items():
        assert simulated == pytest.approx(real, rel=0.15), name


def test_a_run_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    written = recorded(StepTime(), 0.001)
    few = {**written, "requests": written["requests"][:3]}  # type: ignore[index]
    for broken in ({}, few, {**written, "blocks": "x"}):
        path.write_text(json.dumps(broken))
        with pytest.raises(InvalidRequest):
            read_run(path)


def test_ours_stands_against_the_best_of_the_others() -> None:
    def of(policy: str, ttft: float, goodput: float) -> Summary:
        same = ("ttft_p99", "cached_share", "imbalance", "imbalance_window")
        figures = dict.fromkeys(same, (1.0, ""))
        figures |= {"ttft_mean": (ttft, "s"), "goodput": (goodput, "requests/s")}
        return Summary(policy, "80", figures, 1)

    summaries = [of("cost", 1.005, 9.0), of("a", 1.0, 10.0), of("b", 2.0, 8.0)]
    rows = {row.name: row for row in rows_of(summaries)}
    for name, best in (("goodput", 10.0), ("ttft_mean", 1.0)):
        ours = rows[f"cost_{name}"]
        assert (ours.against, ours.against_value) == ("a", best)
        assert rows[f"a_{name}"].against == ""


def test_made_up_chats_are_the_same_for_a_seed() -> None:
    assert small_chats(3) == small_chats(3) != small_chats(4)
    assert all(len(r.keys) == r.prompt_tokens // GRAIN.block_tokens for r in small_chats().requests)
    assert Shape(10, GRAIN).config().step_tokens_max == 2048 // 16
