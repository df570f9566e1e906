"""Recorded traffic as files: Mooncake's JSON lines and Azure's CSV, gzipped or not. It knows no
text, no cluster and no time but the recorded one.

A Mooncake line names the 512-token blocks of its prompt; an Azure line has lengths only.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seams.errors import InvalidRequest

HASHED_TOKENS = 512  # by one hash id
TOKENS_MAX = 1 << 24
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_UNREADABLE = (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error)
_NO_REQUEST = (ValueError, LookupError, TypeError, OverflowError)


@dataclass(frozen=True)
class Recorded:
    """One request of a trace. `at_s` counts from its first one; lengths are tokens, the output's
    may be 0. `hash_ids` name the blocks of its prompt, the last one maybe in part; none if the
    trace does not tell them."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, requests_max: int | None = None) -> list[Recorded]:
    """The first requests of a trace, one at least, by when they came. Its own first line tells the
    format. Raises InvalidRequest, which names the line."""
    found: list[Recorded] = []
    try:
        packed = path.suffix == ".gz"
        with gzip.open(path, "rt") if packed else path.open(encoding="utf-8-sig") as lines:
            for recorded in _recorded(path, lines):
                if len(found) == requests_max:
                    break
                found.append(recorded)
    except _UNREADABLE:
        raise InvalidRequest(f"The trace {path} cannot be read.") from None
    if not found:
        raise InvalidRequest(f"The trace {path} has no requests.")
    first_s = min(recorded.at_s for recorded in found)
    moved = [Recorded(r.at_s - first_s, r.input_tokens, r.output_tokens, r.hash_ids) for r in found]
    return sorted(moved, key=lambda recorded: recorded.at_s)


def _recorded(path: Path, lines: Iterator[str]) -> Iterator[Recorded]:
    first = next(lines, "")
    meant: Callable[[str], Recorded]
    if first.startswith("{"):
        meant, rest, number = _mooncake, _before(first, lines), 1
    else:
        meant, rest, number = _azure(path, first), lines, 2
    for at, line in enumerate(rest, number):
        if not line.strip():
            continue
        try:
            yield meant(line)
        except _NO_REQUEST:
            raise InvalidRequest(f"Line {at} of the trace {path} is no request.") from None


def _before(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _mooncake(line: str) -> Recorded:
    written = json.loads(line)
    ids = tuple(_hash_id(hash_id) for hash_id in written["hash_ids"])
    input_tokens = _tokens(written["input_length"], 1)
    if input_tokens > HASHED_TOKENS * len(ids):
        raise ValueError("it is longer than its blocks")
    at_s = float(written["timestamp"]) / 1000
    return Recorded(_finite(at_s), input_tokens, _tokens(written["output_length"], 0), ids)


def _azure(path: Path, header: str) -> Callable[[str], Recorded]:
    """Reads the lines below `header`."""
    names = [name.strip() for name in header.split(",")]
    if not set(AZURE_COLUMNS) <= set(names):
        message = f"The trace {path} is neither Mooncake's JSON lines nor Azure's CSV."
        raise InvalidRequest(message)
    at, context, generated = (names.index(name) for name in AZURE_COLUMNS)

    def meant(line: str) -> Recorded:
        (cells,) = csv.reader([line])
        when = datetime.fromisoformat(cells[at].strip())
        at_s = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        return Recorded(at_s, _tokens(cells[context], 1), _tokens(cells[generated], 0))

    return meant


def _hash_id(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError("no such block")
    return value


def _tokens(value: Any, least: int) -> int:
    found = int(value)
    if not least <= found <= TOKENS_MAX:
        raise ValueError("no such length")
    return found


def _finite(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise ValueError("no such time")
    return seconds
