"""Every figure of a report, as pure functions of a run's records. No files, no clock.

Warm-up requests count nowhere. Latencies are of requests that were answered in full; the ones
called `from_intended` begin when a request should have been sent, and an objective is held against
those. A request that failed, or was never sent because another failed, meets no objective.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from loadtest.records import SKIPPED, Record, Run, Stage
from loadtest.slo import Slo
from seams.bench import Row

SHARES = (0.5, 0.9, 0.95, 0.99)
POINTS_MAX = 400  # of one line in a plot
BINS = 40  # of a plot over time


@dataclass(frozen=True)
class Spread:
    """A distribution in seconds; quantiles between samples are interpolated."""

    samples: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True)
class ReplicaLoad:
    """What one replica did."""

    replica: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Figures:
    """One stage. `cached_share` is None where the endpoint does not say, `attainment` and
    `goodput_hz` without an objective."""

    load: str
    rate_hz: float | None
    requests: int
    answered: int
    failed: int
    skipped: int
    statuses: dict[str, int]
    moves: int
    wall_s: float
    request_hz: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_hz: float
    total_tokens_hz: float
    cached_tokens: int | None
    cached_share: float | None
    attainment: float | None
    goodput_hz: float | None
    latencies: dict[str, Spread]
    replicas: tuple[ReplicaLoad, ...]

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, at least one."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values_s: Iterable[float | None]) -> Spread | None:
    """Of those that are there; None for none."""
    ordered = sorted(value for value in values_s if value is not None)
    if not ordered:
        return None
    mean_s = math.fsum(ordered) / len(ordered)
    p50_s, p90_s, p95_s, p99_s = (quantile(ordered, share) for share in SHARES)
    return Spread(len(ordered), mean_s, p50_s, p90_s, p95_s, p99_s, ordered[-1])


def from_intended_s(record: Record, latency_s: float | None) -> float | None:
    """A latency that began at `sent_s`, from `intended_s` on."""
    delay_s = record.delay_s
    return None if latency_s is None or delay_s is None else latency_s + delay_s


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """The samples of every latency, seconds, in the records' order. `delay` is the generator's own
    and has those of failed requests too."""
    good = [record for record in records if record.ok]
    found: dict[str, list[float | None]] = {
        "ttft": [r.ttft_s for r in good],
        "itl": [gap_s for r in good for gap_s in r.itls_s],
        "tpot": [r.tpot_s for r in good],
        "e2e": [r.e2e_s for r in good],
        "ttft_from_intended": [from_intended_s(r, r.ttft_s) for r in good],
        "e2e_from_intended": [from_intended_s(r, r.e2e_s) for r in good],
        "delay": [r.delay_s for r in records],
    }
    return {name: [v for v in values if v is not None] for name, values in found.items()}


def meets(record: Record, slo: Slo) -> bool:
    """Whether a request held every objective. `itl` means its longest gap; an answer of one token
    has none and holds it. One of several tokens that came in one piece is held to its whole time:
    nobody saw its gaps."""
    if not record.ok:
        return False
    e2e_s = from_intended_s(record, record.e2e_s)
    ttft_s = from_intended_s(record, record.ttft_s)
    tpot_s, itl_s = record.tpot_s, max(record.itls_s, default=None)
    if record.output_tokens > 1 and itl_s is None and e2e_s is not None:
        tpot_s, itl_s = e2e_s / (record.output_tokens - 1), e2e_s
    needed = {
        "ttft": e2e_s if ttft_s is None else ttft_s,
        "e2e": e2e_s,
        "tpot": tpot_s,
        "itl": itl_s,
    }
    return all((value := needed[metric]) is None or value <= slo[metric] for metric in slo)


def wall_s(records: Sequence[Record]) -> float:
    """From the first intended request to the last end of one that was sent; 0 for none."""
    ends_s = [record.end_s for record in records if record.sent_s is not None]
    return max(ends_s) - min(record.intended_s for record in records) if ends_s else 0.0


def per_s(amount: float, seconds: float) -> float:
    """A rate; 0 over no time."""
    return amount / seconds if seconds > 0 else 0.0


def cached_share(records: Iterable[Record]) -> float | None:
    """Of the prompt tokens of answered requests whose endpoint says; None if there are none."""
    told = [r for r in records if r.ok and r.cached_tokens is not None]
    prompt_tokens = sum(r.prompt_tokens for r in told)
    if not prompt_tokens:
        return None
    return sum(r.cached_tokens or 0 for r in told) / prompt_tokens


def figures(run: Run, stage: Stage) -> Figures:
    """All figures of one stage."""
    records, slo = run.of(stage), run.slo
    good = [record for record in records if record.ok]
    took_s, tokens = wall_s(records), sum(r.output_tokens for r in good)
    prompt_tokens = sum(r.prompt_tokens for r in good)
    told = [r.cached_tokens for r in good if r.cached_tokens is not None]
    held = sum(meets(record, slo) for record in records) if slo else None
    spreads = {name: spread(values) for name, values in latencies(records).items()}
    skipped = sum(record.status == SKIPPED for record in records)
    return Figures(
        load=stage.load,
        rate_hz=stage.rate_hz,
        requests=len(records),
        answered=len(good),
        failed=len(records) - len(good) - skipped,
        skipped=skipped,
        statuses=dict(sorted(Counter(r.status for r in records).items())),
        moves=sum(record.moves for record in records),
        wall_s=took_s,
        request_hz=per_s(len(good), took_s),
        prompt_tokens=prompt_tokens,
        output_tokens=tokens,
        output_tokens_hz=per_s(tokens, took_s),
        total_tokens_hz=per_s(tokens + prompt_tokens, took_s),
        cached_tokens=sum(told) if told else None,
        cached_share=cached_share(records),
        attainment=None if held is None or not records else held / len(records),
        goodput_hz=None if held is None else per_s(held, took_s),
        latencies={name: found for name, found in spreads.items() if found is not None},
        replicas=_replicas(good),
    )


def _replicas(good: Sequence[Record]) -> tuple[ReplicaLoad, ...]:
    names = sorted({record.replica for record in good if record.replica})
    return tuple(_replica(name, [r for r in good if r.replica == name]) for name in names)


def _replica(name: str, mine: Sequence[Record]) -> ReplicaLoad:
    return ReplicaLoad(
        name,
        len(mine),
        sum(r.prompt_tokens for r in mine),
        sum(r.cached_tokens or 0 for r in mine),
        sum(r.output_tokens for r in mine),
    )


def holds(run: Run, stage: Stage) -> bool:
    """Whether as many of the stage's requests meet the run's objective as it wants."""
    records = run.of(stage)
    held = sum(meets(record, run.slo) for record in records)
    return held >= float(run.header["plan"]["attainment"]) * len(records)


def rate_found_hz(run: Run) -> float | None:
    """What a search came to: the greatest rate of a stage that holds, None if none does."""
    held = [stage.rate_hz for stage in run.stages if stage.rate_hz and holds(run, stage)]
    return max(held, default=None)


def all_figures(run: Run) -> list[Figures]:
    """Those of every stage that has requests."""
    return [figures(run, stage) for stage in run.stages if run.of(stage)]


def rows(found: Sequence[Figures]) -> list[Row]:
    """The project's bench rows, one set per stage; several stages are told apart by their load."""
    return [row for one in found for row in _rows(one, f"@{one.load}" if len(found) > 1 else "")]


def _rows(one: Figures, mark: str) -> list[Row]:
    count, plain = one.requests, list[tuple[str, float | None, str]]()
    made = [
        Row(f"{name}_{part}{mark}", getattr(one.latencies[name], f"{part}_s") * 1e3, "ms",
            one.latencies[name].samples)
        for name in one.latencies
        for part in ("p50", "p90", "p95", "p99")
    ]  # fmt: skip
    plain += [
        ("request_rate", one.request_hz, "requests/s"),
        ("output_rate", one.output_tokens_hz, "tokens/s"),
        ("total_rate", one.total_tokens_hz, "tokens/s"),
        ("cached_share", one.cached_share, "of prompt tokens"),
        ("attainment", one.attainment, "of requests"),
        ("goodput", one.goodput_hz, "requests/s"),
        ("failed", float(one.failed), "requests"),
        ("skipped", float(one.skipped), "requests"),
        ("wall", one.wall_s, "s"),
    ]
    return made + [Row(n + mark, v, unit, count) for n, v, unit in plain if v is not None]


# ---- what plots show ---------------------------------------------------------------------------

Line = list[tuple[float, float]]
"""Points (x, y)."""


def distribution(values: Sequence[float]) -> Line:
    """(value, share of samples at most as large), thinned to the points that a plot can show."""
    ordered = sorted(values)
    count = len(ordered)
    taken = range(count) if count <= POINTS_MAX else _thinned(count)
    return [(ordered[i], (i + 1) / count) for i in taken]


def _thinned(count: int) -> list[int]:
    """Evenly, with both ends: the tail's last samples are what such a plot is read for."""
    even = {round(i * (count - 1) / (POINTS_MAX - 1)) for i in range(POINTS_MAX)}
    return sorted(even | set(range(max(0, count - POINTS_MAX // 10), count)))


def _edges_s(records: Sequence[Record]) -> list[float]:
    """BINS + 1 times from the first intended request to the last end."""
    begin_s, took_s = min(r.intended_s for r in records), wall_s(records)
    return [begin_s + took_s * number / BINS for number in range(BINS + 1)]


def cached_over_time(records: Sequence[Record]) -> Line:
    """(seconds since the first request, share of cached prompt tokens), by when requests were sent;
    bins in which none was sent have no point."""
    told = [r for r in records if r.ok and r.cached_tokens is not None and r.sent_s is not None]
    if not told:
        return []
    edges_s = _edges_s(records)
    bins: dict[int, list[Record]] = {}
    for record in told:
        at = bisect_right(edges_s, record.sent_s or 0.0) - 1
        bins.setdefault(min(max(at, 0), BINS - 1), []).append(record)
    middles_s = [(a + b) / 2 - edges_s[0] for a, b in pairwise(edges_s)]
    shares = [(middles_s[at], cached_share(mine)) for at, mine in sorted(bins.items())]
    return [(at_s, share) for at_s, share in shares if share is not None]


def in_flight_over_time(records: Sequence[Record]) -> dict[str, Line]:
    """Replica -> (seconds since the first request, requests that it has on average). Requests of
    which no replica is known are those of ""."""
    sent = [r for r in records if r.sent_s is not None]
    if not sent:
        return {}
    edges_s = _edges_s(records)
    lines: dict[str, Line] = {}
    for name in sorted({record.replica for record in sent}):
        mine = [(r.sent_s or 0.0, r.end_s) for r in sent if r.replica == name]
        lines[name] = [
            ((a + b) / 2 - edges_s[0], per_s(sum(_overlap_s(m, a, b) for m in mine), b - a))
            for a, b in pairwise(edges_s)
        ]
    return lines


def _overlap_s(span: tuple[float, float], begin_s: float, end_s: float) -> float:
    return max(0.0, min(span[1], end_s) - max(span[0], begin_s))


def throughput_latency(found: Sequence[Figures]) -> Line:
    """(output tokens/s, p50 of TTFT from the intended time in seconds) per stage."""
    shown = [one for one in found if "ttft_from_intended" in one.latencies]
    return [(one.output_tokens_hz, one.latencies["ttft_from_intended"].p50_s) for one in shown]


def throughput_latency_within(records: Sequence[Record], parts: int = 12) -> Line:
    """The same of one stage: of the requests that ended in each of `parts` parts of its time."""
    good = [r for r in records if r.ok]
    if not good or wall_s(records) <= 0:
        return []
    begin_s, part_s = min(r.intended_s for r in records), wall_s(records) / parts
    points: Line = []
    for number in range(parts):
        low_s = begin_s + number * part_s
        mine = [r for r in good if low_s < r.end_s <= low_s + part_s]
        found = spread(from_intended_s(r, r.ttft_s) for r in mine)
        if found is not None:
            points.append((sum(r.output_tokens for r in mine) / part_s, found.p50_s))
    return points
