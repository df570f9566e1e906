"""The host tier beyond the contract: what leaves first, staging, pins, dirty blocks, sizes."""

import random
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
from faulty_tier import SCRIBBLE, FaultyTier
from tier_contract import SOON, Opened, content, names_of_chain

from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.host import HostTier, _arena, _prefault
from kvstore.tiers.host_slots import SlotTable, chunk_size

SIZES = {0: 4096}
OK, MISS, DROPPED = Status.OK, Status.MISS, Status.DROPPED


def bytes_of(name: BlockName) -> bytes:
    return content(name, SIZES)


def tier_of(blocks: int, **options: object) -> tuple[HostTier, Opened]:
    tier = HostTier(SIZES, blocks * 4096, prefault=False, **options)  # type: ignore[arg-type]
    return tier, Opened(tier, SIZES)


def single(seed: int) -> BlockName:
    """A chain of one block."""
    return names_of_chain(seed, 1)[0]


# ---- staging and pins


def test_a_block_being_filled_is_nobodys_until_it_is_finished() -> None:
    tier, use = tier_of(2)
    name = single(1)
    view = tier.begin(name)
    assert view is not None and view.nbytes == 4096
    assert tier.begin(name) is None and tier.pin(name) is None and tier.names() == []
    assert use.lookup([name]) == [False] and use.load([name]) == [MISS]
    assert use.store([name]) == [DROPPED]
    assert tier.stats().bytes == 4096, "it counts against the cap"
    view[:] = bytes_of(name)
    tier.finish(name, True)
    assert use.load([name]) == [OK]
    assert tier.coldest_dirty(9) == [], "a lower tier has it"
    assert tier.begin(name) is None, "it is there"
    tier.check_integrity()


@pytest.mark.parametrize("how", ["failed", "discarded", "cleared", "closed"])
def test_what_was_not_filled_leaves_nothing(how: str) -> None:
    tier, use = tier_of(2)
    name = single(2)
    view = tier.begin(name)
    assert view is not None
    if how == "discarded":
        tier.discard([name])
    elif how == "cleared":
        tier.clear()
    elif how == "closed":
        tier.close()
    view[:] = bytes_of(name)  # the slot is still its filler's
    tier.finish(name, how != "failed")
    assert tier.stats().blocks == 0 and use.load([name]) == [MISS]
    tier.check_integrity()
    tier.finish(name, True)  # once too often: nothing


def test_begin_makes_room_and_gives_up_when_all_is_in_use() -> None:
    tier, use = tier_of(3)
    old, kept, new = single(3), single(4), single(5)
    use.keep([old])
    use.keep([kept])
    for name in (old, kept):
        tier.mark_clean(name)
    assert tier.begin(new) is not None
    assert tier.begin(single(6)) is not None, "the older one made room"
    assert use.lookup([old, kept]) == [False, True]
    assert tier.begin(single(7)) is not None
    assert tier.begin(single(8)) is None, "three are being filled"
    assert use.store([single(9)]) == [DROPPED]
    assert tier.stats().dropped == 1
    tier.check_integrity()


def test_a_pinned_block_stays_whatever_happens() -> None:
    tier, use = tier_of(3)
    name = single(10)
    use.keep([name])
    view = tier.pin(name)
    assert view is not None and tier.pin(name) is not None
    tier.unpin(name)  # pins are counted
    for seed in range(11, 20):
        use.keep([single(seed)])
    assert use.load([name]) == [OK]
    tier.discard([name])
    assert use.load([name]) == [MISS] and use.store([name]) == [DROPPED]
    for seed in range(20, 30):
        use.keep([single(seed)])
    assert view == bytes_of(name)
    tier.check_integrity()
    tier.unpin(name)
    use.keep([name])
    tier.check_integrity()


def test_a_pin_compares_all_of_the_name() -> None:
    tier, use = tier_of(2)
    name = single(30)
    use.keep([name])
    assert tier.pin(name._replace(tokens=bytes(16))) is None
    assert tier.pin(name._replace(parent=bytes(16))) is None
    assert use.lookup([name, name._replace(tokens=bytes(16))]) == [True, False]
    assert use.load([name._replace(tokens=bytes(16))]) == [Status.CORRUPT]
    assert tier.stats().corrupt == Counter(tokens=1)
    assert use.load([name]) == [OK], "the impostor did it no harm"


def test_pins_survive_the_close() -> None:
    tier, use = tier_of(2)
    name = single(31)
    use.keep([name])
    view = tier.pin(name)
    tier.close()
    tier.close()
    assert view is not None and view == bytes_of(name)
    tier.unpin(name)
    assert tier.stats().blocks == 0 and tier.begin(name) is None and tier.pin(name) is None


# ---- what leaves first


def test_a_block_does_not_evict_its_own_parent() -> None:
    _, use = tier_of(4)
    chain = names_of_chain(40, 5)
    for name in chain[:3]:
        use.keep([name])
    use.keep([single(41)])  # newer than the whole chain
    use.keep([chain[3]])
    assert use.lookup(chain[:4]) == [True] * 4
    assert use.store([chain[4]]) == [DROPPED], "a chain longer than the tier keeps its front"
    assert use.lookup(chain[:4]) == [True] * 4


def test_clean_ones_leave_before_dirty_ones() -> None:
    tier, use = tier_of(6, dirty_max_share=0.5)
    dirty, clean = [single(50), single(51)], [single(52), single(53)]
    for name in dirty + clean:
        use.keep([name])
    for name in clean:
        tier.mark_clean(name)
    assert tier.coldest_dirty(9) == dirty and tier.coldest_dirty(1) == dirty[:1]
    assert tier.coldest_dirty(9) == dirty, "asking changes nothing"
    use.load(dirty[:1])
    assert tier.coldest_dirty(9) == dirty[::-1]
    assert tier.pin(dirty[0]) is not None
    assert tier.coldest_dirty(9) == dirty[1:], "not while somebody uses it"
    tier.unpin(dirty[0])
    for seed in range(54, 57):
        assert tier.begin(single(seed)) is not None
        tier.finish(single(seed), True)
    assert use.lookup(clean) == [False, True] and use.lookup(dirty) == [True, True]
    assert tier.lost == 0


def test_too_many_dirty_ones_leave_in_their_turn() -> None:
    tier, use = tier_of(4, dirty_max_share=0.5)
    dirty, clean = [single(60 + i) for i in range(3)], single(63)
    for name in [*dirty, clean]:
        use.keep([name])
    tier.mark_clean(clean)
    use.keep([single(64)])
    assert use.lookup([*dirty, clean]) == [False, True, True, True]
    assert tier.lost == 1 and tier.stats().evicted == 1


def test_a_tier_full_of_dirty_ones_still_takes_the_newest() -> None:
    tier, use = tier_of(4, dirty_max_share=1.0)
    for seed in range(70, 80):
        use.keep([single(seed)])
    assert tier.lost == 6
    assert use.load([single(seed) for seed in range(76, 80)]) == [OK] * 4
    assert tier.dirty_bytes == 4 * 4096


def test_nothing_is_dirty_where_there_is_no_lower_tier() -> None:
    tier, use = tier_of(4, write_back=False)
    for seed in range(80, 90):
        use.keep([single(seed)])
    assert tier.coldest_dirty(9) == [] and tier.dirty_bytes == 0 and tier.lost == 0


def test_a_touch_is_a_use() -> None:
    tier, use = tier_of(3)
    names = [single(seed) for seed in range(105, 108)]
    for name in names:
        use.keep([name])
    tier.touch([names[0], single(108)])
    use.keep([single(109)])
    assert use.lookup(names) == [True, False, True]


def test_what_came_and_left_is_told_in_order_outside_the_lock() -> None:
    told: list[BlockName] = []
    came: list[BlockName] = []

    def hear(added: bool, names: list[BlockName]) -> None:
        assert not tier._lock.locked()
        if added:
            came.extend(names)
        else:
            assert tier.lookup(names, SOON) == [False] * len(names)
            told.extend(names)

    tier, use = tier_of(4, on_change=hear)
    names = [single(seed) for seed in range(90, 100)]
    for name in names:
        use.keep([name])
    assert (came, told) == (names, names[:6])
    tier.discard([names[6], names[0]])
    assert told == names[:7]
    assert tier.begin(single(100)) is not None
    tier.finish(single(100), False)
    assert told == names[:7], "it was never there"
    assert came == names
    assert tier.begin(single(101)) is not None
    tier.finish(single(101), True)
    assert came == [*names, single(101)]
    tier.clear()
    assert sorted(told) == sorted([*names, single(101)])


class Naive:
    """What the tier should hold, by going through everything at each step."""

    def __init__(self, capacity: int, dirty_max: float, names: Sequence[BlockName]) -> None:
        self.capacity, self.dirty_max = capacity, dirty_max
        self.named = {name.key: name for name in names}
        self.stamps: dict[BlockName, int] = {}  # all that take room
        self.filling: set[BlockName] = set()
        self.doomed: set[BlockName] = set()
        self.dirty: set[BlockName] = set()
        self.pins: Counter[BlockName] = Counter()
        self.tick = 0

    def valid(self, name: BlockName) -> bool:
        return name in self.stamps and name not in self.filling | self.doomed

    def held(self) -> set[BlockName]:
        return {name for name in self.stamps if self.valid(name)}

    def touch(self, names: Sequence[BlockName]) -> None:
        self.tick += len(names)
        for i, name in enumerate(names):
            self.stamps[name] = self.tick - i

    def remove(self, name: BlockName) -> None:
        stamp = self.stamps.pop(name)
        self.dirty.discard(name)
        self.doomed.discard(name)
        above = self.named.get(name.parent)
        if above in self.stamps:
            self.stamps[above] = max(stamp, self.stamps[above])

    def victim(self, parent: bytes) -> BlockName | None:
        parents = {name.parent for name in self.stamps} | {parent}
        leaves = [n for n in self.held() if n.key not in parents and not self.pins[n]]
        leaves.sort(key=lambda name: self.stamps[name])
        clean = [name for name in leaves if name not in self.dirty]
        if leaves and len(self.dirty) > self.dirty_max:
            return leaves[0]
        return next(iter(clean or leaves), None)

    def take(self, name: BlockName) -> bool:
        if name in self.stamps:
            return False
        if len(self.stamps) == self.capacity:
            victim = self.victim(name.parent)
            if victim is None:
                return False
            self.remove(victim)
        self.stamps[name] = self.tick
        self.filling.add(name)
        return True

    def store(self, names: Sequence[BlockName]) -> list[Status]:
        there = [name for name in names if self.valid(name)]
        self.touch(there)
        self.pins.update(there)
        taken = [name for name in names if name not in there and self.take(name)]
        self.touch(taken)
        self.filling -= set(taken)
        self.dirty |= set(taken)
        self.pins.subtract(there)
        return [OK if name in there or name in taken else DROPPED for name in names]

    def load(self, names: Sequence[BlockName]) -> list[Status]:
        found = [name for name in names if self.valid(name)]
        self.touch(found)
        return [OK if name in found else MISS for name in names]

    def discard(self, name: BlockName) -> None:
        if self.valid(name) and self.pins[name]:
            self.doomed.add(name)
            self.dirty.discard(name)
        elif self.valid(name):
            self.remove(name)

    def unpin(self, name: BlockName) -> None:
        self.pins[name] -= 1
        if name in self.doomed and not self.pins[name]:
            self.remove(name)


@pytest.mark.parametrize("seed", range(6))
def test_against_a_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    stem = [1] * 8
    names = [*names_of_chain(1, 7, prefix=stem), *names_of_chain(2, 6, prefix=stem)[2:]]
    names += [*names_of_chain(3, 5), *names_of_chain(4, 1), *names_of_chain(5, 1)]
    chains = [names[:7], names[:2] + names[7:11], names[11:16], names[16:17], names[17:]]
    tier, use = tier_of(9, dirty_max_share=0.5)
    naive = Naive(9, 4.5, names)
    pinned: list[BlockName] = []
    for step in range(1500):
        chain = rng.choice(chains)
        some = chain[rng.randrange(len(chain)) :] if rng.random() < 0.3 else chain
        some = some[: rng.randrange(1, 6)]
        match rng.randrange(9):
            case 0 | 1 | 2:
                assert use.store(some) == naive.store(some), step
            case 3 | 4:
                assert use.load(some) == naive.load(some), step
            case 5:
                tier.discard(some[-1:])
                naive.discard(some[-1])
            case 6 if tier.pin(some[0]) is not None:
                naive.touch(some[:1])
                naive.pins[some[0]] += 1
                pinned.append(some[0])
            case 7 if pinned:
                name = pinned.pop(rng.randrange(len(pinned)))
                tier.unpin(name)
                naive.unpin(name)
            case 8:
                for name in tier.coldest_dirty(2):
                    tier.mark_clean(name)
                    naive.dirty.discard(name)
        assert set(tier.names()) == naive.held(), step
        tier.check_integrity()
    assert tier.stats().evicted > 100 and tier.lost > 10


# ---- several sizes


def test_a_chunk_wastes_little_of_any_size() -> None:
    assert chunk_size([262144], 1 << 40) == 262144
    for sizes in ([1 << 20, 3 << 19], [1 << 18, 5 * 4096], [4096, 40960, 7 * 4096]):
        chunk = chunk_size(sorted(sizes), 1 << 36)
        assert chunk // 4 <= 4 << 20 and chunk >= max(sizes)
        assert all(chunk % size / chunk <= 0.02 for size in sizes)
    assert chunk_size([4096, 8192], 5 * 8192) == 8192, "a small arena is cut small"


def test_each_size_gets_what_is_used() -> None:
    sizes = {0: 16384, 1: 4096}
    tier = HostTier(sizes, 32 * 16384, prefault=False)
    use = Opened(tier, sizes)
    for seed in range(64):
        use.keep(names_of_chain(seed, 1, 0))
    assert tier.stats().blocks == 32
    small = [names_of_chain(seed, 1, 1)[0] for seed in range(200)]
    for name in small:
        use.keep([name])
        tier.check_integrity()
        assert tier.stats().bytes <= tier.stats().bytes_max == 32 * 16384
    assert sum(use.lookup(small)) >= 40, "the size in use got more than its first chunk"
    assert use.lookup(small[-8:]) == [True] * 8
    for seed in range(100, 200):
        use.keep(names_of_chain(seed, 1, 0))
    assert sum(name.group == 0 for name in tier.names()) >= 24, "and gave it back"


def test_a_size_in_use_is_not_robbed_by_a_pinned_one() -> None:
    table = SlotTable({0: 8192, 1: 4096}, 8192, 0.5)
    (large,), (small,) = names_of_chain(1, 1, 0), names_of_chain(1, 1, 1)
    slot = table.take(large)
    assert slot is not None and table.take(small) is None, "the only chunk is being filled"
    table.finish(slot, True, dirty=False)
    taken = table.take(small)
    assert taken is not None and table.drain_changes() == [(True, large), (False, large)]
    table.finish(taken, False, dirty=False)
    table.check_integrity()
    assert table.take(large) is not None, "a chunk in which nothing lies is anybody's"


# ---- memory and threads


def test_prefault_backs_the_arena_and_changes_no_byte() -> None:
    memory = np.frombuffer(_arena(64 << 20), np.uint8)
    memory[5 << 20 : (5 << 20) + 100] = 7
    before = psutil.Process().memory_info().rss
    _prefault(memory, threading.Event())
    assert psutil.Process().memory_info().rss - before > 48 << 20
    assert int(memory.sum()) == 700


def test_prefault_ends_with_the_tier() -> None:
    tier = HostTier(SIZES, 256 << 20)
    tier.close()
    assert not tier._prefault.is_alive()


@pytest.mark.parametrize("verify", [False, True])
def test_threads_staging_pinning_and_demoting(verify: bool) -> None:
    sizes = {0: 8192, 1: 4096}
    tier = HostTier(sizes, 12 * 8192, verify=verify)
    use = Opened(tier, sizes)
    chains = [names_of_chain(110 + i, 5, i % 2) for i in range(6)]
    escaped: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                names = rng.choice(chains)[: rng.randrange(1, 6)]
                name = names[-1]
                match rng.randrange(7):
                    case 0:
                        use.store(names)
                    case 1:
                        use.load(names)
                    case 2 if (view := tier.begin(name)) is not None:
                        view[:] = content(name, sizes)
                        tier.finish(name, rng.random() < 0.8)
                    case 3 if (view := tier.pin(name)) is not None:
                        assert view == content(name, sizes)
                        tier.unpin(name)
                    case 4:
                        for cold in tier.coldest_dirty(3):
                            tier.mark_clean(cold)
                    case 5:
                        tier.discard([name])
                    case 6:
                        tier.check_integrity()
        except BaseException as error:
            escaped.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not escaped, escaped[0]
    tier.check_integrity()
    assert tier.stats().corrupt == Counter()
    tier.clear()
    assert tier.stats().blocks == 0, "a pin was left behind"
    tier.close()


# ---- the misbehaving wrapper keeps to the contract


def test_faulty_fails_every_nth_and_scribbles() -> None:
    tier, _ = tier_of(8)
    faulty = FaultyTier(tier)
    use = Opened(faulty, SIZES)
    names = names_of_chain(120, 6)
    use.keep(names)
    faulty.fail_every = 3
    into = [memoryview(bytearray(4096)) for _ in names]
    statuses = faulty.load(names, into, SOON)
    assert statuses == [OK, OK, Status.FAILED] * 2
    assert set(into[2]) == {SCRIBBLE} and into[0] == bytes_of(names[0])
    faulty.fail_every = 1
    assert set(use.load(names)) == {Status.FAILED} and set(use.store(names)) == {Status.FAILED}


def test_faulty_lies_and_forgets() -> None:
    tier, _ = tier_of(8)
    faulty = FaultyTier(tier)
    use = Opened(faulty, SIZES)
    names = names_of_chain(121, 2)
    faulty.phantom = faulty.forgetful = True
    assert use.store(names) == [OK] * 2 and tier.names() == []
    assert use.lookup(names) == [True] * 2 and use.load(names) == [MISS] * 2
    faulty.load_status = Status.LATE
    assert use.load(names) == [Status.LATE] * 2


def test_faulty_freezes_until_it_is_released() -> None:
    tier, _ = tier_of(8)
    faulty = FaultyTier(tier)
    use = Opened(faulty, SIZES)
    names = names_of_chain(122, 2)
    faulty.freeze()
    threads = [threading.Thread(target=use.keep, args=([name],)) for name in names]
    for thread in threads:
        thread.start()
    while faulty.hanging < 2:
        threading.Event().wait(0.001)
    assert tier.names() == [] and faulty.stats().blocks == 0
    faulty.release()
    for thread in threads:
        thread.join()
    assert set(tier.names()) == set(names)
