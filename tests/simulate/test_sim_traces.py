"""Traces as workloads: to the token, in both formats."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

from banyan.cli.app import app
from seams.errors import InvalidRequest
from simulate.traces import read_trace
from simulate.workload import Grain

GRAIN = Grain(512, 64)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,1374,44

2023-11-16 18:15:51.2224670,1,0
"""


def test_mooncakes_lines_share_the_blocks_that_they_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 5000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]}\n'
    )
    workload = read_trace(path, GRAIN)
    first, second = workload.requests
    assert (first.prompt_tokens, len(first.cells), len(first.keys)) == (1100, 18, 2)
    assert second.keys == first.keys and second.output_tokens == 1
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert workload.unique_blocks() == 2 and workload.max_tokens == 7


def test_azures_lines_share_nothing_and_come_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    workload = read_trace(path, GRAIN)
    assert [r.prompt_tokens for r in workload.requests] == [1374, 396, 1]
    assert [r.output_tokens for r in workload.requests] == [44, 109, 1]
    assert [r.number for r in workload.requests] == [0, 1, 2]
    assert workload.requests[1].at_s == pytest.approx(4.314579) and workload.requests[0].at_s == 0
    cells = [cell for request in workload.requests for cell in request.cells]
    assert len(cells) == len(set(cells)) == 22 + 7 + 1
    assert len(read_trace(path, GRAIN, 2).requests) == 2


def test_the_command_takes_either(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    answer = CliRunner().invoke(app, ["simulate", "--trace", str(path), "--replicas", "2"])
    assert answer.exit_code == 0, answer.output
    assert "cost_ttft_mean" in answer.output
    with pytest.raises(InvalidRequest, match="blocks have 512"):
        read_trace(path, Grain(256, 64))
