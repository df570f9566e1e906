"""The plots of a report: which figures of a run go into which picture. Draws nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest import figures
from loadtest.plots import Plot, Series
from loadtest.records import Run, Stage


def plots(run: Run) -> list[Plot]:
    """What the report draws, always in this order."""
    stages = [stage for stage in run.stages if run.of(stage)]
    samples = {stage.number: figures.latencies(run.of(stage)) for stage in stages}

    def shares(name: str, title: str) -> Plot:
        lines = [
            Series(
                stage.load if len(stages) > 1 else "",
                figures.distribution([1e3 * v for v in samples[stage.number][name]]),
            )
            for stage in stages
        ]
        return Plot(title, "at most, ms", "share of samples", lines, log_x=True, y_max=1.0)

    return [
        shares("ttft", "Time to first token (TTFT)"),
        shares("itl", "Between tokens (ITL)"),
        shares("e2e", "Whole answer (E2E)"),
        _throughput(run, stages),
        _cached(run, stages),
        _loads(run, stages),
    ]


def _throughput(run: Run, stages: Sequence[Stage]) -> Plot:
    if len(stages) > 1:
        found = sorted(figures.all_figures(run), key=lambda one: one.output_tokens_hz)
        points, title = figures.throughput_latency(found), "Throughput and latency, per stage"
    else:
        of_stages = [figures.throughput_latency_within(run.of(stage)) for stage in stages]
        points = [point for points in of_stages for point in points]
        title = "Throughput and latency, per part of the run"
    in_ms = [(rate, 1e3 * at_s) for rate, at_s in points]
    series = Series("", in_ms, dots=len(stages) < 2, marks=True)
    return Plot(title, "output tokens/s", "TTFT p50 from the intended time, ms", [series])


def _cached(run: Run, stages: Sequence[Stage]) -> Plot:
    lines = [
        Series(stage.load if len(stages) > 1 else "", figures.cached_over_time(run.of(stage)))
        for stage in stages
    ]
    title = "Cached share over time"
    return Plot(title, "s since the stage began", "of prompt tokens", lines, y_max=1.0)


def _loads(run: Run, stages: Sequence[Stage]) -> Plot:
    """Of the stage with the greatest rate."""
    stage = max(stages, key=lambda one: one.rate_hz or 0.0, default=None)
    found = figures.in_flight_over_time(run.of(stage)) if stage is not None else {}
    nameless = "not known" if len(found) > 1 else "all replicas"
    lines = [Series(name or nameless, line) for name, line in found.items()]
    which = f", {stage.load}" if stage is not None and len(stages) > 1 else ""
    return Plot(f"Load per replica{which}", "s since the stage began", "requests in flight", lines)
