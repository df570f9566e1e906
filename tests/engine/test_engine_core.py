"""EngineCore: refusals, endings, resumption, aborts in every state, faults, cached = uncached."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_machine import expected_tokens, replayable
from engine_rig import BLOCK, Rig, request, tokens

from seams.clock import VirtualClock
from seams.errors import (
    BanyanError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutOfBlocks,
    Overloaded,
    PromptTooLong,
)
from worker.config import EngineConfig
from worker.engine.adjusting import ends_masked
from worker.engine.core import EngineCore
from worker.engine.messages import CacheOpKind, EngineRequest, Finish, RequestUsage
from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.fake import SHAPES, fake_model

SHAPES_ALL = [*SHAPES, "full/inverted"]

# --- refusals ----------------------------------------------------------------------------------

REFUSED: list[tuple[str, EngineRequest, type[BanyanError]]] = [
    ("no prompt", request("a", (), prompt_tokens=0), InvalidRequest),
    ("prompt longer than given", request("a", tokens(3), prompt_tokens=4), InvalidRequest),
    ("no output", request("a", tokens(3), max_tokens=0), InvalidRequest),
    ("no choice", request("a", tokens(3), n=0), InvalidRequest),
    ("several resumed", request("a", tokens(3), prompt_tokens=2, n=2), InvalidRequest),
    ("token beyond the vocabulary", request("a", (1, 256)), InvalidRequest),
    ("negative token", request("a", (1, -1)), InvalidRequest),
    ("bias beyond the vocabulary", request("a", (1,), logit_bias=((256, 1.0),)), InvalidRequest),
    ("bias twice", request("a", (1,), logit_bias=((5, 1.0), (5, 2.0))), InvalidRequest),
    ("allowed beyond the vocabulary", request("a", (1,), allowed_token_ids=(256,)), InvalidRequest),
    ("negative allowed", request("a", (1,), allowed_token_ids=(-1, 3)), InvalidRequest),
    (
        "nothing allowed before min_tokens",
        request("a", (1,), allowed_token_ids=(255,), min_tokens=2, ignore_eos=False),
        InvalidRequest,
    ),
    ("context", request("a", tokens(505), max_tokens=8), PromptTooLong),
    ("pool", request("a", tokens(101)), OutOfBlocks),
]


@pytest.mark.parametrize(("what", "spec", "kind"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refusals_are_one_emission(what: str, spec: EngineRequest, kind: type[BanyanError]) -> None:
    rig = Rig(blocks=25)
    rig.submit(request("other", tokens(5)))
    rig.step()
    rig.submit(spec)
    rig.run()
    last = rig.last("a")
    assert type(last.error) is kind and last.finish is Finish.ERROR
    assert last.error.message.endswith(".") and last.token_ids == ()
    assert rig.usage("a").prompt_tokens == 0
    rig.assert_exact("other")


def test_bias_and_allowed_tokens_reach_the_sampler() -> None:
    rig = Rig()
    rig.submit(request("forced", tokens(9), max_tokens=6, logit_bias=((77, 100.0),)))
    rig.submit(request("allowed", tokens(9, 1), max_tokens=30, allowed_token_ids=(5, 6, 7)))
    rig.run()
    assert rig.output("forced") == [77] * 6
    assert set(rig.output("allowed")) == {5, 6, 7}


def test_the_longest_prompt_is_not_refused() -> None:
    rig = Rig(blocks=200)
    rig.submit(request("a", tokens(504), max_tokens=8))
    rig.run()
    assert len(rig.output("a")) == 8
    rig.assert_exact()


def test_a_full_queue_pushes_back() -> None:
    rig = Rig(waiting_max=3, running_max=1)
    rig.submit(request("running", tokens(5)))
    rig.step()
    rig.submit(*(request(f"r{i}", tokens(5, i)) for i in range(4)))
    rig.step()
    refused = rig.last("r3").error
    assert isinstance(refused, Overloaded) and refused.retry_after_s is not None
    assert 0 < refused.retry_after_s < 60
    rig.run()
    rig.assert_exact("running", "r0", "r1", "r2")


def test_slow_readers_do_not_fill_the_queue() -> None:
    """Those without credit hold no blocks and no place; only their number is bounded."""
    rig = Rig(waiting_max=2, running_max=2, requests_max=9)
    slow = [request(f"slow{i}", tokens(9, i), credit_tokens=i % 2) for i in range(8)]
    for one in slow:
        rig.submit(one)
        rig.run()
    assert len(rig.core.scheduler.parked) >= 6
    load = rig.core.load()
    assert (load.waiting, load.queued_prefill_tokens) == (0, 0)
    rig.submit(request("quick", tokens(9, 20)), request("one too many", tokens(9, 21)))
    rig.run()
    refused = rig.last("one too many").error
    assert isinstance(refused, Overloaded) and "paused" in refused.message
    assert refused.retry_after_s is not None
    for one in slow:
        rig.core.grant(one.request_id, 100)
    rig.run()
    rig.assert_exact("quick", *(one.request_id for one in slow))
    assert all(rig.last(one.request_id).error is None for one in slow)


def test_a_duplicate_id_harms_nobody() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(9)))
    rig.step(2)
    with pytest.raises(InvalidRequest, match="id"):
        rig.core.submit(request("a", tokens(4)))
    rig.run()
    assert len(rig.output("a")) == 8 and len(rig.lasts("a")) == 1
    rig.assert_exact()
    rig.emissions.clear()
    rig.submit(request("a", tokens(4)))  # free again
    rig.run()
    rig.assert_exact()


# --- endings -----------------------------------------------------------------------------------


def stopping_prompt(rig: Rig, after: int) -> tuple[tuple[int, ...], int]:
    """A prompt and the token it greedily gives at `after`, not seen before that."""
    for salt in range(100):
        out = rig.model.oracle(tokens(9, salt), after + 1, ignore_eos=True)
        if out.index(out[-1]) == after:
            return tokens(9, salt), out[-1]
    raise AssertionError


def test_stop_tokens_end_a_choice_and_are_emitted() -> None:
    rig = Rig()
    prompt, token = stopping_prompt(rig, 5)
    rig.submit(request("a", prompt, max_tokens=50, stop_token_ids=frozenset({token})))
    rig.run()
    assert rig.last("a").finish is Finish.STOP
    assert rig.output("a") == rig.model.oracle(prompt, 6, ignore_eos=True)
    assert rig.usage("a").completion_tokens == 6


def test_the_end_token_ends_unless_ignored() -> None:
    rig = Rig(blocks=300)
    prompt = next(p for p in (tokens(5, s) for s in range(99)) if len(rig.model.oracle(p, 90)) < 90)
    rig.submit(request("ends", prompt, 90, ignore_eos=False), request("goes on", prompt, 90))
    rig.run()
    assert rig.output("ends") == rig.model.oracle(prompt, 90)
    assert rig.last("ends").finish is Finish.STOP
    assert len(rig.output("goes on")) == 90 and rig.last("goes on").finish is Finish.LENGTH


def row_at(position: int, **params: Any) -> SampleRow:
    return SampleRow(0, 1, 0, position, SamplingParams(seed=1, max_tokens=30, **params), (), ())


def test_min_tokens_keeps_it_going() -> None:
    rig = Rig()
    prompt, token = stopping_prompt(rig, 2)
    stop = frozenset({token})
    rig.submit(request("a", prompt, max_tokens=30, stop_token_ids=stop, min_tokens=6))
    rig.run()
    assert len(rig.output("a")) >= 6 and token not in rig.output("a")[:6]


def test_min_tokens_is_one_rule_for_drawing_and_ending() -> None:
    """A stop token is not drawn among the first min_tokens; where one stands there all the same
    (a resumed stream of another version), it does not end the choice. The next may."""
    stop = frozenset({7})
    for emitted, ends in ((2, False), (3, False), (4, True)):
        rig = Rig()
        given = (*tokens(9), *(5 for _ in range(emitted - 1)), 7)
        sampling = {"min_tokens": 3, "stop_token_ids": stop, "prompt_tokens": 9}
        rig.submit(request("a", given, 30, **sampling))
        rig.step()
        assert bool(rig.lasts("a")) is ends, emitted
        masked = ends_masked(row_at(emitted - 1, min_tokens=3, stop_token_ids=stop), (), 256)
        assert masked == ([] if ends else [7])


def test_logprobs_are_handed_on() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(9), max_tokens=3, logprobs=2))
    rig.run()
    assert [len(e.logprobs) for e in rig.emissions] == [1, 1, 1]
    for emission in rig.emissions:
        (one,) = emission.logprobs
        assert one.chosen[0] == emission.token_ids[0] == one.top[0][0] and len(one.top) == 2


def test_usage_and_last_come_once_with_several_choices() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(9), max_tokens=5, n=3, temperature=1.0, ignore_eos=False))
    rig.run()
    assert [e.last for e in rig.emissions].count(True) == 1 and rig.emissions[-1].last
    assert sum(e.finish is not None for e in rig.emissions) == 3
    assert [e.usage for e in rig.emissions[:-1]] == [None] * (len(rig.emissions) - 1)
    total = sum(len(rig.output("a", c)) for c in range(3))
    assert rig.usage("a") == RequestUsage(9, 0, 9, total)


def test_positions_count_generated_tokens() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(9), max_tokens=5))
    rig.run()
    assert [e.position for e in rig.emissions] == [0, 1, 2, 3, 4]


# --- resumption --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["full", "window"])
def test_a_stream_resumes_exactly_at_every_token(shape: str, temperature: float) -> None:
    whole = Rig(shape)
    whole.submit(request("a", tokens(18), max_tokens=12, temperature=temperature))
    whole.run()
    out = whole.output("a")
    for at in range(1, 12):
        rig = Rig(shape)
        given = tokens(18) + tuple(out[:at])
        rig.submit(request("a", given, max_tokens=12, temperature=temperature, prompt_tokens=18))
        rig.run()
        assert rig.output("a") == out[at:]
        assert rig.emissions[0].position == at
        assert rig.usage("a") == RequestUsage(18, 0, 18, 12, recomputed_tokens=at - 1)


def test_resuming_what_had_ended_just_says_so() -> None:
    rig = Rig()
    prompt, token = stopping_prompt(rig, 3)
    out = tuple(rig.model.oracle(prompt, 4, ignore_eos=True))
    stop = frozenset({token})
    rig.submit(request("stopped", prompt + out, 50, prompt_tokens=9, stop_token_ids=stop))
    rig.submit(request("full", prompt + out, 4, prompt_tokens=9))
    rig.run()
    assert not rig.model.plans
    assert rig.last("stopped").finish is Finish.STOP and rig.last("stopped").position == 4
    assert rig.last("full").finish is Finish.LENGTH
    for name in ("stopped", "full"):  # nothing was computed: as of those never admitted
        assert rig.usage(name) == RequestUsage(0, 0, 0, 4)
    assert (rig.core.load().prompt_tokens, rig.core.load().cached_tokens) == (0, 0)


# --- deadlines ---------------------------------------------------------------------------------


def test_the_expired_get_no_forward_pass() -> None:
    rig = Rig(running_max=1)
    rig.submit(request("late", tokens(9), deadline_s=0.0))
    rig.submit(request("first", tokens(9, 1), max_tokens=40))
    rig.submit(request("queued", tokens(9, 2), deadline_s=0.01))
    rig.submit(request("parked", tokens(9, 3), deadline_s=0.01, credit_tokens=0))
    rig.step()
    assert isinstance(rig.last("late").error, DeadlineExceeded)
    rig.clock.advance(1)
    rig.run()
    for name in ("late", "queued", "parked"):
        assert isinstance(rig.last(name).error, DeadlineExceeded)
        assert rig.output(name) == []
    assert {p.token_ids[0] for p in rig.model.plans if len(p.token_ids) > 1} == {tokens(9, 1)[0]}
    rig.assert_exact("first")


def test_a_deadline_ends_what_runs_or_waits_for_credit() -> None:
    rig = Rig()
    rig.submit(request("runs", tokens(9), max_tokens=200, deadline_s=0.0105))
    rig.submit(request("paused", tokens(9, 1), deadline_s=5.0, credit_tokens=2))
    rig.run()
    assert len(rig.output("runs")) == 11
    assert not rig.core.has_work() and rig.core.next_deadline_s() == 5.0
    rig.clock.advance(5)
    assert rig.core.has_work()
    rig.run()
    assert isinstance(rig.last("paused").error, DeadlineExceeded)
    assert rig.core.next_deadline_s() is None and rig.reclaimable()


# --- aborts ------------------------------------------------------------------------------------


def _waiting(rig: Rig) -> None:
    rig.submit(request("holder", tokens(9, 8), max_tokens=60))
    rig.step()
    rig.submit(request("a", tokens(30)))


def _half_prefilled(rig: Rig) -> None:
    rig.submit(request("a", tokens(40), n=2))
    rig.step(2)


def _attached(rig: Rig) -> None:
    rig.submit(request("before", tokens(18)))
    rig.run()
    rig.submit(request("a", tokens(14) + tokens(40, 3)))
    rig.step()


def _forked(rig: Rig) -> None:
    rig.submit(request("a", tokens(10), n=3))
    rig.step()


def _decoding(rig: Rig) -> None:
    rig.submit(request("a", tokens(10), n=2, max_tokens=40))
    rig.step(9)


def _one_choice_ended(rig: Rig) -> None:
    rig.submit(
        request(
            "a",
            tokens(10),
            n=4,
            temperature=1.0,
            max_tokens=30,
            stop_token_ids=frozenset(range(0, 250, 9)),
        )
    )
    while not any(e.finish for e in rig.emissions):
        rig.step()


def _preempted(rig: Rig) -> None:
    from test_scheduler import preempt

    rig.submit(request("a", tokens(10), max_tokens=40))
    rig.step(5)
    preempt(rig, "a")


def _paused(rig: Rig) -> None:
    rig.submit(request("a", tokens(10), credit_tokens=3))
    rig.run()


def _parked(rig: Rig) -> None:
    rig.submit(request("a", tokens(10), credit_tokens=0))


STATES: list[Callable[[Rig], None]] = [
    _waiting, _half_prefilled, _attached, _forked, _decoding, _one_choice_ended, _preempted,
    _paused, _parked,
]  # fmt: skip


@pytest.mark.parametrize("shape", ["full", "window"])
@pytest.mark.parametrize("state", STATES, ids=lambda s: s.__name__)
def test_abort_in_each_state(state: Callable[[Rig], None], shape: str) -> None:
    """Scenario 5: one last emission, blocks back within two steps, nothing false in the cache."""
    rig = Rig(shape, step_tokens_max=16, running_max=1 if state is _waiting else 8)
    state(rig)
    rig.cancel("a")
    rig.step(2)
    last = rig.last("a")
    assert last.finish is Finish.CANCELLED and isinstance(last.error, Cancelled)
    usage = rig.usage("a")
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    if state is not _waiting:
        assert rig.reclaimable()
    rig.cancel("a")
    rig.run()
    assert len(rig.lasts("a")) == 1
    count = rig.requests["a"].sampling.n
    finishes = [e.choice for e in rig.emissions if e.request_id == "a" and e.finish]
    assert sorted(finishes) == list(range(count))
    spec = rig.requests["a"]
    rig.submit(request("again", spec.token_ids, max_tokens=20))
    rig.run()
    rig.assert_exact("again")
    assert rig.reclaimable()


@pytest.mark.parametrize("seed", range(2))
def test_random_cancels(seed: int) -> None:
    """Scenario 19 at 1 %: 100 cancels at random moments; every block comes back."""
    with replayable("tests/engine/test_engine_core.py::test_random_cancels", seed):
        chance, rig = random.Random(seed), Rig(blocks=40, step_tokens_max=20, running_max=6)
        for index in range(50):
            name = f"r{index}"
            prompt = tokens(chance.randrange(1, 40), chance.randrange(4))
            rig.submit(request(name, prompt, max_tokens=30, n=chance.choice([1, 1, 3])))
            rig.step(chance.randrange(8))
            rig.cancel(name)
            rig.step(2)
            assert len(rig.lasts(name)) == 1 and rig.reclaimable()


# --- faults ------------------------------------------------------------------------------------


def test_a_failing_step_ends_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.submit(
        request("a", tokens(9)),
        request("paused", tokens(9, 1), credit_tokens=2),
        request("b", tokens(9, 2), n=1),
        request("waits", tokens(9, 3), credit_tokens=0),
    )
    rig.step(3)
    rig.model.fail_at = len(rig.model.plans) + 1
    cached = {op.keys for op in rig.core.snapshot()}
    free = rig.free()
    rig.step()
    for name in ("a", "b"):
        assert isinstance(rig.last(name).error, InternalError)
        assert "bus" not in str(rig.last(name).error)
    assert not rig.lasts("paused") and not rig.lasts("waits")
    assert {op.keys for op in rig.core.snapshot()} == cached  # nothing was inserted
    assert rig.free() > free
    rig.core.grant("paused", 50)
    rig.core.grant("waits", 50)
    rig.run()
    rig.assert_exact("paused", "waits")
    assert len(rig.lasts("a")) == 1 and rig.reclaimable()
    assert "failed" in caplog.text


def test_failing_steps_are_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.model.fail_at = 2
    rig.submit(request("a", tokens(9)))
    rig.step(2)
    assert isinstance(rig.last("a").error, InternalError)
    assert rig.core.load().steps == 1
    rig.submit(request("b", tokens(9)))
    rig.step()
    assert rig.core.load().steps == 2


def test_a_device_that_fails_every_step_fails_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """The request of the last straw is not ended: it may go on elsewhere."""
    rig = Rig()
    rig.model.broken = True
    for name in "abc":
        assert not rig.lasts("c")
        rig.submit(request(name, tokens(9)))
        if name != "c":
            rig.step()
            assert isinstance(rig.last(name).error, InternalError)
    with pytest.raises(RuntimeError, match="bus"):
        rig.step()
    assert not rig.lasts("c") and rig.core.load().steps == 0


def test_a_good_step_between_failing_ones_forgives_them(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for turn in range(6):
        rig.model.broken = turn % 3 < 2
        rig.submit(request(f"r{turn}", tokens(9), max_tokens=1))
        rig.step()
        assert (rig.last(f"r{turn}").error is None) is not rig.model.broken


def test_a_failing_fork_ends_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.submit(request("a", tokens(9), n=4))
    rig.model.fail_at = 1
    rig.run()
    assert len(rig.lasts("a")) == 1
    assert sum(e.finish is Finish.ERROR for e in rig.emissions) == 4
    assert rig.free() == 64
    assert caplog.records


@pytest.mark.parametrize("at", range(1, 13))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_device_memory_runs_out_at_any_step(at: int, after: bool) -> None:
    """Scenario 16: the step is made again in smaller ones; the tokens are the same."""
    rig = Rig(blocks=40, step_tokens_max=16)
    execute, calls = rig.model.execute, 0

    def tight(plan: StepPlan) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if after:
            logits = execute(plan)
        if calls in (at, at + 1):
            raise torch.OutOfMemoryError("no memory")
        return logits if after else execute(plan)

    rig.model.execute = tight  # type: ignore[method-assign]
    rig.submit(request("before", tokens(18)))
    rig.submit(request("b", tokens(15) + tokens(9, 3)))
    rig.submit(request("n", tokens(10, 2), n=3, temperature=1.0), request("d", tokens(30, 4)))
    rig.run()
    assert all(rig.last(name).error is None for name in rig.requests)
    rig.assert_exact("before", "b", "d")
    for choice in range(3):
        expected = expected_tokens(rig.model, rig.requests["n"], choice, 8)
        assert tuple(rig.output("n", choice)) == expected


def test_steps_shrink_when_memory_runs_out_and_grow_back() -> None:
    rig = Rig(step_tokens_max=16)
    execute, sizes = rig.model.execute, list[int]()

    def tight(plan: StepPlan) -> torch.Tensor:
        sizes.append(len(plan.token_ids))
        if len(sizes) in (2, 3):
            raise torch.OutOfMemoryError("no memory")
        return execute(plan)

    rig.model.execute = tight  # type: ignore[method-assign]
    rig.submit(request("a", tokens(80), max_tokens=1))
    rig.run()
    assert sizes == [16, 16, 8, 4, 8, 16, 16, 16, 4]
    rig.assert_exact()


def test_a_step_of_one_token_without_memory_ends_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()

    def never(plan: StepPlan) -> torch.Tensor:
        raise MemoryError

    rig.model.execute = never  # type: ignore[method-assign]
    rig.submit(request("a", tokens(20)))
    rig.run()
    assert isinstance(rig.last("a").error, InternalError)
    assert rig.free() == 64 and "too little memory" in caplog.text


def test_unusable_logits_end_their_request_only() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(9)), request("b", tokens(9, 1)))
    rig.step(2)
    execute = rig.model.execute

    def broken(plan: StepPlan) -> torch.Tensor:
        logits = execute(plan)
        logits[0] = float("nan")
        return logits

    rig.model.execute = broken  # type: ignore[method-assign]
    rig.step()
    rig.model.execute = execute  # type: ignore[method-assign]
    rig.run()
    assert isinstance(rig.last("a").error, InternalError)
    assert rig.last("b").error is None
    rig.assert_exact("a", "b")


# --- cached = uncached -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES_ALL)
@pytest.mark.parametrize("pinned", [False, True], ids=["room", "pinned"])
def test_cached_equals_uncached(shape: str, pinned: bool) -> None:
    """Scenario 3 at 1 %: 50 prompts with shared prefixes, chunked prefill, eviction, preemption;
    `pinned`: the pool is full from the start, every block comes from eviction or preemption."""
    case = f"{'pinned' if pinned else 'room'}-{shape}"
    with replayable("tests/engine/test_engine_core.py::test_cached_equals_uncached", case):
        cached_equals_uncached(shape, pinned, prompts=50, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES_ALL)
@pytest.mark.parametrize("pinned", [False, True], ids=["room", "pinned"])
def test_cached_equals_uncached_full(shape: str, pinned: bool) -> None:
    """Scenario 3: 5,000 prompts."""
    cached_equals_uncached(shape, pinned, prompts=5000, seed=2)


def _none_left(generated: int, left_max: int) -> int:
    """The worst prediction: far too much is admitted."""
    return 1


def cached_equals_uncached(shape: str, pinned: bool, prompts: int, seed: int) -> None:
    chance = random.Random(f"{shape}/{pinned}/{seed}")
    rig = Rig(shape, blocks=45 if pinned else 90, step_tokens_max=24, running_max=8)
    rig.core.scheduler.lengths.predict_left = _none_left  # type: ignore[method-assign]
    if pinned:
        fill(rig)
    free: list[int] = []
    prefixes = [tokens(chance.randrange(20, 60), salt) for salt in range(5)]
    for index in range(prompts):
        prefix = chance.choice(prefixes)[: chance.randrange(1, 60)]
        prompt = prefix + tokens(chance.randrange(1, 20), chance.randrange(99))
        rig.submit(
            request(
                f"r{index}",
                prompt,
                max_tokens=chance.randrange(1, 40),
                temperature=chance.choice([0.0, 0.0, 1.0]),
                seed=index,
                ignore_eos=False,
            )
        )
        for _ in range(chance.randrange(12)):
            rig.step()
            free.append(rig.free())
    rig.run(200 * prompts)
    for name, spec in rig.requests.items():
        if name != "fill":
            out = rig.output(name)
            assert rig.last(name).error is None
            assert tuple(out) == expected_tokens(rig.model, spec, 0, len(out)), name
    usages = [rig.usage(f"r{index}") for index in range(prompts)]
    assert sum(u.cached_tokens for u in usages) > 2 * prompts
    if pinned:
        assert sum(free) / len(free) < 0.05 * 45
        assert sum(u.preemptions for u in usages) > prompts / 50


def fill(rig: Rig) -> None:
    """Cached tokens in every block of group 0."""
    rig.submit(request("fill", tokens(BLOCK * 44, 77), max_tokens=4))
    rig.run()
    assert rig.free() <= 1


def test_chunk_sizes_change_nothing() -> None:
    outputs = []
    for budget in (1, 2, 7, 64):
        rig = Rig(step_tokens_max=budget)
        rig.submit(*(request(f"r{i}", tokens(23, i), max_tokens=6) for i in range(4)))
        rig.run()
        rig.assert_exact()
        outputs.append([rig.output(f"r{i}") for i in range(4)])
    assert all(out == outputs[0] for out in outputs)


# --- what it reports ---------------------------------------------------------------------------


def test_load_counts_what_there_is() -> None:
    rig = Rig(running_max=2, step_tokens_max=30)
    assert rig.core.load().blocks_free == rig.core.load().blocks_total == 64
    rig.submit(*(request(f"r{i}", tokens(20, i), max_tokens=5) for i in range(4)))
    assert rig.core.load().waiting == 4 and rig.core.load().queued_prefill_tokens == 80
    rig.step()
    load = rig.core.load()
    assert (load.running, load.waiting, load.steps) == (2, 2, 1)
    assert load.queued_prefill_tokens == 50 + 0 * load.steps
    rig.run()
    rig.submit(request("again", tokens(20)))
    rig.run()
    load = rig.core.load()
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (0, 0, 0)
    assert (load.prompt_tokens, load.cached_tokens) == (100, 19)
    assert load.blocks_free + load.blocks_cached == 64 and load.blocks_cached > 0


def test_times_are_measured_on_the_clock() -> None:
    class Slow(VirtualClock):
        def now(self) -> float:
            self.advance(0.25)
            return super().now()

    model = fake_model("full", block_tokens=BLOCK)
    core = EngineCore(model, EngineConfig(blocks=(16,)), Slow())
    core.submit(request("a", tokens(10), max_tokens=4))
    while core.has_work():
        core.step()
    load = core.load()
    assert load.step_s == pytest.approx(0.25)
    assert load.prefill_s_per_token == pytest.approx(0.025)


def test_cache_operations_add_up_to_the_snapshot() -> None:
    rig = Rig(blocks=30)
    held: set[bytes] = set()
    removed = 0
    for salt in range(8):
        rig.submit(request(f"r{salt}", tokens(30, salt), max_tokens=9))
        while rig.core.has_work():
            output = rig.step()
            for op in output.cache_ops if output else ():
                if op.kind is CacheOpKind.STORED:
                    assert not held & set(op.keys)
                    held.update(op.keys)
                else:
                    assert held >= set(op.keys)
                    held.difference_update(op.keys)
                    removed += len(op.keys)
    snapshot = [key for op in rig.core.snapshot() for key in op.keys]
    assert sorted(snapshot) == sorted(held) and len(held) > 10 and removed > 10


def test_two_layouts_give_one_output() -> None:
    outputs = []
    for shape in ("full", "full/inverted", "ranks"):
        rig = Rig(shape)
        rig.submit(request("a", tokens(30), max_tokens=20))
        rig.run()
        outputs.append(rig.output("a"))
    assert outputs[0] == outputs[1] == outputs[2]
