"""The line on a replica, as a prompt finds it that comes now: what it waits for, whom it passes."""

from __future__ import annotations

import random

import pytest

from banyan.v1 import common_pb2, internal_pb2
from router.bookings import BACKLOG_SHARE, HEAD_SHARE, LINE_MAX, Booking, Workload

RATE = 0.001


def booking(number: int, tokens: int, cached: int = 0, placed_s: float = 0.0) -> Booking:
    return Booking(
        request_id=str(number), replica="r", epoch=1, model="m", placed_s=placed_s,
        prompt_tokens=tokens, prefill_tokens=tokens - cached, queued_s=0.0, blocks=0, choices=1,
        decision=common_pb2.Decision(),
    )  # fmt: skip


def booked(prompts: list[int]) -> Workload:
    work = Workload()
    for number, tokens in enumerate(prompts):
        work.add(booking(number, tokens))
    work.check_integrity()
    return work


def before_s(comes_first: float, backlog: float) -> float:
    return RATE * (comes_first + BACKLOG_SHARE * (backlog - comes_first))


def test_nobody_in_line() -> None:
    assert booked([]).line(500, 500, RATE, 0.0) == (0.0, 0, 0)


def test_a_long_prompt_waits_for_all_and_passes_nobody() -> None:
    line = booked([1000, 300, 2000]).line(1500, 1500, RATE, 0.0)
    assert line == (pytest.approx(3.3), 0, 3)


def test_a_short_one_waits_for_shorter_ones_and_for_as_much_of_the_oldest() -> None:
    """Of the oldest, 1,000 long, as much as of the two together; the one of 2,000 is passed."""
    line = booked([1000, 300, 2000]).line(200, 200, RATE, 0.0)
    assert line == (pytest.approx(before_s(300 + 500, 3300)), 2, 3)
    line = booked([1000, 900, 2000]).line(200, 200, RATE, 0.0)
    assert line == (pytest.approx(before_s(900 + 1000, 3900)), 2, 3), "no more than it has left"


def test_what_is_cached_makes_a_prompt_no_shorter_to_the_scheduler() -> None:
    """It compares whole prompts: one of 3,000 with 10 to compute queues behind 1,000."""
    work = booked([1000])
    assert work.line(3000, 10, RATE, 0.0).before_s == pytest.approx(1.0)
    assert work.line(500, 10, RATE, 0.0).before_s == pytest.approx(before_s(10, 1000))


def test_who_passed_the_oldest_leaves_its_progress_alone() -> None:
    work = booked([1000])
    short = booking(1, 100, placed_s=1.0)
    work.add(short)
    work.end_prefill(short, 1.2)
    done = HEAD_SHARE * 1.5 / RATE
    assert done < 1000
    assert work.line(5000, 5000, RATE, 1.5).before_s == pytest.approx(before_s(1000 - done, 1000))


def test_others_prompts_are_first_in_line() -> None:
    work = booked([100])
    work.report(internal_pb2.Load(running=1, waiting=3, queued_prefill_tokens=1300))
    assert (work.foreign_prompts, work.foreign_tokens) == (3, 1200)
    short, long = work.line(50, 50, RATE, 0.0), work.line(400, 400, RATE, 0.0)
    assert short == (pytest.approx(before_s(100 + 150, 1300)), 3, 4)
    assert long == (pytest.approx(1.3), 0, 4)


def test_a_prompt_behind_a_long_line() -> None:
    work = booked([100] * (LINE_MAX + 40))
    count, backlog = LINE_MAX + 40, 100 * (LINE_MAX + 40)
    assert work.line(50, 50, RATE, 0.0) == (pytest.approx(before_s(50, backlog)), count, count)
    assert work.line(200, 200, RATE, 0.0) == (pytest.approx(RATE * backlog), 0, count)


def test_the_rest_is_its_mean() -> None:
    rng = random.Random(7)
    prompts = [rng.randrange(1, 1000) for _ in range(3 * LINE_MAX)]
    line = booked(prompts).line(10_000, 10_000, RATE, 0.0)
    assert line == (pytest.approx(sum(prompts) * RATE), 0, len(prompts))
