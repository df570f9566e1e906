"""A page of figures: bars of every policy under every load, as plain SVG in one HTML file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulate.experiment import Summary
from simulate.policies.registry import OURS

FIGURES = (
    ("goodput", "requests a second within the limits"),
    ("ttft_mean", "mean time to first token, s"),
    ("ttft_p99", "p99 time to first token, s"),
    ("cached_share", "share of prompt tokens from the cache"),
    ("imbalance_window", "busiest replica by the mean, per window"),
)
WIDTH, BAR, GAP, LABEL, VALUE = 720, 16, 6, 170, 70
STYLE = "body{font:14px sans-serif;margin:2em}text{font:12px sans-serif}h2{font-size:16px}"


def write_page(path: Path, summaries: Sequence[Summary], report: dict[str, Any]) -> None:
    """One section for each load and figure; the report's JSON is in the page too."""
    parts = [
        f"<h2>{html.escape(title)}{_of(label)}</h2>{_bars(summaries, label, name)}"
        for label in dict.fromkeys(summary.label for summary in summaries)
        for name, title in FIGURES
    ]
    data = json.dumps(report).replace("</", "<\\/")
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>banyan simulate</title><style>{STYLE}</style>"
        f"<h1>banyan simulate</h1><p>{html.escape(str(report['command']))}</p>{''.join(parts)}"
        f'<script type="application/json" id="report">{data}</script>\n'
    )


def _of(label: str) -> str:
    return f", at {html.escape(label)} % of saturation" if label else ""


def _bars(summaries: Sequence[Summary], label: str, name: str) -> str:
    here = [summary for summary in summaries if summary.label == label]
    longest = max((summary.value(name) for summary in here), default=0.0) or 1.0
    room = WIDTH - LABEL - VALUE
    bars = []
    for at, summary in enumerate(here):
        value, y = summary.value(name), at * (BAR + GAP)
        length = max(1.0, room * value / longest)
        colour = "#2c7a4b" if summary.policy == OURS else "#9aa5b1"
        bars.append(
            f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{html.escape(summary.policy)}'
            f'</text><rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" '
            f'fill="{colour}"/><text x="{LABEL + length + 6:.1f}" y="{y + 12}">{value:.4g}</text>'
        )
    height = len(here) * (BAR + GAP)
    return f'<svg width="{WIDTH}" height="{height}">{"".join(bars)}</svg>'
