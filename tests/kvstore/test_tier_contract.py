"""The contract suite on the host tier, plain and verifying, and on the faulty tier around it.

Other tiers run it beside their own. With a fault set a tier keeps the part of the contract that no
fault excuses: a status for each block, OK only for the very bytes, nothing raised.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from faulty_tier import SCRIBBLE, FaultyTier
from tier_contract import (
    NOT_OK,
    SOON,
    Opened,
    TierContract,
    TierFactory,
    buffers,
    check,
    content,
    names_of_chain,
    opened,
)

from kvstore.tiers.base import BlockName, Status, Tier
from kvstore.tiers.host import HostTier

SHORT_S = 0.05  # a deadline that some faults use up


class HostFactory(TierFactory):
    """A tier of this process: `fresh` only."""

    def __init__(self, verifies: bool) -> None:
        self.verifies = verifies
        self.tier: HostTier | None = None

    def fresh(self, capacity_blocks: int = 64, representation: str = "bf16-a") -> Tier:
        self.tier = HostTier(self.sizes, capacity_blocks * self.sizes[0], verify=self.verifies)
        return self.tier

    def damage(self, name: BlockName) -> None:
        assert self.tier is not None
        view = self.tier.pin(name)
        assert view is not None
        view[5] ^= 1
        self.tier.unpin(name)


class FaultyFactory(HostFactory):
    """Nothing is wrong with it until somebody says so."""

    def fresh(self, capacity_blocks: int = 64, representation: str = "bf16-a") -> FaultyTier:
        return FaultyTier(super().fresh(capacity_blocks, representation))


class TestHostContract(TierContract):
    """Everything in tier_contract.py."""

    @pytest.fixture(params=[False, True], ids=["plain", "verifying"])
    def factory(self, request: pytest.FixtureRequest) -> Iterator[TierFactory]:
        made = HostFactory(request.param)
        yield made
        made.close()


class TestFaultyContract(TierContract):
    """With no fault set it is the tier inside it: what other tests see comes of their faults."""

    @pytest.fixture
    def factory(self) -> Iterator[TierFactory]:
        made = FaultyFactory(verifies=True)
        yield made
        made.close()


def _slow(tier: FaultyTier) -> None:
    tier.delay_s = 0.002


def _slower(tier: FaultyTier) -> None:
    tier.slow_factor = 4.0


def _overtime(tier: FaultyTier) -> None:
    tier.overtime_s = 0.002


def _some_fail(tier: FaultyTier) -> None:
    tier.fail_every = 3


def _all_fail(tier: FaultyTier) -> None:
    tier.fail_every = 1


def _phantom(tier: FaultyTier) -> None:
    tier.phantom = True


def _forgetful(tier: FaultyTier) -> None:
    tier.forgetful = True


def _all_of_it(tier: FaultyTier) -> None:
    tier.delay_s, tier.fail_every, tier.phantom = 0.001, 3, True


def _saying(status: Status) -> Callable[[FaultyTier], None]:
    def fault(tier: FaultyTier) -> None:
        tier.load_status = status

    fault.__name__ = f"_saying_{status}"
    return fault


FAULTS = [_slow, _slower, _overtime, _some_fail, _all_fail, _phantom, _forgetful, _all_of_it]
FAULTS += [_saying(status) for status in sorted(NOT_OK)]


def by_name(fault: Callable[[FaultyTier], None]) -> str:
    return fault.__name__.strip("_")


def came(names: list[BlockName], statuses: list[Status]) -> set[BlockName]:
    return {name for name, status in zip(names, statuses, strict=True) if status is Status.OK}


@pytest.mark.parametrize("fault", FAULTS, ids=by_name)
def test_what_no_fault_excuses(fault: Callable[[FaultyTier], None]) -> None:
    """Any order of calls: OK is said of what was stored and not discarded since, to the byte."""
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    factory = FaultyFactory(verifies=False)
    chains = [names_of_chain(60 + i, 6, i % len(factory.sizes), i % 2) for i in range(4)]
    kept: set[BlockName] = set()
    faulty = factory.fresh()
    with opened(factory, faulty) as tier:
        fault(faulty)
        for _ in range(40):
            names = rng.choice(chains)[: rng.randrange(1, 7)]
            match rng.randrange(6):
                case 0 | 1:
                    statuses = tier.store(names, SHORT_S)
                    assert set(statuses) <= {Status.OK, *NOT_OK}
                    kept |= came(names, statuses)
                case 2 | 3:
                    statuses = tier.load(names, SHORT_S)
                    assert set(statuses) <= {Status.OK, *NOT_OK}
                    assert {
                        n for n, s in zip(names, statuses, strict=True) if s is Status.OK
                    } <= kept
                case 4:
                    assert set(tier.lookup(names, SHORT_S)) <= {True, False}
                case _:
                    faulty.discard(names[-1:])
                    kept -= set(names[-1:])
            check(faulty)
    assert faulty.stats().blocks == 0, "closed"


@pytest.mark.parametrize("fault", FAULTS, ids=by_name)
def test_a_fault_that_ends_leaves_nothing_behind(fault: Callable[[FaultyTier], None]) -> None:
    """What was kept before is there after; what was refused meanwhile can be stored."""
    factory = FaultyFactory(verifies=True)
    before, meanwhile = names_of_chain(71, 6), names_of_chain(72, 6)
    faulty = factory.fresh()
    with opened(factory, faulty) as tier:
        tier.keep(before)
        fault(faulty)
        tier.load(before, SHORT_S)
        told = tier.store(meanwhile, SHORT_S)
        was_forgetful = faulty.forgetful
        sound = vars(FaultyTier(faulty.inner))
        vars(faulty).update({k: v for k, v in sound.items() if not k.startswith("_")})
        assert tier.load(before) == [Status.OK] * 6
        there = [status is Status.OK and not was_forgetful for status in told]
        assert tier.lookup(meanwhile) == there, "a status that was wrong"
        assert [status is Status.OK for status in tier.load(meanwhile)] == there
        tier.keep(meanwhile)
        assert tier.load(meanwhile) == [Status.OK] * 6


@pytest.mark.parametrize("fault", FAULTS, ids=by_name)
def test_what_is_not_ok_is_scribbled_over(fault: Callable[[FaultyTier], None]) -> None:
    """A caller that reads it all the same is found out."""
    factory = FaultyFactory(verifies=False)
    names = names_of_chain(73, 6)
    faulty = factory.fresh()
    with opened(factory, faulty) as tier:
        tier.keep(names[:4])
        fault(faulty)
        into = buffers(names, factory.sizes)
        statuses = faulty.load(names, into, SHORT_S)
        assert statuses[4:] != [Status.OK] * 2
        for name, view, status in zip(names, into, statuses, strict=True):
            right = content(name, factory.sizes)
            assert view == (right if status is Status.OK else bytes([SCRIBBLE]) * len(right))


def test_a_frozen_call_hangs_and_is_then_done_in_full() -> None:
    factory = FaultyFactory(verifies=False)
    names, more = names_of_chain(74, 3), names_of_chain(75, 3)
    told: dict[str, list[Status]] = {}
    faulty = factory.fresh()
    with opened(factory, faulty) as tier:
        tier.keep(names)
        faulty.freeze()

        def load() -> None:
            told["load"] = Opened(faulty, factory.sizes).load(names)

        def store() -> None:
            told["store"] = Opened(faulty, factory.sizes).store(more)

        threads = [threading.Thread(target=call, daemon=True) for call in (load, store)]
        for thread in threads:
            thread.start()
        while faulty.hanging < 2:
            time.sleep(0.001)
        assert not told and all(thread.is_alive() for thread in threads)
        faulty.release()
        for thread in threads:
            thread.join(SOON)
        assert told == {"load": [Status.OK] * 3, "store": [Status.OK] * 3}
        assert tier.load(more) == [Status.OK] * 3


def test_closing_releases_what_hangs() -> None:
    factory = FaultyFactory(verifies=False)
    names = names_of_chain(76, 3)
    told: list[Status] = []
    faulty = factory.fresh()
    with opened(factory, faulty) as tier:
        tier.keep(names)
        faulty.freeze()
        hanging = threading.Thread(target=lambda: told.extend(tier.load(names)), daemon=True)
        hanging.start()
        while not faulty.hanging:
            time.sleep(0.001)
        faulty.close()
        hanging.join(SOON)
        assert set(told) <= {Status.OK, *NOT_OK} and len(told) == 3
