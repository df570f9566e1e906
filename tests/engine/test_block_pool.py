"""BlockPool: counts, the free list, idle references, and what it refuses."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.groups import GroupKind, KVGroup
from worker.engine.block_pool import BlockPool

GROUP = KVGroup(0, GroupKind.FULL, (0,), 64)


def test_allocate_takes_all_or_nothing() -> None:
    pool = BlockPool(GROUP, 4)
    assert pool.total == pool.free == 4
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.free == 1
    assert pool.allocate(0) == []
    pool.check_integrity({0: 1, 1: 1, 2: 1})


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    freed: list[tuple[int, list[int]]] = []
    pool = BlockPool(KVGroup(7, GroupKind.LATENT, (0,), 64), 3, lambda g, b: freed.append((g, b)))
    blocks = pool.allocate(2)
    assert blocks == [0, 1]
    pool.retain([0, -1])
    assert pool.references(0) == 2
    assert pool.release([0, 1, -1]) == 1
    assert freed == [(7, [1])]
    assert pool.release([-1]) == 0
    assert pool.release([0]) == 1
    assert freed == [(7, [1]), (7, [0])]
    assert pool.free == 3


def test_on_free_comes_before_the_block_can_be_had_again() -> None:
    seen: list[int] = []
    pool = BlockPool(GROUP, 1, lambda _, __: seen.append(pool.free))
    pool.release(pool.allocate(1) or [])
    assert seen == [0]
    assert pool.free == 1


def test_a_block_is_evictable_while_all_its_references_are_idle() -> None:
    pool = BlockPool(GROUP, 4)
    blocks = pool.allocate(2) or []
    pool.retain_idle(blocks)
    assert pool.evictable == 0  # a request still has them
    pool.release([0])
    assert pool.evictable == 1
    pool.retain([0])
    assert pool.evictable == 0
    pool.release([0, 1])
    assert pool.evictable == 2
    pool.to_busy([1])
    assert pool.evictable == 1
    pool.to_idle([1])
    assert pool.evictable == 2
    assert pool.release_idle([0, 1]) == 2
    assert (pool.evictable, pool.free) == (0, 4)


@pytest.mark.parametrize("misuse", ["release", "retain", "retain_idle", "release_idle", "to_busy"])
def test_free_blocks_cannot_be_referred_to(misuse: str) -> None:
    pool = BlockPool(GROUP, 2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        getattr(pool, misuse)([1])


def test_a_busy_release_cannot_take_the_caches_reference() -> None:
    pool = BlockPool(GROUP, 1)
    pool.allocate(1)
    pool.to_idle([0])
    with pytest.raises(AssertionError):
        pool.release([0])


@pytest.mark.parametrize("holders", [{}, {0: 2}, {0: 1, 1: 1}, {0: 1, 9: 1}])
def test_check_integrity_sees_every_difference(holders: dict[int, int]) -> None:
    pool = BlockPool(GROUP, 2)
    pool.allocate(1)
    pool.check_integrity({0: 1})
    with pytest.raises(AssertionError):
        pool.check_integrity(holders)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "retain", "release", "retain_idle", "release_idle", "swap"]),
        st.integers(0, 11),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_counts_against_a_list_of_references(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(GROUP, 6)
    busy: list[int] = []
    idle: list[int] = []
    for name, choice in operations:
        if name == "allocate":
            free = pool.free
            taken = pool.allocate(choice)
            assert (taken is None) == (choice > free)
            busy += taken or []
        elif name in ("retain", "retain_idle") and busy + idle:
            block = (busy + idle)[choice % len(busy + idle)]
            (busy if name == "retain" else idle).append(block)
            getattr(pool, name)([block])
        elif name in ("release", "release_idle"):
            held = busy if name == "release" else idle
            if held:
                block = held.pop(choice % len(held))
                freed = getattr(pool, name)([block])
                assert freed == (block not in busy + idle)
        elif name == "swap" and busy:
            block = busy.pop(choice % len(busy))
            pool.to_idle([block])
            idle.append(block)
        pool.check_integrity(Counter(busy + idle))
        assert pool.evictable == len(set(idle) - set(busy))
        assert pool.free == pool.total - len(set(busy + idle))
