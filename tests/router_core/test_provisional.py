"""Provisional entries: who sees them, what confirms them, and everything that drops them."""

from __future__ import annotations

import random

import pytest
from router_core_world import (
    BLOCK,
    MOVED,
    REMOVED,
    STORED,
    attach_ready,
    batch_of,
    hello_of,
    keys_of,
    new_core,
    op_of,
    prompt,
    request_of,
    snapshot_of,
)

from banyan.v1 import common_pb2, internal_pb2
from router.core import RouterCore
from router.cost import TERMS
from router.index import BOOKED, prefix
from router.placement import Observed
from seams.clock import VirtualClock

TTL_S = 2.0
TOKENS = prompt(1, 12)
KEYS = keys_of(TOKENS)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def core(clock: VirtualClock) -> RouterCore:
    core = new_core(clock, lease_s=1e6, provisional_ttl_s=TTL_S)
    attach_ready(core, "r1")
    return core


def booked(core: RouterCore, replica: str = "r1") -> set[int]:
    return {key for key, lanes in core.held_blocks(replica).items() if lanes >> BOOKED & 1}


def names(keys: list[bytes]) -> set[int]:
    return {prefix(key) for key in keys}


def matched(core: RouterCore, tokens: list[int] = TOKENS) -> int:
    return core.preview(request_of("preview", tokens)).available_tokens


def test_a_booking_shows_at_once_and_a_preview_books_nothing(core: RouterCore) -> None:
    core.preview(request_of("q1", TOKENS))
    assert booked(core) == set()
    core.place(request_of("q1", TOKENS))
    assert booked(core) == names(KEYS)
    assert matched(core) == len(TOKENS) - 1
    core.check_integrity()


def test_only_what_is_not_stored_yet_is_provisional(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:5])))
    core.place(request_of("q1", TOKENS))
    assert booked(core) == names(KEYS[5:])
    core.failed("q1")
    assert booked(core) == set()
    assert matched(core) == 5 * BLOCK, "what was stored stays"
    core.check_integrity()


def test_failure_drops_what_no_event_confirmed(core: RouterCore) -> None:
    core.place(request_of("q1", TOKENS))
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:7])))
    assert booked(core) == names(KEYS[7:])
    core.failed("q1")
    assert matched(core) == 7 * BLOCK
    core.check_integrity()


def test_a_failed_request_leaves_its_siblings_entries(core: RouterCore) -> None:
    core.place(request_of("q1", TOKENS))
    core.place(request_of("q2", TOKENS))
    core.failed("q1")
    assert booked(core) == names(KEYS)
    core.failed("q2")
    assert booked(core) == set() and core.index_blocks == 0
    core.check_integrity()


def test_entries_go_after_the_ttl(core: RouterCore, clock: VirtualClock) -> None:
    core.place(request_of("q1", TOKENS))
    core.first_token("q1")
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:2])))
    core.finished("q1", 0, Observed())
    clock.advance(TTL_S - 0.01)
    core.tick()
    assert matched(core) == len(TOKENS) - 1, "they outlive the request: events are on their way"
    clock.advance(0.02)
    core.tick()
    assert booked(core) == set() and matched(core) == 2 * BLOCK
    core.check_integrity()


def test_entries_of_a_long_prefill_live_until_it_can_be_done(
    core: RouterCore, clock: VirtualClock
) -> None:
    long = prompt(2, 250)  # 4 s at the prior of 1 ms per token
    core.place(request_of("q1", long))
    clock.advance(TTL_S + 2.0)
    core.tick()
    assert matched(core, long) == len(long) - 1
    clock.advance(60.0)
    core.tick()
    assert matched(core, long) == 0, "but not for ever, should nobody tell of its end"
    core.place(request_of("q2", long))
    core.first_token("q2")
    clock.advance(TTL_S)
    core.tick()
    assert matched(core, long) == 0, "after the first token the events are due"


def test_a_removed_parent_takes_what_is_booked_behind_it(core: RouterCore) -> None:
    """Or the chain had a hole: blocks 0-2, nothing, then 5-11."""
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:5])))
    core.place(request_of("q1", TOKENS))
    core.place(request_of("q2", TOKENS[: 9 * BLOCK] + prompt(7, 3)))
    core.events(batch_of("r1", 2, op_of(REMOVED, [KEYS[4], KEYS[3]])))
    assert booked(core) == set()
    assert matched(core) == 3 * BLOCK
    core.check_integrity()


def test_a_removed_provisional_block_takes_its_followers_only(core: RouterCore) -> None:
    core.place(request_of("q1", TOKENS))
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:8])))
    core.events(batch_of("r1", 2, op_of(REMOVED, KEYS[6:8])))
    assert booked(core) == set() and matched(core) == 6 * BLOCK
    core.place(request_of("q2", TOKENS))
    core.events(batch_of("r1", 3, op_of(REMOVED, KEYS[9:10])))
    assert booked(core) == names(KEYS[6:9]), "the replica says that it does not hold block 9"
    core.check_integrity()


def test_a_snapshot_confirms_keeps_or_drops_what_is_booked(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:3])))
    other = prompt(2, 4)
    core.place(request_of("q1", TOKENS))
    core.place(request_of("q2", other))
    core.events(batch_of("r1", 9))
    core.events(snapshot_of("r1", 9, KEYS[:6]))
    assert booked(core) == names(KEYS[6:] + keys_of(other))
    core.check_integrity()
    core.events(batch_of("r1", 19))
    core.events(snapshot_of("r1", 19, KEYS[:2]))  # the parents of q1's blocks are gone
    assert booked(core) == names(keys_of(other))
    core.check_integrity()


def test_a_gone_replica_takes_its_bookings_along(core: RouterCore) -> None:
    core.place(request_of("q1", TOKENS))
    core.attach(hello_of("r1", epoch=2))
    core.check_integrity()
    assert core.held_blocks("r1") == {} and matched(core) == 0


def test_blocks_on_slower_tiers_are_booked_for_the_device(core: RouterCore) -> None:
    """Or siblings saw a device chain with a hole: booked blocks behind ones in host memory."""
    host = internal_pb2.TIER_HOST
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:2]), op_of(STORED, KEYS[2:6], tier=host)))
    first = core.place(request_of("q1", TOKENS)).decision
    assert load_s(first) > 0
    assert booked(core) == names(KEYS[2:])
    assert load_s(core.preview(request_of("q2", TOKENS))) == 0, "the first one loads them"
    core.events(batch_of("r1", 2, op_of(STORED, KEYS[2:4]), op_of(STORED, KEYS[6:7], tier=host)))
    assert booked(core) == names(KEYS[4:]), "a copy in host memory confirms nothing"
    shared = internal_pb2.TIER_SHARED
    core.events(batch_of("r1", 3, op_of(REMOVED, KEYS[7:9], tier=shared)))
    assert booked(core) == names(KEYS[4:]), "nor does what the shared tier loses take anything"
    core.events(batch_of("r1", 4, op_of(MOVED, KEYS[1:4], tier=host)))
    assert booked(core) == set(), "what was to follow them on the device goes"
    assert load_s(core.preview(request_of("q2", TOKENS))) > 0
    assert matched(core) == 7 * BLOCK
    core.check_integrity()


def load_s(decision: common_pb2.Decision) -> float:
    return decision.candidates[0].terms[TERMS.index("tier_load")].seconds


def test_requests_without_cache_leave_no_trace(core: RouterCore) -> None:
    core.events(batch_of("r1", 1, op_of(STORED, KEYS[:5])))
    decision = core.place(request_of("q1", TOKENS, no_cache=True)).decision
    assert (decision.available_tokens, decision.chosen_tokens) == (0, 0)
    assert booked(core) == set()


def test_a_moved_request_leaves_the_replica_it_came_from(core: RouterCore) -> None:
    attach_ready(core, "r2")
    first = core.place(request_of("q1", TOKENS)).replica
    second = core.place(request_of("q1", TOKENS, excluded=frozenset({first}))).replica
    assert second != first
    assert booked(core, first) == set() and booked(core, second) == names(KEYS)
    core.check_integrity()


def test_window_groups_are_booked_too(clock: VirtualClock) -> None:
    core = new_core(clock)
    attach_ready(core, "r1", windows={1: 64})
    core.place(request_of("q1", TOKENS))
    assert matched(core) == len(TOKENS) - 1, "siblings follow on a model with a window as well"
    core.events(batch_of("r1", 1, op_of(STORED, KEYS), op_of(STORED, KEYS[8:], group=1)))
    core.finished("q1", 0, Observed())
    clock.advance(TTL_S + 1.0)
    core.tick()
    assert matched(core) == len(TOKENS) - 1
    core.events(batch_of("r1", 2, op_of(REMOVED, KEYS[10:11], group=1)))
    assert matched(core) == 0, "no whole window is left before any end"
    assert matched(core, TOKENS[: 10 * BLOCK]) == 0
    core.check_integrity()


def test_random_lives_of_requests_keep_every_law() -> None:
    """Places, ends, events, ticks and restarts in any order; nothing is left at the end."""
    prompts = [prompt(1, 5) + prompt(10 + n, n) for n in range(6)] + [prompt(3, 7)]
    for seed in range(15):
        draw, clock = random.Random(seed), VirtualClock()
        core = new_core(clock, seed, lease_s=1e6)
        attach_ready(core, "r1", "r2", windows={1: 48})
        epochs, seqs, open_requests = {"r1": 1, "r2": 1}, {"r1": 0, "r2": 0}, []
        for number in range(150):
            chance, replica = draw.random(), draw.choice(["r1", "r2"])
            if chance < 0.3:
                core.place(request_of(f"q{number}", draw.choice(prompts)))
                open_requests.append(f"q{number}")
            elif chance < 0.5 and open_requests:
                name = open_requests.pop(draw.randrange(len(open_requests)))
                core.first_token(name)
                end = draw.random()
                if end < 0.5:
                    core.failed(name)
                else:
                    core.finished(name, 1, Observed(5, 0.1, 3, 1.0))
            elif chance < 0.8:
                keys = keys_of(draw.choice(prompts))
                seqs[replica] += 1
                cut = draw.randrange(len(keys))
                store = draw.random() < 0.6
                op = op_of(STORED, keys[:cut]) if store else op_of(REMOVED, keys[cut:])
                core.events(batch_of(replica, seqs[replica], op, epoch=epochs[replica]))
            elif chance < 0.95:
                clock.advance(draw.random())
                core.tick()
            else:
                epochs[replica] += 1
                seqs[replica] = 0
                core.attach(hello_of(replica, epochs[replica], windows={1: 48}))
                core.events(snapshot_of(replica, 0, [], epoch=epochs[replica]))
            core.check_integrity()
        for name in open_requests:
            core.failed(name)
        clock.advance(200.0)
        for _ in range(20):
            core.tick()
        assert booked(core, "r1") == booked(core, "r2") == set(), f"seed {seed}"
        core.check_integrity()
