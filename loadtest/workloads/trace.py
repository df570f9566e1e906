"""Recorded traffic, replayed: Mooncake's JSON lines and Azure's CSV, gzipped or not.

A Mooncake line says which 512-token blocks its prompt shares with others, so texts are made that
share just these; an Azure line has lengths only, so its prompt shares nothing.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from loadtest.text import Writer, rng_of
from loadtest.workloads.base import Message, Session, Turn
from seams.errors import InvalidRequest

HASHED_TOKENS = 512  # by one hash id
TOKENS_MAX = 1 << 24
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Recorded:
    """One request of a trace. `at_s` counts from its first one; lengths are tokens."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, requests_max: int | None = None) -> list[Recorded]:
    """The first requests of a trace, by when they came. Raises InvalidRequest, which names the
    line."""
    found: list[Recorded] = []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for recorded in _recorded(path, lines):
                if len(found) == requests_max:
                    break
                found.append(recorded)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error):
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
        except (ValueError, LookupError, TypeError):
            raise InvalidRequest(f"Line {at} of the trace {path} is no request.") from None


def _before(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _mooncake(line: str) -> Recorded:
    written: dict[str, Any] = json.loads(line)
    ids = tuple(int(hash_id) for hash_id in written["hash_ids"])
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


def _tokens(value: Any, least: int) -> int:
    found = int(value)
    if not least <= found <= TOKENS_MAX:
        raise ValueError("no such length")
    return found


def _finite(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise ValueError("no such time")
    return seconds


class Trace:
    """One turn a session. Lengths, and the blocks that are shared, are divided by `scale`."""

    def __init__(self, recorded: list[Recorded], scale: float, writer: Writer, seed: str) -> None:
        self._recorded, self._scale = recorded, scale
        self._writer, self._seed = writer, seed
        self._block_tokens = max(1, round(HASHED_TOKENS / scale))
        self._block = cache(self._write)
        self.sessions_max: int | None = len(recorded)

    def session(self, number: int) -> Session:
        """See Workload."""
        recorded = self._recorded[number]
        tokens = max(1, round(recorded.input_tokens / self._scale))
        if recorded.hash_ids:
            text = self._shared(recorded, tokens)
        else:
            text = self._writer.write(rng_of(self._seed, "trace", number), tokens)
        output_tokens = max(1, round(recorded.output_tokens / self._scale))
        turn = Turn((Message("user", text),), output_tokens)
        return Session(f"trace-{number}", (turn,), at_s=recorded.at_s)

    def _shared(self, recorded: Recorded, tokens: int) -> str:
        """Its blocks' texts, the last one as full as it was."""
        *whole, last = recorded.hash_ids
        rest = min(max(1, tokens - len(whole) * self._block_tokens), self._block_tokens)
        texts = [self._block(hash_id, self._block_tokens) for hash_id in whole]
        return " ".join([*texts, self._block(last, rest)])

    def _write(self, hash_id: int, tokens: int) -> str:
        return self._writer.write(rng_of(self._seed, "block", hash_id), tokens)
