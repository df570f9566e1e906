"""The breaker against a clock of our own: when it opens, who may probe, when it closes."""

from __future__ import annotations

import random
import threading

import pytest

from kvstore.tiers.breaker import FAILURE_S, Breaker, Verdict
from seams.clock import VirtualClock


def opened(clock: VirtualClock) -> Breaker:
    breaker = Breaker(clock)
    breaker.failed(0.5)
    assert not breaker.closed
    return breaker


def test_starts_closed() -> None:
    breaker = Breaker(VirtualClock())
    assert breaker.closed and not breaker.refusing
    assert breaker.admit() is Verdict.CALL


def test_opens_at_the_trouble_it_can_bear_and_not_before() -> None:
    breaker = Breaker(VirtualClock())
    breaker.failed(0.3)
    assert breaker.closed
    breaker.failed(0.3)
    assert not breaker.closed and breaker.refusing
    assert breaker.admit() is Verdict.REFUSED


def test_three_fast_failures_open_it_two_do_not() -> None:
    breaker = Breaker(VirtualClock())
    for expected in (True, True, False):
        breaker.failed(FAILURE_S)
        assert breaker.closed is expected


def test_short_deadlines_missed_now_and_then_never_open_it() -> None:
    breaker = Breaker(VirtualClock())
    for call in range(1000):
        if call % 5 == 0:
            breaker.failed(0.005)
        else:
            breaker.succeeded()
        assert breaker.closed


def test_half_of_all_calls_failing_opens_it() -> None:
    breaker = Breaker(VirtualClock())
    for _ in range(10):
        breaker.failed(FAILURE_S)
        if not breaker.closed:
            return
        breaker.succeeded()
    pytest.fail("stayed closed")


def test_one_probe_at_a_time() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.49)
    assert breaker.admit() is Verdict.REFUSED
    clock.advance(0.02)
    assert not breaker.refusing, "asking takes no probe away"
    assert breaker.admit() is Verdict.PROBE
    assert [breaker.admit() for _ in range(3)] == [Verdict.REFUSED] * 3
    breaker.succeeded()
    assert breaker.closed and breaker.admit() is Verdict.CALL


def test_a_probe_that_never_reports_is_given_up() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.5)
    assert breaker.admit() is Verdict.PROBE
    clock.advance(4.9)
    assert breaker.admit() is Verdict.REFUSED
    clock.advance(0.2)
    assert breaker.admit() is Verdict.PROBE


def test_backs_off_to_the_longest_wait_and_no_further() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    waits = []
    for _ in range(7):
        began = clock.now()
        while breaker.admit() is not Verdict.PROBE:
            clock.advance(0.125)
        waits.append(clock.now() - began)
        breaker.failed(FAILURE_S)
    assert waits == [0.5, 1, 2, 4, 5, 5, 5]


def test_on_probation_one_failure_opens_it_for_longer() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.5)
    assert breaker.admit() is Verdict.PROBE
    breaker.succeeded()
    breaker.failed(0.001)
    assert not breaker.closed
    clock.advance(0.9)
    assert breaker.admit() is Verdict.REFUSED
    clock.advance(0.2)
    assert breaker.admit() is Verdict.PROBE


def test_successes_end_the_probation_and_the_backing_off() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.5)
    breaker.admit()
    for _ in range(8):
        breaker.succeeded()
    breaker.failed(0.1)
    assert breaker.closed
    breaker.failed(0.5)
    clock.advance(0.5)
    assert breaker.admit() is Verdict.PROBE


def test_calls_that_began_before_the_opening_change_nothing() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    breaker.succeeded()
    assert not breaker.closed
    breaker.failed(5.0)
    clock.advance(0.5)
    assert breaker.admit() is Verdict.PROBE, "no longer wait for late failures"


def test_nothing_bearable_opens_at_once() -> None:
    breaker = Breaker(VirtualClock(), bearable_s=0.0)
    breaker.failed(FAILURE_S)
    assert not breaker.closed


@pytest.mark.parametrize("seed", range(20))
def test_however_calls_end_recovery_takes_ten_seconds_at_most(seed: int) -> None:
    """Any history of failures, then a well server: closed within 10 s."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    clock = VirtualClock()
    breaker = Breaker(clock)
    for _ in range(500):
        if breaker.admit() is not Verdict.REFUSED and rng.random() < 0.9:
            breaker.failed(rng.choice([0.001, FAILURE_S, 1.0]))
        clock.advance(rng.random())
    recovered = clock.now()
    while not breaker.closed:
        if breaker.admit() is Verdict.PROBE:
            breaker.succeeded()
        clock.advance(0.01)
    assert clock.now() - recovered <= 10


def test_many_threads_get_one_probe() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(1)
    verdicts: list[Verdict] = []
    threads = [threading.Thread(target=lambda: verdicts.append(breaker.admit())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts.count(Verdict.PROBE) == 1 and len(verdicts) == 16
