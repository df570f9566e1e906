"""Random questions about one conversation, together, while its episodes come and go and sequences
are preempted, paused and cancelled: each stream is that of an episode or of the whole conversation.
A stream whose episode was lost goes on over the whole one; none changes the other way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from episode_runs import logits
from test_episodes_engine import (
    HISTORY,
    KINDS,
    OPTIONS,
    POLICY,
    TALK,
    Served,
    build,
    decoder,
    hide,
    served,
    show,
)

from kvstore.tiers.base import BlockName
from worker.engine.messages import Emission
from worker.engine.planning import StepDraft
from worker.engine.promotion import Promoter
from worker.engine.sampling import SamplingParams
from worker.episodes.build import EpisodeBuilder
from worker.episodes.outline import nearest, outline

Promoter.strict = True
Behind = partial[torch.Tensor]  # logits of ids behind the conversation
WHOLE = -1
FOUND = outline(TALK, range(0, HISTORY, 20), [3] * 8, OPTIONS)


@pytest.fixture(scope="module")
def views() -> Mapping[int, Behind]:
    """What comes next over the whole conversation, and over each episode."""
    model = decoder()
    model.allocate((16,))
    logits(model, range(10), 0, TALK, 0)
    found = {WHOLE: partial(logits, model, range(10), HISTORY, first=HISTORY)}
    for episode, patch in enumerate(FOUND.patches):
        model = decoder()
        builder = EpisodeBuilder(model, TALK, OPTIONS)
        builder.build(patch)
        pages, stored = list(builder.pages), builder.stored
        found[episode] = partial(logits, model, pages, stored, first=HISTORY)
    return found


def is_explained(views: Mapping[int, Behind], question: Sequence[int], out: list[int]) -> bool:
    """Whether all of it is one view's, or first the episode's and then the whole one's."""
    if not out:
        return True
    ids, last = [*question, *out], len(question) - 1
    whole, own = (
        views[view](ids=ids)[last:-1].argmax(-1).tolist()
        for view in (WHOLE, nearest(FOUND.index, question))
    )
    same = next((at for at, token in enumerate(out) if own[at] != token), len(out))
    return whole[same:] == out[same:]


def question(chance: random.Random) -> list[int]:
    kind = KINDS[chance.randrange(2)]
    return [*kind[: chance.randrange(3, 30)], *chance.choices(range(300, 319), k=2)]


def submit(rig: Served, name: str, chance: random.Random) -> tuple[list[int], int]:
    """A question, and how many answers are wanted."""
    asked, count = question(chance), chance.choice([1, 1, 1, 2, 3])
    params = SamplingParams(
        seed=1, max_tokens=chance.randrange(1, 24), n=count, ignore_eos=True, temperature=0.0
    )
    credit, policy = chance.choice([3, 1000, 1000]), chance.choice([POLICY, POLICY, "none"])
    rig.submit(name, [*TALK, *asked], sampling=params, credit_tokens=credit, retention=policy)
    return asked, count


Hidden = list[tuple[BlockName, bytes]]


def trouble(rig: Served, chance: random.Random, hidden: Hidden, names: Sequence[str]) -> None:
    """Seldom, one of what may happen between two steps."""
    core, host = rig.core, rig.store.host
    match chance.randrange(14):
        case 0 if hidden:
            show(rig.store, hidden)
            hidden.clear()
        case 0:
            hidden += hide(rig.store)
        case 1:
            assert core.memory.cache is not None
            core.memory.cache.clear()
        case 2 if chance.random() < 0.05:
            held = host.names()
            host.discard(chance.sample(held, len(held) // 10))
        case 3 if core.scheduler.running:
            core.scheduler._preempt(StepDraft(1, 1), chance.choice(core.scheduler.running))
            core.check_integrity()
        case 4:
            core.grant(chance.choice(names), 3)
        case 5 if chance.random() < 0.3:
            core.cancel(chance.choice(names))


def answers(emissions: Sequence[Emission], name: str, count: int) -> list[list[int]]:
    """Of a request that ended once, with its tokens accounted for."""
    mine = [one for one in emissions if one.request_id == name]
    (last,) = [one for one in mine if one.last]
    assert last.usage is not None
    assert last.usage.cached_tokens + last.usage.computed_tokens == last.usage.prompt_tokens
    return [
        [token for one in mine if one.choice == choice for token in one.token_ids]
        for choice in range(count)
    ]


def questions(views: Mapping[int, Behind], seed: int) -> Counter[str]:
    chance = random.Random(seed)
    rig = served(blocks=chance.choice([16, 24, 40]), running_max=chance.choice([1, 2, 4]))
    build(rig.store)
    hidden = hide(rig.store) if chance.random() < 0.3 else []
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(12):
        asked[f"{number}"] = submit(rig, f"{number}", chance)
        for _ in range(chance.randrange(12)):
            rig.step()
            trouble(rig, chance, hidden, list(asked))
    for name in asked:
        rig.core.grant(name, 1000)
    rig.run()
    for name, (ids, count) in asked.items():
        for out in answers(rig.emissions, name, count):
            assert is_explained(views, ids, out), f"{name} is of neither"
    memory, resumed = rig.core.memory, rig.resumed
    assert memory.available(0) == memory.pools[0].total
    assert not any(slot.pins for slot in rig.store.host._table._slots.values())
    rig.core.close()
    return Counter(resumed=resumed, asked=sum(count for _, count in asked.values()))


def test_random_questions_stay_with_what_they_began_with(views: Mapping[int, Behind]) -> None:
    print("seeds 1029, 1031")
    found = sum((questions(views, seed) for seed in (1029, 1031)), Counter[str]())
    print(found)
    assert found["resumed"] > 5


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_random_questions_stay_with_what_they_began_with_full(
    views: Mapping[int, Behind], seed: int
) -> None:
    print(f"seed {seed}: {questions(views, seed)}")
