"""Reports that the clients themselves wrote, read; and a wire taken apart."""

from __future__ import annotations

import json
from pathlib import Path

import aiperf
import guidellm
import pytest
import sglang_bench
from witness import Passed, exchanges, record_of

REPORTS = Path(__file__).parent / "reports"


def test_aiperf() -> None:
    said = aiperf.read(REPORTS / "aiperf")
    assert (said.requests, said.failed) == (16, 0)
    assert said.ttft_ms == pytest.approx(408.4, abs=0.05)
    assert said.tpot_ms == pytest.approx(92.2, abs=0.05)
    assert said.cached_share == pytest.approx(0.9479, abs=5e-5)


def test_guidellm_by_its_own_requests() -> None:
    said = guidellm.read(REPORTS / "guidellm")
    (bench,) = json.loads((REPORTS / "guidellm/report.json").read_text())["benchmarks"]
    each = bench["requests"]["successful"]
    assert (said.requests, said.failed) == (len(each), 0) == (12, 0)
    mean = sum(one["time_to_first_token_ms"] for one in each) / len(each)
    assert said.ttft_ms == pytest.approx(mean)
    assert said.tpot_ms == pytest.approx(126.8, abs=0.05)
    assert said.cached_share == pytest.approx(0.5342, abs=5e-5)


def test_sglang_says_nothing_of_cached_tokens() -> None:
    said = sglang_bench.read(REPORTS / "sglang")
    assert (said.requests, said.failed, said.cached_share) == (12, 0, None)
    assert said.ttft_ms > said.tpot_ms > 0


@pytest.mark.parametrize("read", [aiperf.read, guidellm.read, sglang_bench.read])
def test_no_report_is_an_error_that_the_runner_knows(read: object, tmp_path: Path) -> None:
    assert callable(read)
    with pytest.raises((LookupError, OSError, ValueError)):
        read(tmp_path)


def test_the_trace_is_shorter_and_keeps_its_shared_blocks() -> None:
    found = aiperf.scaled(3)
    assert [line["hash_ids"][0] for line in found] == [0, 0, 0]  # type: ignore[index]
    assert found[0]["input_length"] == 6758 // aiperf.SCALE


ASK = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(payload: str) -> bytes:
    """One server-sent event in one HTTP chunk."""
    event = f"data: {payload}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def answer(at_s: float) -> list[Passed]:
    """A request and a streamed answer of two messages, the second one in two pieces."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    usage |= {"prompt_tokens_details": {"cached_tokens": 4}}  # type: ignore[dict-item]
    second = chunk(json.dumps({"choices": [{"text": "b"}]}))
    last = chunk(json.dumps({"choices": [], "usage": usage})) + chunk("[DONE]") + b"0\r\n\r\n"
    first = HEAD + chunk(json.dumps({"choices": [{"text": "a"}]}))
    parts = [(0.0, ASK), (0.5, first), (0.6, second[:9]), (0.75, second[9:]), (1.0, last)]
    return [Passed(at_s + later_s, data is ASK, data) for later_s, data in parts]


def test_two_requests_on_one_connection_are_timed_as_the_load_generator_would() -> None:
    records = [record_of(one) for one in exchanges(answer(10.0) + answer(20.0), 10.0)]
    assert [record.sent_s for record in records] == [10.0, 20.0]
    for record in records:
        assert record.ok and record.chunks_s == (0.5, 0.75) and record.e2e_s == 1.0
        tokens = (record.prompt_tokens, record.cached_tokens, record.output_tokens)
        assert tokens == (9, 4, 2) and record.tpot_s == 0.25


def test_an_answer_that_is_cut_off_is_not_ok() -> None:
    (cut,) = exchanges(answer(0.0)[:-1], 0.0)
    assert cut.end_s == 0.0 and not record_of(cut).ok


def test_the_first_request_waited_for_its_connection() -> None:
    first, second = map(record_of, exchanges(answer(10.0) + answer(20.0), 9.75))
    assert first.ttft_s == 0.75 and second.ttft_s == 0.5
