"""The next turn of a pruned conversation goes on from what the last one left in the tiers, or is
computed as if that had never been: exact either way, whatever is lost."""

import logging
import random
import time
from collections.abc import Sequence
from struct import Struct

import pytest
from dict_tier import DictTier
from engine_rig import BLOCK, request, tokens
from pruned_oracle import Mover, PrunedOracle, PrunedRig, Scattered, pruned_continuation

from kvstore.objectnames import is_part
from kvstore.objects import Objects
from kvstore.tiered import TieredStore
from kvstore.tiers.base import BlockName, Tier
from kvstore.tiers.host import HostTier
from kvstore.tiers.queue import TierQueue
from seams.clock import SystemClock
from seams.errors import InvalidRequest
from worker.engine.core import EngineCore
from worker.engine.derived import MISFITS_MAX
from worker.engine.derived_state import DerivedState
from worker.engine.messages import CacheOp, Compacted, EngineLoad
from worker.engine.promotion import Promoter
from worker.engine.retention.base import Quota, RetentionPolicy
from worker.engine.retention.policies import Policies, policy_of
from worker.models.fake import fake_model
from worker.service.convert import heartbeat
from worker.service.settings import check_retention

Promoter.strict = True
SUFFIX = Scattered(Quota(budget_tokens=10, interval_tokens=8), resume=True)
WHOLE = Scattered(
    Quota(budget_tokens=22, interval_tokens=8, suffix=False, sink_tokens=6), resume=True
)
STREAMING = "streaming:window=10,interval=8,resume"
SINKS = "streaming:sinks=3,window=18,interval=8,resume"
EVERY = pytest.mark.parametrize(
    "policy", [STREAMING, SINKS, SUFFIX, WHOLE], ids=["streaming", "sinks", "suffix", "whole"]
)
PREFILL_S = 0.01  # per token, as the engine is told: waiting for a tier nearly always pays


class TurnRig(PrunedRig):
    """A PrunedRig over tiers."""

    def __init__(
        self,
        policy: str | RetentionPolicy,
        shape: str = "full",
        *,
        lower: Sequence[Tier] = (),
        host: int = 600,
        weights: int = 0,
        **config: object,
    ) -> None:
        super().__init__(policy, shape, **config)
        made = fake_model(shape, context_tokens=2048, block_tokens=BLOCK, weights=weights)
        self.model = Mover(made)
        groups = made.spec.groups
        sizes = {group.id: group.block_bytes for group in groups}
        slots = host * sum(group.ranks for group in groups)
        self.host = HostTier(sizes, slots * 4096, verify=True, prefault=False)
        self.store = TieredStore(self.host, [TierQueue(tier, threads=1) for tier in lower])
        self.clock = SystemClock()  # type: ignore[assignment]
        self.core = EngineCore(
            self.model, self.config, self.clock, tiers=self.store, retention=self.policies
        )
        self.price()
        self.ops: list[CacheOp] = []

    def price(self, prefill_s_per_token: float = PREFILL_S) -> None:
        """What the engine believes a token costs."""
        times = self.core._times
        times.record = lambda *_: None  # type: ignore[method-assign]
        times.prefill_s_per_token = prefill_s_per_token

    def step(self, count: int = 1):  # type: ignore[no-untyped-def]
        output = None
        for _ in range(count):
            output = self.core.step()
            self.core.check_integrity()
            if output is not None:
                self.emissions += output.emissions
                self.ops += output.cache_ops
        return output

    def run(self, steps_max: int = 5000) -> None:
        while self.core.scheduler.can_step() or self.core.has_work():
            if not self.core.has_work():
                time.sleep(0.0005)
                continue
            self.step()
            steps_max -= 1
            assert steps_max > 0, "no end"

    def turn(self, name: str, prompt: Sequence[int], count: int, **fields: object) -> list[int]:
        """One request to its end."""
        self.submit(request(name, tuple(prompt), count, **fields))
        self.run()
        assert self.last(name).error is None
        return self.output(name)

    def resumed(self, first: int, ids: Sequence[int], count: int) -> list[int]:
        """What goes on from a state that the turn with a prompt of `first` tokens began."""
        policy = self.policies.default
        assert policy is not None
        return pruned_continuation(self.model, policy, first, ids, count)

    @property
    def total(self) -> Compacted:
        found = self.core.load().compacted
        assert found is not None
        return found

    def objects(self) -> list[BlockName]:
        return [name for name in self.host.names() if is_part(name)]

    def lose_objects(self) -> None:
        self.host.discard(self.objects())

    def close(self) -> None:
        assert all(queue.drain(5.0) for queue in self.store.lower.values())  # or it pins blocks
        assert self.core._pruner is not None and self.core._pruner.derived is not None
        assert self.core._pruner.derived.faults == 0
        assert not any(slot.pins for slot in self.host._table._slots.values())
        assert self.reclaimable()
        self.core.close()


@pytest.mark.parametrize(
    ("policy", "shape"),
    [(STREAMING, "full"), (SINKS, "latent"), (SUFFIX, "ranks"), (WHOLE, "full")],
)
def test_the_next_turn_goes_on_from_the_last(policy: str | RetentionPolicy, shape: str) -> None:
    """Four turns: no token of an earlier one is computed again, and what each attends to, and takes
    of the pool, is what one long generation after the first prompt would."""
    rig = TurnRig(policy, shape, blocks=80, step_tokens_max=13)
    conversation, known = list(tokens(21)), 0
    for number in range(4):
        given = len(conversation)
        out = rig.turn(f"t{number}", conversation, 50 + number)
        assert out == rig.resumed(21, conversation, len(out))
        usage = rig.usage(f"t{number}")
        assert usage.cached_tokens == known
        known = given + len(out) - 1  # the last token's keys were never computed
        conversation += [*out, *tokens(7, 50 + number)]
    made = rig.policies.default
    assert made is not None
    assert max(int(plan.lengths.max()) for plan in rig.model.plans) <= made.quota.limit(21)
    found = rig.total
    assert (found.objects_kept, found.objects_resumed) == (4, 3)
    assert found.resumed_tokens > 3 * 40
    rig.assert_cache_is_plain()
    rig.close()


def test_turns_that_nobody_asked_to_keep_are_not_kept() -> None:
    rig = TurnRig("streaming:window=10,interval=8")
    first = rig.turn("a", tokens(21), 50)
    rig.turn("b", (*tokens(21), *first, 1, 2), 20)
    rig.assert_exact()
    assert rig.total.objects_kept == 0 and not rig.objects()
    assert rig.usage("b").cached_tokens <= 21
    rig.close()


def test_a_turn_without_a_round_leaves_a_plain_chain() -> None:
    rig = TurnRig(STREAMING)
    first = rig.turn("a", tokens(20), 15)
    rig.turn("b", (*tokens(20), *first, 1, 2), 8)
    rig.assert_exact()
    assert rig.total.objects_kept == 0
    assert rig.usage("b").cached_tokens >= 32
    rig.close()


@pytest.mark.parametrize("policy", [STREAMING, WHOLE])
def test_a_lost_state_is_as_if_it_had_never_been(policy: str | RetentionPolicy) -> None:
    rig = TurnRig(policy)
    first = rig.turn("a", tokens(21), 50)
    conversation = (*tokens(21), *first, *tokens(5, 9))
    for name in rig.objects()[::3]:
        rig.host.discard([name])
        rig.turn(f"b{name.key.hex()}", conversation, 4)
        rig.host.discard(rig.objects())
        rig.turn("a" + name.key.hex(), tokens(21), 50)
    rig.assert_exact()  # all of them plain
    assert rig.total.objects_resumed == 0
    rig.close()


@EVERY
def test_a_lost_prefix_is_computed_and_the_rest_is_not(policy: str | RetentionPolicy) -> None:
    rig = TurnRig(policy)
    first = rig.turn("a", tokens(21), 50)
    assert rig.core.memory.cache is not None
    rig.core.memory.cache.clear()
    rig.host.discard([name for name in rig.host.names() if not is_part(name)])
    conversation = (*tokens(21), *first, *tokens(5, 9))
    out = rig.turn("b", conversation, 30)
    assert out == rig.resumed(21, conversation, 30)
    assert rig.total.objects_resumed == 1
    usage = rig.usage("b")
    assert usage.cached_tokens == rig.total.resumed_tokens
    assert usage.cached_tokens + usage.computed_tokens == len(conversation)
    rig.close()


@pytest.mark.parametrize(("name", "shape"), [("disk", "ranks"), ("shared", "full")])
def test_a_state_comes_back_from_a_lower_tier(name: str, shape: str) -> None:
    tier = DictTier(name, load_s=0.0003)
    rig = TurnRig(SUFFIX, shape, lower=[tier])
    first = rig.turn("a", tokens(21), 50)
    assert rig.store.flush(5.0)
    rig.host.clear()
    conversation = (*tokens(21), *first, *tokens(5, 9))
    assert rig.turn("b", conversation, 30) == rig.resumed(21, conversation, 30)
    assert rig.usage("b").cached_tokens == 21 + 50 - 1
    rig.close()


def test_another_replica_goes_on_from_it() -> None:
    tier = DictTier("shared")
    rig = TurnRig(SUFFIX, lower=[tier])
    first = rig.turn("a", tokens(21), 50)
    rig.core.close(5.0)
    other = TurnRig(SUFFIX, lower=[tier], step_tokens_max=7)
    conversation = (*tokens(21), *first, *tokens(5, 9))
    assert other.turn("b", conversation, 30) == other.resumed(21, conversation, 30)
    assert other.usage("b").cached_tokens == 21 + 50 - 1
    other.close()


def test_a_slow_tier_is_not_waited_for_and_a_frozen_one_neither() -> None:
    for price, freeze in ((1e-7, False), (0.002, True)):
        tier = DictTier("shared", load_s=0.02)
        rig = TurnRig(SUFFIX, lower=[tier])
        first = rig.turn("a", tokens(21), 50)
        assert rig.store.flush(5.0)
        rig.host.clear()
        rig.price(price)
        if freeze:
            tier.frozen.set()
        began = time.monotonic()
        rig.turn("b", (*tokens(21), *first, *tokens(5, 9)), 4)
        assert time.monotonic() - began < 3.0
        tier.frozen.clear()
        rig.assert_exact()
        assert rig.total.objects_resumed == 0
        rig.close()


def test_states_of_others_are_never_met() -> None:
    """Tenants, policies, models: the same tokens, and not the same name."""
    tier = DictTier("shared")
    rig = TurnRig(STREAMING, lower=[tier])
    mine = {"salt": b"a" * 32, "tenant": "a", "private_from": 1000}
    first = rig.turn("a", tokens(21), 50, **mine)
    conversation = (*tokens(21), *first, *tokens(5, 9))
    theirs = {**mine, "salt": b"b" * 32, "tenant": "b"}
    rig.turn("b", conversation, 30, **theirs)
    rig.turn("c", conversation, 30, retention="streaming:window=11,interval=8,resume", **mine)
    rig.turn("d", conversation, 30, retention="none", **mine)
    rig.turn("e", conversation, 30, retention="streaming:window=10,interval=8", **mine)
    rig.turn("f", conversation, 30, no_cache=True, **mine)
    rig.assert_exact()
    assert rig.total.objects_resumed == 0
    assert rig.core.memory.cache is not None
    rig.core.memory.cache.clear()  # or there is nothing to wait for the shared tier's answer for
    assert rig.turn("again", conversation, 30, **mine) == rig.resumed(21, conversation, 30)
    assert rig.total.objects_resumed == 1
    assert rig.store.flush(5.0)
    other = TurnRig(STREAMING, lower=[tier], weights=1)
    other.turn("a", conversation, 30, **mine)
    other.assert_exact()
    assert other.total.objects_resumed == 0
    other.close()
    rig.close()


def test_the_longest_beginning_that_fits_is_taken() -> None:
    """A branch from inside the second turn, an answer once more, a prompt cut in the tail."""
    rig = TurnRig(SUFFIX)
    first = rig.turn("a", tokens(21), 51)
    conversation = (*tokens(21), *first, *tokens(6, 9))
    second = rig.turn("b", conversation, 40)
    branch = (*conversation, *second[:20], 77, *tokens(30, 3))
    assert rig.turn("branch", branch, 30) == rig.resumed(21, branch, 30)
    assert rig.usage("branch").cached_tokens == 21 + 51 - 1
    assert rig.turn("again", conversation, 40) == second
    assert rig.usage("again").cached_tokens == 21 + 51 - 1
    assert (21 + 51 - 1) % BLOCK == 3, "the first state has a tail"
    cut = (*conversation[: 21 + 51 - 2], 99, 98, 97, 96, 95)
    rig.turn("cut", cut, 20)
    rig.assert_exact("cut", "a")
    assert rig.usage("cut").cached_tokens <= 21
    rig.close()


def test_choices_go_on_from_one_state_each_by_itself() -> None:
    rig = TurnRig(SUFFIX, blocks=120)
    first = rig.turn("a", tokens(21), 50)
    conversation = (*tokens(21), *first, *tokens(5, 9))
    rig.submit(request("n", conversation, 40, n=3))
    rig.run()
    expected = rig.resumed(21, conversation, 40)
    assert [rig.output("n", choice) for choice in range(3)] == [expected] * 3
    assert rig.total.objects_resumed == 1
    rig.close()


@pytest.mark.parametrize("policy", [SINKS, SUFFIX])
def test_a_cancelled_turn_leaves_its_state_too(policy: str | RetentionPolicy) -> None:
    rig = TurnRig(policy)
    rig.submit(request("a", tokens(21), 200))
    rig.step(70)
    rig.cancel("a")
    rig.run()
    conversation = (*tokens(21), *rig.output("a"), *tokens(5, 9))
    assert rig.turn("b", conversation, 30) == rig.resumed(21, conversation, 30)
    assert rig.total.objects_resumed == 1
    rig.close()


@pytest.mark.parametrize("policy", [STREAMING, WHOLE])
def test_a_preempted_sequence_goes_on_from_its_own_state(policy: str | RetentionPolicy) -> None:
    """Resumed ones too: what was emitted before goes on as it began, to the token."""
    rig = TurnRig(policy, blocks=30, running_max=8)
    conversations = []
    for number in range(5):
        prompt = tokens(9 + number, number)
        out = rig.turn(f"a{number}", prompt, 40)
        conversations.append((*prompt, *out, *tokens(4, 60 + number)))
    for number, conversation in enumerate(conversations):
        rig.submit(request(f"b{number}", conversation, 70, credit_tokens=20))
    rig.step(40)
    for _ in range(12):
        for number in range(5):
            rig.core.grant(f"b{number}", 5)
        rig.step(9)
    for number in range(5):
        rig.core.grant(f"b{number}", 100)
    rig.run()
    for number, conversation in enumerate(conversations):
        expected = rig.resumed(9 + number, conversation, 70)
        assert rig.output(f"b{number}") == expected, number
    assert sum(rig.usage(f"b{n}").preemptions for n in range(5)) > 3
    assert rig.total.objects_resumed > 8
    rig.assert_cache_is_plain()
    rig.close()


def test_a_stream_goes_on_as_it_began_where_an_older_state_turns_up() -> None:
    """The first turn's state is hidden while the second begins; that one is preempted after it
    came back: it goes on from its own, not from the older one."""
    rig = TurnRig(SUFFIX, blocks=60)
    first = rig.turn("a", tokens(21), 50)
    conversation = (*tokens(21), *first, *tokens(5, 9))
    held = [(n, bytes(rig.host.pin(n))) for n in rig.objects()]  # type: ignore[arg-type]
    for name, _ in held:
        rig.host.unpin(name)
    rig.lose_objects()
    rig.submit(request("b", conversation, 60, credit_tokens=30))
    rig.step(60)
    assert len(rig.output("b")) == 30
    rig.store.demote([name for name, _ in held], [memoryview(data) for _, data in held])
    (sequence,) = rig.core.scheduler.running
    from worker.engine.planning import StepDraft

    rig.core.scheduler._preempt(StepDraft(1, 1), sequence)
    rig.core.grant("b", 100)
    rig.run()
    assert rig.total.objects_resumed == 1
    rig.assert_exact("b")
    rig.close()


def test_a_moved_stream_goes_on_from_a_state() -> None:
    tier = DictTier("shared")
    rig = TurnRig(SUFFIX, lower=[tier])
    first = rig.turn("a", tokens(21), 50)
    conversation = (*tokens(21), *first, *tokens(5, 9))
    whole = rig.turn("b", conversation, 40)
    assert rig.store.flush(5.0)
    other = TurnRig(SUFFIX, lower=[tier])
    moved = other.turn("b", (*conversation, *whole[:13]), 40, prompt_tokens=len(conversation))
    assert whole[:13] + moved == whole
    usage = other.usage("b")
    assert usage.cached_tokens == 21 + 50 - 1 - 20, "the prefix is the first replica's alone"
    assert usage.prompt_tokens == len(conversation)
    other.close()
    rig.close()


def test_a_pool_that_is_full_gives_a_state_room_or_none() -> None:
    """Older sequences keep their blocks: the state waits for them."""
    rig = TurnRig(SUFFIX, blocks=24, running_max=6)
    first = rig.turn("a", tokens(21), 50)
    conversation = (*tokens(21), *first, *tokens(5, 9))
    rig.submit(*[request(f"old{n}", tokens(12, 30 + n), 30) for n in range(3)])
    rig.step(3)
    rig.submit(request("b", conversation, 30))
    rig.run()
    assert rig.output("b") == rig.resumed(21, conversation, 30)
    rig.assert_exact("a", *[f"old{n}" for n in range(3)])
    rig.close()


def test_those_that_queue_for_one_state_share_its_table() -> None:
    rig = TurnRig(SUFFIX, running_max=1)
    first = rig.turn("a", tokens(21), 50)
    conversation = (*tokens(21), *first, *tokens(5, 9))
    rig.submit(*[request(f"b{n}", conversation, 30) for n in range(4)])
    wanted = [sequence.wanted for sequence in rig.core.scheduler.waiting]
    states = {id(one.state) for one in wanted if one is not None and one.state is not None}
    assert len(wanted) == 4 and len(states) == 1
    assert not any(meta for one in wanted if one for meta in one.finding.metas.values())
    del wanted
    rig.run()
    expected = rig.resumed(21, conversation, 30)
    assert [rig.output(f"b{n}") for n in range(4)] == [expected] * 4
    assert rig.total.objects_resumed == 4
    assert rig.core._pruner is not None and rig.core._pruner.derived is not None
    assert not rig.core._pruner.derived._states
    rig.close()


def test_few_states_are_read_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of which every beginning has a state, each with another end."""
    rig = TurnRig(SINKS, host=3000, blocks=120)
    conversation = tokens(200)
    for edge in range(8, 48):
        end = (conversation[BLOCK * edge] + 1) % 250
        rig.turn(f"e{edge}", (*conversation[: BLOCK * edge], end), 1)
    assert rig.total.objects_kept == 40
    read: list[bytes] = []
    decode = DerivedState.decode

    def counted(meta: bytes, block_tokens: int) -> DerivedState | None:
        read.append(meta)
        return decode(meta, block_tokens)

    monkeypatch.setattr(DerivedState, "decode", counted)
    rig.turn("whole", conversation, 20)
    assert len(read) == MISFITS_MAX
    rig.assert_exact()
    assert rig.total.objects_resumed == 0
    rig.close()


def test_a_state_too_large_for_host_memory_is_not_even_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = TurnRig(SUFFIX, host=8)
    copied: list[object] = []
    monkeypatch.setattr("kvstore.objects._content", lambda *given: copied.append(given))
    monkeypatch.setattr(Promoter, "view", lambda *given: copied.append(given))
    for name in "ab":
        rig.turn(name, tokens(21, ord(name)), 50)
    assert not copied and rig.total.objects_kept == 0 and not rig.objects()
    assert caplog.text.count("take too much of the host tier") == 1
    rig.assert_exact()
    rig.close()


def test_no_router_hears_of_a_state() -> None:
    rig = TurnRig(SUFFIX, lower=[DictTier("disk")])
    first = rig.turn("a", tokens(21), 50)
    rig.turn("b", (*tokens(21), *first, *tokens(5, 9)), 30)
    assert rig.store.flush(5.0)
    rig.step()
    told = {key for op in (*rig.ops, *rig.core.snapshot()) for key in op.keys}
    assert rig.objects() and not told & {name.key for name in rig.objects()}
    rig.close()


@pytest.mark.parametrize("broken", ["put", "find", "place", "load", "bring", "wait_s"])
def test_a_fault_in_there_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(Promoter, "strict", False)
    rig = TurnRig(SUFFIX, lower=[DictTier("shared", load_s=0.002)])

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    if broken == "put":
        monkeypatch.setattr(Objects, broken, fail)
    first = rig.turn("a", tokens(21), 50)
    assert rig.store.flush(5.0)
    rig.host.clear()
    monkeypatch.setattr(Objects, broken, fail)
    rig.turn("b", (*tokens(21), *first, *tokens(5, 9)), 30)
    rig.assert_exact()
    assert rig.core._pruner is not None and rig.core._pruner.derived is not None
    assert rig.core._pruner.derived.faults > 0
    assert rig.reclaimable()
    rig.core.close()


# --- the meta ------------------------------------------------------------------------------------


def test_a_state_is_read_as_it_was_written_or_not_at_all() -> None:
    import numpy as np

    positions = np.array([[0, 1, 2, 9, 7, 8]], dtype=np.int32)
    state = DerivedState(10, 2, 0, (5, 6), positions)
    meta = state.encode()
    found = DerivedState.decode(meta, BLOCK)
    assert found is not None
    assert (found.computed, found.fixed, found.plain_blocks, found.tail) == (10, 2, 0, (5, 6))
    assert (found.positions == positions).all() and found.stored == 6
    assert DerivedState.decode(meta, 8) is not None, "the tail is as long there"
    assert DerivedState.decode(meta, 16) is None
    for end in range(len(meta)):
        assert DerivedState.decode(meta[:end], BLOCK) is None
    for wrong in ([0, 1, 2, 9, 7, 7], [0, 1, 2, 9, 7, 10], [1, 0, 2, 9, 7, 8], [0, 1, 2, -1, 7, 8]):
        bad = DerivedState(10, 2, 0, (5, 6), np.array([wrong], dtype=np.int32))
        assert DerivedState.decode(bad.encode(), BLOCK) is None, wrong
    chance = random.Random(4)
    for _ in range(300):
        noise = bytearray(meta)
        noise[chance.randrange(len(noise))] ^= 1 << chance.randrange(8)
        found = DerivedState.decode(bytes(noise), BLOCK)
        assert found is None or found.stored <= found.computed


def test_no_numbers_in_a_meta_raise() -> None:
    print("seed 11")
    chance, head = random.Random(11), Struct("<4sIIIIII")
    extremes = [0, 1, 2, 3, 5, 1 << 16, 2**31 - 1, 2**31, 2**32 - 1]
    for _ in range(20_000):
        numbers = [chance.choice(extremes) for _ in range(6)]
        _, _, _, tail, rows, stored = numbers
        count = tail + rows * stored
        content = chance.randbytes(4 * count) if count < 100 else b""
        found = DerivedState.decode(head.pack(b"BDS\x01", *numbers) + content, BLOCK)
        assert found is None or 0 < found.stored < found.computed


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("streaming:resume=1", "streaming's resume takes no value."),
        ("streaming:resume,resume", "each key once."),
        ("none:resume", "none has no option resume."),
    ],
)
def test_an_option_that_is_none_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Policies(fake_model("full").spec).make(text)
    assert sentence in str(raised.value)


def test_turns_are_kept_where_there_is_a_tier() -> None:
    check_retention("streaming:window=9,resume")
    check_retention("streaming:window=9", tiered=False)
    with pytest.raises(InvalidRequest) as raised:
        check_retention("streaming:window=9,resume", tiered=False)
    assert "streaming's resume keeps turns in tiers, and there are none" in str(raised.value)


def test_heartbeats_say_what_came_of_states() -> None:
    found = Compacted(objects_kept=3, objects_resumed=2, resumed_tokens=140)
    load = heartbeat(EngineLoad(compacted=found), EngineLoad(), False, False).load
    assert load.retention_objects_kept == 3 and load.retention_objects_resumed == 2
    assert load.retention_resumed_tokens == 140


def test_whether_turns_are_kept_is_part_of_the_numeric_class() -> None:
    spec = fake_model("full").spec
    plain, kept = Policies(spec, "streaming"), Policies(spec, "streaming:resume")
    assert plain.default is not None and kept.default is not None
    assert plain.default.state_hash == kept.default.state_hash
    assert plain.numerics != kept.numerics


# --- anything at any time --------------------------------------------------------------------


def predictions(
    rig: TurnRig, policy: RetentionPolicy, first: int, ids: Sequence[int], out: Sequence[int]
) -> list[int]:
    """At each place of `out`, what would come next if all before was computed after `first`."""
    oracle = PrunedOracle(rig.model, policy, first)
    for token in ids:
        oracle.append(token)
    found = []
    for token in out:
        found.append(int(oracle.logits().argmax()))
        oracle.append(token)
    return found


def explained(
    rig: TurnRig, firsts: Sequence[int], ids: Sequence[int], out: list[int], preempted: bool
) -> int | None:
    """The turn, by the length of its prompt, whose state `out` went on from: its own where there
    was none. A preempted stream whose state was lost goes on as if there had been none."""
    policy = policy_of("", rig.policies)
    assert policy is not None
    own = predictions(rig, policy, len(ids), ids, out)
    for first in (len(ids), *firsts):
        told = predictions(rig, policy, first, ids, out)
        same = next((i for i, token in enumerate(out) if told[i] != token), len(out))
        if same == len(out) or (preempted and own[same:] == out[same:]):
            return first
    return None


def conversations(seed: int, count: int) -> tuple[int, int]:
    """Random turns of a few conversations, together, in a small pool, over tiers that evict, lose,
    freeze; returns how many turns went on from an earlier one's state, and how many did not."""
    chance = random.Random(seed)
    lower = [
        DictTier("disk", load_s=0.0001, losing=0.1, seed=seed),
        DictTier("shared", load_s=0.0001, losing=0.1, seed=seed + 1),
    ]
    quota = chance.choice(
        [Quota(10, 8), Quota(3, 4), Quota(26, 12, suffix=False, sink_tokens=chance.choice([0, 5]))]
    )
    rig = TurnRig(
        Scattered(quota, resume=True),
        chance.choice(["full", "ranks", "latent", "full/inverted"]),
        lower=chance.choice([[], lower[:1], lower[1:], lower]),
        host=chance.choice([60, 150, 600]),
        blocks=chance.choice([40, 60, 90]),
        step_tokens_max=chance.choice([5, 16, 64]),
        running_max=4,
    )
    rig.price(chance.choice([1e-5, 1e-3, 1e-2]))
    histories = [list(tokens(chance.randrange(1, 30), 70 + i)) for i in range(4)]
    firsts: list[list[int]] = [[] for _ in histories]
    resumed = plain = 0
    for number in range(count):
        asked = chance.sample(range(4), chance.randrange(1, 5))
        for i in asked:
            credit = chance.choice([5, 1000, 1000])
            rig.submit(
                request(
                    f"{number}/{i}", tuple(histories[i]), chance.randrange(1, 60),
                    salt=bytes([i]) * 32, tenant=f"{i}", credit_tokens=credit,
                )
            )  # fmt: skip
        for _ in range(chance.randrange(60)):
            rig.step()
            trouble(rig, chance, lower)
        for i in asked:
            rig.core.grant(f"{number}/{i}", 1000)
        if chance.random() < 0.1:
            rig.cancel(f"{number}/{chance.choice(asked)}")
        rig.run()
        for i in asked:
            name = f"{number}/{i}"
            out, history = rig.output(name), histories[i]
            usage = rig.usage(name)
            assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
            first = explained(rig, firsts[i], history, out, usage.preemptions > 0)
            assert first is not None, f"{name} is neither resumed nor plain"
            resumed += first < len(history)
            plain += first == len(history)
            firsts[i].append(len(history))
            histories[i] += [*out, *tokens(chance.randrange(1, 12), number)]
            if len(histories[i]) > 300:
                histories[i] = list(tokens(chance.randrange(1, 30), number + 100))
                firsts[i] = []
        rig.emissions.clear()
    rig.assert_cache_is_plain()
    for tier in lower:
        tier.frozen.clear()
    rig.host.check_integrity()
    rig.close()
    return resumed, plain


def trouble(rig: TurnRig, chance: random.Random, lower: Sequence[DictTier]) -> None:
    """Seldom: parts are lost, the cache is dropped, a tier stops answering or answers again."""
    match chance.randrange(300):
        case 0 | 1:
            held = rig.host.names()
            rig.host.discard(chance.sample(held, len(held) // 6))
        case 2:
            rig.lose_objects()
        case 3 | 4:
            assert rig.core.memory.cache is not None
            rig.core.memory.cache.clear()
        case 5:
            rig.host.clear()
        case 6:
            chance.choice(lower).frozen.set()
        case 7 | 8 | 9:
            for tier in lower:
                tier.frozen.clear()


def test_random_conversations_are_resumed_or_plain() -> None:
    print("seeds 2, 4")
    counts = [conversations(seed, 8) for seed in (2, 4)]
    print(counts)
    assert min(sum(each) for each in zip(*counts, strict=True)) > 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_random_conversations_are_resumed_or_plain_full(seed: int) -> None:
    print(f"seed {seed}: {conversations(seed, 60)}")
