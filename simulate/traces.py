"""Recorded traffic as workloads: Mooncake's JSON lines and Azure's CSV, gzipped or not.

A Mooncake line names the 512-token blocks of its prompt, so requests share just these; an Azure
line has lengths only, so its prompt shares nothing. It knows no replica, no router and no text.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from seams.errors import InvalidRequest
from simulate.workload import TRACE_BLOCK_TOKENS, Cells, Grain, SimRequest, Workload, request_of

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

Traced = Callable[[int, str], SimRequest]
"""What a line of a trace, and its number, stand for. Raises one of NO_REQUEST for another."""

NO_REQUEST = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


def read_trace(path: Path, grain: Grain, requests_max: int | None = None) -> Workload:
    """The first requests of a trace, by when they came; times count from the first one. Its own
    first line tells the format. Raises InvalidRequest, which names the line."""
    if grain.block_tokens != TRACE_BLOCK_TOKENS:
        raise InvalidRequest(f"The trace's blocks have {TRACE_BLOCK_TOKENS} tokens.")
    requests: list[SimRequest] = []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for request in _requests(path, grain, lines):
                if len(requests) == requests_max:
                    break
                requests.append(request)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error):
        raise InvalidRequest(f"The trace {path} cannot be read.") from None
    if not requests:
        raise InvalidRequest(f"The trace {path} has no requests.")
    longest = max(request.output_tokens for request in requests)
    return Workload(grain, tuple(requests), longest).from_zero()


def _requests(path: Path, grain: Grain, lines: Iterator[str]) -> Iterator[SimRequest]:
    first = next(lines, "")
    traced: Traced
    if first.startswith("{"):
        traced, rest, at = _mooncake(grain), _before(first, lines), 1
    else:
        traced, rest, at = _azure(path, grain, first), lines, 2
    number = 0
    for line_number, line in enumerate(rest, at):
        if not line.strip():
            continue
        try:
            yield traced(number, line)
        except NO_REQUEST:
            raise InvalidRequest(f"Line {line_number} of the trace {path} is no request.") from None
        number += 1


def _before(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _mooncake(grain: Grain) -> Traced:
    per = grain.block_cells

    def traced(number: int, line: str) -> SimRequest:
        written = json.loads(line)
        ids, tokens = written["hash_ids"], int(written["input_length"])
        if not isinstance(ids, list) or not 0 < tokens <= TRACE_BLOCK_TOKENS * len(ids):
            raise ValueError("hash_ids do not cover input_length")
        cells = [hash_id * per + at for hash_id in ids for at in range(per)][: grain.cells(tokens)]
        at_s = float(written["timestamp"]) / 1000
        output_tokens = max(1, int(written["output_length"]))
        if not math.isfinite(at_s):
            raise ValueError("a timestamp that is no time")
        return request_of(grain, number, at_s, cells, tokens, output_tokens)

    return traced


def _azure(path: Path, grain: Grain, header: str) -> Traced:
    """Reads the lines below `header`."""
    names = [name.strip() for name in header.split(",")]
    if not set(AZURE_COLUMNS) <= set(names):
        message = f"The trace {path} is neither Mooncake's JSON lines nor Azure's CSV."
        raise InvalidRequest(message)
    when, context, generated = (names.index(name) for name in AZURE_COLUMNS)
    own = Cells(grain)

    def traced(number: int, line: str) -> SimRequest:
        (row,) = csv.reader([line])
        moment = datetime.fromisoformat(row[when].strip())
        at_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        tokens, output_tokens = int(row[context]), max(1, int(row[generated]))
        if tokens < 1:
            raise ValueError("an empty prompt")
        return request_of(grain, number, at_s, own.take(tokens), tokens, output_tokens)

    return traced
