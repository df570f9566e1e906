"""TierQueue: bounds, order, estimates, and that every job is answered exactly once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from scripted_tier import WAIT_S, ScriptedTier
from tier_contract import names_of_chain

from kvstore.tiers import queue as tier_queue
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.queue import (
    BATCH_BLOCKS,
    LOADS_MAX,
    LOOKUPS_MAX,
    PRIOR_S_PER_BYTE,
    STORES_MAX,
    LoadJob,
    LookupJob,
    StoreJob,
    TierQueue,
)

SIZE = 64
KINDS = ("lookup", "load", "store")
Answers = list[tuple[BlockName, Status]]


class Asked:
    """A queue over a scripted tier, and what its jobs were told."""

    def __init__(self, threads: int) -> None:
        self.tier = ScriptedTier()
        self.queue = TierQueue(self.tier, threads=threads)
        self.loaded: Answers = []
        self.stored: Answers = []
        self.found: list[list[bool]] = []

    def load(self, names: list[BlockName], place: Callable | None = None) -> None:
        given = place or (lambda name: memoryview(bytearray(SIZE)))
        done = lambda name, status: self.loaded.append((name, status))  # noqa: E731
        self.queue.load([LoadJob(name, given, done) for name in names])

    def store(self, names: list[BlockName], source: Callable | None = None) -> None:
        given = source or (lambda name: memoryview(name.key * (SIZE // 16)))
        done = lambda name, status: self.stored.append((name, status))  # noqa: E731
        self.queue.store([StoreJob(name, given, done) for name in names])

    def lookup(self, names: list[BlockName], wanted: bool = True) -> None:
        self.queue.lookup(
            LookupJob(names, lambda _, found: self.found.append(found), lambda: wanted)
        )

    def keep(self, names: list[BlockName]) -> None:
        """In the tier, without a call."""
        self.tier.blocks.update({name: name.key * (SIZE // 16) for name in names})


def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < WAIT_S, "never came"
        time.sleep(0.001)


@pytest.fixture
def one() -> Iterator[Asked]:
    yield from opened(1)


@pytest.fixture
def two() -> Iterator[Asked]:
    yield from opened(2)


def opened(threads: int) -> Iterator[Asked]:
    asked = Asked(threads)
    yield asked
    for kind in KINDS:
        asked.tier.let(kind)
    asked.queue.close()
    assert asked.tier.closed == 1


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger=tier_queue.__name__)


# -- bounds ----------------------------------------------------------------------------------------


def test_loads_beyond_the_cap_are_dropped_at_once(one: Asked) -> None:
    names = names_of_chain(1, LOADS_MAX + 4)
    one.tier.hold("load")
    one.load(names[:1])
    one.tier.entered("load", 1)
    one.load(names[1:])
    assert one.loaded == [(name, Status.DROPPED) for name in names[LOADS_MAX + 1 :]]
    assert one.queue.dropped_loads == 3 and one.queue.depth() == (LOADS_MAX + 1, 0)
    one.load(names[:2])
    assert one.queue.dropped_loads == 5


def test_stores_beyond_the_cap_are_dropped_at_once(one: Asked) -> None:
    names = names_of_chain(1, STORES_MAX + 4)
    one.tier.hold("store")
    one.store(names[:1])
    one.tier.entered("store", 1)
    assert one.queue.stores_free() == STORES_MAX
    one.store(names[1:])
    assert one.stored == [(name, Status.DROPPED) for name in names[STORES_MAX + 1 :]]
    assert one.queue.dropped_stores == 3 and one.queue.stores_free() == 0
    one.tier.let("store")
    assert one.queue.drain(WAIT_S)
    assert Counter(status for _, status in one.stored) == {Status.OK: STORES_MAX + 1, "dropped": 3}


def test_lookups_beyond_the_cap_find_nothing(one: Asked) -> None:
    names = names_of_chain(1, 2)
    one.keep(names)
    one.tier.hold("lookup")
    one.lookup(names)
    one.tier.entered("lookup", 1)
    for _ in range(LOOKUPS_MAX + 3):
        one.lookup(names)
    assert one.found == [[False, False]] * 3
    one.tier.let("lookup")
    until(lambda: len(one.found) == LOOKUPS_MAX + 4)
    assert one.found.count([True, True]) == LOOKUPS_MAX + 1


def test_what_is_asked_after_the_end_is_refused(two: Asked) -> None:
    names = names_of_chain(1, 2)
    two.queue.close()
    two.load(names)
    two.store(names)
    two.lookup(names)
    assert two.loaded == two.stored == [(name, Status.DROPPED) for name in names]
    assert two.found == [[False, False]] and two.queue.stores_free() == 0
    assert not two.tier.calls
    two.tier.closed = 0  # `close` may be repeated


# -- order -----------------------------------------------------------------------------------------


def test_loads_go_before_stores_and_in_their_order(one: Asked) -> None:
    names = names_of_chain(2, 40)
    one.tier.hold("store")
    one.store(names[:1])
    one.tier.entered("store", 1)
    one.store(names[1:])
    one.load(names[:20])
    one.load(names[20:])
    one.tier.let("store")
    assert one.queue.drain(WAIT_S)
    kinds = [kind for kind, _ in one.tier.calls]
    assert kinds == ["store"] + ["load"] * 5 + ["store"] * 5
    assert one.tier.seen("load") == names and one.tier.seen("store") == names
    assert [name for name, _ in one.loaded] == names
    assert max(len(batch) for _, batch in one.tier.calls) == BATCH_BLOCKS


@pytest.mark.parametrize("threads", [2, 3])
def test_lookups_never_block_loads(threads: int) -> None:
    """Lookups that hang, more than there are threads, and loads and stores that come later."""
    for asked in opened(threads):
        names = names_of_chain(3, 20)
        asked.keep(names)
        asked.tier.hold("lookup")
        for _ in range(8):
            asked.lookup(names)
        asked.tier.entered("lookup", threads - 1)
        time.sleep(0.02)  # any thread that would take one more has done so
        asked.load(names)
        asked.store(names)
        assert asked.queue.drain(WAIT_S)
        assert [status for _, status in asked.loaded] == [Status.OK] * 20
        assert [kind for kind, _ in asked.tier.calls].count("lookup") == threads - 1
        asked.tier.let("lookup")
        until(lambda asked=asked: len(asked.found) == 8)


def test_loads_do_not_block_lookups(two: Asked) -> None:
    names = names_of_chain(3, 40)
    two.tier.hold("load")
    two.load(names[:1])
    two.tier.entered("load", 1)
    two.lookup(names)
    until(lambda: len(two.found) == 1)


def test_lookups_of_nobody_are_not_made(one: Asked) -> None:
    names = names_of_chain(3, 2)
    one.keep(names)
    one.lookup(names, wanted=False)
    until(lambda: len(one.found) == 1)
    assert one.found == [[False, False]] and not one.tier.calls


# -- estimates -------------------------------------------------------------------------------------


class Ticking:
    """Time that passes in calls of the tier only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(tier_queue, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def block_s(self, asked: Asked, seconds: float) -> None:
        """What each block costs from now on."""

        def spend(call: str, blocks: int) -> None:
            self.now_s += seconds * blocks

        asked.tier.during = spend


def test_an_estimate_learns_what_a_block_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(monkeypatch)
    for asked in opened(1):
        names = names_of_chain(4, 8)
        asked.keep(names)
        assert asked.queue.estimate_s(4, 0, SIZE) == pytest.approx(4 * SIZE * PRIOR_S_PER_BYTE)
        clock.block_s(asked, 0.5)
        asked.load(names)
        assert asked.queue.drain(WAIT_S)
        assert asked.queue.estimate_s(4, 0, SIZE) == pytest.approx(2.0)  # the first is believed
        assert asked.queue.bytes_per_s == pytest.approx(SIZE / 0.5)
        clock.block_s(asked, 0.1)
        asked.load(names)
        assert asked.queue.drain(WAIT_S)
        after_one = asked.queue.estimate_s(1, 0, SIZE)
        assert 0.1 < after_one < 0.5
        for _ in range(40):
            asked.load(names)
            assert asked.queue.drain(WAIT_S)
        assert asked.queue.estimate_s(1, 0, SIZE) == pytest.approx(0.1, rel=0.01)
        clock.block_s(asked, 3.0)
        asked.load(names_of_chain(5, 8))  # misses say nothing of how long a block takes
        assert asked.queue.drain(WAIT_S)
        assert asked.queue.estimate_s(1, 0, SIZE) == pytest.approx(0.1, rel=0.01)


def test_slow_blocks_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the engine can compute those it gets to first; fast ones share a call."""
    clock = Ticking(monkeypatch)
    for asked in opened(1):
        names = names_of_chain(4, 32)
        asked.keep(names)
        for block_s, most in ((0.0001, 8), (0.5, 1), (0.0001, 8)):
            clock.block_s(asked, block_s)
            for _ in range(40):
                asked.load(names)
                assert asked.queue.drain(WAIT_S)
            with asked.queue._ready:
                asked.queue._loads.extend([LoadJob(names[0], lambda _: None, lambda *_: None)] * 16)
                asked.queue._take()
                taken, asked.queue._loading = asked.queue._loading, 0
                asked.queue._busy = 0
                asked.queue._loads.clear()
            assert taken == most


def test_others_loads_ahead_count_and_silence_makes_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(monkeypatch)
    for asked in opened(1):
        mine, others = names_of_chain(6, 4), names_of_chain(7, 20)
        asked.keep([*mine, *others])
        clock.block_s(asked, 0.5)
        asked.load(mine)
        assert asked.queue.drain(WAIT_S)
        asked.tier.hold("load")
        asked.load(others)
        asked.load(mine)
        due = asked.queue.due()
        asked.load(others)  # behind mine: none of my time
        asked.tier.entered("load", 2)
        assert asked.queue.estimate_s(4, due, SIZE) == pytest.approx(24 * 0.5)
        clock.now_s += 20.0  # nothing from a batch, of one block where they are slow, for so long
        assert asked.queue.estimate_s(4, due, SIZE) == pytest.approx(24 * 20.0)
        asked.tier.let("load")
        assert asked.queue.drain(WAIT_S)
        assert asked.queue.estimate_s(4, due, SIZE) < 24 * 20.0
        clock.now_s += 1e6  # silence of a queue that has nothing to do says nothing
        assert asked.queue.estimate_s(0, due, SIZE) == 0.0


# -- what is not wanted, what raises ---------------------------------------------------------------


def test_no_place_and_no_source_is_no_call(one: Asked) -> None:
    names = names_of_chain(8, 6)
    one.keep(names)
    gone = set(names[::2])
    one.load(names, lambda name: None if name in gone else memoryview(bytearray(SIZE)))
    one.store(names, lambda name: None if name in gone else memoryview(bytes(SIZE)))
    assert one.queue.drain(WAIT_S)
    assert set(one.tier.seen("load")) == set(one.tier.seen("store")) == set(names) - gone
    for answers in (one.loaded, one.stored):
        assert {name for name, status in answers if status is Status.DROPPED} == gone
        assert {name for name, status in answers if status is Status.OK} == set(names) - gone


def test_one_that_raises_harms_nobody_else(one: Asked) -> None:
    names = names_of_chain(9, 6)
    one.keep(names)

    def bytes_for(name: BlockName) -> memoryview:
        if name == names[2]:
            raise RuntimeError("a bug")
        return memoryview(bytearray(SIZE))

    one.load(names, bytes_for)
    one.store(names, bytes_for)
    assert one.queue.drain(WAIT_S)
    for answers in (one.loaded, one.stored):
        assert dict(answers) == dict.fromkeys(names, Status.OK) | {names[2]: Status.DROPPED}


@pytest.mark.parametrize("when", ["done", "refused", "closed"])
def test_an_answer_that_raises_harms_nobody_else(one: Asked, when: str) -> None:
    names = names_of_chain(9, 6)
    told: list[BlockName] = []

    def done(name: BlockName, status: Status) -> None:
        told.append(name)
        if name == names[2]:
            raise RuntimeError("a bug")

    if when == "closed":
        one.tier.hold("load")
        one.load(names[:1])
        one.tier.entered("load", 1)
    if when == "refused":
        one.queue.close()
        one.tier.closed = 0
    one.queue.load([LoadJob(name, lambda _: None, done) for name in names])
    one.queue.store([StoreJob(name, lambda _: None, done) for name in names])
    if when == "closed":
        one.queue.close(0.0)
        one.tier.closed = 0
    assert when != "done" or one.queue.drain(WAIT_S)
    assert told == names * 2


def test_a_tier_that_raises_costs_its_batch_alone(two: Asked) -> None:
    names = names_of_chain(10, 3)
    two.keep(names)

    def fail(call: str, blocks: int) -> None:
        raise RuntimeError("a bug")

    two.tier.during = fail
    two.load(names)
    two.store(names)
    two.lookup(names)
    until(lambda: bool(two.found) and two.queue.drain(0.0))
    assert {status for _, status in two.loaded + two.stored} == {Status.DROPPED}
    assert two.found == [[False] * 3]
    two.tier.during = lambda call, blocks: None
    two.load(names)
    assert two.queue.drain(WAIT_S)
    assert [status for _, status in two.loaded[3:]] == [Status.OK] * 3


# -- drain and close -------------------------------------------------------------------------------


def test_a_drained_queue_has_told_everything(two: Asked) -> None:
    names = names_of_chain(11, 4)
    two.tier.hold("store")
    two.store(names[:1])
    assert not two.queue.drain(0.0) and not two.queue.drain(0.02)
    two.tier.let("store")
    assert two.queue.drain(WAIT_S)
    told: Answers = []

    def done(name: BlockName, status: Status) -> None:
        time.sleep(0.002)
        told.append((name, status))

    for turn in range(1, 9):
        if turn % 2:
            two.queue.load([LoadJob(name, lambda _: None, done) for name in names])
        else:
            two.queue.store([StoreJob(name, lambda _: None, done) for name in names])
        assert two.queue.drain(WAIT_S)
        assert len(told) == 4 * turn and two.queue.depth() == (0, 0)


def test_who_drains_takes_no_turn_of_a_thread(two: Asked) -> None:
    """One thread hangs, the other waits, behind several that drain: it still gets the next job."""
    names = names_of_chain(12, 40)
    two.tier.hold("store")
    two.store(names[:1])
    two.tier.entered("store", 1)
    two.keep(names)
    draining = [threading.Thread(target=two.queue.drain, args=(WAIT_S,)) for _ in range(4)]
    for thread in draining:
        thread.start()
    two.queue.after_batch = lambda: time.sleep(0.005)  # they wait again before the thread does
    for i in range(1, 12):
        two.load(names[i : i + 1])
        until(lambda: two.queue.depth()[0] == 0)
        time.sleep(0.01)
        two.lookup(names[:1])
        until(lambda i=i: len(two.found) == i)
    two.tier.let("store")
    for thread in draining:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tier_does_not_keep_close_waiting(kind: str) -> None:
    asked = Asked(2)
    names = names_of_chain(13, 200)
    asked.keep(names)
    asked.tier.hold(kind)
    for _ in range(3):
        asked.lookup(names)
    asked.load(names)
    asked.store(names)
    asked.tier.entered(kind, 1)
    closing = threading.Thread(target=asked.queue.close, args=(0.1,))
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive(), "it waits for the tier"
    assert asked.tier.closed == 0, "closed under a call"
    asked.tier.let(kind)
    until(lambda: len(asked.loaded) == len(asked.stored) == 200 and len(asked.found) == 3)
    asked.queue.close()
    assert asked.tier.closed == 1
    assert Counter(name for name, _ in asked.loaded) == dict.fromkeys(names, 1)
    assert Counter(name for name, _ in asked.stored) == dict.fromkeys(names, 1)


class Schedule:
    """Threads that ask for things, at random, while the queue is closed under them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tier = ScriptedTier()
        self.tier.kept = lambda name: self.draw.choice(list(Status))
        self.tier.during = self.during
        self.queue = TierQueue(self.tier, threads=self.draw.choice([1, 2, 3]))
        self.asked = 0
        self.told: Counter[int] = Counter()
        self.lock = threading.Lock()

    def during(self, call: str, blocks: int) -> None:
        time.sleep(self.draw.choice([0.0, 0.0, 0.001]))
        if self.draw.random() < 0.05:
            raise RuntimeError("a bug")

    def ticket(self) -> Callable[..., None]:
        with self.lock:
            number, self.asked = self.asked, self.asked + 1

        def done(*_: object) -> None:
            with self.lock:
                self.told[number] += 1
            if self.draw.random() < 0.05:
                raise RuntimeError("a bug")

        return done

    def bytes_for(self, name: BlockName) -> memoryview | None:
        if self.draw.random() < 0.05:
            raise RuntimeError("a bug")
        return self.draw.choice([None, memoryview(bytearray(SIZE))])

    def ask(self, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(40):
            names = names_of_chain(draw.randrange(9), draw.choice([1, 3, 20]))
            match draw.randrange(3):
                case 0:
                    self.queue.load([LoadJob(n, self.bytes_for, self.ticket()) for n in names])
                case 1:
                    self.queue.store([StoreJob(n, self.bytes_for, self.ticket()) for n in names])
                case 2:
                    done = self.ticket()
                    self.queue.lookup(LookupJob(names, done, lambda: self.draw.random() < 0.8))
            time.sleep(draw.choice([0.0, 0.0, 0.0005]))

    def run(self) -> None:
        callers = [threading.Thread(target=self.ask, args=(self.draw.random(),)) for _ in range(3)]
        for caller in callers:
            caller.start()
        time.sleep(self.draw.random() * 0.03)
        self.queue.close(WAIT_S)
        for caller in callers:
            caller.join(WAIT_S)
        assert self.asked and self.told == dict.fromkeys(range(self.asked), 1)
        assert self.tier.closed == 1 and self.queue.depth() == (0, 0)


def test_every_job_is_answered_exactly_once() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for turn in range(30):
        Schedule(seed + turn).run()
