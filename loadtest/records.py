"""What a load test leaves: JSON lines, of which every figure can be computed again.

The first line is the header; each stage (one rate, say) has a line of its own before its requests;
every request has one, whatever became of it. Times are seconds from the header's `started` on, but
`chunks_s`, which count from `sent_s`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from seams.errors import InvalidRequest

VERSION = 1
OK, SKIPPED = "OK", "SKIPPED"
_DIGITS = 6  # microseconds


@dataclass(frozen=True)
class Record:
    """One request. `status` is OK, an error's name, or SKIPPED: never sent, since a turn that it
    needs failed; `sent_s` is then None.

    `intended_s` is when it should have been sent: by the arrivals, or when what it waited for had
    ended. `chunks_s` has one entry per message of the stream that brought tokens. `cached_tokens`
    is None where the endpoint does not say, `replica` "" likewise.
    """

    stage: int
    session: str
    turn: int
    group: str
    warmup: bool
    intended_s: float
    sent_s: float | None
    end_s: float
    chunks_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    wanted_tokens: int = 0
    replica: str = ""
    request_id: str = ""
    moves: int = 0
    status: str = OK
    error: str = ""

    @property
    def ok(self) -> bool:
        """It was answered in full."""
        return self.status == OK

    @property
    def delay_s(self) -> float | None:
        """The generator's own: how much later than intended it was sent."""
        return None if self.sent_s is None else self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first tokens; None without any."""
        return self.chunks_s[0] if self.chunks_s else None

    @property
    def e2e_s(self) -> float | None:
        """From sending to the end."""
        return None if self.sent_s is None else self.end_s - self.sent_s

    @property
    def itls_s(self) -> list[float]:
        """Between chunks that follow each other."""
        return [later - earlier for earlier, later in pairwise(self.chunks_s)]

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None for fewer than two."""
        if self.output_tokens < 2 or len(self.chunks_s) < 2:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Stage:
    """A part of a run under one load. `rate_hz`: sessions per second, None where none is set;
    `load` says it in words."""

    number: int
    load: str
    rate_hz: float | None = None


@dataclass
class Run:
    """A whole run, as read or as measured."""

    header: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def slo(self) -> dict[str, float]:
        """Metric -> seconds."""
        return dict(self.header["slo"])

    @property
    def searched(self) -> bool:
        """Its stages are the probes of a search."""
        return bool(self.header["plan"]["search"])

    def of(self, stage: Stage) -> list[Record]:
        """The stage's requests without its warm-up, in the order of their ends."""
        return [r for r in self.records if r.stage == stage.number and not r.warmup]


class Log:
    """Collects a run, and writes each line as it comes if there is a path: what was measured stays
    when the process is killed. Raises InvalidRequest if the file cannot be written."""

    def __init__(self, header: dict[str, Any], path: Path | None = None) -> None:
        self.run = Run(json.loads(json.dumps({"version": VERSION} | header)))  # as a file has it
        self._file = self._opened(path) if path is not None else None
        self._write("run", self.run.header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def stage(self, stage: Stage) -> None:
        """What follows was measured in it."""
        self.run.stages.append(stage)
        self._write("stage", asdict(stage))

    def add(self, record: Record) -> None:
        """One request has ended."""
        rounded = _rounded(record)
        self.run.records.append(rounded)
        self._write("request", asdict(rounded))

    @staticmethod
    def _opened(path: Path) -> TextIO:
        try:
            return path.open("w", buffering=1)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be written: {error.strerror}.") from None

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **fields}) + "\n")


def _rounded(record: Record) -> Record:
    """To microseconds: in the run as in its file, whose figures are then the same."""
    fields = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    fields["chunks_s"] = tuple(round(at_s, _DIGITS) for at_s in record.chunks_s)
    for name in ("intended_s", "sent_s", "end_s"):
        fields[name] = None if fields[name] is None else round(fields[name], _DIGITS)
    return Record(**fields)


def read_run(path: Path) -> Run:
    """The run that a file holds. Raises InvalidRequest, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InvalidRequest(f"{path} cannot be read.") from None
    run: Run | None = None
    for number, line in enumerate(lines, 1):
        try:
            run = _taken(run, json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError):
            message = f"Line {number} of {path} is no record of a load test."
            raise InvalidRequest(message) from None
    if run is None:
        raise InvalidRequest(f"{path} is empty.")
    return run


def _taken(run: Run | None, fields: dict[str, Any]) -> Run:
    """`run` with one more line."""
    kind = fields.pop("kind")
    if run is None:
        if kind != "run" or fields["version"] != VERSION or not _whole(fields):
            raise ValueError("not a header")
        return Run(fields)
    if kind == "stage":
        run.stages.append(Stage(**fields))
    elif kind == "request":
        run.records.append(_record(fields))
    else:
        raise ValueError("no such line")
    return run


def _whole(header: dict[str, Any]) -> bool:
    """It has all that figures are computed with."""
    plan = header["plan"]
    numbers = (*header["slo"].values(), plan["attainment"])
    return all(isinstance(number, int | float) for number in numbers) and "search" in plan


_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "stage": int, "turn": int, "intended_s": float, "end_s": float, "output_tokens": int,
    "prompt_tokens": int, "wanted_tokens": int, "moves": int,
}  # fmt: skip


def _record(fields: dict[str, Any]) -> Record:
    checked = {name: kind(fields[name]) for name, kind in _NUMBERS.items()}
    chunks_s = tuple(float(at_s) for at_s in fields["chunks_s"])
    record = Record(**(fields | checked | {"chunks_s": chunks_s}))
    if (record.sent_s is None) != (record.status == SKIPPED):
        raise ValueError("sent and skipped")
    return record
