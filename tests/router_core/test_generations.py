"""Keys named lately are kept, others forgotten a few at a time; and so in the router's index."""

from __future__ import annotations

import random

import pytest
from router_core_world import (
    REMOVED,
    STORED,
    attach_ready,
    batch_of,
    keys_of,
    new_core,
    op_of,
    prompt,
    snapshot_of,
)

from banyan.v1 import internal_pb2
from router import generations
from router.core import RouterCore
from router.generations import Generations
from router.index import DEVICE, SHARED, prefix
from seams.clock import VirtualClock

SHARED_TIER = internal_pb2.TIER_SHARED


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "GENERATION_KEYS", 8)
    monkeypatch.setattr(generations, "GENERATIONS_MAX", 4)


@pytest.fixture
def core(small: None) -> RouterCore:
    core = new_core(VirtualClock())
    attach_ready(core, "r1")
    return core


def on_tier(core: RouterCore, tier: int) -> set[int]:
    return {key for key, lanes in core.held_blocks("r1").items() if lanes >> tier & 1}


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_bounded_and_what_was_named_lately_is_kept(small: None, seed: int) -> None:
    """Against a model: every key named and not said to be forgotten is held."""
    print(f"seed {seed}")
    rng, noted, held, order = random.Random(seed), Generations(), set[int](), list[int]()
    for _ in range(2000):
        keys = [rng.randrange(200) for _ in range(rng.choice([1, 1, 3, 8, 20]))]
        gone = noted.note(keys)
        held |= set(keys)
        order += keys
        assert len(gone) == len(set(gone)) <= 2 * len(keys)
        assert set(gone) <= held and not set(gone) & set(keys)
        held -= set(gone)
        lately = set(order[-8 * 3 :])  # 3 generations at least are whole
        assert lately <= held
        assert len(held) <= len(noted) <= 8 * 5 + 20
    assert held < set(range(200)), "nothing was ever forgotten"


def test_more_at_once_than_is_ever_kept(small: None) -> None:
    noted = Generations()
    gone = noted.note(range(1000))
    assert len(noted) <= 8 * 5 and set(gone).isdisjoint(range(1000 - 24, 1000))
    assert len(gone) + len(noted) == 1000


def test_forgetting_is_never_a_burst() -> None:
    """At full size: one key a call, as a replica's blocks sink one by one."""
    noted, most = Generations(), 0
    cap = generations.GENERATION_KEYS * generations.GENERATIONS_MAX
    for key in range(cap + 3 * generations.GENERATION_KEYS):
        most = max(most, len(noted.note([key])))
    assert most == 2
    assert cap - generations.GENERATION_KEYS <= len(noted) <= cap + generations.GENERATION_KEYS


def test_a_shared_tier_that_never_says_removed_does_not_grow_the_index(core: RouterCore) -> None:
    keys = keys_of(prompt(1, 400))
    core.events(batch_of("r1", 1, op_of(STORED, keys[:10])))
    for number, key in enumerate(keys):
        core.events(batch_of("r1", 2 + number, op_of(STORED, [key], SHARED_TIER)))
    shared = on_tier(core, SHARED)
    assert {prefix(key) for key in keys[-24:]} <= shared, "the latest are believed"
    assert len(shared) <= 8 * 5
    assert on_tier(core, DEVICE) == {prefix(key) for key in keys[:10]}, "another tier's stay"
    core.check_integrity()


def test_what_is_stored_there_again_and_again_stays(core: RouterCore) -> None:
    keys = keys_of(prompt(1, 400))
    for number, key in enumerate(keys):
        core.events(batch_of("r1", 1 + number, op_of(STORED, [keys[0], key], SHARED_TIER)))
    assert prefix(keys[0]) in on_tier(core, SHARED)


def test_a_removal_from_the_shared_tier_is_believed(core: RouterCore) -> None:
    keys = keys_of(prompt(1, 4))
    core.events(batch_of("r1", 1, op_of(STORED, keys, SHARED_TIER)))
    core.events(batch_of("r1", 2, op_of(REMOVED, keys[2:], SHARED_TIER)))
    assert on_tier(core, SHARED) == {prefix(key) for key in keys[:2]}


def test_a_snapshot_begins_anew(core: RouterCore) -> None:
    """Its generations are its own: the old view's keys are not taken from the new one."""
    keys = keys_of(prompt(1, 64))
    core.events(batch_of("r1", 1, op_of(STORED, keys[:24], SHARED_TIER)))
    core.events(batch_of("r1", 3))  # 2 was lost
    core.events(snapshot_of("r1", 3, []))
    assert not on_tier(core, SHARED)
    core.events(batch_of("r1", 4, op_of(STORED, keys[40:], SHARED_TIER)))
    assert on_tier(core, SHARED) == {prefix(key) for key in keys[40:]}
    core.check_integrity()


def test_a_snapshot_is_bounded_too(core: RouterCore) -> None:
    keys = keys_of(prompt(1, 400))
    snapshot = batch_of("r1", 5, *(op_of(STORED, [key], SHARED_TIER) for key in keys))
    snapshot.snapshot = snapshot.snapshot_last = True
    core.events(snapshot)
    assert len(on_tier(core, SHARED)) <= 8 * 5
    later = keys_of(prompt(2, 100))
    for number, key in enumerate(later):
        core.events(batch_of("r1", 6 + number, op_of(STORED, [key], SHARED_TIER)))
    assert on_tier(core, SHARED) <= {prefix(key) for key in later}, "nobody minded the snapshot's"
