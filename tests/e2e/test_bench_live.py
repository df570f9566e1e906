"""`banyan bench run` on a real cluster: gRPC and HTTP, and what the report says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.records import Record, read_run

pytestmark = pytest.mark.timeout(280)
PREFIX, QUESTION, ANSWER = 80, 12, 6


def measured(cluster, out: Path, target: str, workload: str) -> list[Record]:
    """The requests of a short run, warm-up left out."""
    done = cluster.banyan(
        "bench", "run", workload, "--target", target, "--sessions", "4", "--concurrency", "2",
        "--groups", "1", "--turns", "2", "--warmup", "1", "--prefix-tokens", str(PREFIX),
        "--input-tokens", str(QUESTION), "--output-tokens", str(ANSWER), "--out", str(out),
        "--slo", "e2e:200s", "--seed", "3" if target == "grpc" else "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [record for record in read_run(out / "requests.jsonl").records if not record.warmup]


def test_both_protocols_are_measured(cluster, tmp_path: Path) -> None:
    grpc = measured(cluster, tmp_path / "grpc", "grpc", "prefix-groups")
    http = measured(cluster, tmp_path / "http", "http", "prefix-groups")
    around = set()  # tokens of the chat template
    for record in (*grpc, *http):
        assert record.ok and record.output_tokens == ANSWER, record
        assert 1 <= len(record.chunks_s) <= ANSWER
        around.add(record.prompt_tokens - PREFIX - QUESTION)
    assert len(around) == 1 and 0 < around.pop() < 40
    for records in (grpc, http):
        assert {record.replica for record in records} <= {"replica-0", "replica-1"}
        assert max(record.cached_tokens or 0 for record in records) >= PREFIX
    report = json.loads((tmp_path / "http" / "report.json").read_text())
    (stage,) = report["stages"]
    assert stage["answered"] == 4 and stage["attainment"] == 1.0
    assert 0 < stage["cached_share"] < 1
    compared = cluster.banyan("bench", "compare", str(tmp_path / "grpc"), str(tmp_path / "http"))
    assert compared.returncode == 0 and "protocol: A gRPC, B HTTP" in compared.stdout


def test_a_chat_finds_its_own_history_in_the_cache(cluster, tmp_path: Path) -> None:
    records = measured(cluster, tmp_path / "chat", "grpc", "chat")
    assert len(records) == 8 and all(record.ok for record in records)
    for record in records:
        if record.turn:
            assert (record.cached_tokens or 0) >= PREFIX + QUESTION
