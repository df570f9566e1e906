"""RadixCache by example: what is shared, what is cut, what is kept, what is freed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import keys
from kvstore.groups import GroupKind, KVGroup
from worker.engine.block_pool import BlockPool
from worker.engine.messages import CacheOp, CacheOpKind
from worker.engine.radix import RadixCache
from worker.engine.radix_node import common_tokens

SIZE = 4
ROOT = keys.root("model", "", SIZE)
CHAIN = keys.ChainSpec(ROOT, SIZE)
FULL = KVGroup(0, GroupKind.FULL, (0,), 64)


def tenant(
    name: str, private_from: int = 0, extra: dict[int, bytes] | None = None
) -> keys.ChainSpec:
    salt = keys.tenant_salt(b"secret", name)
    return keys.ChainSpec(ROOT, SIZE, salt, private_from, extra)


class Bench:
    """A cache over its pools, and whole requests in one call."""

    def __init__(self, *groups: KVGroup, blocks: int = 64) -> None:
        self.pools = [BlockPool(group, blocks) for group in groups or (FULL,)]
        self.cache = RadixCache(self.pools, SIZE)

    def put(self, tokens: Sequence[int], chain: keys.ChainSpec = CHAIN) -> list[list[int]]:
        """A request without reuse ran `tokens` and is gone; returns the blocks it had."""
        count = -(-len(tokens) // SIZE)
        blocks = [pool.allocate(count) or [] for pool in self.pools]
        self.insert(tokens, blocks, chain)
        for pool, run in zip(self.pools, blocks, strict=True):
            pool.release(run)
        return blocks

    def insert(
        self,
        tokens: Sequence[int],
        blocks: Sequence[Sequence[int]],
        chain: keys.ChainSpec = CHAIN,
        partial: bool = True,
    ) -> int:
        whole = keys.chain(chain, tokens)
        return self.cache.insert(chain, tokens, whole, blocks, len(tokens), partial=partial)

    def depth(self, tokens: Sequence[int], chain: keys.ChainSpec = CHAIN) -> int:
        return self.cache.match(chain, tokens, len(tokens)).tokens

    def check(self) -> None:
        """Nobody but the cache holds anything, and everything agrees."""
        self.cache.check_integrity()
        for pool, holders in zip(self.pools, self.cache.holders(), strict=True):
            pool.check_integrity(holders)


def test_match_is_to_the_token_and_within_the_limit() -> None:
    bench = Bench()
    (blocks,) = bench.put(range(10))
    match = bench.cache.match(CHAIN, range(10), 9)
    assert (match.tokens, match.blocks, match.boundary) == (9, (tuple(blocks[:2]),), (blocks[2],))
    match = bench.cache.match(CHAIN, [*range(6), 99, 7], 8)
    assert (match.tokens, match.blocks, match.boundary) == (6, (tuple(blocks[:1]),), (blocks[1],))
    match = bench.cache.match(CHAIN, range(20), 20)
    assert (match.tokens, match.boundary) == (10, (blocks[2],))
    match = bench.cache.match(CHAIN, range(8), 8)
    assert (match.tokens, match.blocks, match.boundary) == (8, (tuple(blocks[:2]),), None)
    assert bench.cache.match(CHAIN, [5, *range(1, 10)], 10).tokens == 0
    assert bench.cache.match(CHAIN, range(10), 0).blocks == ((),)
    bench.check()


def test_an_empty_cache_matches_nothing_and_its_match_can_be_held() -> None:
    bench = Bench()
    match = bench.cache.match(CHAIN, range(10), 10)
    assert (match.tokens, match.blocks, match.boundary) == (0, ((),), None)
    bench.cache.unlock(bench.cache.hold(match))
    bench.check()


def test_only_whole_blocks_of_a_running_request_are_adopted() -> None:
    bench = Bench()
    blocks = bench.pools[0].allocate(3) or []
    assert bench.insert(range(10), [blocks], partial=False) == 2
    assert bench.depth(range(10)) == 8
    assert bench.insert(range(10), [blocks], partial=True) == 1
    assert bench.depth(range(10)) == 10


def test_nothing_beyond_valid_is_found() -> None:
    bench = Bench()
    blocks = bench.pools[0].allocate(5) or []
    whole = keys.chain(CHAIN, range(20))
    assert bench.cache.insert(CHAIN, range(20), whole, [blocks], 0, partial=True) == 0
    assert bench.cache.insert(CHAIN, range(20), whole, [blocks], 3, partial=False) == 0
    assert bench.depth(range(20)) == 0
    assert bench.cache.insert(CHAIN, range(20), whole, [blocks], 9, partial=True) == 3
    assert bench.depth(range(20)) == 9
    assert [op.keys for op in bench.cache.take_ops()] == [tuple(whole[:2])]


def test_a_duplicate_insert_adopts_nothing_and_leaves_the_others_blocks() -> None:
    bench = Bench()
    (first,) = bench.put(range(10))
    second = bench.pools[0].allocate(3) or []
    assert bench.insert(range(10), [second]) == 0
    assert [bench.pools[0].references(block) for block in second] == [1, 1, 1]
    assert bench.pools[0].release(second) == 3
    match = bench.cache.match(CHAIN, range(10), 10)
    assert match.blocks == (tuple(first[:2]),)
    bench.check()


def test_a_collision_of_keys_is_a_miss() -> None:
    bench = Bench()
    blocks = bench.pools[0].allocate(2) or []
    bench.insert(range(8), [blocks])
    # Whatever key another text is said to have, its tokens decide.
    other = [*range(4), 9, 9, 9, 9]
    assert bench.depth(other) == 4
    more = bench.pools[0].allocate(2) or []
    same_keys = keys.chain(CHAIN, range(8))
    assert bench.cache.insert(CHAIN, other, same_keys, [more], 8, partial=True) == 1
    match = bench.cache.match(CHAIN, other, 8)
    assert match.blocks == ((blocks[0], more[1]),)
    with pytest.raises(AssertionError, match="key function"):
        bench.cache.check_integrity()


def test_a_branch_inside_a_block_costs_one_block_a_child() -> None:
    bench = Bench()
    bench.put([0, 1, 2, 3, 4, 5])  # ends inside its second block
    assert bench.pools[0].free == 64 - 2
    bench.put([0, 1, 2, 3, 4, 5, 6, 7])  # its block 1 replaces the parent's
    assert bench.pools[0].free == 64 - 2
    bench.put([0, 1, 2, 3, 4, 5, 8, 8])
    bench.put([0, 1, 2, 3, 4, 5, 9])
    assert bench.pools[0].free == 64 - 4
    bench.check()
    assert bench.cache.evict([61])  # one child goes: the parent shares another one's block
    assert bench.pools[0].free == 61
    bench.check()
    assert bench.cache.evict([62])
    assert bench.depth([0, 1, 2, 3, 4, 5, 9]) == 7
    bench.check()


def test_branches_inside_one_block_share_it_through_all_levels() -> None:
    bench = Bench()
    for end in (5, 6, 7, 9):  # each but the last ends inside block 1
        bench.put(range(end))
    assert bench.pools[0].free == 64 - 3
    bench.put([*range(6), 9, 9])
    assert bench.pools[0].free == 64 - 4
    bench.check()
    bench.cache.clear()
    assert bench.pools[0].free == 64


def test_equal_prompts_of_two_tenants_never_share_and_of_one_tenant_do() -> None:
    bench = Bench()
    prompt = list(range(11))
    (blocks,) = bench.put(prompt, tenant("a"))
    for other in (tenant("b"), CHAIN, keys.ChainSpec(keys.root("m", "x", SIZE), SIZE)):
        assert bench.depth(prompt, other) == 0
    assert bench.depth(prompt, tenant("a")) == 11
    (own,) = bench.put(prompt, tenant("b"))
    assert not set(own) & set(blocks)
    assert bench.cache.match(tenant("a"), prompt, 11).blocks == (tuple(blocks[:2]),)
    assert bench.cache.match(tenant("b"), prompt, 11).blocks == (tuple(own[:2]),)
    bench.check()


@pytest.mark.parametrize(("private_from", "shared"), [(0, 0), (3, 0), (4, 4), (9, 8), (99, 11)])
def test_a_published_prefix_is_shared_up_to_the_first_private_block(
    private_from: int, shared: int
) -> None:
    bench = Bench()
    prompt = list(range(11))
    bench.put(prompt, tenant("a", private_from))
    assert bench.depth(prompt, tenant("b", private_from)) == shared
    assert bench.depth(prompt, tenant("a", private_from)) == 11
    bench.put(prompt, tenant("b", private_from))
    assert bench.depth(prompt, tenant("b", private_from)) == 11
    # Who publishes less sees no more than what both publish.
    assert bench.depth(prompt, tenant("a", 4)) == (11 if private_from == 4 else min(shared, 4))
    bench.check()


def test_what_is_not_a_token_separates_from_its_block_on() -> None:
    bench = Bench()
    prompt = list(range(11))
    cat, dog = tenant("a", extra={1: b"cat"}), tenant("a", extra={1: b"dog"})
    bench.put(prompt, cat)
    assert bench.depth(prompt, cat) == 11
    assert bench.depth(prompt, dog) == 4
    assert bench.depth(prompt, tenant("a")) == 4
    bench.put(prompt, tenant("a"))
    bench.put(prompt, dog)
    assert bench.depth(prompt, tenant("a", extra={0: b"", 9: b"later"})) == 11
    assert bench.depth(prompt, dog) == bench.depth(prompt, tenant("a")) == 11
    bench.check()


def test_least_recently_used_goes_first_and_from_its_end() -> None:
    bench = Bench(blocks=12)
    for first in (10, 20, 30):
        bench.put([first] * 16)  # four blocks each
    assert bench.depth([10] * 16) == 16
    assert bench.cache.evict([2])
    assert [bench.depth([first] * 16) for first in (30, 10)] == [16, 16]
    assert bench.cache.evict([6])  # the rest of 20, then two blocks of what was touched least
    assert bench.depth([20] * 16) == 0
    assert [bench.depth([first] * 16) for first in (10, 30)] == [16, 8]
    bench.check()


def test_using_a_part_of_a_node_keeps_only_that_part_young() -> None:
    bench = Bench(blocks=8)
    bench.put([1] * 16)
    bench.put([2] * 16)
    assert bench.depth([1] * 8) == 8
    assert bench.cache.evict([2])
    assert bench.depth([1] * 16) == 8
    assert bench.depth([2] * 16) == 16


def test_held_paths_stay_whatever_is_asked() -> None:
    bench = Bench(blocks=8)
    bench.put([1] * 16)
    bench.put([2] * 16)
    hold = bench.cache.hold(bench.cache.match(CHAIN, [1] * 16, 10))
    assert bench.cache.evictable(0) == 5  # all of 2, and the last block of 1
    assert not bench.cache.evict([6])
    assert bench.pools[0].free == 0  # an impossible wish drops nothing
    assert bench.cache.evict([5])
    bench.cache.clear()
    assert bench.depth([1] * 16) == 10
    bench.cache.unlock(hold)
    assert bench.cache.evictable(0) == 0  # the references are the caller's still
    bench.pools[0].release([*hold.blocks[0], *(hold.boundary or ())])
    assert bench.cache.evictable(0) == 3
    bench.cache.clear()
    assert bench.pools[0].free == 8
    bench.check()


def test_a_hold_survives_cuts_and_growth_of_its_path() -> None:
    bench = Bench()
    bench.put([1] * 14)
    hold = bench.cache.hold(bench.cache.match(CHAIN, [1] * 14, 14))
    assert bench.depth([1] * 5 + [2]) == 5
    bench.put([1] * 5 + [2] * 9)
    bench.put([1] * 30)
    bench.cache.check_integrity()
    bench.cache.clear()
    assert bench.depth([1] * 30) == 14
    bench.cache.unlock(hold)
    bench.pools[0].release([*hold.blocks[0], *(hold.boundary or ())])
    bench.cache.clear()
    assert bench.pools[0].free == 64


def test_a_hold_is_unlocked_once_and_a_stale_match_is_not_held() -> None:
    bench = Bench()
    bench.put([1] * 14)
    match = bench.cache.match(CHAIN, [1] * 14, 14)
    hold = bench.cache.hold(match)
    bench.cache.unlock(hold)
    with pytest.raises(KeyError):
        bench.cache.unlock(hold)
    bench.pools[0].release([*hold.blocks[0], *(hold.boundary or ())])
    bench.cache.clear()
    with pytest.raises(AssertionError, match="no longer valid"):
        bench.cache.hold(match)


def test_a_running_request_that_publishes_block_by_block_makes_one_node() -> None:
    bench = Bench()
    blocks = bench.pools[0].allocate(8) or []
    tokens = list(range(32))
    for valid in range(1, 33):
        whole = keys.chain(CHAIN, tokens[:valid])
        bench.cache.insert(CHAIN, tokens, whole, [blocks], valid, partial=False)
    assert bench.cache.match(CHAIN, tokens, 32).blocks == (tuple(blocks),)
    assert len(list(bench.cache._tree.nodes())) == 1
    bench.pools[0].release(blocks)
    bench.check()


def test_a_hold_given_to_insert_moves_on_with_what_is_inserted() -> None:
    bench = Bench()
    bench.put([1] * 8)
    hold = bench.cache.hold(bench.cache.match(CHAIN, [1] * 8, 8))
    blocks = [*hold.blocks[0], *(bench.pools[0].allocate(6) or [])]
    tokens = [*[1] * 8, *range(24)]
    for valid in range(8, 33):
        whole = keys.chain(CHAIN, tokens[:valid])
        bench.cache.insert(CHAIN, tokens, whole, [blocks], valid, partial=False, hold=hold)
        assert bench.cache.evictable(0) == 0
    assert len(list(bench.cache._tree.nodes())) == 1
    bench.cache.clear()
    assert bench.depth(tokens) == 32
    bench.cache.check_integrity()
    bench.cache.unlock(hold)
    bench.pools[0].release(blocks)
    bench.check()
    bench.cache.clear()
    assert bench.pools[0].free == 64


def test_an_insert_does_not_lengthen_somebody_elses_lock() -> None:
    bench = Bench()
    bench.put([1] * 8)
    hold = bench.cache.hold(bench.cache.match(CHAIN, [1] * 8, 8))
    bench.put([1] * 20)
    assert bench.cache.evictable(0) == 3
    bench.cache.unlock(hold)


WINDOWED = (FULL, KVGroup(1, GroupKind.WINDOW, (1,), 64, window_tokens=6))


def windowed(
    drop: Sequence[int], *groups: KVGroup, blocks: int = 4
) -> tuple[Bench, list[list[int]]]:
    """Blocks of tokens inserted by an owner who has dropped the window blocks `drop`."""
    bench, count = Bench(*(groups or WINDOWED)), blocks
    owned = [pool.allocate(count) or [] for pool in bench.pools]
    bench.pools[1].release([owned[1][i] for i in drop])
    owned[1] = [-1 if i in drop else block for i, block in enumerate(owned[1])]
    bench.insert([1] * SIZE * count, owned)
    for pool, run in zip(bench.pools, owned, strict=True):
        pool.release(run)
    bench.check()
    return bench, owned


def test_a_match_gives_only_the_blocks_its_window_needs() -> None:
    bench, blocks = windowed(drop=[])
    match = bench.cache.match(CHAIN, [1] * 16, 15)
    assert match.blocks == (tuple(blocks[0][:3]), (-1, -1, blocks[1][2]))
    assert match.boundary == (blocks[0][3], blocks[1][3])


@pytest.mark.parametrize(
    ("drop", "limit", "usable"),
    [
        ([0, 1], 16, 16),
        ([0, 1], 14, 14),
        ([0, 1], 13, 13),  # position 13 sees 8 to 13
        ([0, 1], 12, 0),  # position 7 is needed and gone, and so is all before
        ([1], 16, 16),
        ([1], 12, 4),  # block 0 alone serves the first four tokens
        ([3], 16, 12),
        ([2], 16, 8),
        ([0, 1, 2, 3], 16, 0),
    ],
)
def test_a_match_ends_where_the_window_is_whole(drop: list[int], limit: int, usable: int) -> None:
    bench, _ = windowed(drop)
    assert bench.cache.match(CHAIN, [1] * 16, limit).tokens == usable


@pytest.mark.parametrize("window", [2, 3, 5, 6, 8, 9])
@pytest.mark.parametrize("sinks", [0, 1])
def test_a_match_asks_for_exactly_what_its_next_token_sees(window: int, sinks: int) -> None:
    """By the mask of the kernels' reference: a query at t sees p > t - window, and sinks. Without
    any other block the match is whole, without one of these it is shorter."""
    tokens = 6 * SIZE
    group = KVGroup(1, GroupKind.WINDOW, (1,), 64, window_tokens=window, sink_tokens=sinks)
    for matched in range(1, tokens + 1):
        seen = {p // SIZE for p in range(matched) if p < sinks or p > matched - window}
        own = {(matched - 1) // SIZE}  # holds the last position, which a further match may see
        for gone in [set(range(6)) - seen - own, *({block} for block in seen)]:
            bench, _ = windowed(sorted(gone), FULL, group, blocks=6)
            match = bench.cache.match(CHAIN, [1] * tokens, matched)
            assert (match.tokens == matched) == (not gone & seen), (window, matched, gone)
            if match.tokens == matched:
                held = {i for i, block in enumerate(match.blocks[1]) if block >= 0}
                assert held == {block for block in seen if block < matched // SIZE}


def test_a_long_leaf_is_cut_once_for_the_sake_of_one_block() -> None:
    group = KVGroup(1, GroupKind.WINDOW, (1,), 64, window_tokens=6, sink_tokens=SIZE)
    bench, _ = windowed(range(1, 64), FULL, group, blocks=64)
    told: list[int] = []
    bench.cache.on_leaving(lambda going: told.append(len(going)))
    assert bench.cache.evict([0, 64]) and not any(bench.cache.holders())
    assert told == [64, 1], "each group's blocks leave in one go"
    bench.check()


def test_a_cut_frees_no_more_than_is_short() -> None:
    group = KVGroup(1, GroupKind.WINDOW, (1,), 64, window_tokens=6, sink_tokens=SIZE)
    bench, _ = windowed([*range(1, 40), *range(42, 64)], FULL, group, blocks=64)
    assert bench.cache.evict([1, 0]) and [pool.free for pool in bench.pools] == [1, 61]
    assert bench.cache.evict([2, 62]), "one of those inside"
    assert [pool.free for pool in bench.pools] == [2, 62]
    bench.check()


def test_window_blocks_that_are_missing_are_adopted_from_a_later_owner() -> None:
    bench, _ = windowed(drop=[0, 1, 2])
    bench.cache.take_ops()
    assert bench.depth([1] * 12) == 0
    bench.put([1] * 12)
    assert bench.depth([1] * 12) == 12
    whole = keys.chain(CHAIN, [1] * 12)
    assert bench.cache.take_ops() == [CacheOp(CacheOpKind.STORED, 1, tuple(whole))]
    bench.check()


def test_a_short_window_group_loses_what_lies_inside_nodes_first() -> None:
    bench = Bench(*WINDOWED, blocks=16)
    bench.put([1] * 40)  # ten blocks, the last two in the window
    bench.put([2] * 8)
    whole = keys.chain(CHAIN, [1] * 40)
    bench.cache.take_ops()
    assert bench.cache.evict([0, 7])
    assert bench.cache.take_ops() == [CacheOp(CacheOpKind.REMOVED, 1, (whole[7], *whole[6:4:-1]))]
    assert [pool.free for pool in bench.pools] == [4, 7]
    assert bench.depth([1] * 40) == 40
    assert bench.depth([1] * 30) == 20
    bench.check()
    assert bench.cache.evict([0, 15])  # more than that: leaves, the least recently used first
    assert bench.depth([2] * 8) == 0
    bench.check()


def test_the_inside_of_the_least_recently_used_node_goes_first() -> None:
    bench = Bench(*WINDOWED, blocks=20)
    bench.put([1] * 40)
    bench.put([2] * 40)
    assert bench.depth([1] * 40) == 40
    bench.cache.take_ops()
    assert bench.cache.evict([0, 9])
    inside_2, inside_1 = (keys.chain(CHAIN, [n] * 40)[7::-1] for n in (2, 1))
    assert bench.cache.take_ops() == [
        CacheOp(CacheOpKind.REMOVED, 1, (*inside_2, inside_1[0])),
    ]
    assert bench.depth([2] * 40) == 40


def test_a_long_generation_under_a_small_window_pool_keeps_its_prefix() -> None:
    pools = [BlockPool(WINDOWED[0], 64), BlockPool(WINDOWED[1], 5)]
    cache, tokens = RadixCache(pools, SIZE), list(range(200))
    blocks: list[list[int]] = [[], []]
    for end in range(SIZE, 200 + 1, SIZE):
        assert cache.evict([1, 1])
        for pool, run in zip(pools, blocks, strict=True):
            run += pool.allocate(1) or []
        gone = max(0, end - 6) // SIZE
        pools[1].release(blocks[1][:gone])
        blocks[1][:gone] = [-1] * gone
        cache.insert(CHAIN, tokens, keys.chain(CHAIN, tokens[:end]), blocks, end, partial=False)
    assert cache.match(CHAIN, tokens, 200).tokens == 200
    cache.check_integrity()


def test_a_lock_does_not_pin_window_blocks_that_only_the_cache_has() -> None:
    bench = Bench(*WINDOWED, blocks=10)
    bench.put([1] * 40)
    match = bench.cache.match(CHAIN, [1] * 40, 40)
    hold = bench.cache.hold(match)
    assert [bench.cache.evictable(g) for g in (0, 1)] == [0, 8]
    assert not bench.cache.evict([1, 0])
    assert not bench.cache.evict([0, 9])
    assert bench.cache.evict([0, 8])
    assert bench.cache.match(CHAIN, [1] * 40, 40).blocks == match.blocks
    bench.pools[1].release(hold.blocks[1])  # its owner's window has moved on
    assert bench.cache.evict([0, 10])
    assert bench.depth([1] * 40) == 0
    bench.cache.check_integrity()
    computed_again = bench.pools[1].allocate(10) or []
    bench.insert([1] * 40, [match.blocks[0], computed_again])
    bench.pools[1].release(computed_again)
    assert bench.depth([1] * 40) == 40
    bench.cache.unlock(hold)
    bench.pools[0].release(hold.blocks[0])
    bench.check()


def test_a_full_group_with_a_hole_is_refused() -> None:
    bench = Bench()
    with pytest.raises(AssertionError, match="only windows"):
        bench.insert([1] * 8, [[*(bench.pools[0].allocate(1) or []), -1]])


def test_ops_name_parents_first_and_a_snapshot_says_the_same() -> None:
    bench = Bench()
    bench.put([1] * 8)
    bench.put([1] * 6 + [2] * 6)
    one, two = keys.chain(CHAIN, [1] * 8), keys.chain(CHAIN, [1] * 6 + [2] * 6)
    assert bench.cache.take_ops() == [CacheOp(CacheOpKind.STORED, 0, (*one, *two[1:]))]
    assert bench.cache.take_ops() == []
    (snapshot,) = bench.cache.snapshot()
    assert sorted(snapshot.keys) == sorted({*one, *two})
    assert snapshot.keys.index(one[0]) == 0
    assert snapshot.keys.index(two[1]) < snapshot.keys.index(two[2])
    bench.cache.clear()
    removed = [op for op in bench.cache.take_ops() if op.kind is CacheOpKind.REMOVED]
    assert sorted(key for op in removed for key in op.keys) == sorted(snapshot.keys)
    assert bench.cache.snapshot() == []


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.integers(0, 3))
def test_common_tokens_counts_equal_ones(left: list[int], right: list[int], at: int) -> None:
    query = keys.tokens_u32le([9] * at + left)
    run = keys.tokens_u32le(right)
    count = min(len(left), len(right))
    same = next((i for i in range(count) if left[i] != right[i]), count)
    assert common_tokens(query, at, run, count) == same
