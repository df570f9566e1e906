"""Requests with `epicache`: each goes on from the episode that its question is about, exactly, or
is computed whole if anything of it is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from episode_runs import logits
from random_decoders import compiled, config_of, in_torch, random_weights

from kvstore.keys import ChainSpec, chain, root
from kvstore.objectnames import is_part
from kvstore.objects import Objects
from kvstore.tiered import TieredStore
from kvstore.tiers.base import BlockName
from kvstore.tiers.host import HostTier
from seams.clock import SystemClock
from seams.errors import InvalidRequest
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.forgetting import forget_cache
from worker.engine.messages import CacheOp, Emission, EngineRequest
from worker.engine.planning import StepDraft
from worker.engine.promotion import Promoter
from worker.engine.retention.options import Options
from worker.engine.retention.policies import Policies
from worker.engine.sampling import SamplingParams
from worker.episodes.base import EpisodeOptions
from worker.episodes.build import EpisodeBuilder
from worker.episodes.keeping import EpisodeShelf
from worker.episodes.outline import Outline, nearest, outline
from worker.models.llama import LlamaModel
from worker.service.settings import check_retention

Promoter.strict = True
CONFIG = config_of("llama")
POLICY = "epicache:episodes=2,budget=64,block=96,window=1,sinks=5"
OPTIONS = EpisodeOptions.of(Options(POLICY), 16)
SALT, COUNT = b"s" * 32, 12
HISTORY = 160
# Utterances of 20 tokens, of which two kinds have no token in common.
KINDS = [[10 + kind * 100 + (7 * n * n + n) % 90 for n in range(80)] for kind in (0, 1)]
TALK = [token for n in range(4) for kind in KINDS for token in kind[n * 20 : n * 20 + 20]]
QUESTIONS = [[*KINDS[kind][3:40:5], 305, 306] for kind in (0, 1)]


def decoder() -> LlamaModel:
    return in_torch(CONFIG, random_weights(CONFIG, torch.float32))


@dataclass
class Served:
    """An engine over a host tier; what it said so far."""

    core: EngineCore
    store: TieredStore
    emissions: list[Emission]
    ops: list[CacheOp]

    def submit(self, name: str, prompt: Sequence[int], **fields: object) -> None:
        params = SamplingParams(seed=1, max_tokens=COUNT, ignore_eos=True, temperature=0.0)
        made = {"sampling": params, "salt": SALT, "retention": POLICY} | fields
        self.core.submit(EngineRequest(name, tuple(prompt), len(prompt), **made))  # type: ignore[arg-type]

    def run(self) -> None:
        while self.core.has_work() or self.core.scheduler.can_step():
            self.step()

    def step(self) -> None:
        output = self.core.step()
        self.core.check_integrity()
        if output is not None:
            self.emissions += output.emissions
            self.ops += output.cache_ops

    @property
    def resumed(self) -> int:
        found = self.core.load().compacted
        assert found is not None
        return found.objects_resumed

    def said(self, name: str, choice: int = 0) -> list[int]:
        mine = [e for e in self.emissions if e.request_id == name and e.choice == choice]
        assert all(e.error is None for e in mine)
        return [token for e in mine for token in e.token_ids]

    def cached(self, name: str) -> int:
        (last,) = [e for e in self.emissions if e.request_id == name and e.last]
        assert last.usage is not None
        return last.usage.cached_tokens

    def ask(self, name: str, prompt: Sequence[int], **fields: object) -> list[int]:
        self.submit(name, prompt, **fields)
        self.run()
        return self.said(name)


def served(default: str = "requests", blocks: int = 40, running_max: int = 64) -> Served:
    model = decoder()
    groups = model.spec.groups
    store = TieredStore(HostTier({0: groups[0].block_bytes}, 4 << 20, prefault=False))
    config = EngineConfig((blocks,), step_tokens_max=64, running_max=running_max, poison_freed=True)
    policies = Policies(model.spec, default)
    core = EngineCore(model, config, SystemClock(), tiers=store, retention=policies)
    core._times.record = lambda *_: None  # type: ignore[method-assign]
    core._times.prefill_s_per_token = 0.01  # so that waiting for an episode pays
    return Served(core, store, [], [])


def shelf_of(store: TieredStore, model: LlamaModel, salt: bytes = SALT) -> EpisodeShelf:
    spec = ChainSpec(root(model.spec.fingerprint, "", 16), 16, salt)
    return EpisodeShelf(
        Objects(store, model.spec.groups, 16), model, chain(spec, TALK)[-1], OPTIONS
    )


def build(store: TieredStore) -> tuple[Outline, list[list[int]]]:
    """Put the episodes there; per episode what each question's greedy answer is, computed over its
    pages by hand."""
    model = decoder()
    found = outline(TALK, range(0, HISTORY, 20), [3] * 8, OPTIONS)
    builder, shelf = EpisodeBuilder(model, TALK, OPTIONS), shelf_of(store, model)
    answers = []
    for episode, patch in enumerate(found.patches):
        builder.build(patch)
        assert shelf.put_episode(episode, builder.state, builder.pages)
        behind = partial(logits, model, builder.pages, builder.stored, first=HISTORY)
        answers.append([greedy(behind, question) for question in QUESTIONS])
    assert shelf.put_index(found.index)
    return found, answers


def greedy(behind: partial[torch.Tensor], question: Sequence[int]) -> list[int]:
    ids = list(question)
    for _ in range(COUNT):
        ids.append(int(behind(ids=ids)[-1].argmax()))
    return ids[len(question) :]


def plain_answer(question: Sequence[int]) -> list[int]:
    model = decoder()
    model.allocate((14,))
    logits(model, range(10), 0, TALK, 0)
    return greedy(partial(logits, model, range(10), HISTORY, first=HISTORY), question)


def test_the_planted_conversation_has_two_episodes() -> None:
    found = outline(TALK, range(0, HISTORY, 20), [3] * 8, OPTIONS)
    assert found.labels.tolist() == [0, 1] * 4
    assert [nearest(found.index, question) for question in QUESTIONS] == [0, 1]


@pytest.mark.parametrize("default", ["requests", POLICY])
def test_a_question_goes_on_from_the_episode_that_it_is_about(default: str) -> None:
    rig = served(default)
    _, answers = build(rig.store)
    for kind, question in enumerate(QUESTIONS):
        fields = {} if default == "requests" else {"retention": ""}
        out = rig.ask(f"q{kind}", [*TALK, *question], **fields)
        assert out == answers[kind][kind]
        assert rig.cached(f"q{kind}") == HISTORY
    assert answers[0][0] != answers[1][0] and answers[1][1] != answers[0][1], "a weak test"
    assert plain_answer(QUESTIONS[0]) != answers[0][0], "a weak test"
    assert rig.ops == []  # nothing of it is in the cache, and no router hears of it
    found = rig.core.load().compacted
    assert found is not None and found.objects_resumed == 2 and found.objects_kept == 0
    assert found.rounds == 0
    pool = rig.core.memory.pools[0]
    assert pool.free == pool.total
    rig.core.close()


def test_many_at_once_and_several_choices() -> None:
    """Beside plain requests, in chunks, in a pool that does not hold all of them at once."""
    rig = served(blocks=24)
    _, answers = build(rig.store)
    plain = [plain_answer(question) for question in QUESTIONS]
    for number in range(3):
        for kind, question in enumerate(QUESTIONS):
            rig.submit(f"e{kind}{number}", [*TALK, *question])
            rig.submit(f"p{kind}{number}", [*TALK, *question], retention="none")
    several = SamplingParams(seed=1, max_tokens=COUNT, n=3, ignore_eos=True, temperature=0.0)
    rig.submit("n", [*TALK, *QUESTIONS[1]], sampling=several)
    rig.run()
    for number in range(3):
        for kind in (0, 1):
            assert rig.said(f"e{kind}{number}") == answers[kind][kind]
            assert rig.said(f"p{kind}{number}") == plain[kind]
    assert [rig.said("n", choice) for choice in range(3)] == [answers[1][1]] * 3
    rig.core.close()


@pytest.mark.parametrize("lost", ["index", "episode", "blocks", "everything"])
def test_whatever_is_lost_the_answer_is_the_whole_conversations(lost: str) -> None:
    rig = served()
    build(rig.store)
    names = [name for name in rig.store.host.names() if is_part(name)]
    metas = [name for name in names if name.tokens[:1] == b"\xff"]
    index = shelf_index_key(rig.store)
    gone = {
        "index": [name for name in metas if name.key == index],
        "episode": [name for name in metas if name.key != index],
        "blocks": [name for name in names if name not in metas][::3],
        "everything": names,
    }[lost]
    assert gone
    rig.store.host.discard(gone)
    for kind, question in enumerate(QUESTIONS):
        assert rig.ask(f"q{kind}", [*TALK, *question]) == plain_answer(question)
    found = rig.core.load().compacted
    assert found is not None and found.objects_resumed == 0
    assert rig.cached("q1") >= HISTORY - 16  # it had what the first one left in the cache
    rig.core.close()


def shelf_index_key(store: TieredStore) -> bytes:
    from kvstore.objectnames import head_part
    from worker.episodes.record import index_name

    spec = ChainSpec(root("small", "", 16), 16, SALT)
    return head_part(index_name(chain(spec, TALK)[-1], OPTIONS), 16).key


def test_other_tenants_options_and_prompts_find_nothing() -> None:
    rig = served()
    build(rig.store)
    question = QUESTIONS[0]
    plain = plain_answer(question)
    others: dict[str, dict[str, object]] = {
        "tenant": {"salt": b"t" * 32},
        "options": {"retention": POLICY + ",seed=1"},
        "none": {"retention": "none"},
        "no_cache": {"no_cache": True},
    }
    for name, fields in others.items():
        assert rig.ask(name, [*TALK, *question], **fields) == plain
    rig.ask("whole", TALK)  # and no question behind it
    rig.ask("short", [*TALK[:-1]])
    changed = [*TALK[:-1], TALK[-1] + 1, *question]
    rig.ask("changed", changed)
    found = rig.core.load().compacted
    assert found is not None and found.objects_resumed == 0
    assert rig.ask("right", [*TALK, *question]) != plain
    rig.core.close()


def test_a_later_turn_is_a_question_too() -> None:
    """What came after the conversation, answers too, is computed behind the nearest episode."""
    rig = served()
    _, answers = build(rig.store)
    first = rig.ask("a", [*TALK, *QUESTIONS[0]])
    assert first == answers[0][0]
    longer = [*QUESTIONS[0], *first, *KINDS[1][:30]]
    out = rig.ask("b", [*TALK, *longer])
    model = decoder()
    model.allocate((10,))
    state = shelf_of(rig.store, model).load_episode(1, range(10), 10.0)
    assert state is not None and rig.cached("b") == HISTORY
    assert out == greedy(partial(logits, model, range(4), state.stored, first=HISTORY), longer)
    rig.core.close()


def hide(store: TieredStore) -> list[tuple[BlockName, bytes]]:
    """Take all objects away, for `show`."""
    held = []
    for name in [name for name in store.host.names() if is_part(name)]:
        view = store.host.pin(name)
        assert view is not None
        held.append((name, bytes(view)))
        store.host.unpin(name)
    store.host.discard([name for name, _ in held])
    return held


def show(store: TieredStore, held: Sequence[tuple[BlockName, bytes]]) -> None:
    store.demote([name for name, _ in held], [memoryview(content) for _, content in held])


def preempt(rig: Served) -> None:
    (sequence,) = rig.core.scheduler.running
    rig.core.scheduler._preempt(StepDraft(1, 1), sequence)


def test_a_stream_goes_on_as_it_began() -> None:
    """One that began on the whole conversation is preempted once its episode has turned up; one
    that began on the episode, while that is there."""
    rig = served()
    _, answers = build(rig.store)
    hidden = hide(rig.store)
    prompt = [*TALK, *QUESTIONS[0]]
    rig.submit("whole", prompt)
    while len(rig.said("whole")) < 4:
        rig.step()
    show(rig.store, hidden)
    preempt(rig)
    rig.run()
    assert rig.said("whole") == plain_answer(QUESTIONS[0])
    assert rig.resumed == 0
    rig.submit("episode", prompt)
    while len(rig.said("episode")) < 4:
        rig.step()
    preempt(rig)
    rig.run()
    assert rig.said("episode") == answers[0][0]
    assert rig.resumed == 2
    rig.core.close()


def test_a_reset_of_the_device_changes_no_stream() -> None:
    """One that began on an episode, and one that began without, are preempted after a reset."""
    rig = served()
    _, answers = build(rig.store)
    prompt = [*TALK, *QUESTIONS[0]]
    rig.submit("episode", prompt)
    while len(rig.said("episode")) < 4:
        rig.step()
    forget_cache(rig.core.scheduler)
    preempt(rig)
    rig.run()
    assert rig.said("episode") == answers[0][0] and rig.resumed == 2
    hidden = hide(rig.store)
    rig.submit("whole", prompt)
    while len(rig.said("whole")) < 4:
        rig.step()
    forget_cache(rig.core.scheduler)
    show(rig.store, hidden)
    preempt(rig)
    rig.run()
    assert rig.said("whole") == plain_answer(QUESTIONS[0]) and rig.resumed == 2
    rig.core.close()


def test_choices_that_wait_for_a_place_go_on_as_the_first() -> None:
    """Their episode turns up between the first one's start and theirs."""
    rig = served(running_max=1)
    build(rig.store)
    hidden = hide(rig.store)
    several = SamplingParams(seed=1, max_tokens=COUNT, n=3, ignore_eos=True, temperature=0.0)
    rig.submit("n", [*TALK, *QUESTIONS[0]], sampling=several)
    rig.step()
    show(rig.store, hidden)
    rig.run()
    assert [rig.said("n", choice) for choice in range(3)] == [plain_answer(QUESTIONS[0])] * 3
    assert rig.resumed == 0
    rig.core.close()


def test_models_that_cannot_have_episodes_say_so() -> None:
    spec = compiled(CONFIG, random_weights(CONFIG, torch.float32)).spec
    with pytest.raises(InvalidRequest, match="epicache needs a model that torch computes"):
        Policies(spec).make(POLICY)
    with pytest.raises(InvalidRequest, match="epicache has no option resume"):
        Policies(decoder().spec).make(POLICY + ",resume")
    with pytest.raises(
        InvalidRequest, match="epicache finds episodes in tiers, and there are none"
    ):
        check_retention(POLICY, tiered=False)
    check_retention(POLICY, tiered=True)
    made = Policies(decoder().spec, POLICY).default
    assert made is not None and made.quota.limit(1) > CONFIG.context_tokens
