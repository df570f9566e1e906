"""`banyan bench run | compare | report`: from options to a load test, shown while it runs."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from banyan.cli import output
from banyan.cli.talk import Target as Cluster
from banyan.cluster import state
from loadtest import figures, page
from loadtest import report as files
from loadtest.arrivals import CLOSED, POISSON, SCHEDULE, Arrivals
from loadtest.measure import Measurement, header, opened
from loadtest.plan import Plan
from loadtest.records import Log, Record, Run, read_run
from loadtest.slo import parse_slo
from loadtest.targets.base import Form, Target
from loadtest.text import Words, Writer, made_up, words_of
from loadtest.tokens import folder_tokens
from loadtest.workloads.base import Shape
from loadtest.workloads.catalog import TRACE, Make, maker
from seams.bench import Report, machine
from seams.clock import SystemClock
from seams.errors import InvalidRequest, LaunchError, NoReplica

if TYPE_CHECKING:
    from loadtest.compare import Ratio

GRPC, HTTP = "grpc", "http"
SECRET = "--api-key"
LATEST = 64  # requests whose TTFT the live line shows


@dataclass(frozen=True)
class Asked:
    """Who is to be loaded, and how prompts are made for it, as the options say it."""

    cluster: Cluster
    target: str
    model: str
    form: str
    ignore_eos: bool
    no_cache: bool
    tokenizer: str
    text: str


def arrivals(
    kind: str, workload: str, rate: str, cv: float, speed: float, concurrency: int
) -> Arrivals:
    """What was named, else Poisson for a rate, the schedule for a trace, a closed loop for others.
    Raises InvalidRequest."""
    fitting = POISSON if rate else SCHEDULE if workload == TRACE else CLOSED
    return Arrivals(kind or fitting, cv, speed, concurrency)


def plan(workload: str, arriving: Arrivals, shape: Shape, **given: Any) -> Plan:
    """The options as a Plan; 0 and "" stand for what is not given. Raises InvalidRequest."""
    try:
        rates_hz = tuple(float(rate) for rate in given.pop("rate").split(",") if rate.strip())
    except ValueError:
        raise InvalidRequest("--rate must be a number, or several with commas.") from None
    for name in ("rate_max_hz", "sessions", "duration_s"):
        given[name] = given[name] or None
    given["trace"] = Path(given["trace"]).expanduser() if given["trace"] else None
    given["slo"] = parse_slo(given["slo"])
    return Plan(workload, arriving, shape, rates_hz, **given)


def _target(asked: Asked) -> Target:
    """Raises LaunchError where a cluster's own is meant and there is none."""
    try:
        form = Form(asked.form)
    except ValueError:
        raise InvalidRequest("--form must be chat, text or ids.") from None
    if asked.target == GRPC:
        from loadtest.targets.grpc import GrpcTarget

        addresses, key = asked.cluster.resolve()
        return GrpcTarget(
            addresses, key, model=asked.model, form=form, ignore_eos=asked.ignore_eos,
            no_cache=asked.no_cache,
        )  # fmt: skip
    if asked.no_cache:
        raise InvalidRequest("--no-cache needs --target grpc.")
    from loadtest.targets.openai import OpenAiTarget

    url, key = _url(asked)
    return OpenAiTarget(url, key, model=asked.model, form=form, ignore_eos=asked.ignore_eos)


def _url(asked: Asked) -> tuple[str, str]:
    """The API's URL, and the key for it: a cluster's own key goes to that cluster alone."""
    if asked.target != HTTP:
        return asked.target, asked.cluster.api_key
    if asked.cluster.address:
        return f"http://{asked.cluster.address}/v1", asked.cluster.api_key
    record = state.running(asked.cluster.name)
    at = next((router.http for router in record.routers if router.http), "")
    if not at:
        raise LaunchError(f"Cluster {record.name} has no HTTP: start it with --http 8000.")
    return f"http://{at}/v1", asked.cluster.api_key or record.api_key


def run(asked_plan: Plan, asked: Asked, out: str, json_file: str) -> None:
    """Measure, show, and keep what was asked for. Raises NoReplica if no request was answered."""
    until_s = asked_plan.duration_s
    if until_s is not None and asked_plan.arrivals.kind == SCHEDULE:
        until_s *= asked_plan.arrivals.speed
    make = maker(
        asked_plan.workload, asked_plan.shape, asked_plan.trace, asked_plan.scale,
        sessions_max=asked_plan.sessions_max,
        until_s=until_s if asked_plan.arrivals.kind == SCHEDULE else None,
    )  # fmt: skip
    words = words_of(Path(asked.text).expanduser()) if asked.text else made_up
    target = _target(asked)
    folder = _fresh(out) if out else None
    measured = uvloop.run(_measured(asked_plan, asked, target, make, words, folder))
    _show(measured)
    if folder is not None:
        files.write(measured, folder)
        output.console.print(f"Report: {folder / files.PAGE}", markup=False, soft_wrap=True)
    if json_file:
        _write_json(json_file, files.as_json(measured))
    if not any(record.ok for record in measured.records if not record.warmup):
        raise NoReplica("No request was answered.")


async def _measured(
    asked_plan: Plan, asked: Asked, target: Target, make: Make, words: Words, folder: Path | None
) -> Run:
    try:
        await opened(target)
        counter = await asyncio.to_thread(
            lambda: folder_tokens(asked.tokenizer) if asked.tokenizer else target.counter()
        )
        started = datetime.now(UTC).isoformat(timespec="seconds")
        began = header(asked_plan, target, machine(), _command(sys.argv), started)
        path = folder / files.RECORDS if folder is not None else None
        with closing(counter), Log(began, path) as log, Screen() as screen:
            writer, clock = Writer(counter, words), SystemClock()
            await Measurement(asked_plan, target, make, writer, log, screen, clock).run()
        return log.run
    finally:
        await target.aclose()


def _fresh(out: str) -> Path:
    """The folder, made if missing. Raises InvalidRequest if another run is in it."""
    folder = Path(out).expanduser()
    if (folder / files.RECORDS).exists():
        raise InvalidRequest(f"{folder} holds a run already; name another --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be made: {error.strerror}.") from None
    return folder


def _command(arguments: Sequence[str]) -> str:
    """The command line as typed, but for the API key."""
    shown, hide = ["banyan"], False
    for argument in arguments[1:]:
        name, equals, _ = argument.partition("=")
        shown.append("..." if hide else f"{SECRET}=..." if equals and name == SECRET else argument)
        hide = argument == SECRET
    return " ".join(shown)


def _show(measured: Run) -> None:
    columns, lines = page.summary(figures.all_figures(measured))
    heads = ["", *(f">{line[0]}" for line in lines)]
    rows = [[column, *(line[at] for line in lines)] for at, column in enumerate(columns) if at]
    output.console.print(page.title(measured), markup=False)
    output.table("", heads, rows)
    if words := page.verdict(measured):
        output.console.print(words)
    for status, count, said in page.failures([r for r in measured.records if not r.warmup]):
        output.console.print(f"{count} x {status}: {said}", markup=False)


def _write_json(path: str, value: Any) -> None:
    try:
        Path(path).expanduser().write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}.") from None


def _read(place: str) -> Run:
    path = Path(place).expanduser()
    return read_run(path / files.RECORDS if path.is_dir() else path)


def compare(a: str, b: str, json_file: str, seed: int) -> None:
    """B over A."""
    from loadtest import compare as comparison  # loads numpy

    one, other = _read(a), _read(b)
    ratios = comparison.compare(one, other, seed=seed)
    output.table("", ["", ">A", ">B", ">B / A", ">95 % interval", ""], list(map(_compared, ratios)))
    for name, (ours, theirs) in comparison.differing(one, other).items():
        output.console.print(f"{name}: A {ours}, B {theirs}", markup=False)
    if json_file:
        written = Report(_command(sys.argv))
        for ratio in ratios:
            written.add(ratio.row())
        _write_json(json_file, written.as_json())


def _compared(ratio: Ratio) -> list[str]:
    unit = "" if ratio.unit.startswith("of ") else f", {ratio.unit}"
    between = "" if ratio.low is None else f"{ratio.low:.3f} – {ratio.high:.3f}"
    numbers = [page.number(ratio.a), page.number(ratio.b), f"{ratio.ratio:.3f}"]
    return [ratio.name + unit, *numbers, between, "differs" if ratio.differs else ""]


def report(place: str) -> None:
    """Write a run's files beside its records."""
    path = Path(place).expanduser()
    folder = path if path.is_dir() else path.parent
    found = _read(place)
    _show(found)
    files.write(found, folder)
    output.console.print(f"Report: {folder / files.PAGE}", markup=False, soft_wrap=True)


class Screen:
    """The live line of each stage, on standard error: a Watch."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            console=output.errors,
        )
        self._task: TaskID | None = None
        self._in_flight = self._failed = 0
        self._ttfts_s: deque[float] = deque(maxlen=LATEST)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def began(self, load: str, requests: int) -> None:
        """See Watch."""
        self._task = self._progress.add_task(load, total=requests, said="")
        self._in_flight = self._failed = 0
        self._ttfts_s.clear()

    def sent(self) -> None:
        """See Watch."""
        self._in_flight += 1

    def ended(self, record: Record) -> None:
        """See Watch."""
        assert self._task is not None
        self._in_flight -= record.sent_s is not None
        self._failed += not record.ok
        if record.ttft_s is not None:
            self._ttfts_s.append(record.ttft_s)
        said = f"{self._in_flight} in flight"
        if self._ttfts_s:
            said += f", TTFT p50 {statistics.median(self._ttfts_s) * 1e3:,.0f} ms"
        if self._failed:
            said += f", {self._failed} failed"
        self._progress.update(self._task, advance=1, said=said)
