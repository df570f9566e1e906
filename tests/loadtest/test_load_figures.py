"""Every figure of a report can be computed again from its JSON lines, here by other code too."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load_rig import QueueTarget, header_of, measured, plan_of, virtually

from loadtest import figures
from loadtest.arrivals import GAMMA, Arrivals
from loadtest.page import page
from loadtest.plots import Plot, Series, svg
from loadtest.records import Log, Record, Run, Stage, read_run
from loadtest.report import RECORDS, as_csv, as_json, write
from loadtest.workloads.base import Shape
from seams.errors import InvalidRequest

PLAN = plan_of(
    "agent", arrivals=Arrivals(GAMMA, cv=2.0), rates_hz=(4.0,), sessions=30, warmup=2, seed=11,
    slo={"ttft": 0.1, "e2e": 0.5},
    shape=Shape(turns=2, branches=3, groups=2, prefix_tokens=30, input_tokens=9, spread=0.5),
)  # fmt: skip


@pytest.fixture(scope="module")
def measured_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run with failures, and the folder of its report."""
    folder = tmp_path_factory.mktemp("report")
    target = QueueTarget(token_s=0.004, servers=3, fail_when="answer40.0")
    with Log(header_of(PLAN, target), folder / RECORDS) as log:
        run = virtually(measured(PLAN, target, log))
    write(run, folder)
    print("seed 11")
    return run, folder


def lines_of(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    return [line for line in found if line["kind"] == "request" and not line["warmup"]]


def test_a_file_gives_the_same_report_as_the_run(measured_run: tuple[Run, Path]) -> None:
    run, folder = measured_run
    again = read_run(folder / RECORDS)
    assert again.records == run.records and again.stages == run.stages
    times_s = [at_s for r in run.records for at_s in (*r.chunks_s, r.intended_s, r.end_s)]
    assert all(at_s == round(at_s, 6) for at_s in times_s)  # microseconds: the file stays small
    written = json.loads((folder / "report.json").read_text())
    assert written == json.loads(json.dumps(as_json(again)))
    assert (folder / "report.html").read_text() == page(again)
    assert (folder / "requests.csv").read_text() == as_csv(again)


def test_figures_computed_by_other_code(measured_run: tuple[Run, Path]) -> None:
    _, folder = measured_run
    report = json.loads((folder / "report.json").read_text())
    rows = {row["name"]: row["value"] for row in report["rows"]}
    every = lines_of(folder)
    good = [line for line in every if line["status"] == "OK"]
    assert len(every) == 30 * 9 and 1 <= rows["failed"] < rows["skipped"] < len(good)
    late_s = [line["sent_s"] - line["intended_s"] for line in good]
    first_s = np.array([line["chunks_s"][0] for line in good])
    whole_s = np.array([line["end_s"] - line["sent_s"] for line in good])
    gaps_s = [b - a for line in good for a, b in pairwise(line["chunks_s"])]
    many = [line for line in good if line["output_tokens"] > 1]
    tpot_s = [
        (line["chunks_s"][-1] - line["chunks_s"][0]) / (line["output_tokens"] - 1) for line in many
    ]
    samples = {
        "ttft": first_s, "itl": gaps_s, "tpot": tpot_s, "e2e": whole_s,
        "ttft_from_intended": first_s + late_s, "e2e_from_intended": whole_s + late_s,
    }  # fmt: skip
    for name, values in samples.items():
        for share in (50, 90, 95, 99):
            wanted = 1e3 * float(np.percentile(values, share))
            assert rows[f"{name}_p{share}"] == pytest.approx(wanted, rel=1e-9), name
    sent = [line for line in every if line["sent_s"] is not None]
    wall_s = max(line["end_s"] for line in sent) - min(line["intended_s"] for line in every)
    prompt = sum(line["prompt_tokens"] for line in good)
    output = sum(line["output_tokens"] for line in good)
    assert rows["wall"] == pytest.approx(wall_s)
    assert rows["request_rate"] == pytest.approx(len(good) / wall_s)
    assert rows["output_rate"] == pytest.approx(output / wall_s)
    assert rows["total_rate"] == pytest.approx((prompt + output) / wall_s)
    cached = sum(line["cached_tokens"] for line in good)
    assert rows["cached_share"] == pytest.approx(cached / prompt) and cached > 0
    met = sum((first_s + late_s <= 0.1) & (whole_s + late_s <= 0.5))
    assert 0 < met < len(good)
    assert rows["attainment"] == pytest.approx(met / len(every))
    assert rows["goodput"] == pytest.approx(met / wall_s)
    (stage,) = report["stages"]
    assert stage["latencies"]["delay"]["samples"] == len(every) - rows["skipped"]
    assert sum(replica["requests"] for replica in stage["replicas"]) == len(good)
    assert sum(replica["cached_tokens"] for replica in stage["replicas"]) == cached


def test_the_table_has_a_line_per_request(measured_run: tuple[Run, Path]) -> None:
    run, _ = measured_run
    lines = list(csv.DictReader(io.StringIO(as_csv(run))))
    assert len(lines) == len(run.records)
    for line, record in zip(lines, run.records, strict=True):
        assert line["session"] == record.session and line["status"] == record.status
        assert (line["warmup"] == "True") == record.warmup
        if record.ok:
            assert float(line["ttft_ms"]) == pytest.approx(1e3 * record.chunks_s[0], abs=1e-3)
        assert (line["meets_slo"] == "True") == figures.meets(record, run.slo)


def test_the_page_holds_all_that_it_shows(measured_run: tuple[Run, Path]) -> None:
    _, folder = measured_run
    text = (folder / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|url\(|src=|href=", text)
    drawn = re.findall(r"<svg.*?</svg>", text)
    assert len(drawn) == 6
    for one in drawn:
        ET.fromstring(one)
    for title in ("TTFT", "ITL", "E2E", "Throughput and latency", "Cached share", "Load per rep"):
        assert title in text
    assert "not known for this run" not in text
    assert "The queue is full." in text
    ET.fromstring((folder / "report.svg").read_text())


def test_words_of_a_server_are_escaped() -> None:
    run = Run(header_of(PLAN, QueueTarget()) | {"version": 1}, [Stage(0, "<b>1/s</b>", 1.0)])
    run.records.append(
        Record(0, "s", 0, "", False, 0.0, 0.0, 1.0, status="INTERNAL", error="<script>alert()")
    )
    text = page(run)
    assert "<script>" not in text and "<b>" not in text and "&lt;script&gt;alert()" in text
    assert text.count("not known for this run") == 5  # all but the load


# ---- parts -------------------------------------------------------------------------------------


def record(session: str = "s", **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "stage": 0, "session": session, "turn": 0, "group": "", "warmup": False,
        "intended_s": 0.0, "sent_s": 0.5, "end_s": 2.0, "chunks_s": (0.5, 0.75, 1.25),
        "prompt_tokens": 100, "cached_tokens": 40, "output_tokens": 3, "replica": "r0",
    }  # fmt: skip
    return Record(**(fields | changes))


def test_an_objective_counts_from_the_intended_time() -> None:
    one = record()  # sent half a second late: its first token came after 1.0 s, its end after 2.0
    for slo, held in (
        ({"ttft": 1.0}, True), ({"ttft": 0.99}, False), ({"e2e": 2.0}, True),
        ({"e2e": 1.9}, False), ({"itl": 0.5}, True), ({"itl": 0.4}, False),
        ({"tpot": 0.375}, True), ({"tpot": 0.37}, False), ({"ttft": 5.0, "e2e": 1.0}, False),
    ):  # fmt: skip
        assert figures.meets(one, slo) is held, slo
    assert not figures.meets(record(status="INTERNAL"), {"e2e": 1e9})
    alone = record(chunks_s=(0.5,), output_tokens=1)
    assert figures.meets(alone, {"tpot": 1e-9, "itl": 1e-9})
    assert not figures.meets(record(chunks_s=(), output_tokens=0), {"ttft": 1.9})


def test_an_answer_in_one_piece_is_held_to_its_whole_time() -> None:
    whole = record(chunks_s=(1.5,), output_tokens=3)  # e2e 2.0 from the intended time
    assert figures.meets(whole, {"tpot": 1.0}) and not figures.meets(whole, {"tpot": 0.99})
    assert figures.meets(whole, {"itl": 2.0}) and not figures.meets(whole, {"itl": 1.9})


def test_what_was_never_sent_takes_no_time() -> None:
    never = record(intended_s=300.0, sent_s=None, end_s=300.0, chunks_s=(), status="SKIPPED")
    assert figures.wall_s([record(), never]) == 2.0
    assert figures.wall_s([never]) == 0.0


@pytest.mark.parametrize("count", [1, 2, 3, 100, 1001])
def test_quantiles_are_numpys(count: int) -> None:
    values = sorted(np.random.default_rng(count).exponential(size=count).tolist())
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert figures.quantile(values, share) == pytest.approx(np.quantile(values, share))


def test_a_distribution_keeps_its_tail() -> None:
    values = list(range(100_000))
    line = figures.distribution(values)
    assert len(line) < 500 and line[-1] == (99_999, 1.0) and line[-2] == (99_998, 0.99999)
    assert line[0] == (0, 1e-5)
    assert figures.distribution([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]


def test_load_per_replica_adds_up_to_the_time_in_flight() -> None:
    records = [
        record(replica="r0", intended_s=0.0, sent_s=0.0, end_s=3.0),
        record(replica="r1", intended_s=1.0, sent_s=1.0, end_s=2.0),
        record(replica="r1", intended_s=1.0, sent_s=1.5, end_s=4.0),
    ]
    lines = figures.in_flight_over_time(records)
    bin_s = 4.0 / figures.BINS
    for name, busy_s in (("r0", 3.0), ("r1", 3.5)):
        assert sum(y for _, y in lines[name]) * bin_s == pytest.approx(busy_s)
    assert max(y for _, y in lines["r1"]) == pytest.approx(2.0)


def test_cached_share_over_time_is_of_what_was_sent_then() -> None:
    records = [
        record(intended_s=0.0, sent_s=0.0, end_s=10.0, cached_tokens=0),
        record(intended_s=5.0, sent_s=5.0, end_s=10.0, cached_tokens=50),
        record(intended_s=5.0, sent_s=5.1, end_s=10.0, cached_tokens=100),
        record(intended_s=9.0, sent_s=9.0, end_s=10.0, cached_tokens=None),
    ]
    points = figures.cached_over_time(records)
    assert [share for _, share in points] == [0.0, 0.75]
    assert points[1][0] == pytest.approx(5.125)
    assert figures.cached_share(records) == pytest.approx(0.5)


def test_an_endpoint_that_says_less_has_fewer_figures() -> None:
    run = Run(header_of(PLAN, QueueTarget()) | {"slo": {}}, [Stage(0, "x")])
    run.records.append(record(cached_tokens=None, replica=""))
    (found,) = figures.all_figures(run)
    assert found.cached_share is found.cached_tokens is found.goodput_hz is None
    assert found.replicas == ()
    names = {row.name for row in figures.rows([found])}
    assert "cached_share" not in names and "goodput" not in names and "ttft_p50" in names


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(0.0, 0.0)], [(5.0, 1.0), (5.0, 3.0)],
                                    [(0.0, 1.0), (1e-9, 2.0), (1e9, 3.0)]])  # fmt: skip
@pytest.mark.parametrize("log_x", [False, True])
def test_any_points_can_be_drawn(points: list[tuple[float, float]], log_x: bool) -> None:
    text = svg(Plot("a & b", "<x>", "y", [Series("one", points), Series("", [])], log_x=log_x))
    drawn = ET.fromstring(text)
    numbers = [float(v) for e in drawn.iter() for k, v in e.attrib.items() if k in ("cx", "cy")]
    assert all(-1 <= number <= 461 for number in numbers)
    assert "nan" not in text and "inf" not in text


# ---- the file ----------------------------------------------------------------------------------


def test_what_was_measured_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / RECORDS
    with Log(header_of(PLAN, QueueTarget()), path) as log:
        log.stage(Stage(0, "1/s", 1.0))
        log.add(record())
        found = read_run(path)  # before it is closed
        assert found.records == [record()] and found.stages == [Stage(0, "1/s", 1.0)]


@pytest.mark.parametrize(
    ("line", "number"),
    [("{", 3), ("[]", 3), ('{"kind": "other"}', 3), ('{"kind": "request"}', 3), ("", 3)],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, number: int) -> None:
    path = tmp_path / RECORDS
    with Log(header_of(PLAN, QueueTarget()), path) as log:
        log.stage(Stage(0, "1/s", 1.0))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InvalidRequest) as caught:
        read_run(path)
    assert caught.value.message == f"Line {number} of {path} is no record of a load test."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read."),
        ("", "is empty."),
        ('{"kind": "stage", "number": 0, "load": "x", "rate_hz": null}\n', "Line 1 of"),
        ('{"kind": "run", "version": 99, "slo": {}}\n', "Line 1 of"),
        ('{"kind": "run", "version": 1, "slo": 5, "plan": {}}\n', "Line 1 of"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / RECORDS
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=sentence):
        read_run(path)
