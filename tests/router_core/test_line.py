"""A long line of prompts is priced by its first ones and the mean of the rest."""

from __future__ import annotations

import random

from banyan.v1 import common_pb2
from router.bookings import LINE_MAX, Booking, Workload


def booked(prompts: list[int]) -> Workload:
    work = Workload()
    for number, tokens in enumerate(prompts):
        work.add(
            Booking(
                request_id=str(number), replica="r", epoch=1, model="m", placed_s=0.0,
                prompt_tokens=tokens, prefill_tokens=tokens, queued_s=0.0, blocks=0, choices=1,
                decision=common_pb2.Decision(),
            )
        )  # fmt: skip
    work.check_integrity()
    return work


def test_a_prompt_behind_a_long_line() -> None:
    work = booked([100] * (LINE_MAX + 40))
    assert work.line(50, 0.001, 0.0) == ((LINE_MAX + 40) * 50 * 0.001, LINE_MAX + 40)
    before_s, longer = work.line(200, 0.001, 0.0)
    assert abs(before_s - (LINE_MAX + 40) * 0.1) < 1e-9 and longer == 0


def test_the_rest_is_its_mean() -> None:
    rng = random.Random(7)
    prompts = [rng.randrange(1, 1000) for _ in range(3 * LINE_MAX)]
    before_s, longer = booked(prompts).line(10_000, 0.5, 0.0)
    assert abs(before_s - sum(prompts) * 0.5) < 1e-6 and longer == 0
    shown = booked(prompts[:LINE_MAX]).line(300, 0.5, 0.0)
    assert shown.before_s == 0.5 * sum(min(tokens, 300) for tokens in prompts[:LINE_MAX])
