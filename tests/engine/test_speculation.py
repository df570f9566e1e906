"""Speculation by prompt lookup: the streams of decoding token by token, whatever happens between,
and no time lost where drafts do not pay ("n-gram speculation that slows or corrupts")."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from engine_rig import Rig, request, tokens

from worker.engine.messages import EngineRequest, Finish, Logprobs
from worker.engine.plan import StepPlan
from worker.engine.speculation import PLAIN_EVERY, STEPS_MIN, Drafter, Gate

SHAPES = ("full", "window", "latent", "ranks")
MOST = 5


@dataclass
class Stream:
    """What came out of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: Finish | None = None


def some_requests(chance: random.Random, count: int) -> list[EngineRequest]:
    """Over two or three tokens, so that text repeats and about half of a draft is right."""
    return [
        request(
            f"r{i}",
            tuple(chance.choice((3, 5)) for _ in range(chance.randrange(1, 20))),
            max_tokens=chance.choice([1, 2, 9, 40]),
            seed=chance.randrange(1000),
            temperature=chance.choice([0.0, 0.0, 1.0]),
            allowed_token_ids=chance.choice([(3, 5), (3, 5, 7)]),
            stop_token_ids=frozenset(chance.choice([(), (), (7,)])),
            min_tokens=chance.choice([0, 0, 6]),
            frequency_penalty=chance.choice([0.0, 0.0, 0.0, 0.3]),
            logprobs=chance.choice([None, None, 2]),
            n=chance.choice([1, 1, 1, 3]),
            credit_tokens=chance.choice([3, 1000, 1000]),
            tenant=chance.choice("ab"),
            no_cache=chance.random() < 0.1,
        )
        for i in range(count)
    ]


def play(shape: str, seed: int, speculate: int) -> tuple[Rig, dict[tuple[str, int], Stream]]:
    """The same requests, cancels and grants at the same steps, in too few blocks."""
    chance = random.Random(f"{shape}/{seed}")
    rig = Rig(shape, blocks=24, step_tokens_max=30, running_max=6, speculate=speculate)
    requests = some_requests(chance, 14)
    at = dict(enumerate(requests))
    cancelled = {chance.randrange(4, 30): chance.choice(requests).request_id for _ in range(3)}
    for step in range(2000):
        if step in at:
            rig.submit(at[step])
        if step in cancelled:
            rig.cancel(cancelled[step])
        if step % 7 == 6:
            for one in requests:
                rig.core.grant(one.request_id, 4)
        if step > 30 and all(rig.lasts(one.request_id) for one in requests):
            break
        rig.step()
    streams: dict[tuple[str, int], Stream] = {}
    for emission in rig.emissions:
        stream = streams.setdefault((emission.request_id, emission.choice), Stream())
        assert emission.position == len(stream.token_ids)
        stream.token_ids += emission.token_ids
        stream.logprobs += emission.logprobs
        stream.finish = emission.finish or stream.finish
    assert rig.reclaimable()
    return rig, streams


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_streams_are_those_without(shape: str, seed: int, totals: Counter[str]) -> None:
    print(f"shape {shape} seed {seed}")
    rig, with_drafts = play(shape, seed, MOST)
    _, without = play(shape, seed, 0)
    for key in with_drafts.keys() | without.keys():
        ours, theirs = with_drafts.get(key, Stream()), without.get(key, Stream())
        if Finish.CANCELLED in (ours.finish, theirs.finish):  # in the midst of it
            shorter = min(len(ours.token_ids), len(theirs.token_ids))
            assert ours.token_ids[:shorter] == theirs.token_ids[:shorter]
        else:
            assert ours == theirs, key
    speculator = rig.core.scheduler.speculator
    totals["rejected"] += speculator.drafted - speculator.accepted
    totals["accepted"] += speculator.accepted
    totals["preemptions"] += sum(e.usage.preemptions for e in rig.emissions if e.usage)
    totals["several"] += sum(len(e.token_ids) > 1 for e in rig.emissions)
    totals["stopped"] += sum(e.finish is Finish.STOP for e in rig.emissions)
    totals["cached"] += _assert_cache_exact(rig)


def _assert_cache_exact(rig: Rig) -> int:
    """What is cached of these streams is what computing it gives. Returns tokens it was asked."""
    before = list(rig.requests.values())
    rig.requests = {}
    for i, one in enumerate(before):
        text = (*one.token_ids, *rig.output(one.request_id))
        rig.submit(request(f"later {i}", text, 3, tenant=one.tenant))
        rig.run()
    rig.assert_exact()
    return sum(rig.usage(name).cached_tokens for name in rig.requests)


def test_the_schedules_went_everywhere(totals: Counter[str]) -> None:
    """Runs after the cases above."""
    for what in ("rejected", "accepted", "preemptions", "several", "stopped", "cached"):
        assert totals[what] > 10, (what, totals)


def test_a_failed_row_of_a_draft_ends_nothing_that_went_before() -> None:
    rig = Rig(speculate=MOST)
    rig.submit(request("a", (3, 5) * 4, 40, allowed_token_ids=(3,)))
    execute, seen = rig.model.execute, []

    def failing(plan: StepPlan) -> torch.Tensor:
        logits = execute(plan)
        if len(plan.samples) > 2 and not seen:
            logits[2] = float("nan")
            seen.append(plan.step)
        return logits

    rig.model.execute = failing  # type: ignore[method-assign]
    rig.run()
    assert seen and rig.output("a") == [3] * 40 and rig.last("a").finish is Finish.LENGTH


def test_drafts_keep_to_credit_and_budget() -> None:
    rig = Rig(speculate=MOST, step_tokens_max=4)
    for name in ("a", "b"):
        prompt = tuple(3 for _ in range(6))
        rig.submit(request(name, prompt, 40, allowed_token_ids=(3,), credit_tokens=21))
    rig.run()
    assert rig.output("a") == rig.output("b") == [3] * 21
    assert max(len(plan.token_ids) for plan in rig.model.plans) <= 4
    assert rig.core.scheduler.speculator.accepted > 5


def test_drafts_evict_and_preempt_nothing() -> None:
    rig = Rig(speculate=MOST, blocks=8)
    rig.submit(request("old", tokens(11), 2))
    rig.run()
    cached = rig.core.load().blocks_cached
    rig.submit(request("a", (3,) * 6, 13, allowed_token_ids=(3,)))
    rig.run()
    assert rig.core.scheduler.speculator.accepted > 0
    assert rig.core.load().blocks_cached >= cached  # 3 + 5 blocks: all fits, drafts included


def timed(rig: Rig, step_s: float, row_s: float) -> Rig:
    """A device on which a step and each of its rows take so long."""
    execute = rig.model.execute

    def slow(plan: StepPlan) -> torch.Tensor:
        rig.clock.advance(step_s + row_s * len(plan.token_ids))
        return execute(plan)

    rig.model.execute = slow  # type: ignore[method-assign]
    return rig


def seconds(
    speculate: int, step_s: float, row_s: float, allowed: tuple[int, ...] = (3, 5)
) -> tuple[float, Rig]:
    """Of two streams over a few tokens: one repeats itself, two are as good as chance."""
    rig = timed(Rig(speculate=speculate, blocks=200), step_s, row_s)
    for name in "ab":
        rig.submit(request(name, (3, 5) * 4, 300, allowed_token_ids=allowed))
    rig.run()
    return rig.clock.now(), rig


def test_it_is_faster_where_rows_are_cheap() -> None:
    assert seconds(MOST, 0.01, 0.0001)[0] < seconds(0, 0.01, 0.0001)[0]
    fast, rig = seconds(MOST, 0.01, 0.0001, allowed=(3,))
    assert fast < 0.35 * seconds(0, 0.01, 0.0001, allowed=(3,))[0]
    assert rig.output("a") == [3] * 300


def test_it_switches_itself_off_where_rows_are_dear() -> None:
    """Where a row costs as much as a step, half of the drafts being right is not enough."""
    slow, rig = seconds(MOST, 0.001, 0.01)
    assert slow < 1.06 * seconds(0, 0.001, 0.01)[0]
    later = rig.model.plans[len(rig.model.plans) // 2 :]
    drafted = sum(len(plan.token_ids) - plan.sequences for plan in later)
    assert rig.core.scheduler.speculator.drafted > 0 and drafted < 0.1 * len(later)


def test_text_that_does_not_repeat_is_not_drafted() -> None:
    rig = Rig(speculate=MOST, blocks=200)
    rig.submit(request("a", tokens(60), 400))
    rig.run()
    rig.assert_exact()
    assert rig.core.scheduler.speculator.drafted <= 4 * 5


def test_a_drafter_that_is_wrong_pauses_longer_and_longer() -> None:
    chance, text = random.Random(1), [1, 2, 9, 1, 2]
    drafter, drafted = Drafter(text), []
    for _ in range(400):
        draft = drafter.propose(MOST)
        drafted.append(len(draft))
        text += [chance.randrange(1000, 1 << 18), 1, 2]
        if draft:
            drafter.judged(len(draft), 0)
    assert drafted[0] > 0 and sum(drafted[200:]) <= 4


def test_a_draft_is_what_followed_the_longest_latest_match() -> None:
    assert Drafter([7, 1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]).propose(2) == [4, 9]
    assert Drafter([1, 2, 3, 4, 1, 2, 5, 6, 1, 2]).propose(3) == [5, 6, 1]
    assert Drafter([4, 4, 4, 4]).propose(4) == [4, 4, 4, 4]
    assert Drafter([1, 2, 1, 2]).propose(4) == [1, 2, 1, 2]
    assert Drafter([1, 2, 3]).propose(4) == [] == Drafter([1]).propose(4)


def test_indexing_at_once_and_one_by_one_agree() -> None:
    chance = random.Random(2)
    whole = [chance.randrange(6) for _ in range(500)]
    grown = whole[:3]
    drafter = Drafter(grown)
    for token in whole[3:]:
        drafter.propose(4)
        grown.append(token)
    assert drafter.propose(4) == Drafter(whole).propose(4) != []


def test_a_gate_measures_first_and_again() -> None:
    gate = Gate()
    assert not gate.is_open
    for _ in range(STEPS_MIN):
        gate.record_plain(1.0)
    assert gate.is_open
    for _ in range(PLAIN_EVERY):
        gate.record_drafted(1.2, 2.0)
    assert not gate.is_open, "one without, to stay current"
    gate.record_plain(1.0)
    assert gate.is_open
    for _ in range(16):
        gate.record_drafted(3.0, 2.0)
    assert not gate.is_open
