"""The files of a report, all made from a run's records: JSON, CSV, the page and its picture."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from loadtest import figures, slo
from loadtest.page import page, title
from loadtest.panels import plots
from loadtest.plots import sheet
from loadtest.records import Record, Run
from seams.bench import Report
from seams.errors import InvalidRequest

RECORDS, REPORT, TABLE, PAGE, PICTURE = (
    "requests.jsonl", "report.json", "requests.csv", "report.html", "report.svg",
)  # fmt: skip
_COLUMNS = (
    "stage", "session", "turn", "group", "warmup", "status", "replica", "request_id", "intended_s",
    "sent_s", "end_s", "delay_ms", "ttft_ms", "itl_mean_ms", "itl_max_ms", "tpot_ms", "e2e_ms",
    "prompt_tokens", "cached_tokens", "output_tokens", "wanted_tokens", "moves", "meets_slo",
    "error",
)  # fmt: skip


def as_json(run: Run) -> dict[str, Any]:
    """The project's bench format, with the run's settings and every stage's figures beside."""
    found = figures.all_figures(run)
    report = Report(str(run.header["command"]))
    for row in figures.rows(found):
        report.add(row)
    stages = [one.as_json() for one in found]
    searched = {"rate_found_hz": figures.rate_found_hz(run)} if run.searched else {}
    whole = report.as_json() | {"machine": run.header["machine"], "run": run.header}
    return whole | {"stages": stages} | searched


def as_csv(run: Run) -> str:
    """One line per request, warm-up too."""
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(_COLUMNS)
    for record in run.records:
        cells = _cells(record, run.slo)
        lines.writerow([cells[column] for column in _COLUMNS])
    return written.getvalue()


def _cells(record: Record, objectives: slo.Slo) -> dict[str, Any]:
    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e3:.3f}"

    gaps_s = record.itls_s
    computed = {
        "delay_ms": ms(record.delay_s),
        "ttft_ms": ms(record.ttft_s),
        "itl_mean_ms": ms(sum(gaps_s) / len(gaps_s) if gaps_s else None),
        "itl_max_ms": ms(max(gaps_s, default=None)),
        "tpot_ms": ms(record.tpot_s),
        "e2e_ms": ms(record.e2e_s),
        "meets_slo": figures.meets(record, objectives) if objectives else "",
    }
    return {name: getattr(record, name, None) for name in _COLUMNS} | computed


def write(run: Run, folder: Path) -> None:
    """All but the records themselves. Raises InvalidRequest if a file cannot be written."""
    texts = {
        REPORT: json.dumps(as_json(run), indent=2) + "\n",
        TABLE: as_csv(run),
        PAGE: page(run),
        PICTURE: sheet(plots(run), title(run)) + "\n",
    }
    for name, text in texts.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            message = f"{folder / name} cannot be written: {error.strerror}."
            raise InvalidRequest(message) from None
