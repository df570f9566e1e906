"""Scenarios 1 and 19 of reliability.md: blocks conserved, outputs exact, under random operations.

Full size is 200 seeds x 10,000 steps; CI runs 1 % of it: 20 seeds x 1,000 steps. The same over
tiers that are too small and lose calls: 200 x 10,000, of which CI runs 6 x 600.
"""

from collections import Counter

import pytest
from engine_machine import SHAPES, Machine, replayable

CI = [(SHAPES[seed % len(SHAPES)], seed) for seed in range(20)]
TIERED = [(SHAPES[seed % len(SHAPES)], seed) for seed in range(2000, 2006)]
SOAK = [(SHAPES[seed % len(SHAPES)], seed) for seed in range(1000, 1200)]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="worker.engine.core")  # injected faults are logged


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize(("shape", "seed"), CI, ids=str)
def test_conservation(shape: str, seed: int, totals: Counter[str]) -> None:
    with replayable("tests/engine/test_engine_stateful.py::test_conservation", f"{shape}-{seed}"):
        machine = Machine(shape, seed)
        machine.run(1000)
        totals.update(machine.counts)


def test_the_machine_went_everywhere(totals: Counter[str]) -> None:
    """Runs after the cases above: a machine that never preempts proves nothing about it."""
    for what in ("preemptions", "recomputed", "cached", "forked"):
        assert totals[what] > 100, what
    for end in ("NoneType", "Cancelled", "InternalError", "DeadlineExceeded", "Overloaded"):
        assert totals[end] > 5, end
    assert totals["OutOfBlocks"] > 0


@pytest.mark.parametrize("case", [("window", 1015), ("window/inverted", 1019)], ids=str)
def test_a_match_without_its_boundary_has_whole_windows(case: tuple[str, int]) -> None:
    """Runs in which no block is left for a boundary, and the window before it has been stripped."""
    Machine(*case).run(400)


@pytest.fixture(scope="module")
def tiered_totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize(("shape", "seed"), TIERED, ids=str)
def test_conservation_over_tiers(shape: str, seed: int, tiered_totals: Counter[str]) -> None:
    """Blocks leave and come back, or not, in time, late or wrong, while all of that happens. The
    tiers have threads: what happens when is not the same in each run."""
    test = "tests/engine/test_engine_stateful.py::test_conservation_over_tiers"
    with replayable(test, f"{shape}-{seed}"):
        machine = Machine(shape, seed, tiered=True)
        machine.run(600)
        tiered_totals.update(machine.counts)


def test_the_machine_used_every_tier(tiered_totals: Counter[str]) -> None:
    print(tiered_totals)
    assert tiered_totals["HOST"] > 20
    assert tiered_totals["DISK"] + tiered_totals["SHARED"] > 5


@pytest.mark.soak
@pytest.mark.parametrize(("shape", "seed"), SOAK, ids=str)
def test_conservation_over_tiers_full(shape: str, seed: int) -> None:
    test = "tests/engine/test_engine_stateful.py::test_conservation_over_tiers_full"
    with replayable(test, f"{shape}-{seed}"):
        Machine(shape, seed, tiered=True).run(10_000)


@pytest.mark.soak
@pytest.mark.parametrize(("shape", "seed"), SOAK, ids=str)
def test_conservation_full(shape: str, seed: int) -> None:
    test = "tests/engine/test_engine_stateful.py::test_conservation_full"
    with replayable(test, f"{shape}-{seed}"):
        Machine(shape, seed).run(10_000)
