"""Traces in Mooncake's and in Azure's format: read, scaled, and what they share kept."""

from __future__ import annotations

import gzip
import json
from itertools import takewhile
from pathlib import Path

import pytest

from loadtest.mooncake import TRACE
from loadtest.text import Writer
from loadtest.tokens import WordTokens
from loadtest.workloads.base import Shape
from loadtest.workloads.catalog import maker
from seams.errors import InvalidRequest
from seams.traces import Recorded, read_trace

MOONCAKE = [
    {"timestamp": 2000, "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 2]},
    {"timestamp": 5500, "input_length": 1300, "output_length": 0, "hash_ids": [0, 1, 3]},
    {"timestamp": 4000, "input_length": 512, "output_length": 9, "hash_ids": [9]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9051690,396,109
2023-11-16 18:16:01.6805900,80,1
"""


def mooncake(folder: Path, lines: list[dict[str, object]] | list[str]) -> Path:
    path = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def prompts(path: Path, scale: float = 1.0) -> list[str]:
    workload = maker("trace", Shape(), path, scale)(Writer(WordTokens()), "1.0")
    assert workload.sessions_max is not None
    made = [workload.session(number) for number in range(workload.sessions_max)]
    return [session.turns[0].messages[0].content for session in made]


def shared(a: str, b: str) -> int:
    pairs = zip(a.split(), b.split(), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_mooncake_requests_come_in_order_from_the_first_on(tmp_path: Path) -> None:
    assert read_trace(mooncake(tmp_path, MOONCAKE)) == [
        Recorded(0.0, 1100, 30, (0, 1, 2)),
        Recorded(2.0, 512, 9, (9,)),
        Recorded(3.5, 1300, 0, (0, 1, 3)),
    ]


def test_azure_requests_have_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    found = read_trace(path)
    assert [(r.input_tokens, r.output_tokens) for r in found] == [(374, 44), (396, 109), (80, 1)]
    assert [r.at_s for r in found] == pytest.approx([0.0, 4.224579, 15.0], abs=1e-5)
    assert len(read_trace(path, 2)) == 2
    texts = prompts(path, scale=2)
    assert [len(text.split()) for text in texts] == [187, 198, 40]
    assert shared(texts[0], texts[1]) < 10


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_prompts_share_the_blocks_that_the_trace_says(tmp_path: Path, scale: float) -> None:
    first, other, later = prompts(mooncake(tmp_path, MOONCAKE), scale)
    assert [len(text.split()) for text in (first, other, later)] == [
        round(1100 / scale), round(512 / scale), round(1300 / scale),
    ]  # fmt: skip
    block = round(512 / scale)
    assert 2 * block <= shared(first, later) < 2 * block + 5
    assert shared(first, other) < 5


def test_answers_have_a_token_at_least(tmp_path: Path) -> None:
    workload = maker("trace", Shape(), mooncake(tmp_path, MOONCAKE), 10)(Writer(WordTokens()), "1")
    made = [workload.session(number) for number in range(3)]
    assert [session.turns[0].output_tokens for session in made] == [3, 1, 1]
    assert [session.at_s for session in made] == [0.0, 2.0, 3.5]


def test_the_trace_of_the_repository_keeps_its_shared_share() -> None:
    recorded = read_trace(TRACE, 300)
    seen: set[int] = set()
    blocks = hits = 0
    for one in recorded:
        blocks += len(one.hash_ids)
        hits += len(list(takewhile(lambda hash_id: hash_id in seen, one.hash_ids)))
        seen.update(one.hash_ids)
    workload = maker("trace", Shape(), TRACE, 128, sessions_max=300)(Writer(WordTokens()), "1")
    starts: set[tuple[str, ...]] = set()
    tokens = cached = 0
    for number in range(300):
        text = tuple(workload.session(number).turns[0].messages[0].content.split())
        tokens += len(text)
        mine = [text[: 4 * (i + 1)] for i in range(len(text) // 4)]
        cached += 4 * len(list(takewhile(lambda start: start in starts, mine)))
        starts.update(mine)
    assert cached / tokens == pytest.approx(hits / blocks, abs=0.02)
    assert hits / blocks > 0.05


def test_a_part_of_a_trace(tmp_path: Path) -> None:
    path = mooncake(tmp_path, MOONCAKE)
    make = maker("trace", Shape(), path, until_s=2.5)
    assert make(Writer(WordTokens()), "1").sessions_max == 2


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '"text"',
        '{"timestamp": 1}',
        '{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1]}',
        '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": [0]}',
        '{"timestamp": 1, "input_length": 5, "output_length": -1, "hash_ids": [0]}',
        '{"timestamp": "x", "input_length": 5, "output_length": 1, "hash_ids": [0]}',
        '{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [0]}',
        '{"timestamp": 1, "input_length": Infinity, "output_length": 1, "hash_ids": [0]}',
        '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": null}',
        '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [-1]}',
        '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [0.5]}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = mooncake(tmp_path, [json.dumps(MOONCAKE[0]), "", line])
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path)
    assert caught.value.message == f"Line 3 of the trace {path} is no request."


@pytest.mark.parametrize("line", ["2023-11-16 18:15:46,1", "yesterday,5,5", "2023-11-16,x,5"])
def test_a_bad_line_of_csv_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + line + "\n")
    with pytest.raises(InvalidRequest, match=r"^Line 5 of the trace .* is no request\.$"):
        read_trace(path)


@pytest.mark.parametrize(
    "content", [b"", b"a,b\n1,2\n", b"\x80\x81", AZURE.split("\n")[0].encode()]
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"^The trace .*(neither|no requests|cannot be read)"):
        read_trace(path)


def test_a_mark_of_byte_order_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("\ufeff" + AZURE, encoding="utf-8")
    assert len(read_trace(path)) == 3


@pytest.mark.parametrize("name", ["missing.csv", "short.gz", "damaged.gz"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "short.gz").write_bytes(gzip.compress(AZURE.encode())[:-12])
    packed = bytearray(gzip.compress(AZURE.encode() * 500))
    packed[40:42] = bytes(0xFF ^ byte for byte in packed[40:42])
    (tmp_path / "damaged.gz").write_bytes(packed)
    with pytest.raises(InvalidRequest, match=r"^The trace .* cannot be read\.$"):
        read_trace(tmp_path / name)
