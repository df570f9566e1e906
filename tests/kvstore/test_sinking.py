"""Sinker: what is dirty goes to every tier that takes it, parents first, and nothing stays held."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from scripted_tier import WAIT_S, ScriptedTier
from tier_contract import names_of_chain

from kvstore import sinking
from kvstore.fetch import Level
from kvstore.sinking import PAUSE_S, Sinker
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.host import HostTier
from kvstore.tiers.queue import STORES_MAX, TierQueue

SIZE = 4096


class Sunk:
    """A host tier of `slots`, a disk and a shared tier under it."""

    def __init__(self, slots: int = 64, threads: int = 1) -> None:
        self.host = HostTier({0: SIZE}, slots * SIZE, dirty_max_share=1.0, prefault=False)
        self.disk, self.shared = ScriptedTier("disk"), ScriptedTier("shared")
        self.tiers = {Level.DISK: self.disk, Level.SHARED: self.shared}
        self.queues = {
            level: TierQueue(tier, threads=threads) for level, tier in self.tiers.items()
        }
        self.heard: list[tuple[BlockName, Level]] = []
        self.sinker = Sinker(self.host, self.queues, lambda name, to: self.heard.append((name, to)))

    def keep(self, names: list[BlockName]) -> None:
        """Dirty in host memory."""
        blocks = [memoryview(name.key * (SIZE // 16)) for name in names]
        assert self.host.store(names, blocks, WAIT_S) == [Status.OK] * len(names)

    def check_rest(self) -> None:
        """Nothing is queued, on its way or held; what a tier has is what was stored."""
        assert all(queue.depth() == (0, 0) for queue in self.queues.values())
        assert not self.sinker._under_way
        assert not any(slot.pins for slot in self.host._table._slots.values())
        self.host.check_integrity()
        for tier in self.tiers.values():
            assert all(b == name.key * (SIZE // 16) for name, b in tier.blocks.items())

    def close(self) -> None:
        for tier in self.tiers.values():
            tier.let("store")
        for queue in self.queues.values():
            queue.close()
        self.check_rest()
        self.host.close()


@pytest.fixture
def sunk() -> Iterator[Sunk]:
    made = Sunk()
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < WAIT_S, "never came"
        time.sleep(0.001)


def test_a_slow_tier_keeps_no_other_from_being_written() -> None:
    """Far more blocks than the slow one's queue holds reach the other one."""
    sunk = Sunk(slots=4 * STORES_MAX)
    names = names_of_chain(1, 3 * STORES_MAX)
    sunk.disk.hold("store")
    for i in range(0, len(names), 16):
        sunk.keep(names[i : i + 16])
        sunk.sinker.sink()
    until(lambda: len(sunk.shared.blocks) == len(names))
    until(lambda: sunk.host.dirty_bytes == 0)
    assert not sunk.disk.blocks and not sunk.sinker.flush(0.01)
    sunk.disk.let("store")
    assert sunk.sinker.flush(WAIT_S)
    assert len(sunk.disk.blocks) >= STORES_MAX
    sunk.close()


@pytest.mark.parametrize("well", [Level.DISK, Level.SHARED])
def test_clean_once_one_has_it(sunk: Sunk, well: Level) -> None:
    names = names_of_chain(2, 12)
    for level, tier in sunk.tiers.items():
        tier.kept = lambda _, ok=level is well: Status.OK if ok else Status.FAILED
    sunk.keep(names)
    assert sunk.host.dirty_bytes == len(names) * SIZE
    assert sunk.sinker.flush(WAIT_S)
    assert sunk.host.dirty_bytes == 0 and set(sunk.tiers[well].blocks) == set(names)
    assert sorted(sunk.heard) == sorted((name, well) for name in names)
    before = len(sunk.disk.calls) + len(sunk.shared.calls)
    sunk.sinker.sink()
    assert sunk.sinker.flush(WAIT_S)
    assert len(sunk.disk.calls) + len(sunk.shared.calls) == before, "clean is written once"


def paused(sunk: Sunk, monkeypatch: pytest.MonkeyPatch, names: list[BlockName]) -> SimpleNamespace:
    """Time that stands still, and a block that nobody took."""
    clock = SimpleNamespace(now_s=100.0, sleep=time.sleep)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(sinking, "time", clock)
    for tier in sunk.tiers.values():
        tier.kept = lambda _: Status.FAILED
    sunk.keep(names)
    sunk.sinker.sink()
    until(lambda: not sunk.sinker._under_way)
    return clock


def test_what_nobody_takes_is_offered_again_later(
    sunk: Sunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_of_chain(3, 4)
    clock = paused(sunk, monkeypatch, names)
    for tier in sunk.tiers.values():
        tier.kept = lambda _: Status.OK
    calls = [len(tier.calls) for tier in sunk.tiers.values()]
    for _ in range(20):
        sunk.sinker.sink()
    assert [len(tier.calls) for tier in sunk.tiers.values()] == calls, "asked while paused"
    assert sunk.host.dirty_bytes == 4 * SIZE and not sunk.heard
    clock.now_s += PAUSE_S
    assert sunk.sinker.flush(WAIT_S)
    assert sunk.host.dirty_bytes == 0
    assert set(sunk.disk.blocks) == set(sunk.shared.blocks) == set(names)


def test_a_flush_that_nobody_takes_ends(sunk: Sunk) -> None:
    for tier in sunk.tiers.values():
        tier.kept = lambda _: Status.DROPPED
    sunk.keep(names_of_chain(4, 4))
    assert not sunk.sinker.flush(0.1)
    assert sunk.host.dirty_bytes == 4 * SIZE


def test_what_left_meanwhile_is_no_refusal(sunk: Sunk) -> None:
    """A block that is gone when its turn comes does not stop the others for a while."""
    first, gone, later = names_of_chain(5, 1), names_of_chain(6, 2), names_of_chain(7, 3)
    for tier in sunk.tiers.values():
        tier.hold("store")
    sunk.keep(first)
    sunk.sinker.sink()
    for tier in sunk.tiers.values():
        tier.entered("store", 1)
    sunk.keep(gone)
    sunk.sinker.sink()
    sunk.host.discard(gone)
    for tier in sunk.tiers.values():
        tier.let("store")
    until(lambda: not sunk.sinker._under_way)
    sunk.keep(later)
    sunk.sinker.sink()
    until(lambda: set(sunk.disk.blocks) == set(sunk.shared.blocks) == {*first, *later})


def test_a_flush_is_not_over_while_something_is_in_flight(
    sunk: Sunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are being read by a tier are no longer listed as dirty; a queue that has just
    been waited for may have got them since."""
    sunk.disk.hold("store")
    sunk.shared.kept = lambda _: Status.FAILED
    sunk.keep(names_of_chain(8, 4))
    sunk.sinker.sink()
    sunk.disk.entered("store", 1)
    until(lambda: sunk.queues[Level.SHARED].depth() == (0, 0))
    with monkeypatch.context() as patch:
        for queue in sunk.queues.values():
            patch.setattr(queue, "drain", lambda timeout_s: True)
        assert not sunk.sinker.flush(0.05)
    sunk.disk.let("store")
    assert sunk.sinker.flush(WAIT_S)
    assert sunk.host.dirty_bytes == 0


def test_parents_go_first(sunk: Sunk) -> None:
    """Of one offer: whatever a tier has got so far is the beginning of each chain."""
    chains = [names_of_chain(seed, 10) for seed in (10, 11, 12)]
    for chain in chains:
        sunk.keep(chain)
    sunk.sinker.sink()
    assert sunk.sinker.flush(WAIT_S)
    for tier in sunk.tiers.values():
        stored = tier.seen("store")
        assert len(stored) == 30
        for chain in chains:
            assert [name for name in stored if name in set(chain)] == chain


def test_random_tiers_hold_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come, are used and leave while two tiers take some of them, from several threads."""
    monkeypatch.setattr(sinking, "PAUSE_S", 0.02)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for turn in range(6):
        one_random_run(random.Random(seed + turn))


def one_random_run(draw: random.Random) -> None:
    sunk = Sunk(slots=24, threads=2)
    for tier in sunk.tiers.values():
        tier.kept = lambda _: draw.choice([Status.OK, Status.OK, Status.FAILED, Status.DROPPED])
        tier.during = lambda *_: time.sleep(draw.choice([0.0, 0.001]))

    def work(seed: float) -> None:
        mine = random.Random(seed)
        for _ in range(60):
            names = names_of_chain(mine.randrange(12), mine.randrange(1, 6))
            blocks = [memoryview(name.key * (SIZE // 16)) for name in names]
            sunk.host.store(names, blocks, WAIT_S)
            sunk.sinker.sink()
            if mine.random() < 0.2:
                sunk.host.discard(names[-1:])

    threads = [threading.Thread(target=work, args=(draw.random(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    for tier in sunk.tiers.values():
        tier.kept = lambda _: Status.OK
    assert sunk.sinker.flush(WAIT_S)
    assert sunk.host.dirty_bytes == 0
    sunk.check_rest()
    held = {*sunk.disk.blocks, *sunk.shared.blocks}
    assert {name for name, _ in sunk.heard} == held >= set(sunk.host.names())
    sunk.close()
