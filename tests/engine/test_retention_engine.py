"""Pruned streams over FakeModel: exact, whatever the batch, the chunks, the pressure and the cache.

Freed blocks are poisoned, so a stale slot changes a stream; the conservation law, which knows slots
and logical positions, is checked after every step.
"""

import logging

import numpy as np
import pytest
import torch
from engine_rig import BLOCK, request, tokens
from pruned_oracle import Mover, PrunedRig, Scattered

from kvstore.tiered import TieredStore
from kvstore.tiers.host import HostTier
from seams.errors import InternalError, InvalidRequest, LaunchError, OutOfBlocks
from worker.engine.core import EngineCore
from worker.engine.messages import Compacted, Finish
from worker.engine.pruning import ROUNDS_MAX
from worker.engine.retention.base import Quota
from worker.engine.retention.policies import Policies
from worker.models.fake import fake_model

SUFFIX = Scattered(Quota(budget_tokens=10, interval_tokens=8))
WHOLE = Scattered(Quota(budget_tokens=22, interval_tokens=8, suffix=False, sink_tokens=4))
STREAMING = "streaming:window=10,interval=8"
SINKS = "streaming:sinks=3,window=18,interval=8"
EVERY = pytest.mark.parametrize(
    "policy", [STREAMING, SINKS, SUFFIX, WHOLE], ids=["streaming", "sinks", "suffix", "whole"]
)


def totals(rig: PrunedRig) -> Compacted:
    found = rig.core.load().compacted
    assert found is not None
    return found


@EVERY
@pytest.mark.parametrize("shape", ["full", "latent", "ranks"])
def test_streams_are_those_of_the_policy(policy: object, shape: str) -> None:
    rig = PrunedRig(policy, shape, blocks=80, step_tokens_max=13)  # type: ignore[arg-type]
    for number, prompt in enumerate([1, 6, 8, 23, 57]):
        rig.submit(request(f"r{number}", tokens(prompt, number), 50 + number))
    rig.run()
    rig.assert_exact()
    found = totals(rig)
    assert found.rounds > 15
    assert found.freed_blocks >= 0.95 * found.dropped_tokens / BLOCK
    assert rig.reclaimable()
    rig.assert_cache_is_plain()


def test_positions_go_on_and_lengths_do_not() -> None:
    rig = PrunedRig(STREAMING)
    rig.submit(request("a", tokens(6), 60))
    rig.run()
    last = rig.model.plans[-1]
    assert last.positions.tolist() == [6 + 60 - 2]
    assert last.lengths[0] <= 6 + 10 + 8
    assert max(int(plan.lengths.max()) for plan in rig.model.plans) == 6 + 10 + 8


def test_short_answers_are_served_and_cached_as_ever() -> None:
    """Before its first round a sequence is a plain one."""
    rig = PrunedRig(STREAMING)
    rig.submit(request("a", tokens(8), 10))
    rig.run()
    plain = rig.model.oracle(tokens(8), 10, ignore_eos=True)
    assert rig.output("a") == plain
    rig.submit(request("next", (*tokens(8), *plain), 4, retention="none"))
    rig.run()
    assert rig.usage("next").cached_tokens == 17
    rig.assert_exact()


@EVERY
def test_nothing_behind_the_plain_prefix_is_cached(policy: object) -> None:
    rig = PrunedRig(policy, blocks=60)  # type: ignore[arg-type]
    rig.submit(request("a", tokens(21), 60))
    rig.run()
    rig.assert_cache_is_plain()
    conversation = (*tokens(21), *rig.output("a"))
    rig.submit(request("next", conversation, 4, retention="none"))
    rig.run()
    assert rig.usage("next").cached_tokens <= 21
    rig.assert_exact()


@EVERY
def test_a_preempted_sequence_goes_on_exactly(policy: object) -> None:
    """It is computed again in the same stretches and pruned at the same counts."""
    rig = PrunedRig(policy, blocks=26, running_max=8)  # type: ignore[arg-type]
    for number in range(6):
        rig.submit(request(f"r{number}", tokens(5 + number, number), 70, credit_tokens=20))
    rig.step(30)
    for _ in range(12):
        for number in range(6):
            rig.core.grant(f"r{number}", 5)
        rig.step(9)
    for number in range(6):
        rig.core.grant(f"r{number}", 100)
    rig.run()
    rig.assert_exact()
    assert sum(rig.usage(f"r{n}").preemptions for n in range(6)) > 3
    assert all(rig.last(f"r{n}").finish is Finish.LENGTH for n in range(6))


@EVERY
@pytest.mark.parametrize("emitted", [1, 7, 18, 19, 40])
def test_another_replica_goes_on_exactly(policy: object, emitted: int) -> None:
    first, second = PrunedRig(policy), PrunedRig(policy, step_tokens_max=7)  # type: ignore[arg-type]
    first.submit(request("a", tokens(9), 64))
    first.run()
    whole = first.output("a")
    given = (*tokens(9), *whole[:emitted])
    second.submit(request("a", given, 64, prompt_tokens=9))
    second.run()
    assert whole[:emitted] + second.output("a") == whole


@EVERY
def test_choices_are_pruned_each_by_itself(policy: object) -> None:
    rig = PrunedRig(policy, blocks=120)  # type: ignore[arg-type]
    rig.submit(request("a", tokens(27), 40, n=3), request("b", tokens(27), 40))
    rig.run()
    rig.assert_exact()
    assert totals(rig).rounds >= 12


@EVERY
def test_donors_keep_every_byte(policy: object) -> None:
    """Blocks of a prompt that others hold, or the cache, while one of its users is pruned."""
    rig = PrunedRig(policy, blocks=120)  # type: ignore[arg-type]
    rig.submit(request("donor", tokens(42), 300, retention="none", credit_tokens=3))
    rig.step(6)
    (donor,) = rig.core.scheduler.running
    held = [rig.model.read_block(0, block) for block in donor.tables[0][:-1]]
    blocks = donor.tables[0][:-1]
    rig.submit(request("a", tokens(42), 60), request("b", (*tokens(30), 1, 2, 3), 60))
    rig.run()
    assert totals(rig).rounds > 8
    assert donor.tables[0][: len(blocks)] == blocks
    assert [rig.model.read_block(0, block) for block in blocks] == held
    rig.assert_exact("a", "b")


def test_shared_pages_with_holes_are_copied_first() -> None:
    """A prompt that the cache holds is pruned all over: its pages are read, not written."""
    moved = []
    for cache in (True, False):
        rig = PrunedRig(WHOLE, blocks=120, cache=cache)
        rig.submit(request("a", tokens(29), 60), request("b", tokens(29), 60))
        rig.run()
        rig.assert_exact()
        moved.append(sum(rig.model.moves))
        if cache:
            rig.assert_cache_is_plain()
    assert moved[0] > moved[1], "nothing was copied that the cache holds"


@EVERY
def test_cold_tiers_get_plain_chains_only(policy: object) -> None:
    """Everything cached goes down and comes back; nothing of it is a pruned sequence's own."""
    rig = PrunedRig(policy, blocks=60)  # type: ignore[arg-type]
    rig.model = Mover(fake_model("full", context_tokens=2048, block_tokens=BLOCK))
    sizes = {group.id: group.block_bytes for group in rig.model.spec.groups}
    store = TieredStore(HostTier(sizes, 400 * 4096, verify=True, prefault=False), [])
    rig.core = EngineCore(rig.model, rig.config, rig.clock, tiers=store, retention=rig.policies)
    for number in range(3):
        rig.submit(request(f"r{number}", tokens(21 + number, number), 60))
    rig.run()
    assert totals(rig).rounds > 10 and rig.core.memory.cache is not None
    rig.core.memory.cache.clear()
    held = len(store.host.names())
    assert 0 < held <= sum((21 + number) // BLOCK for number in range(3))
    for number in range(3):
        conversation = (*tokens(21 + number, number), *rig.output(f"r{number}"))
        rig.submit(request(f"plain{number}", conversation, 4, retention="none"))
        rig.submit(request(f"again{number}", tokens(21 + number, number), 60))
    rig.run()
    rig.assert_exact()
    assert sum(store.loaded_blocks.values()) > 0
    rig.core.close()


def test_rounds_need_no_free_block() -> None:
    """Every block of the pool is taken when rounds come due, and nobody is refused or preempted."""
    policy = Scattered(Quota(12, 4))
    rig = PrunedRig(policy, blocks=24, running_max=4, cache=False)
    for number in range(4):
        rig.submit(request(f"r{number}", tokens(8, number), 80))
    rig.run()
    rig.assert_exact()
    assert rig.core.load().blocks_low == 0
    assert totals(rig).waited == 0 and totals(rig).rounds > 60
    assert all(rig.usage(f"r{n}").preemptions == 0 for n in range(4))


def test_a_small_pool_holds_three_times_the_long_generations() -> None:
    """Admission knows that a pruned sequence does not grow."""

    def together(retention: str) -> int:
        rig = PrunedRig(blocks=96, running_max=64, cache=False)
        for number in range(14):
            rig.submit(request(f"r{number}", tokens(8, number), 90, retention=retention))
        most = 0
        while rig.core.has_work():
            rig.step()
            most = max(most, len(rig.core.scheduler.running))
        rig.assert_exact()
        assert all(rig.usage(f"r{n}").preemptions == 0 for n in range(14))
        return most

    plain, pruned = together("none"), together("streaming:window=16,interval=8")
    print(f"{plain} plain and {pruned} pruned generations at once")
    assert pruned >= 3 * plain


def test_a_generation_longer_than_the_pool_comes_to_its_end() -> None:
    rig = PrunedRig(blocks=12)
    rig.submit(request("long", tokens(9), 400, retention="streaming:window=16,interval=8"))
    rig.submit(request("plain", tokens(9), 400))
    rig.run()
    assert rig.last("long").finish is Finish.LENGTH and len(rig.output("long")) == 400
    assert rig.last("plain").error is not None
    rig.assert_exact("long")


def test_a_prompt_longer_than_the_pool_is_served_where_prompts_are_pruned() -> None:
    rig = PrunedRig(SINKS, blocks=12, step_tokens_max=16)
    rig.submit(request("long", tokens(230), 40), request("short", tokens(20), 40))
    rig.submit(request("whole", tokens(230), 40, retention=STREAMING))
    rig.run()
    assert len(rig.output("long")) == len(rig.output("short")) == 40
    assert isinstance(rig.last("whole").error, OutOfBlocks)
    rig.assert_exact("long", "short")


def test_choices_of_a_pruned_prompt_hold_what_they_hold() -> None:
    """A fork of a prompt that lost blocks shares those that are left, and admission counts so."""
    rig = PrunedRig(SINKS, blocks=60, step_tokens_max=16)
    rig.submit(request("many", tokens(200), 24, n=3))
    held = []
    while rig.core.has_work():
        rig.step()
        held += [rig.core.memory.held_alone(s, 0) for s in rig.core.scheduler.running]
    assert held and min(held) >= 0
    rig.assert_exact()


def test_many_rounds_in_one_step_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices fork at one length, so all are due at once."""
    rig = PrunedRig(SUFFIX, blocks=200)
    rig.submit(request("many", tokens(9), 60, n=8))
    total, most = rig.core._pruner.compactor.total, 0
    while rig.core.has_work():
        before = total.rounds
        rig.step()
        most = max(most, total.rounds - before)
    assert most == ROUNDS_MAX
    rig.assert_exact()


def test_a_failing_round_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rig = PrunedRig(SUFFIX, blocks=80)
    move, calls = rig.model.move_slots, 0

    def failing(group: int, sources: np.ndarray, targets: np.ndarray, rows: object = None) -> None:
        nonlocal calls
        calls += 1
        move(group, sources[:1], targets[:1])  # some of it is done
        if calls == 2:
            raise RuntimeError("the device fell off the bus")
        move(group, sources, targets)

    rig.model.move_slots = failing  # type: ignore[method-assign, assignment]
    rig.submit(*[request(f"r{n}", tokens(9 + n, n), 40) for n in range(3)])
    rig.run()
    failed = [n for n in range(3) if rig.last(f"r{n}").error is not None]
    assert len(failed) == 1
    assert isinstance(rig.last(f"r{failed[0]}").error, InternalError)
    rig.assert_exact(*[f"r{n}" for n in range(3) if n not in failed])
    assert rig.reclaimable()
    rig.assert_cache_is_plain()


def test_a_policy_that_breaks_its_word_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    class Greedy(Scattered):
        def select(self, view: object) -> np.ndarray:
            kept = super().select(view)  # type: ignore[arg-type]
            kept[:, -1] = kept[:, -2] = True
            kept[:, : view.fixed + 9] = True  # type: ignore[attr-defined]
            return kept

    rig = PrunedRig(Greedy(Quota(10, 8)))
    rig.submit(request("a", tokens(9), 40), request("b", tokens(9), 40, retention="none"))
    rig.run()
    assert isinstance(rig.last("a").error, InternalError)
    rig.assert_exact("b")
    assert rig.reclaimable()


def test_drafts_are_for_sequences_that_keep_all() -> None:
    rig = PrunedRig(STREAMING, speculate=4)
    rig.submit(request("a", tokens(9) * 3, 60), request("b", tokens(9) * 3, 60, retention="none"))
    rig.run()
    rig.assert_exact()


def test_requests_choose_among_what_the_replica_offers() -> None:
    rig = PrunedRig()
    rig.submit(request("plain", tokens(9), 40), request("pruned", tokens(9), 40, retention=SINKS))
    rig.submit(request("wrong", tokens(9), 40, retention="streaming:sinks=4,window=0"))
    rig.run()
    rig.assert_exact("plain", "pruned")
    assert isinstance(rig.last("wrong").error, InvalidRequest)
    assert str(rig.last("wrong").error) == (
        "streaming's window is a whole number from 1 to 1048576."
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("h2o", "There is no such retention policy; there are none, "),
        ("streaming:window", "A retention policy is written NAME or NAME:KEY=VALUE"),
        ("streaming:window=4,window=5", "each key once."),
        ("streaming:budget=4", "streaming has no option budget."),
        ("streaming:window=" + "9" * 300, "A retention policy has at most 256 bytes."),
        ("streaming:window=9999999", "is a whole number from 1 to"),
        ("streaming:interval=-1", "is a whole number from 1 to"),
        ("none:window=4", "none has no option window."),
    ],
)
def test_a_policy_that_is_none_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Policies(fake_model("full").spec).make(text)
    assert sentence in str(raised.value)


def test_a_replica_without_retention_says_so() -> None:
    rig = PrunedRig()
    rig.model = Mover(fake_model("full", block_tokens=BLOCK))
    rig.core = EngineCore(rig.model, rig.config, rig.clock)
    rig.submit(request("a", tokens(4), 4, retention="none"), request("b", tokens(4), 4))
    rig.submit(request("c", tokens(4), 4, retention=STREAMING))
    rig.run()
    assert rig.last("a").error is None and rig.last("b").error is None
    assert isinstance(rig.last("c").error, InvalidRequest)
    assert rig.core.load().compacted is None
    assert torch.equal(torch.tensor(rig.output("a")), torch.tensor(rig.output("b")))


def test_models_with_windows_are_not_pruned() -> None:
    with pytest.raises(LaunchError, match="sliding windows"):
        Policies(fake_model("window").spec)
