"""The compression report as one HTML page and one picture, made from its JSON alone; no script, and
nothing loaded from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from banyan.compression_tables import Figures, policy_name, short, tables
from loadtest.page import STYLE, facts_table, table
from loadtest.plots import Plot, Series, sheet, svg
from seams.errors import InvalidRequest

REPORT, PAGE, PICTURE = "report.json", "report.html", "report.svg"
PLAIN, KEEP_ALL = "model", "none"


def write(document: dict[str, Any], folder: Path) -> None:
    """All files of the report. Raises InvalidRequest if one cannot be written."""
    texts = {
        REPORT: json.dumps(document, indent=2) + "\n",
        PAGE: page(document),
        PICTURE: sheet(plots(document), title(document)) + "\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be written: {error.strerror}.") from None


def title(document: dict[str, Any]) -> str:
    """What was measured, in a line."""
    return f"KV cache compression of {document['run']['model']}"


def page(document: dict[str, Any]) -> str:
    """The whole HTML page."""
    drawn = "".join(svg(plot) for plot in plots(document))
    parts = [
        f"<h2>{escape(one.title)}</h2>{table([c.lstrip('>') for c in one.columns], one.rows)}"
        for one in tables(document)
    ]
    left_out = "".join(f"<p class='note'>{escape(said)}</p>" for said in document["left_out"])
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title(document))}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title(document))}</h1>"
        f"<p class='note'><code>{escape(document['command'])}</code></p>{left_out}"
        f"<h2>Plots</h2><div class='plots'>{drawn}</div>{''.join(parts)}"
        f"<h2>Run</h2>{facts_table(facts(document))}</body></html>\n"
    )


def facts(document: dict[str, Any]) -> dict[str, str]:
    """Texts, settings and machine, flat."""
    run = document["run"]
    found = {name: str(run[name]) for name in ("model", "fingerprint", "dtype")}
    found |= {f"shape.{name}": str(value) for name, value in run["shape"].items()}
    for text in run["texts"]:
        found[f"text: {text['name']}"] = (
            f"{text['bytes']:,} bytes, {text['tokens']:,} tokens, sha256 {text['sha256']}"
        )
    found |= {f"read for {part}": ", ".join(names) for part, names in document["read"].items()}
    found["calibration"] = str(run["calibration"])
    found |= {name: str(value) for name, value in run["settings"].items()}
    found |= {f"{name} took": f"{value} s" for name, value in run["took_s"].items()}
    return found | {name: str(value) for name, value in document["machine"].items()}


def plots(document: dict[str, Any]) -> list[Plot]:
    """What the report draws, always in this order."""
    figures = Figures(document)
    return [
        _size_and_kl(figures),
        _codecs(figures, "needles", "Needles found", "share found", share=True),
        _throughput(figures),
        _along(document, figures),
        _retention(figures),
        _running(document),
    ]


def _coded(figures: Figures, context: int) -> list[str]:
    return [codec for codec in figures.subjects(str(context), "token") if codec != PLAIN]


def _size_and_kl(figures: Figures) -> Plot:
    """A codec of one size at all contexts is named at the first of them."""
    lines, named = [], set()
    for context in figures.contexts:
        points, names = [], []
        for codec in _coded(figures, context):
            kl = figures.value(f"{context}/{codec}/kl")
            size = figures.value(f"{context}/{codec}/token")
            if kl is not None and size is not None:
                points.append((kl, size))
                names.append("" if (codec, size) in named else short(codec))
                named.add((codec, size))
        lines.append(Series(str(context), points, dots=True, names=names))
    return Plot("Bytes and KL", "KL to the model's dtype, nats", "bytes per token", lines, True)


def _codecs(figures: Figures, figure: str, head: str, label: str, *, share: bool) -> Plot:
    """A figure of each codec over its size."""
    lines = []
    for context in figures.contexts:
        points, names = [], []
        for codec in figures.subjects(str(context), figure):
            row = figures.row(f"{context}/{codec}/{figure}")
            size = figures.value(f"{context}/{codec}/token")
            if row is not None and size is not None:
                points.append((size, row["value"] / row["samples"] if share else row["value"]))
                names.append(short(codec))
        lines.append(Series(str(context), points, dots=True, names=names))
    return Plot(head, "bytes per token", label, lines, y_max=1.1 if share else None)


def _throughput(figures: Figures) -> Plot:
    lines = []
    for context in figures.contexts:
        points, names = [], []
        for codec in figures.subjects(str(context), "steps b=1"):
            ratio = figures.ratio(f"{context}/{codec}/steps b=1")
            size = figures.value(f"{context}/{codec}/token")
            if ratio is not None and size is not None:
                points.append((size, ratio))
                names.append(short(codec))
        lines.append(Series(str(context), points, dots=True, names=names))
    return Plot("Decode throughput", "bytes per token", "to no codec, batch 1", lines)


def _along(document: dict[str, Any], figures: Figures) -> Plot:
    """Of the longest context: whether errors grow with what is behind a token."""
    context = max(figures.contexts, default=0)
    start = f"kl along {context}/"
    lines = []
    for name, points in document["curves"].items():
        codec = name.removeprefix(start)
        mean = figures.value(f"{context}/{codec}/kl")
        if name.startswith(start) and mean:
            lines.append(Series(short(codec), [(x, y / mean) for x, y in _points(points)]))
    return Plot("KL by place", f"place in a context of {context:,}", "KL, to its mean", lines)


def _retention(figures: Figures) -> Plot:
    """Policies that move something: quality lost and what a moved MiB frees."""
    points, names = [], []
    for policy in figures.subjects("retention", "freed per MiB"):
        start = f"retention/{policy}"
        kl, freed = figures.value(f"{start}/kl"), figures.value(f"{start}/freed per MiB")
        if kl is not None and freed is not None:
            points.append((kl, freed))
            names.append(policy_name(policy))
    line = Series("", points, dots=True, names=names)
    return Plot("Freed per MiB moved", "KL to the model that keeps all", "blocks", [line])


def _running(document: dict[str, Any]) -> Plot:
    """Of every codec without a policy and every policy without a codec."""
    lines = []
    for name, points in document["curves"].items():
        codec, _, policy = name.removeprefix("running/").partition(" + ")
        if name.startswith("running/") and (codec == PLAIN or policy == KEEP_ALL):
            label = policy if codec == PLAIN else short(codec)
            lines.append(Series(label, _points(points)))
    return Plot("In a small pool", "step", "generations at once", lines)


def _points(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points]
