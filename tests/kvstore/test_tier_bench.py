"""`python -m kvstore.bench` measures what it says: every row is there, nothing stays behind."""

import json
import sys
from pathlib import Path

import pytest

from kvstore import bench
from kvstore.benches import host, lookup, nvme
from kvstore.benches.measure import Pair, Race

TIERS, SIZES = ("host", "nvme", "redis"), ("256k", "1m", "2m")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same benches on blocks of 16 to 64 KiB."""
    monkeypatch.setattr(bench, "SIZES", {label: 16384 << i for i, label in enumerate(SIZES)})
    for module in (host, nvme):
        monkeypatch.setattr(module, "TOTAL_BYTES", 2 << 20)
    monkeypatch.setattr(lookup, "CALLS", 2)


@pytest.mark.usefixtures("small")
def test_every_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, written = tmp_path / "disk", tmp_path / "out.json"
    folder.mkdir()
    options = ["--rounds", "1", "--dir", str(folder), "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    bench.main()
    rows = {row["name"]: row for row in json.loads(written.read_text())["rows"]}
    for tier in TIERS:
        for size in SIZES:
            for what in ("store", "load"):
                row = rows[f"{tier}_{what}_{size}"]
                assert row["unit"] == "GB/s" and row["ratio"] > 0 and row["samples"] > 0
        assert rows[f"{tier}_overhead_us_256k"]["unit"] == "us"
    assert rows["lookup_128_redis_round_trips"]["value"] == 1
    assert {"lookup_128_host_us", "lookup_128_nvme_us", "lookup_128_redis_us"} <= set(rows)
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("small")
def test_only_picks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1", "--only", "host_1m,keys"])
    bench.main()
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert set(names) == {
        "keys_chain_2000", "host_store_1m", "host_load_1m", "host_load_single_1m",
        "host_overhead_us_1m",
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "tape"])
    with pytest.raises(SystemExit):
        bench.main()


def test_a_race_takes_turns_and_its_first_pass_does_not_count() -> None:
    calls: list[str] = []

    def passes(turn: int):
        for _ in range(2):
            yield Pair(lambda: calls.append(f"ours {turn}"), lambda: calls.append(f"raw {turn}"))

    race = Race("x", "y", 1000)
    race.run(passes, 2)
    assert calls[-4:] == ["ours 2", "raw 2", "raw 2", "ours 2"]
    assert len(calls) == 12 and race.row().samples == 4
