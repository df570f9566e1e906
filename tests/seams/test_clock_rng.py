"""Clock and Rng: one suite for every implementation."""

import pytest

from seams.clock import Clock, SystemClock, VirtualClock
from seams.rng import Rng, SeededRng, SystemRng


@pytest.mark.parametrize("clock", [SystemClock(), VirtualClock(5.0)], ids=["system", "virtual"])
def test_time_never_goes_back(clock: Clock) -> None:
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)


def test_virtual_time_moves_only_when_told() -> None:
    clock = VirtualClock()
    assert (clock.now(), clock.now()) == (0.0, 0.0)
    clock.advance(2.5)
    assert clock.now() == 2.5


@pytest.mark.parametrize("rng", [SystemRng(), SeededRng(1)], ids=["system", "seeded"])
def test_numbers_stay_in_their_ranges(rng: Rng) -> None:
    floats = [rng.random() for _ in range(2000)]
    assert 0 <= min(floats) < 0.1
    assert 0.9 < max(floats) < 1
    assert {rng.bits(2) for _ in range(500)} == {0, 1, 2, 3}


def test_a_seed_replays() -> None:
    a, b, c = SeededRng(7), SeededRng(7), SeededRng(8)
    first = [a.bits(64) for _ in range(5)]
    assert first == [b.bits(64) for _ in range(5)]
    assert first != [c.bits(64) for _ in range(5)]
