"""Two runs beside each other: ratios of their figures, with intervals by bootstrap.

Whole sessions are drawn with replacement, since requests of one session are not independent. What a
run has but once, its throughput, gets a ratio and no interval. The
intervals say what other sessions of the same kind would have given on the same day; what differs
between two days, or between two states of a machine, no run can tell about itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loadtest.figures import from_intended_s, meets, wall_s
from loadtest.records import Record, Run, Stage
from loadtest.slo import Slo
from seams.bench import Row
from seams.errors import InvalidRequest

RESAMPLES = 1000
CONFIDENCE = 0.95
DIGITS = 9  # of a ratio; further ones are floating point's
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
"""One row per draw, one column per session: how often it was drawn."""
Value = Callable[[Counts], Floats]
"""A figure of each draw; NaN where none of its sessions has it."""
CELLS_MAX = 4_000_000  # of a table of draws and samples that is in memory at once


@dataclass(frozen=True)
class Ratio:
    """One figure of B over A's. `low` and `high` bound it with 95 % confidence; they are None where
    there is no interval, or sessions are too few to say."""

    name: str
    unit: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    sessions: int

    @property
    def differs(self) -> bool:
        """The interval leaves 1 out."""
        if self.low is None or self.high is None:
            return False
        return not self.low <= 1 <= self.high

    def row(self) -> Row:
        """The project's bench row: B's figure against A's."""
        bounds = {"ratio_low": self.low, "ratio_high": self.high}
        others = {name: value for name, value in bounds.items() if value is not None}
        return Row(self.name, self.b, self.unit, self.sessions, "A", self.a, others)


@dataclass(frozen=True)
class _Figure:
    name: str
    unit: str
    value: Value
    drawn: bool = True  # else it is of the run as a whole


def compare(a: Run, b: Run, *, seed: int = 1, resamples: int = RESAMPLES) -> list[Ratio]:
    """Of every stage that both have: the same load, or the only one of each. Raises InvalidRequest
    if there is none, or if they were held to different objectives."""
    if a.slo != b.slo:
        raise InvalidRequest("The runs were held to different objectives (--slo).")
    pairs = _pairs(a, b)
    found: list[Ratio] = []
    for ours, theirs in pairs:
        mark = f"@{ours.load}" if len(pairs) > 1 else ""
        found += _stage(a.of(ours), b.of(theirs), a.slo, mark, seed, resamples)
    return found


def differing(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same in both headers."""
    found: dict[str, tuple[Any, Any]] = {}
    for part in ("target", "plan", "machine"):
        one, other = a.header[part], b.header[part]
        for name in dict.fromkeys([*one, *other]):
            if one.get(name) != other.get(name):
                found[name] = (one.get(name), other.get(name))
    return found


def _pairs(a: Run, b: Run) -> list[tuple[Stage, Stage]]:
    ours = [stage for stage in a.stages if a.of(stage)]
    theirs = [stage for stage in b.stages if b.of(stage)]
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    by_load = {stage.load: stage for stage in theirs}
    pairs = [(stage, by_load[stage.load]) for stage in ours if stage.load in by_load]
    if not pairs:
        raise InvalidRequest("The runs have no load in common.")
    return pairs


def _stage(
    a: Sequence[Record], b: Sequence[Record], slo: Slo, mark: str, seed: int, resamples: int
) -> list[Ratio]:
    ours, theirs = _sessions(a), _sessions(b)
    rng = np.random.default_rng(seed)
    draws_a, draws_b = _draws(rng, len(ours), resamples), _draws(rng, len(theirs), resamples)
    pairs = zip(_figures(ours, wall_s(a), slo), _figures(theirs, wall_s(b), slo), strict=True)
    count = min(len(ours), len(theirs))
    found = (_ratio(one, other, draws_a, draws_b, mark, count) for one, other in pairs)
    return [ratio for ratio in found if ratio is not None]


def _draws(rng: np.random.Generator, sessions: int, resamples: int) -> Counts:
    """All sessions once, then so many draws of as many with replacement."""
    drawn = rng.multinomial(sessions, np.full(sessions, 1 / sessions), resamples)
    return np.concatenate([np.ones((1, sessions), np.int64), drawn])


def _sessions(records: Sequence[Record]) -> list[list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.session, []).append(record)
    return list(found.values())


def _ratio(
    one: _Figure, other: _Figure, draws_a: Counts, draws_b: Counts, mark: str, count: int
) -> Ratio | None:
    """None where one of them has no such figure, or none to divide by."""
    (a, *drawn_a), (b, *drawn_b) = one.value(draws_a), other.value(draws_b)
    if not (np.isfinite(a) and np.isfinite(b) and a > 0):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.round(np.array(drawn_b) / np.array(drawn_a), DIGITS)
    ratios = ratios[np.isfinite(ratios)]
    low = high = None
    if one.drawn and count > 1 and len(ratios):
        edge = (1 - CONFIDENCE) / 2
        low, high = (float(x) for x in np.quantile(ratios, [edge, 1 - edge]))
    ratio = round(float(b / a), DIGITS)
    return Ratio(one.name + mark, one.unit, float(a), float(b), ratio, low, high, count)


def _figures(sessions: list[list[Record]], took_s: float, slo: Slo) -> list[_Figure]:
    """What is compared, in the report's order."""
    good = [[r for r in session if r.ok] for session in sessions]
    quantiles = [
        _Figure(f"{name}_{part}", "ms", _quantile_of(good, of, share))
        for name, of in _SAMPLES.items()
        for part, share in (("p50", 0.5), ("p99", 0.99))
    ]
    told = [[r for r in session if r.cached_tokens is not None] for session in good]
    every = _sums(sessions, lambda r: 1.0)
    held = _sums(sessions, lambda r: float(meets(r, slo)))
    seconds = np.full(len(sessions), took_s / len(sessions))
    rates = [
        ("request_rate", "requests/s", _sums(good, lambda r: 1.0), seconds),
        ("output_rate", "tokens/s", _sums(good, lambda r: float(r.output_tokens)), seconds),
        ("cached_share", "of prompt tokens", _sums(told, lambda r: float(r.cached_tokens or 0)),
         _sums(told, lambda r: float(r.prompt_tokens))),
        ("answered", "of requests", _sums(good, lambda r: 1.0), every),
    ]  # fmt: skip
    if slo:
        rates += [
            ("attainment", "of requests", held, every),
            ("goodput", "requests/s", held, seconds),
        ]
    return quantiles + [
        _Figure(name, unit, _per(over, under), drawn=under is not seconds)
        for name, unit, over, under in rates
    ]


_SAMPLES: dict[str, Callable[[Record], Sequence[float | None]]] = {
    "ttft": lambda r: [r.ttft_s],
    "itl": lambda r: r.itls_s,
    "tpot": lambda r: [r.tpot_s],
    "e2e": lambda r: [r.e2e_s],
    "ttft_from_intended": lambda r: [from_intended_s(r, r.ttft_s)],
    "e2e_from_intended": lambda r: [from_intended_s(r, r.e2e_s)],
}


def _quantile_of(
    sessions: list[list[Record]], of: Callable[[Record], Sequence[float | None]], share: float
) -> Value:
    """In ms."""
    pairs = [
        (1e3 * v, number)
        for number, session in enumerate(sessions)
        for r in session
        for v in of(r)
        if v is not None
    ]
    pairs.sort()
    values = np.array([value for value, _ in pairs], np.float64)
    owners = np.array([number for _, number in pairs], np.int64)

    def value(draws: Counts) -> Floats:
        if not len(values):
            return np.full(len(draws), np.nan)
        rows = max(1, CELLS_MAX // len(values))
        parts = [draws[at : at + rows] for at in range(0, len(draws), rows)]
        return np.concatenate(
            [_weighted_quantile(values, part[:, owners], share) for part in parts]
        )

    return value


def _weighted_quantile(values: Floats, weights: Counts, share: float) -> Floats:
    """Of sorted values that stand as often as each row of `weights` says; as figures.quantile."""
    last = np.cumsum(weights, axis=1)  # how many stand up to each value
    at = share * (last[:, -1] - 1)
    low = np.floor(at)
    high = np.minimum(low + 1, last[:, -1] - 1)
    below, above = (
        values[np.minimum((last <= place[:, None]).sum(axis=1), len(values) - 1)]
        for place in (low, high)
    )
    found: Floats = np.where(last[:, -1] > 0, below + (above - below) * (at - low), np.nan)
    return found


def _sums(sessions: list[list[Record]], of: Callable[[Record], float]) -> Floats:
    """One sum per session."""
    return np.array([sum(of(record) for record in session) for session in sessions], np.float64)


def _per(over: Floats, under: Floats) -> Value:
    def value(draws: Counts) -> Floats:
        below = draws @ under
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = np.where(below > 0, draws @ over / below, np.nan)
        return found

    return value
