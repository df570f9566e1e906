"""One simulated engine: closed sums against single steps, conservation, preemption, a tier."""

from __future__ import annotations

import random

import pytest
from simulated_world import GRAIN, one_request

from seams.errors import OutOfBlocks, Overloaded
from simulate.engine import Shape, SimEngine
from simulate.flight import Ended
from simulate.steptime import Run, StepTime
from simulate.workload import SimRequest


def drive(
    engine: SimEngine, arrivals: list[tuple[float, SimRequest]], *, steps_max: int = 1 << 30
) -> tuple[dict[int, float], dict[int, float], list[Ended]]:
    """(first token, last token) by request, and what ended. A run is cut where a request comes, and
    after `steps_max` steps."""
    arrivals = sorted(arrivals, key=lambda pair: pair[0])
    now, first, last, ended = 0.0, {}, {}, []
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= now:
            engine.submit(arrivals.pop(0)[1], 1 << 12)
        run = engine.begin() if engine.has_work else None
        if run is None:
            now = arrivals[0][0]
            continue
        steps = min(run.steps, steps_max)
        if arrivals and now + run.total_s > arrivals[0][0]:
            steps = min(steps, run.steps_by(arrivals[0][0] - now))
        result = engine.finish(steps)
        now += run.until_s(steps)
        engine.check_integrity()
        first.update((request.number, now) for request in result.first_tokens)
        last.update((one.request.number, now) for one in result.ended)
        ended += result.ended
    return first, last, ended


def some_requests(seed: int, count: int = 30) -> list[tuple[float, SimRequest]]:
    rng = random.Random(seed)
    systems = [list(range(i * 1000, i * 1000 + 20)) for i in range(3)]
    made = []
    for number in range(count):
        own = [10_000 + number * 50 + i for i in range(rng.randint(1, 30))]
        prompt = rng.choice(systems) + own
        request = one_request(number, prompt, output_tokens=rng.randint(1, 90))
        made.append((rng.uniform(0, 3), request))
    return made


@pytest.mark.parametrize("growth", [0.0, 1e-5, 0.3])
def test_a_run_is_the_sum_of_its_steps(growth: float) -> None:
    run = Run(0.01, growth, 40)
    total = 0.0
    for steps in range(1, 41):
        begun = total
        total += 0.01 + growth * (steps - 1)
        assert run.until_s(steps) == pytest.approx(total)
        assert run.steps_by((begun + total) / 2) == steps
        assert run.steps_done((begun + total) / 2) == steps - 1
        assert run.steps_by(total) == steps
    assert run.steps_done(total + 1) == 40
    assert run.steps_by(total + 1) == 40 and run.steps_by(0.0) == 1


@pytest.mark.parametrize("seed", range(3))
def test_steps_taken_together_are_the_steps_one_by_one(seed: int) -> None:
    """What is decided between steps depends on measured times alone, so those are kept equal."""
    shape = Shape(400, GRAIN, step_tokens_max=256, decode_slowdown_max=0)
    together = drive(SimEngine(shape), some_requests(seed))
    single = drive(SimEngine(shape), some_requests(seed), steps_max=1)
    assert together[0] == pytest.approx(single[0])
    assert together[1] == pytest.approx(single[1])
    assert [e.cached_tokens for e in together[2]] == [e.cached_tokens for e in single[2]]


def test_a_lone_request_takes_the_time_of_its_steps() -> None:
    times = StepTime(0.01, 0.001, 1e-6, 1e-4, 0.0)
    engine = SimEngine(Shape(100, GRAIN, times, step_tokens_max=256))
    request = one_request(0, range(20), output_tokens=5)  # 320 tokens: 256, then 64
    first, last, _ = drive(engine, [(0.0, request)])
    assert first[0] == pytest.approx(0.02 + 320e-4)
    decode = sum(0.011 + (320 + done) * 1e-6 for done in range(1, 5))
    assert last[0] == pytest.approx(first[0] + decode)


def test_a_prompt_seen_before_is_cached_but_for_its_last_cell() -> None:
    engine = SimEngine(Shape(100, GRAIN))
    again = one_request(1, range(20), output_tokens=2)
    _, _, ended = drive(engine, [(0.0, one_request(0, range(20))), (9.0, again)])
    assert [e.cached_tokens for e in ended] == [0, 19 * 16]
    assert engine.prompt_tokens == 640 and engine.cached_tokens == 304


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once_in_a_pool_that_preempts(seed: int) -> None:
    rng = random.Random(seed)
    long = [
        (0.01 * n, one_request(n, range(n * 100, n * 100 + 8), output_tokens=rng.randint(200, 400)))
        for n in range(20)
    ]
    engine = SimEngine(Shape(40, GRAIN, step_tokens_max=256))
    for length in range(32):  # short answers so far: too many are let in
        engine.scheduler.lengths.record(1 + length % 2)
    first, last, ended = drive(engine, long)
    assert sorted(e.request.number for e in ended) == list(range(20))
    assert all(e.error is None for e in ended)
    assert sum(e.preemptions for e in ended) > 0 and sum(e.recomputed_tokens for e in ended) > 0
    assert all(first[n] < last[n] for n in range(20))


def test_what_can_never_fit_is_refused_and_the_queue_is_bounded() -> None:
    engine = SimEngine(Shape(4, GRAIN))
    _, _, ended = drive(engine, [(0.0, one_request(0, range(17)))])
    assert isinstance(ended[0].error, OutOfBlocks)
    engine = SimEngine(Shape(100, GRAIN))
    many = [(0.0, one_request(n, range(n * 50, n * 50 + 4))) for n in range(1030)]
    _, _, ended = drive(engine, many)
    assert sum(isinstance(e.error, Overloaded) for e in ended) == 6
    assert len(ended) == 1030


def test_a_request_that_comes_with_tokens_goes_on_from_them() -> None:
    engine = SimEngine(Shape(100, GRAIN))
    engine.submit(one_request(0, range(8), output_tokens=50), 100, produced=30)
    tokens = steps = 0
    while engine.has_work:
        run = engine.begin()
        assert run is not None
        steps += run.steps
        result = engine.finish(run.steps)
        engine.check_integrity()
        tokens += len(result.first_tokens)
        ended = result.ended
    assert tokens == 1 and steps == 20
    assert ended[0].recomputed_tokens == 16  # the cell that was full; the other goes on growing


def test_what_left_the_device_comes_back_from_the_host() -> None:
    def turns(shape: Shape) -> SimEngine:
        engine = SimEngine(shape)
        one = one_request(0, range(40), output_tokens=2)
        others = [
            (1.0 + n, one_request(1 + n, range(1000 * n + 1000, 1000 * n + 1060), output_tokens=2))
            for n in range(4)
        ]
        again = one_request(9, range(40), output_tokens=2)
        drive(engine, [(0.0, one), *others, (9.0, again)])
        return engine

    without, tiered = turns(Shape(20, GRAIN)), turns(Shape(20, GRAIN, host_blocks=100))
    assert without.cached_tokens == 0
    assert tiered.cached_tokens == tiered.host.loaded_tokens > 500  # type: ignore[union-attr]
    assert tiered.busy_s < without.busy_s
    tiered.host.close()  # type: ignore[union-attr]
