"""The bench format: what every benchmark of the project writes."""

import json
from pathlib import Path

import pytest

from seams.bench import Report, Row, alternate, median


def test_json_has_the_documented_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("bench x")
    report.add(Row("decode_b1", 10.0, "ms", 5, "floor", 8.0, {"peer": 20.0}))
    report.add(Row("alone", 1.0, "s", 1))
    report.show(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written) == {"machine", "command", "rows"}
    assert written["rows"][0] == {
        "name": "decode_b1", "value": 10.0, "unit": "ms", "samples": 5, "against": "floor",
        "against_value": 8.0, "ratio": 1.25, "others": {"peer": 20.0},
    }  # fmt: skip
    assert written["rows"][1]["ratio"] is None
    assert "1.250" in capsys.readouterr().out


def test_the_table_has_a_column_for_every_peer_and_for_others_load() -> None:
    report = Report("x")
    report.add(Row("decode_b1", 10, "ms", 5, "one", 8.0, {"one": 8.0, "two": 21.5}, 0.25))
    report.add(Row("alone", 1, "s", 1))
    head, decode, alone = (line.split() for line in report.table().splitlines())
    assert head[-2:] == ["two", "foreign"] and decode[-2:] == ["21.5", "25%"]
    assert alone == ["alone", "1", "s", "1"]
    assert report.as_json()["rows"][0]["foreign"] == 0.25


def test_names_are_unique() -> None:
    report = Report("x")
    report.add(Row("a", 1, "s", 1))
    with pytest.raises(AssertionError, match="duplicate"):
        report.add(Row("a", 2, "s", 1))


def test_measures_alternate_and_warm_up_is_dropped() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    samples = alternate({"a": lambda: measure("a"), "b": lambda: measure("b")}, rounds=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert samples == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert median(samples["a"]) == 4.0
