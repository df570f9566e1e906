"""The behaviour of every tier, whatever it is made of: one suite, run on each implementation.

To plug a tier in, write tests/kvstore/test_<it>_tier.py with a factory and two lines:

    from tier_contract import TierContract, TierFactory

    class DiskFactory(TierFactory):
        persistent = True
        def fresh(self, capacity_blocks=64, representation="bf16-a"): ...open an empty place...
        def reopen(self, representation="bf16-a"): ...open the last place again...

    @pytest.fixture
    def factory(tmp_path):
        made = DiskFactory(tmp_path)
        yield made
        made.close()

    class TestDiskContract(TierContract):
        pass

`fresh` may be called many times in one test (the state machine does); a place that is left behind
may be deleted. The suite closes the tiers it opens, `factory.close()` removes the rest. A test that
a tier cannot pass for a good reason is overridden in the subclass, with the reason.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

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

from kvstore.keys import KEY_BYTES, ChainSpec, chain, root, tokens_u32le
from kvstore.tiers.base import BlockName, Status, Tier, TierStats

BLOCK_TOKENS = 4
ROOT = root("tier-contract", "", BLOCK_TOKENS)
SOON = 20.0  # seconds; nothing here should ever need them
NOT_OK = {Status.MISS, Status.CORRUPT, Status.FAILED, Status.LATE, Status.DROPPED}


class TierFactory:
    """Opens tiers of one kind. Override what differs."""

    sizes: Mapping[int, int] = {0: 8192, 1: 4096, 2: 5000}
    """Group -> bytes of a block on one rank. Ranks 0 and 1 are used."""
    persistent = False  # `reopen` after `close` finds what was stored
    shared = False  # `reopen` beside an open one sees the same blocks
    bounded = True  # holds at most what `fresh` was told, evicting leaf first, least recently used
    verifies = False  # `damage` changes stored bytes, and a load must notice

    def fresh(self, capacity_blocks: int = 64, representation: str = "bf16-a") -> Tier:
        """An empty tier with room for exactly that many blocks of group 0, the largest."""
        raise NotImplementedError

    def reopen(self, representation: str = "bf16-a") -> Tier:
        """The place of the last `fresh` again, perhaps for another representation."""
        raise NotImplementedError

    def damage(self, name: BlockName) -> None:
        """Change one byte of what is stored under `name`, behind the back of the last `fresh`."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove everything left."""


def names_of_chain(
    seed: int, blocks: int, group: int = 0, rank: int = 0, *, prefix: Sequence[int] = ()
) -> list[BlockName]:
    """The names of a chain, parent before child. Chains with one `prefix` (token ids, whole blocks)
    share their first blocks."""
    rng = random.Random(seed)
    tokens = list(prefix)
    tokens += [rng.randrange(1 << 32) for _ in range(blocks * BLOCK_TOKENS - len(tokens))]
    keys = chain(ChainSpec(ROOT, BLOCK_TOKENS), tokens)
    parents = [ROOT[:KEY_BYTES], *keys[:-1]]
    packed, width = tokens_u32le(tokens), 4 * BLOCK_TOKENS
    return [
        BlockName(key, parent, packed[i * width : (i + 1) * width], group, rank)
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]


def content(name: BlockName, sizes: Mapping[int, int]) -> bytes:
    """What this suite stores under `name`: a function of all of it."""
    seed = b"".join((name.key, bytes([name.group, name.rank])))
    return random.Random(seed).randbytes(sizes[name.group])


def contents(names: Sequence[BlockName], sizes: Mapping[int, int]) -> list[memoryview]:
    """Read-only views, as a network gives them."""
    return [memoryview(content(name, sizes)) for name in names]


def buffers(names: Sequence[BlockName], sizes: Mapping[int, int]) -> list[memoryview]:
    """Destinations, full of something else."""
    return [memoryview(bytearray(b"\xa5" * sizes[name.group])) for name in names]


def unaligned(size: int, fill: bytes = b"") -> memoryview:
    """A writable view of `size` bytes that begins at an odd address."""
    whole = memoryview(bytearray(size + 1))
    whole[1 : 1 + len(fill)] = fill
    return whole[1:]


class Opened:
    """A tier and the bytes its calls need."""

    def __init__(self, tier: Tier, sizes: Mapping[int, int]) -> None:
        self.tier, self.sizes = tier, sizes

    def store(self, names: Sequence[BlockName], deadline_s: float = SOON) -> list[Status]:
        statuses = self.tier.store(names, contents(names, self.sizes), deadline_s)
        assert len(statuses) == len(names)
        return statuses

    def load(self, names: Sequence[BlockName], deadline_s: float = SOON) -> list[Status]:
        """Loads, and holds every OK to the byte."""
        into = buffers(names, self.sizes)
        statuses = self.tier.load(names, into, deadline_s)
        assert len(statuses) == len(names)
        for name, view, status in zip(names, into, statuses, strict=True):
            if status is Status.OK:
                assert view == content(name, self.sizes), f"wrong bytes for {name}"
        return statuses

    def lookup(self, names: Sequence[BlockName], deadline_s: float = SOON) -> list[bool]:
        found = self.tier.lookup(names, deadline_s)
        assert len(found) == len(names)
        return found

    def keep(self, names: Sequence[BlockName]) -> None:
        assert self.store(names) == [Status.OK] * len(names)


@contextmanager
def opened(factory: TierFactory, tier: Tier) -> Iterator[Opened]:
    """`tier` for a while; its conservation law, if it has one, is checked before it is closed."""
    try:
        yield Opened(tier, factory.sizes)
        check(tier)
    finally:
        tier.close()


def check(tier: Tier) -> TierStats:
    """What must be true of a tier at every moment."""
    if hasattr(tier, "check_integrity"):
        tier.check_integrity()
    stats = tier.stats()
    assert stats.blocks >= 0 and stats.bytes >= 0
    if stats.bytes_max:
        assert stats.bytes <= stats.bytes_max
    return stats


class TierContract:
    """Subclass it where a fixture `factory` is in sight."""

    def test_what_was_stored_comes_back_to_the_byte(self, factory: TierFactory) -> None:
        names = [
            name
            for group in factory.sizes
            for rank in (0, 1)
            for name in names_of_chain(7, 3, group, rank)
        ]
        with opened(factory, factory.fresh()) as tier:
            assert tier.lookup(names) == [False] * len(names)
            tier.keep(names)
            assert tier.lookup(names) == [True] * len(names)
            assert tier.load(names) == [Status.OK] * len(names)
            assert tier.load(names[::-1]) == [Status.OK] * len(names)

    def test_name_is_what_the_place_is_called(self, factory: TierFactory) -> None:
        with opened(factory, factory.fresh()) as tier:
            assert tier.tier.name in ("host", "disk", "shared")

    def test_buffers_may_lie_anywhere(self, factory: TierFactory) -> None:
        (name,) = names_of_chain(8, 1)
        expected = content(name, factory.sizes)
        source = unaligned(len(expected), expected)
        into = unaligned(len(expected))
        with opened(factory, factory.fresh()) as tier:
            assert tier.tier.store([name], [source], SOON) == [Status.OK]
            assert tier.tier.load([name], [into], SOON) == [Status.OK]
            assert into == expected

    def test_nothing_of_a_caller_is_touched_after_the_return(self, factory: TierFactory) -> None:
        names = names_of_chain(9, 4)
        sources = [memoryview(bytearray(content(name, factory.sizes))) for name in names]
        into = buffers(names, factory.sizes)
        with opened(factory, factory.fresh()) as tier:
            assert tier.tier.store(names, sources, SOON) == [Status.OK] * 4
            for source in sources:
                source[:] = bytes(len(source))
            assert tier.tier.load(names, into, SOON) == [Status.OK] * 4
            for view in into:
                view[:] = bytes(len(view))
            assert tier.load(names) == [Status.OK] * 4
            assert all(view == bytes(len(view)) for view in into)

    def test_empty_calls(self, factory: TierFactory) -> None:
        with opened(factory, factory.fresh()) as tier:
            assert tier.lookup([]) == [] and tier.store([]) == [] and tier.load([]) == []
            tier.tier.discard([])

    def test_each_block_of_a_call_has_its_own_status(self, factory: TierFactory) -> None:
        names = names_of_chain(10, 8)
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names[:3] + names[5:6])
            there = [True, True, True, False, False, True, False, False]
            assert tier.lookup(names) == there
            expected = [Status.OK if found else Status.MISS for found in there]
            assert tier.load(names) == expected
            assert tier.load(names[::-1]) == expected[::-1]

    @pytest.mark.parametrize("field", ["key", "parent", "tokens", "group", "rank"])
    def test_a_name_that_differs_in_anything_is_never_a_hit(
        self, factory: TierFactory, field: str
    ) -> None:
        (name,) = names_of_chain(11, 1)
        old = getattr(name, field)
        changed = 1 - old if isinstance(old, int) else bytes([old[0] ^ 1]) + old[1:]
        impostor = BlockName(**{**name._asdict(), field: changed})
        with opened(factory, factory.fresh()) as tier:
            tier.keep([name])
            assert tier.load([impostor])[0] in (Status.MISS, Status.CORRUPT)
            tier.keep([name])  # a tier may throw out what it found odd
            assert tier.load([name]) == [Status.OK], "the true one is there for its owner"

    def test_two_names_with_one_key_never_mix(self, factory: TierFactory) -> None:
        (name,) = names_of_chain(12, 1)
        twin = name._replace(tokens=bytes(len(name.tokens)))
        other = memoryview(bytes(factory.sizes[0]))
        with opened(factory, factory.fresh()) as tier:
            tier.keep([name])
            tier.tier.store([twin], [other], SOON)
            tier.load([name])  # exact or not OK
            into = buffers([twin], factory.sizes)
            if tier.tier.load([twin], into, SOON) == [Status.OK]:
                assert into[0] == other

    def test_another_representation_is_never_a_hit(self, factory: TierFactory) -> None:
        if not (factory.persistent or factory.shared):
            pytest.skip("a tier that nobody else can open")
        names = names_of_chain(13, 3)
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names)
        with opened(factory, factory.reopen("fp8-b")) as tier:
            assert set(tier.load(names)) <= {Status.MISS, Status.CORRUPT}

    def test_storing_again_is_ok_and_changes_nothing(self, factory: TierFactory) -> None:
        names = names_of_chain(14, 3)
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names)
            before = tier.tier.stats()
            tier.keep(names)
            after = check(tier.tier)
            assert (after.blocks, after.bytes) == (before.blocks, before.bytes)
            assert tier.load(names) == [Status.OK] * 3

    def test_one_name_twice_in_a_call(self, factory: TierFactory) -> None:
        names = names_of_chain(15, 2)
        with opened(factory, factory.fresh()) as tier:
            statuses = tier.store([*names, *names])
            assert statuses[:2] == [Status.OK] * 2
            assert tier.load([*names, *names]) == [Status.OK] * 4

    def test_discard(self, factory: TierFactory) -> None:
        names = names_of_chain(16, 4)
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names[:3])
            tier.tier.discard([names[1], names[3]])
            expected = [Status.OK, Status.MISS, Status.OK, Status.MISS]
            assert tier.load(names) == expected
            assert tier.lookup(names) == [s is Status.OK for s in expected]
            tier.keep(names)
            assert tier.load(names) == [Status.OK] * 4

    def test_names_are_what_it_holds(self, factory: TierFactory) -> None:
        names = [name for group in factory.sizes for name in names_of_chain(16, 3, group)]
        with opened(factory, factory.fresh()) as tier:
            assert tier.tier.names() == []
            tier.keep(names)
            tier.tier.discard(names[:1])
            held = tier.tier.names()
            assert len(held) == len(set(held)) and set(held) <= set(names[1:])
            assert not factory.bounded or set(held) == set(names[1:])

    def test_clear(self, factory: TierFactory) -> None:
        names = names_of_chain(17, 5)
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names)
            tier.tier.clear()
            assert tier.load(names) == [Status.MISS] * 5
            assert check(tier.tier).blocks == 0
            tier.keep(names)
            assert tier.load(names) == [Status.OK] * 5

    def test_stats_count_what_happened(self, factory: TierFactory) -> None:
        names = names_of_chain(18, 4)
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names[:3])
            tier.load(names)
            stats = tier.tier.stats()
            size = factory.sizes[0]
            assert (stats.stored, stats.hits, stats.misses) == (3, 3, 1)
            assert stats.loaded_bytes >= 3 * size and stats.stored_bytes >= 3 * size
            assert stats.state == "ok" and stats.failed == 0
            if factory.bounded:
                assert stats.blocks == 3 and stats.bytes >= 3 * size and stats.bytes_max > 0
            stats.hits = 99
            assert tier.tier.stats().hits == 3, "a copy"

    def test_no_time_means_no_wait(self, factory: TierFactory) -> None:
        names = names_of_chain(19, 6)
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names[:3])
            assert set(tier.load(names, 0.0)) <= {Status.LATE, Status.MISS}
            assert set(tier.store(names[3:], 0.0)) <= {Status.LATE, Status.DROPPED}
            tier.lookup(names, 0.0)
            assert tier.load(names[:3]) == [Status.OK] * 3

    def test_the_cap_is_held_at_every_moment(self, factory: TierFactory) -> None:
        if not factory.bounded:
            pytest.skip("no cap of its own")
        done, over = threading.Event(), []
        with opened(factory, factory.fresh(capacity_blocks=8)) as tier:

            def watch() -> None:
                while not done.is_set():
                    stats = tier.tier.stats()
                    if stats.bytes > stats.bytes_max or stats.blocks > 8:
                        over.append(stats)

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                for seed in range(12):
                    tier.store(names_of_chain(seed, 1 + seed))
            finally:
                done.set()
                watcher.join()
            assert not over
            assert 0 < check(tier.tier).blocks <= 8
            assert tier.tier.stats().evicted > 0

    def test_what_fits_stays(self, factory: TierFactory) -> None:
        if not factory.bounded:
            pytest.skip("no cap of its own")
        names = names_of_chain(20, 8)
        with opened(factory, factory.fresh(capacity_blocks=8)) as tier:
            for name in names:
                tier.keep([name])
            assert tier.load(names) == [Status.OK] * 8
            assert tier.tier.stats().evicted == 0

    def test_leaf_before_parent(self, factory: TierFactory) -> None:
        if not factory.bounded:
            pytest.skip("evicts by rules of its own")
        old = names_of_chain(21, 8)
        with opened(factory, factory.fresh(capacity_blocks=8)) as tier:
            tier.keep(old)
            for number, name in enumerate(names_of_chain(22, 5), 1):
                tier.keep([name])
                left = tier.lookup(old)
                assert left == sorted(left, reverse=True), "a block outlived its parent"
                assert sum(left) <= 8 - number

    def test_least_recently_used_goes_first(self, factory: TierFactory) -> None:
        if not factory.bounded:
            pytest.skip("evicts by rules of its own")
        used, idle = names_of_chain(23, 4), names_of_chain(24, 4)
        with opened(factory, factory.fresh(capacity_blocks=8)) as tier:
            tier.keep(used)
            tier.keep(idle)
            assert tier.load(used[3:]) == [Status.OK], "a use of the leaf is one of its parents"
            tier.lookup(idle)  # counts as no use
            tier.keep(names_of_chain(25, 3))
            assert tier.load(used) == [Status.OK] * 4

    def test_damage_is_a_miss_with_a_cause(self, factory: TierFactory) -> None:
        if not factory.verifies:
            pytest.skip("believes its own memory")
        names = names_of_chain(26, 3)
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names)
            factory.damage(names[1])
            statuses = tier.load(names)
            assert statuses == [Status.OK, Status.CORRUPT, Status.OK]
            assert sum(tier.tier.stats().corrupt.values()) == 1
            tier.keep(names)
            assert tier.load(names) == [Status.OK] * 3, "what was damaged can be stored again"

    def test_kept_over_a_restart(self, factory: TierFactory) -> None:
        if not factory.persistent:
            pytest.skip("memory of one process")
        names = [n for group in factory.sizes for n in names_of_chain(27, 4, group)]
        with opened(factory, factory.fresh()) as tier:
            tier.keep(names)
        with opened(factory, factory.reopen()) as tier:
            assert tier.load(names) == [Status.OK] * len(names)
            tier.tier.discard(names[:2])
        with opened(factory, factory.reopen()) as tier:
            assert Status.OK in tier.load(names[2:])
            tier.load(names[:2])  # forgotten, or exact

    def test_seen_by_others(self, factory: TierFactory) -> None:
        if not factory.shared:
            pytest.skip("memory of one process")
        names = names_of_chain(28, 4)
        with (
            opened(factory, factory.fresh()) as one,
            opened(factory, factory.reopen()) as two,
        ):
            one.keep(names)
            assert two.lookup(names) == [True] * 4
            assert two.load(names) == [Status.OK] * 4

    def test_closed_is_empty_and_quiet(self, factory: TierFactory) -> None:
        names = names_of_chain(29, 2)
        tier = factory.fresh()
        with opened(factory, tier) as use:
            use.keep(names)
        tier.close()
        after = Opened(tier, factory.sizes)
        assert after.lookup(names) == [False] * 2
        assert set(after.load(names)) <= NOT_OK
        assert set(after.store(names)) <= NOT_OK
        tier.discard(names)
        tier.clear()
        assert tier.names() == []
        tier.stats()

    def test_closing_under_use(self, factory: TierFactory) -> None:
        tier = factory.fresh(capacity_blocks=8)
        escaped = hammer(factory, tier, seed=30, rounds=60, close_midway=True)
        assert not escaped, escaped[0]

    @pytest.mark.parametrize("seed", [1, 2])
    def test_many_threads(self, factory: TierFactory, seed: int) -> None:
        tier = factory.fresh(capacity_blocks=24)
        with opened(factory, tier):
            escaped = hammer(factory, tier, seed=seed, rounds=120)
        assert not escaped, escaped[0]

    def test_as_a_dict_that_may_forget(self, factory: TierFactory) -> None:
        run_state_machine_as_test(
            lambda: TierMachine(factory),  # type: ignore[arg-type]  # any factory will do
            settings=settings(max_examples=25, stateful_step_count=30, deadline=None),
        )


def hammer(
    factory: TierFactory, tier: Tier, *, seed: int, rounds: int, close_midway: bool = False
) -> list[BaseException]:
    """Four threads that store, load, look up and discard overlapping chains. Whatever escapes them,
    a wrong byte first of all, is returned."""
    print(f"hammer seed {seed}")
    chains = [names_of_chain(40 + i, 8, i % len(factory.sizes), i % 2) for i in range(8)]
    escaped: list[BaseException] = []
    use = Opened(tier, factory.sizes)
    odd = NOT_OK if close_midway else {Status.DROPPED, Status.MISS}

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        try:
            for turn in range(rounds):
                names = rng.choice(chains)
                names = names[: rng.randrange(1, 9)]
                match rng.randrange(8):
                    case 0 | 1 | 2:
                        assert set(use.store(names)) <= {Status.OK, *odd}
                    case 3 | 4 | 5:
                        assert set(use.load(names)) <= {Status.OK, *odd}
                    case 6:
                        use.lookup(names)
                    case _:
                        tier.discard(names[-1:])
                if close_midway and number == 0 and turn == rounds // 2:
                    tier.close()
        except BaseException as error:
            escaped.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return escaped


class TierMachine(RuleBasedStateMachine):
    """Any order of calls against a dict: a tier may forget beyond its cap, and nothing else."""

    CAPACITY = 6

    def __init__(self, factory: TierFactory) -> None:
        super().__init__()
        self.factory = factory
        stem = [5] * (2 * BLOCK_TOKENS)
        self.names = [
            *names_of_chain(50, 4, prefix=stem),
            *names_of_chain(51, 4, prefix=stem)[2:],
            *names_of_chain(50, 3, 1, 1, prefix=stem),
        ]
        self.use = Opened(factory.fresh(self.CAPACITY), factory.sizes)
        self.stored: set[BlockName] = set()  # and not discarded since
        self.may_forget = False  # since the last clear, more was stored than fits

    subsets = st.lists(st.integers(0, 8), min_size=1, max_size=5, unique=True).map(sorted)

    def chosen(self, picked: list[int]) -> list[BlockName]:
        return [self.names[i] for i in picked]

    @rule(picked=subsets)
    def store(self, picked: list[int]) -> None:
        names = self.chosen(picked)
        statuses = self.use.store(names)
        assert set(statuses) <= {Status.OK, Status.DROPPED}
        self.stored |= {n for n, s in zip(names, statuses, strict=True) if s is Status.OK}
        self.may_forget |= self.factory.bounded and len(self.stored) > self.CAPACITY
        assert self.may_forget or statuses == [Status.OK] * len(names)

    @rule(picked=subsets)
    def load(self, picked: list[int]) -> None:
        names = self.chosen(picked)
        for name, status in zip(names, self.use.load(names), strict=True):
            assert status in (Status.OK, Status.MISS)
            assert status is Status.MISS or name in self.stored, "never stored, or discarded"
            assert status is Status.OK or name not in self.stored or self.may_forget

    @rule(picked=subsets)
    def lookup(self, picked: list[int]) -> None:
        names = self.chosen(picked)
        for name, found in zip(names, self.use.lookup(names), strict=True):
            assert found <= (name in self.stored)
            assert found or name not in self.stored or self.may_forget

    @rule(picked=subsets)
    def discard(self, picked: list[int]) -> None:
        names = self.chosen(picked)
        self.use.tier.discard(names)
        self.stored -= set(names)

    @rule()
    def clear(self) -> None:
        self.use.tier.clear()
        self.stored, self.may_forget = set(), False

    @precondition(lambda self: self.factory.persistent)
    @rule()
    def restart(self) -> None:
        self.use.tier.close()
        self.use = Opened(self.factory.reopen(), self.factory.sizes)

    @invariant()
    def integrity(self) -> None:
        stats = check(self.use.tier)
        assert stats.blocks <= len(self.names)

    def teardown(self) -> None:
        with suppress(AttributeError):  # the factory failed
            self.use.tier.close()
