"""The grid: capacities, numbers of routers and loads crossed, and in how many ours is first.

It makes cases and reads summaries; how a case is run it does not know. Where there is one router,
our policy runs twice more, told times of prompts that are wrong for good, as `cost+slow` and
`cost+fast`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from seams.bench import Row
from simulate.cluster import Setup
from simulate.experiment import Case, Summary
from simulate.policies.cost import Wrong
from simulate.policies.registry import OURS
from simulate.rows import best_of

CAPACITIES = (0.1, 0.2)  # of the workload's different blocks, over the whole fleet
ROUTERS = (1, 4)
LOADS = (0.5, 0.8, 0.95)  # of the saturation
WRONG = {"slow": Wrong(prefill=3.0), "fast": Wrong(prefill=1 / 3)}
NEAR = 1.01  # times the best of the others: still first
FIGURES = ("ttft_mean", "ttft_p99", "e2e_mean", "cached_share", "imbalance")
JUDGED = ("ttft_mean", "ttft_p99")


@dataclass(frozen=True)
class Fleet:
    """What one capacity makes of the fleet. `saturation` in requests a second; `ideal` is the share
    of prompt tokens that one cache of the whole capacity has."""

    setup: Setup
    saturation: float
    ideal: float


@dataclass(frozen=True)
class Corner:
    """One cell of the grid."""

    capacity: float
    routers: int
    load: float

    @property
    def label(self) -> str:
        """As in c20_r1_l95."""
        return f"c{100 * self.capacity:.0f}_r{self.routers}_l{100 * self.load:.0f}"


def corners() -> list[Corner]:
    """All of them."""
    return [Corner(*cell) for cell in product(CAPACITIES, ROUTERS, LOADS)]


def cases(fleets: Mapping[float, Fleet], policies: Sequence[str], seeds: int) -> list[Case]:
    """Every policy in every corner, and ours told wrong times. `fleets` by capacity. All of the
    first seed come first."""
    made = []
    for corner in corners():
        fleet = fleets[corner.capacity]
        plain = Case(
            OURS, 0, replace(fleet.setup, routers=corner.routers),
            corner.load * fleet.saturation, corner.label,
        )  # fmt: skip
        made += [replace(plain, policy=name) for name in policies]
        if corner.routers == 1:
            made += [
                replace(plain, policy=f"{OURS}+{h}", wrong=wrong) for h, wrong in WRONG.items()
            ]
    return [replace(case, seed=seed) for seed in range(1, seeds + 1) for case in made]


def rows(fleets: Mapping[float, Fleet], summaries: Sequence[Summary]) -> Iterator[Row]:
    """Ours beside all others, figure by figure and corner by corner; what that comes to, last."""
    cells = [(c, [s for s in summaries if s.label == c.label]) for c in corners()]
    for name in FIGURES:
        for corner, here in cells:
            yield _beside(name, OURS, f"{name}_{corner.label}", here)
    for how in WRONG:
        for corner, here in _told(cells):
            row = f"told_{how}_ttft_mean_{corner.label}"
            yield _beside("ttft_mean", f"{OURS}+{how}", row, here)
    yield from _verdict(fleets, cells)


Cells = list[tuple[Corner, list[Summary]]]


def _told(cells: Cells) -> Cells:
    return [(corner, here) for corner, here in cells if corner.routers == 1]


def _ours(here: Sequence[Summary], policy: str = OURS) -> Summary:
    return next(summary for summary in here if summary.policy == policy)


def _others(here: Sequence[Summary]) -> list[Summary]:
    return [summary for summary in here if summary.policy.partition("+")[0] != OURS]


def _beside(name: str, policy: str, row: str, here: Sequence[Summary]) -> Row:
    ours, others = _ours(here, policy), _others(here)
    value, unit = ours.figures[name]
    if not others:
        return Row(row, value, unit, ours.samples)
    best = best_of(others, name)
    everyone = {other.policy: other.value(name) for other in others}
    return Row(row, value, unit, ours.samples, best.policy, best.value(name), everyone)


def _verdict(fleets: Mapping[float, Fleet], cells: Cells) -> Iterator[Row]:
    samples = sum(_ours(here).samples for _, here in cells)
    shares = [_ours(here).value("cached_share") / fleets[c.capacity].ideal for c, here in cells]
    yield Row("share_of_ideal_min", min(shares), "of the ideal's", samples)
    worst = max(_ours(here).value("imbalance") for _, here in cells)
    yield Row("imbalance_max", worst, "max / mean", samples)
    for name in JUDGED:
        yield _won(f"first_{name}", name, OURS, cells)
    for how in WRONG:
        yield _won(f"first_told_{how}_ttft_mean", "ttft_mean", f"{OURS}+{how}", _told(cells))


def _won(row: str, name: str, policy: str, cells: Cells) -> Row:
    ours = [(_ours(here, policy), _others(here)) for _, here in cells]
    won = sum(is_first(name, mine, others) for mine, others in ours)
    runs = sum(mine.samples for mine, _ in ours)
    return Row(row, float(won), "corners", runs, "all corners", float(len(cells)))


def is_first(name: str, ours: Summary, others: Sequence[Summary]) -> bool:
    """Best, or within NEAR of the best, in a figure of which less is better."""
    return all(ours.value(name) <= NEAR * other.value(name) for other in others)
