"""Bench rows of summaries: each policy beside the best of the others. Numbers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seams.bench import Row
from simulate.experiment import Summary
from simulate.policies.registry import OURS

HIGHER_IS_BETTER = {"goodput", "kept_share", "cached_share", "device_share", "host_share"}
HEADLINE = ("goodput", "ttft_mean", "ttft_p99", "cached_share", "imbalance", "imbalance_window")
MORE = ("e2e_mean", "e2e_p99", "itl_mean", "itl_p99", "device_share", "host_share", "blocks_used",
        "preemptions", "moved", "failed")  # fmt: skip


def rows_of(summaries: Sequence[Summary], *, more: bool = False) -> Iterator[Row]:
    """{policy}_{figure} rows, with the load's label behind where there are several loads. Ours
    stand against the best of the others."""
    labels = dict.fromkeys(summary.label for summary in summaries)
    for label in labels:
        here = [summary for summary in summaries if summary.label == label]
        suffix = f"_{label}" if len(labels) > 1 and label else ""
        for summary in here:
            failed = ("failed",) if "failed" in summary.figures and summary.value("failed") else ()
            for name in (*HEADLINE, *MORE) if more else (*HEADLINE, *failed):
                yield _row(summary, name, suffix, here)


def _row(summary: Summary, name: str, suffix: str, here: Sequence[Summary]) -> Row:
    value, unit = summary.figures[name]
    others = [other for other in here if other.policy != summary.policy]
    row = f"{summary.policy}_{name}{suffix}"
    if summary.policy != OURS or not others:
        return Row(row, value, unit, summary.samples)
    best = best_of(others, name)
    return Row(row, value, unit, summary.samples, best.policy, best.value(name))


def best_of(summaries: Sequence[Summary], name: str) -> Summary:
    """Whoever is best in one figure."""
    choose = max if name in HIGHER_IS_BETTER else min
    return choose(summaries, key=lambda summary: summary.value(name))
