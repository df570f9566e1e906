"""A run's report as one HTML page that loads nothing from anywhere, without a script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from loadtest import figures, slo
from loadtest.figures import Figures
from loadtest.panels import plots
from loadtest.plots import svg
from loadtest.records import Record, Run

LATENCIES = {
    "ttft": "time to first token",
    "itl": "between chunks of tokens",
    "tpot": "per token after the first",
    "e2e": "whole answer",
    "ttft_from_intended": "time to first token, from the intended time",
    "e2e_from_intended": "whole answer, from the intended time",
    "delay": "the generator's own delay",
}
ERRORS_SHOWN = 12
STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; color: #24292f;
  margin: 24px auto; max-width: 1440px; padding: 0 16px; background: #f4f5f7; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 26px 0 8px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 10px; }
.plots svg { width: 100%; height: auto; border: 1px solid #d5d9de; border-radius: 4px; }
table { border-collapse: collapse; background: #fff; border: 1px solid #d5d9de; }
th, td { padding: 4px 10px; text-align: right; border-top: 1px solid #e9ebee; white-space: nowrap; }
th { font-weight: 600; background: #fafbfc; } th:first-child, td:first-child { text-align: left; }
td.words { text-align: left; white-space: normal; } .scroll { overflow-x: auto; }
p.note { color: #57606a; margin: 4px 0 0; } code { background: #e9ebee; padding: 1px 4px; }
"""


def number(value: float | None, unit: float = 1.0) -> str:
    """`value` times `unit` for people."""
    if value is None:
        return "–"
    return f"{value * unit:,.0f}" if value * unit >= 1000 else f"{value * unit:.4g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def summary(found: Sequence[Figures]) -> tuple[list[str], list[list[str]]]:
    """Columns and one line per stage, as the page and the terminal show them."""
    columns = [
        "load", "requests", "failed", "requests/s", "output tokens/s", "TTFT p50 ms",
        "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "TPOT p50 ms", "E2E p50 ms", "E2E p99 ms",
        "cached", "within SLO", "goodput/s",
    ]  # fmt: skip
    return columns, [_summed(one) for one in found]


def _summed(one: Figures) -> list[str]:
    def ms(name: str, part: str) -> str:
        found = one.latencies.get(name)
        return number(getattr(found, part), 1e3) if found is not None else "–"

    return [
        one.load, str(one.requests), str(one.failed + one.skipped), number(one.request_hz),
        number(one.output_tokens_hz), ms("ttft", "p50_s"), ms("ttft", "p99_s"),
        ms("itl", "p50_s"), ms("itl", "p99_s"), ms("tpot", "p50_s"), ms("e2e", "p50_s"),
        ms("e2e", "p99_s"), _share(one.cached_share), _share(one.attainment),
        number(one.goodput_hz),
    ]  # fmt: skip


def _latency_rows(one: Figures) -> list[list[str]]:
    parts = ("mean_s", "p50_s", "p90_s", "p95_s", "p99_s", "max_s")
    return [
        [words, str(one.latencies[name].samples)]
        + [number(getattr(one.latencies[name], part), 1e3) for part in parts]
        for name, words in LATENCIES.items()
        if name in one.latencies
    ]


def _replica_rows(one: Figures) -> list[list[str]]:
    return [
        [r.replica, str(r.requests), f"{r.prompt_tokens:,}", f"{r.cached_tokens:,}",
         _share(r.cached_tokens / r.prompt_tokens if r.prompt_tokens else None),
         f"{r.output_tokens:,}"]
        for r in one.replicas
    ]  # fmt: skip


def failures(records: Sequence[Record]) -> list[list[str]]:
    """Each status with its different sentences, the commonest first."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        if not record.ok:
            kind = (record.status, record.error)
            counts[kind] = counts.get(kind, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [[status, str(count), said] for (status, said), count in ordered[:ERRORS_SHOWN]]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As HTML; the first column holds names."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


def facts_table(facts: dict[str, str]) -> str:
    """Names and what they stand for, as HTML."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td class='words'>{escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    return f"<div class='scroll'><table>{rows}</table></div>"


def page(run: Run) -> str:
    """The whole HTML page: no script, nothing loaded from anywhere."""
    found = figures.all_figures(run)
    drawn = "".join(svg(plot) for plot in plots(run))
    columns, lines = summary(found)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title(run))}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title(run))}</h1>"
        f"<p class='note'>{escape(str(run.header['started']))} · "
        f"<code>{escape(str(run.header['command']))}</code></p>"
        f"<h2>Summary</h2>{table(columns, lines)}{_slo_note(run)}"
        f"<h2>Plots</h2><div class='plots'>{drawn}</div>"
        f"{''.join(_stage_part(run, one) for one in found)}"
        f"<h2>Run</h2>{facts_table(_facts(run))}</body></html>\n"
    )


def title(run: Run) -> str:
    """What was measured, in a line."""
    target, plan = run.header["target"], run.header["plan"]
    return f"{plan['workload']} on {target.get('model', '?')} over {target.get('protocol', '?')}"


def _slo_note(run: Run) -> str:
    words = verdict(run)
    return f"<p class='note'>{escape(words)}</p>" if words else ""


def verdict(run: Run) -> str:
    """The objective, and what a search came to; "" without one."""
    if not run.slo:
        return ""
    words = f"SLO {slo.shown(run.slo)}, held against times from the intended ones on."
    if not run.searched:
        return words
    share, rate_hz = run.header["plan"]["attainment"], figures.rate_found_hz(run)
    if rate_hz is None:
        least_hz = min((stage.rate_hz for stage in run.stages if stage.rate_hz), default=0.0)
        found = f"none that was tried, down to {least_hz:.3g} sessions/s"
    else:
        found = f"{rate_hz:.3g} sessions/s"
    return f"{words} Greatest rate at which {share:.0%} of requests meet it: {found}."


def _stage_part(run: Run, one: Figures) -> str:
    stage = next(stage for stage in run.stages if stage.load == one.load)
    parts = [f"<h2>{escape(one.load)}: latencies in ms</h2>"]
    columns = ["", "samples", "mean", "p50", "p90", "p95", "p99", "max"]
    parts.append(table(columns, _latency_rows(one)))
    if one.replicas:
        columns = ["replica", "requests", "prompt tokens", "cached", "share", "output tokens"]
        parts.append(f"<h2>{escape(one.load)}: replicas</h2>")
        parts.append(table(columns, _replica_rows(one)))
    errors = failures(run.of(stage))
    if errors:
        parts.append(f"<h2>{escape(one.load)}: what failed</h2>")
        parts.append(table(["status", "requests", "said"], errors))
    return "".join(parts)


def _facts(run: Run) -> dict[str, str]:
    """Settings of the run, flat, as the header has them."""
    facts: dict[str, str] = {}
    for part in ("target", "plan", "machine"):
        for name, value in run.header[part].items():
            if isinstance(value, dict):
                facts |= {f"{name}.{inner}": str(v) for inner, v in value.items()}
            elif value not in (None, "", [], False):
                facts[name] = str(value)
    warmed = sum(record.warmup for record in run.records)
    return facts | {"warm-up requests, left out": str(warmed)}
