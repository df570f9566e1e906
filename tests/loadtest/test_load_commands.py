"""`banyan bench run | compare | report`: whole commands against a peer, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_peer import Peer, peer
from typer.testing import CliRunner, Result

from banyan.cli.app import app
from banyan.cli.load import _command
from loadtest.records import read_run
from seams.errors import BanyanError


@pytest.fixture
def there() -> Iterator[Peer]:
    """A peer on a thread of its own: commands run their own loop."""
    ready, stop = threading.Event(), threading.Event()
    found: list[Peer] = []

    async def serve() -> None:
        async with peer() as one:
            found.append(one)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    stop.set()
    thread.join()


def banyan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def run(there: Peer, out: Path, *more: str) -> Result:
    small = ("--prefix-tokens", "20", "--input-tokens", "8", "--output-tokens", "4")
    done = banyan("run", *more, "--target", there.url, *small, "--out", str(out))
    assert done.exit_code == (there.status != 200), done.output + str(done.exception)
    return done


def test_run_report_and_compare(there: Peer, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    done = run(there, a, "prefix-groups", "--sessions", "6", "--json", str(tmp_path / "a.json"))
    assert "prefix-groups on peer-model over HTTP" in done.output
    names = {"requests.jsonl", "report.json", "requests.csv", "report.html", "report.svg"}
    assert {path.name for path in a.iterdir()} == names
    written = json.loads((tmp_path / "a.json").read_text())
    assert written == json.loads((a / "report.json").read_text())
    assert len(read_run(a / "requests.jsonl").records) == 8  # two of warm-up
    run(there, b, "chat", "--rate", "100", "--sessions", "4", "--warmup", "0", "--turns", "2")
    assert len(read_run(b / "requests.jsonl").records) == 8
    page = (a / "report.html").read_text()
    (a / "report.html").unlink()
    assert banyan("report", str(a)).exit_code == 0
    assert (a / "report.html").read_text() == page
    done = banyan("compare", str(a), str(b / "requests.jsonl"), "--json", str(tmp_path / "c.json"))
    assert done.exit_code == 0, done.output
    assert "B / A" in done.output and "workload: A prefix-groups, B chat" in done.output
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert {"ttft_p50", "output_rate", "cached_share"} <= {row["name"] for row in rows}


def test_every_workload_runs_against_an_endpoint(there: Peer, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:4{second}.0,20,3\n" for second in range(4)
    ))  # fmt: skip
    for workload in ("random", "agent", "rag"):
        run(there, tmp_path / workload, workload, "--sessions", "2", "--document-tokens", "9")
        assert all(r.ok for r in read_run(tmp_path / workload / "requests.jsonl").records)
    trace = ("--trace", str(tmp_path / "t.csv"), "--speed", "100", "--warmup", "0")
    run(there, tmp_path / "trace", "trace", *trace)
    found = read_run(tmp_path / "trace" / "requests.jsonl").records
    assert [record.prompt_tokens for record in found] == [20] * 4
    assert [record.output_tokens for record in found] == [3] * 4


def test_failures_are_shown_and_counted(there: Peer, tmp_path: Path) -> None:
    there.status = 429
    done = run(there, tmp_path / "a", "random", "--sessions", "3", "--warmup", "0")
    assert "3 x RESOURCE_EXHAUSTED: HTTP 429: refused with 429" in done.output
    assert str(done.exception) == "No request was answered."
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["stages"][0]["statuses"] == {"RESOURCE_EXHAUSTED": 3}


def test_a_run_is_never_written_over(there: Peer, tmp_path: Path) -> None:
    run(there, tmp_path / "a", "random", "--sessions", "1")
    done = banyan("run", "random", "--target", there.url, "--out", str(tmp_path / "a"))
    assert isinstance(done.exception, BanyanError)
    assert done.exception.message.endswith("holds a run already; name another --out.")


def test_no_key_is_written_anywhere(there: Peer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "bench", "run", "--api-key", "sesame", "--seed", "1"])
    run(there, tmp_path / "a", "random", "--sessions", "1", "--api-key", "sesame")
    assert any(headers.get("authorization") == "Bearer sesame" for _, _, headers in there.asked)
    for path in (tmp_path / "a").iterdir():
        assert "sesame" not in path.read_text()
    assert _command(["x", "bench", "--api-key=sesame", "run"]) == "banyan bench --api-key=... run"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "nonsense"], "There is no workload nonsense; there are random"),
        (["run", "--rate", "fast"], "--rate must be a number, or several with commas."),
        (["run", "--rate", "-1"], "--rate must be more than 0."),
        (["run", "--slo", "ttft=5"], "--slo: ttft=5 is no objective such as ttft:500ms;"),
        (["run", "--arrivals", "rarely"], "--arrivals must be one of closed"),
        (["run", "trace"], "The workload trace needs --trace FILE"),
        (["run", "trace", "--trace", "/no/such"], "The trace /no/such cannot be read."),
        (["run", "--target", "nonsense"], "The target must be a URL such as"),
        (["run", "--target", "http", "--address", "127.0.0.1:1"], "The endpoint cannot be"),
        (["run", "--address", "127.0.0.1:1"], "The router cannot be reached."),
        (["run", "--target", "http://127.0.0.1:1/v1", "--no-cache"], "--no-cache needs --target"),
        (["run", "--form", "verse"], "--form must be chat, text or ids."),
        (["run"], "No cluster default is running: start one with `banyan up`."),
        (["run", "--target", "http"], "No cluster default is running"),
        (["--name", "other", "run"], "Give the options of bench run after the word run."),
        (["--users", "3", "run"], "Give the options of bench run after the word run."),
        (["compare", "/no/a", "/no/b"], "/no/a cannot be read."),
        (["report", "/no/such"], "/no/such cannot be read."),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path))
    done = banyan(*arguments)
    assert isinstance(done.exception, BanyanError), done.output
    message = done.exception.message
    assert message.startswith(sentence) and "\n" not in message
