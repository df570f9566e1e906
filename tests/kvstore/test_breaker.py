"""The breaker against a clock of our own: when it opens, who may probe, when it closes."""

from __future__ import annotations

import random
import threading

import pytest

from kvstore.tiers.breaker import FAILURE_S, Breaker, Verdict
from seams.clock import VirtualClock


def fail(breaker: Breaker, waited_s: float) -> None:
    breaker.failed(breaker.admit(), waited_s)


def succeed(breaker: Breaker) -> None:
    breaker.succeeded(breaker.admit())


def opened(clock: VirtualClock) -> Breaker:
    breaker = Breaker(clock)
    fail(breaker, 0.5)
    assert not breaker.closed
    return breaker


def test_starts_closed() -> None:
    breaker = Breaker(VirtualClock())
    assert breaker.closed and not breaker.refusing
    assert breaker.admit().verdict is Verdict.CALL


def test_opens_at_the_trouble_it_can_bear_and_not_before() -> None:
    breaker = Breaker(VirtualClock())
    fail(breaker, 0.3)
    assert breaker.closed
    fail(breaker, 0.3)
    assert not breaker.closed and breaker.refusing
    assert breaker.admit().verdict is Verdict.REFUSED


def test_three_fast_failures_open_it_two_do_not() -> None:
    breaker = Breaker(VirtualClock())
    for expected in (True, True, False):
        fail(breaker, FAILURE_S)
        assert breaker.closed is expected


def test_short_deadlines_missed_now_and_then_never_open_it() -> None:
    breaker = Breaker(VirtualClock())
    for call in range(1000):
        if call % 5 == 0:
            fail(breaker, 0.005)
        else:
            succeed(breaker)
        assert breaker.closed


def test_half_of_all_calls_failing_opens_it() -> None:
    breaker = Breaker(VirtualClock())
    for _ in range(10):
        fail(breaker, FAILURE_S)
        if not breaker.closed:
            return
        succeed(breaker)
    pytest.fail("stayed closed")


def test_one_probe_at_a_time() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.49)
    assert breaker.admit().verdict is Verdict.REFUSED
    clock.advance(0.02)
    assert not breaker.refusing, "asking takes no probe away"
    probe = breaker.admit()
    assert probe.verdict is Verdict.PROBE
    assert [breaker.admit().verdict for _ in range(3)] == [Verdict.REFUSED] * 3
    breaker.succeeded(probe)
    assert breaker.closed and breaker.admit().verdict is Verdict.CALL


def test_a_probe_that_never_reports_is_given_up() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.5)
    assert breaker.admit().verdict is Verdict.PROBE
    clock.advance(4.9)
    assert breaker.admit().verdict is Verdict.REFUSED
    clock.advance(0.2)
    assert breaker.admit().verdict is Verdict.PROBE


def test_backs_off_to_the_longest_wait_and_no_further() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    waits = []
    for _ in range(7):
        began = clock.now()
        while (probe := breaker.admit()).verdict is not Verdict.PROBE:
            clock.advance(0.125)
        waits.append(clock.now() - began)
        breaker.failed(probe, FAILURE_S)
    assert waits == [0.5, 1, 2, 4, 5, 5, 5]


def test_on_probation_one_failure_opens_it_for_longer() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.5)
    succeed(breaker)
    fail(breaker, 0.001)
    assert not breaker.closed
    clock.advance(0.9)
    assert breaker.admit().verdict is Verdict.REFUSED
    clock.advance(0.2)
    assert breaker.admit().verdict is Verdict.PROBE


def test_successes_end_the_probation_and_the_backing_off() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.5)
    for _ in range(9):
        succeed(breaker)
    fail(breaker, 0.1)
    assert breaker.closed
    fail(breaker, 0.5)
    clock.advance(0.5)
    assert breaker.admit().verdict is Verdict.PROBE


def test_calls_that_began_before_the_opening_change_nothing() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    good, bad = breaker.admit(), breaker.admit()
    fail(breaker, 0.5)
    breaker.succeeded(good)
    assert not breaker.closed
    breaker.failed(bad, 5.0)
    clock.advance(0.5)
    assert breaker.admit().verdict is Verdict.PROBE, "no longer wait for late failures"


def test_a_stale_call_is_no_probe() -> None:
    """Neither its failure nor its success, while a probe is out, is the probe's."""
    clock = VirtualClock()
    breaker = Breaker(clock)
    good, bad = breaker.admit(), breaker.admit()
    fail(breaker, 0.5)
    clock.advance(0.5)
    probe = breaker.admit()
    breaker.succeeded(good)
    assert not breaker.closed
    breaker.failed(bad, 5.0)
    breaker.succeeded(probe)
    assert breaker.closed, "the probe's own word counts"


def test_a_stale_failure_does_not_end_the_probation() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    stale = breaker.admit()
    fail(breaker, 0.5)
    clock.advance(0.5)
    succeed(breaker)
    breaker.failed(stale, 5.0)
    assert breaker.closed


def test_a_probe_that_was_given_up_does_not_speak_for_the_next() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(0.5)
    old = breaker.admit()
    clock.advance(5.0)
    new = breaker.admit()
    assert old.verdict is new.verdict is Verdict.PROBE
    breaker.succeeded(old)
    assert not breaker.closed
    breaker.succeeded(new)
    breaker.failed(old, FAILURE_S)
    assert breaker.closed


def test_nothing_bearable_opens_at_once() -> None:
    breaker = Breaker(VirtualClock(), bearable_s=0.0)
    fail(breaker, FAILURE_S)
    assert not breaker.closed


@pytest.mark.parametrize("seed", range(20))
def test_however_calls_end_recovery_takes_ten_seconds_at_most(seed: int) -> None:
    """Any history of failures, then a well server: closed within 10 s."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    clock = VirtualClock()
    breaker = Breaker(clock)
    for _ in range(500):
        call = breaker.admit()
        if call.verdict is not Verdict.REFUSED and rng.random() < 0.9:
            breaker.failed(call, rng.choice([0.001, FAILURE_S, 1.0]))
        clock.advance(rng.random())
    recovered = clock.now()
    while not breaker.closed:
        call = breaker.admit()
        if call.verdict is Verdict.PROBE:
            breaker.succeeded(call)
        clock.advance(0.01)
    assert clock.now() - recovered <= 10


def test_many_threads_get_one_probe() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(1)
    verdicts: list[Verdict] = []
    threads = [
        threading.Thread(target=lambda: verdicts.append(breaker.admit().verdict)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts.count(Verdict.PROBE) == 1 and len(verdicts) == 16
