"""The index against a naive dict of sets, slot by slot and chain by chain; its memory."""

from __future__ import annotations

import os
import random
import tracemalloc
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from router_core_world import keys_of, prompt, xor_of

from router.index import (
    BOOKED,
    DEVICE,
    DISK,
    HOST,
    SHARED,
    Depths,
    PrefixIndex,
    prefix,
    prefixes,
)


def live_slot(index: PrefixIndex) -> int:
    slot = index.allocate()
    index.set_live(slot, True)
    return slot


def names(keys: list[bytes], group: int = 0) -> list[int]:
    return prefixes(b"".join(keys), group)


def test_packed_and_single_keys_have_the_same_names() -> None:
    keys = keys_of(prompt(1, 5))
    for group in (0, 1, 15):
        assert names(keys, group) == [prefix(key, group) for key in keys]
    assert len({prefix(keys[0], group) for group in range(16)}) == 16


def test_digest_is_the_prefix_of_the_xor_of_the_keys() -> None:
    index = PrefixIndex()
    slot = live_slot(index)
    keys = keys_of(prompt(1, 7))
    index.store(slot, DEVICE, names(keys))
    index.store(slot, DEVICE, names(keys[:3]))  # again: changes nothing
    index.store(slot, DEVICE, names(keys[:3], group=1))  # another group: not in the digest
    assert index.digest(slot) == prefix(xor_of(keys))
    index.remove(slot, DEVICE, names(keys[5:]))
    assert index.digest(slot) == prefix(xor_of(keys[:5]))
    assert index.stored(slot) == 5


@pytest.mark.parametrize("length", [1, 2, 3, 16, 127, 128])
def test_every_depth_is_found(length: int) -> None:
    keys = keys_of(prompt(1, length))
    index = PrefixIndex()
    slots = {live_slot(index): depth for depth in range(length + 1)}
    for slot, depth in slots.items():
        index.store(slot, DEVICE, names(keys[:depth]))
    expected = {slot: Depths(depth, depth, depth) for slot, depth in slots.items() if depth}
    assert index.match(keys) == expected


def test_tiers_add_up_and_a_removal_from_one_leaves_the_others() -> None:
    index = PrefixIndex()
    slot = live_slot(index)
    keys = keys_of(prompt(1, 10))
    index.store(slot, DEVICE, names(keys[:8]))
    index.store(slot, HOST, names(keys[:8]))
    index.remove(slot, DEVICE, names(keys[4:8]))
    index.store(slot, DISK, names(keys[8:]))
    assert index.match(keys) == {slot: Depths(4, 8, 10)}
    index.move(slot, HOST, names(keys[2:4]))
    assert index.match(keys) == {slot: Depths(2, 8, 10)}
    index.move(slot, DISK, names(keys[6:8]))
    assert index.match(keys) == {slot: Depths(2, 6, 10)}
    index.move(slot, DEVICE, names(keys[2:4]))
    assert index.match(keys) == {slot: Depths(4, 6, 10)}
    assert index.stored(slot) == 4
    index.check_integrity()


def test_the_shared_tier_is_membership_of_the_whole_domain() -> None:
    index = PrefixIndex()
    first, second = live_slot(index), live_slot(index)
    keys = keys_of(prompt(1, 10))
    index.store(first, SHARED, names(keys[2:5]) + names(keys[6:]))
    assert index.match(keys) == {}
    assert index.shared_depth(keys, 2, [first, second]) == 5
    assert index.shared_depth(keys, 6, [first, second]) == 10
    assert index.shared_depth(keys, 0, [first, second]) == 0
    assert index.shared_depth(keys, 2, [second]) == 2


def test_same_content_under_another_prefix_does_not_match() -> None:
    index = PrefixIndex()
    slot = live_slot(index)
    same = prompt(3, 4)
    index.store(slot, DEVICE, names(keys_of(prompt(1, 4) + same)))
    assert index.match(keys_of(prompt(2, 4) + same)) == {}
    assert index.match(keys_of(same)) == {}
    assert index.match(keys_of(prompt(1, 4) + same))[slot].device == 8


def test_a_window_group_is_matched_from_the_end_backwards() -> None:
    index = PrefixIndex()
    slot = live_slot(index)
    keys = keys_of(prompt(1, 20))
    index.store(slot, DEVICE, names(keys))
    window = names(keys, 1)
    index.store(slot, DEVICE, window[4:9] + window[15:18])
    assert index.usable_depth(keys, slot, 20, 1, 3) == 18
    assert index.usable_depth(keys, slot, 17, 1, 3) == 9  # only two of three before 17
    assert index.usable_depth(keys, slot, 20, 1, 5) == 9
    assert index.usable_depth(keys, slot, 20, 1, 6) == 0
    index.store(slot, DEVICE, window[:3])
    assert index.usable_depth(keys, slot, 20, 1, 6) == 3  # a start shorter than the window


def test_a_retired_slot_is_gone_at_once_and_reused_clean() -> None:
    index = PrefixIndex()
    keys = keys_of(prompt(1, 300))
    stays, goes = live_slot(index), live_slot(index)
    index.store(stays, DEVICE, names(keys[:100]))
    index.store(goes, DEVICE, names(keys))
    index.retire(goes)
    assert index.match(keys) == {stays: Depths(100, 100, 100)}
    for _ in range(255):
        index.sweep(1)
    assert index.allocate() != goes, "reused before all of its bits were cleared"
    index.sweep(1)
    assert index.allocate() == goes
    index.set_live(goes, True)
    assert index.match(keys) == {stays: Depths(100, 100, 100)}
    assert len(index) == 100
    index.check_integrity()


def test_many_restarts_do_not_grow_the_masks() -> None:
    index = PrefixIndex()
    block = names(keys_of(prompt(1, 1)))
    for _ in range(1000):
        slot = live_slot(index)
        index.store(slot, DEVICE, block)
        index.retire(slot)
    assert index.allocate() < 200
    index.check_integrity()


def test_memory_per_block() -> None:
    blocks = 100_000
    packed = os.urandom(16 * blocks)
    index = PrefixIndex()
    slots = [live_slot(index) for _ in range(16)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for slot in slots[3], slots[15]:
            for start in range(0, len(packed), 16 * 64):
                index.store(slot, DEVICE, prefixes(packed[start : start + 16 * 64]))
        used = (tracemalloc.get_traced_memory()[0] - before) / blocks
    finally:
        tracemalloc.stop()
    assert len(index) == blocks
    assert used < 100, f"{used:.0f} bytes per unique block"


PROMPTS = [
    prompt(1, 3) + prompt(2, 9),
    prompt(1, 3) + prompt(3, 5),
    prompt(1, 2) + prompt(4, 6),
    prompt(5, 8),
]
CHAINS = [keys_of(tokens) for tokens in PROMPTS]
CHAIN = st.integers(0, len(CHAINS) - 1)
LOCAL = st.sampled_from([DEVICE, HOST, DISK])


def closed(sets: dict[int, set[bytes]]) -> bool:
    """The law that replicas keep (leaf first) and bisection rests on: no holes in any chain."""
    held: set[bytes] = set()
    for more in (sets[DEVICE] | sets[BOOKED], sets[HOST], sets[DISK]):
        held = held | more
        for keys in CHAINS:
            start = len(list(takewhile(held.__contains__, keys)))
            if held.intersection(keys[start:]):
                return False
    return True


class IndexMachine(RuleBasedStateMachine):
    """Several slots; every operation keeps each one's cumulative sets closed under prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[int, dict[int, set[bytes]]] = {}

    @rule()
    def add_slot(self) -> None:
        if len(self.model) < 6:
            slot = live_slot(self.index)
            assert slot not in self.model
            self.model[slot] = {lane: set() for lane in range(5)}

    def slot(self, number: int) -> int:
        return sorted(self.model)[number % len(self.model)]

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 5), chain=CHAIN, depth=st.integers(1, 12))
    def store(self, number: int, chain: int, depth: int) -> None:
        slot, keys = self.slot(number), CHAINS[chain][:depth]
        self.index.store(slot, DEVICE, names(keys))
        self.model[slot][DEVICE] |= set(keys)
        self.model[slot][BOOKED] -= set(keys)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 5), chain=CHAIN, depth=st.integers(1, 12), tier=LOCAL)
    def write_through(self, number: int, chain: int, depth: int, tier: int) -> None:
        """Copy the start of a chain that is held already to another tier too."""
        slot = self.slot(number)
        sets = self.model[slot]
        near = sets[DEVICE] | sets[HOST] | sets[DISK] | sets[BOOKED]
        keys = list(takewhile(near.__contains__, CHAINS[chain][:depth]))
        if keys:
            self.index.store(slot, tier, names(keys))
            sets[tier] |= set(keys)
            sets[BOOKED] -= sets[DEVICE]

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 5), chain=CHAIN, depth=st.integers(0, 11), tier=LOCAL)
    def remove(self, number: int, chain: int, depth: int, tier: int) -> None:
        """A block and all that follow it, of one tier and the faster ones."""
        slot = self.slot(number)
        head = CHAINS[chain][: depth + 1]
        if len(head) <= depth:
            return
        gone = {k for keys in CHAINS if keys[: depth + 1] == head for k in keys[depth:]}
        left = {lane: set(held) for lane, held in self.model[slot].items()}
        for lane in (*range(tier + 1), BOOKED):
            left[lane] -= gone
        if not closed(left):  # something further on had its copy in a slower tier only
            return
        for lane in range(tier + 1):
            self.index.remove(slot, lane, names(sorted(gone)))
        self.model[slot] = left

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 5), chain=CHAIN, depth=st.integers(0, 11), tier=LOCAL)
    def demote(self, number: int, chain: int, depth: int, tier: int) -> None:
        """Move the blocks from `depth` on to a slower tier; what is booked behind them goes."""
        slot = self.slot(number)
        sets = self.model[slot]
        head = CHAINS[chain][: depth + 1]
        tail = {k for keys in CHAINS if keys[: depth + 1] == head for k in keys[depth:]}
        moved = {k for k in tail if k in sets[DEVICE] | sets[HOST] | sets[DISK]}
        if tier == DEVICE or not moved:
            return
        left = {lane: held - moved for lane, held in sets.items()}
        left[BOOKED] = sets[BOOKED] - tail
        left[tier] |= moved
        if not closed(left):  # blocks on disk may not overtake those before them
            return
        self.index.move(slot, tier, names(sorted(moved)))
        self.index.unbook(slot, names(sorted(tail)))
        self.model[slot] = left

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 5), chain=CHAIN, depth=st.integers(1, 12))
    def book(self, number: int, chain: int, depth: int) -> None:
        slot, keys = self.slot(number), CHAINS[chain][:depth]
        self.index.book(slot, names(keys))
        self.model[slot][BOOKED] |= set(keys) - self.model[slot][DEVICE]

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 5))
    def unbook(self, number: int) -> None:
        slot = self.slot(number)
        self.index.unbook(slot, names(sorted(k for keys in CHAINS for k in keys)))
        self.model[slot][BOOKED].clear()
        assert closed(self.model[slot])

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 5))
    def retire(self, number: int) -> None:
        slot = self.slot(number)
        self.index.retire(slot)
        del self.model[slot]

    @rule(shards=st.integers(1, 300))
    def sweep(self, shards: int) -> None:
        self.index.sweep(shards)

    @invariant()
    def matches_agree(self) -> None:
        for keys in CHAINS:
            assert self.index.match(keys) == self.naive(keys)

    def naive(self, keys: list[bytes]) -> dict[int, Depths]:
        found = {}
        for slot, sets in self.model.items():
            held = sets[DEVICE] | sets[BOOKED]
            depths = []
            for more in (set(), sets[HOST], sets[DISK]):
                held = held | more
                missing = (at for at, key in enumerate(keys) if key not in held)
                depths.append(next(missing, len(keys)))
            if any(depths):
                found[slot] = Depths(*depths)
        return found

    @invariant()
    def contents_agree(self) -> None:
        self.index.check_integrity()
        for slot, sets in self.model.items():
            expected = {(prefix(k), lane) for lane, keys in sets.items() for k in keys}
            got = {
                (key, lane)
                for key, lanes in self.index.held(slot).items()
                for lane in range(5)
                if lanes >> lane & 1
            }
            assert got == expected
            assert self.index.digest(slot) == prefix(xor_of(sets[DEVICE]))


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_index_machine_in_full() -> None:
    """Fresh examples every time; hypothesis prints how to replay one that fails."""
    size = settings(max_examples=5000, stateful_step_count=60, deadline=None, print_blob=True)
    run_state_machine_as_test(IndexMachine, settings=size)  # type: ignore[no-untyped-call]


def test_random_closed_views_of_long_chains() -> None:
    """Sixteen slots, chains of 500: depths equal a block by block walk, 50 seeds."""
    for seed in range(50):
        draw = random.Random(seed)
        index = PrefixIndex()
        keys = keys_of(prompt(seed, 500))
        expected = {}
        for _ in range(16):
            slot = live_slot(index)
            device = draw.choice([0, 1, 2, draw.randrange(500), 499, 500])
            disk = draw.randint(device, 500)
            host = draw.randint(device, disk)
            index.store(slot, DEVICE, names(keys[:device]))
            index.store(slot, HOST, names(keys[device:host]))
            index.store(slot, DISK, names(keys[host:disk]))
            if disk:
                expected[slot] = Depths(device, host, disk)
        assert index.match(keys) == expected, f"seed {seed}"


def test_views_with_holes_still_give_sensible_depths() -> None:
    """Events may be late or wrong: whoever holds the first block, and nobody else, has a depth,
    and its depth ends on a block that it holds. 300 seeds.
    """
    keys = keys_of(prompt(1, 40))
    for seed in range(300):
        draw = random.Random(seed)
        index = PrefixIndex()
        held = {}
        for _ in range(5):
            slot, density = live_slot(index), draw.random()
            mine = [key for key in keys if draw.random() < density]
            if mine:
                index.store(slot, DEVICE, names(mine))
            held[slot] = set(mine)
        depths = index.match(keys)
        assert set(depths) == {slot for slot, mine in held.items() if keys[0] in mine}, seed
        for slot, depth in depths.items():
            assert len(set(depth)) == 1 and keys[depth.device - 1] in held[slot], seed
