"""Resetting the prefix cache under running requests: their streams stay exact, and nothing that was
computed before is found afterwards."""

from collections import Counter

import pytest
from engine_machine import SHAPES, Machine, replayable
from engine_rig import BLOCK, Rig, request, tokens
from test_tiers_engine import TierRig

from worker.engine.forgetting import forget_cache
from worker.engine.messages import CacheOpKind

CASES = [(SHAPES[seed % len(SHAPES)], seed) for seed in range(4000, 4004)]
TIERED = [(SHAPES[seed % len(SHAPES)], seed) for seed in range(4100, 4101)]


def cached(rig: Rig, name: str, prompt: tuple[int, ...]) -> int:
    """What a new request for `prompt` finds."""
    rig.submit(request(name, prompt, 2))
    rig.run()
    return rig.usage(name).cached_tokens


@pytest.mark.parametrize("shape", ["full", "window", "latent"])
def test_an_idle_cache_is_empty_and_says_so(shape: str) -> None:
    rig = Rig(shape)
    prompt = tokens(30)
    assert cached(rig, "a", prompt) == 0
    assert cached(rig, "b", prompt) > 0
    assert rig.core.memory.cache is not None
    held = {key for op in rig.core.snapshot() if op.group == 0 for key in op.keys}
    forgotten = forget_cache(rig.core.scheduler)
    assert forgotten.blocks >= len(held) > 0 and forgotten.in_use == 0
    removed = [op for op in rig.core.memory.cache.take_ops() if op.group == 0]
    assert {op.kind for op in removed} == {CacheOpKind.REMOVED}
    assert {key for op in removed for key in op.keys} == held
    rig.core.check_integrity()
    assert all(pool.free == pool.total for pool in rig.core.memory.pools)
    assert forget_cache(rig.core.scheduler).blocks == 0
    assert cached(rig, "c", prompt) == 0
    assert cached(rig, "d", prompt) > 0, "what came after is cached as ever"


@pytest.mark.parametrize("shape", ["full", "window", "latent"])
def test_running_requests_go_on_and_leave_nothing(shape: str) -> None:
    rig = Rig(shape)
    prompt = tokens(40)
    rig.submit(request("before", prompt, 2))
    rig.run()
    rig.submit(request("runs", prompt, 30), request("forks", prompt, 12, n=2, temperature=1.0))
    rig.step(6)
    assert rig.output("runs") and not rig.lasts("runs")
    forgotten = forget_cache(rig.core.scheduler)
    rig.core.check_integrity()
    assert 0 < forgotten.in_use <= forgotten.blocks
    rig.submit(request("later", prompt, 2))
    rig.run()
    assert rig.usage("later").cached_tokens == 0
    rig.assert_exact("before", "runs", "later")
    assert rig.usage("runs").cached_tokens > 0, "it had been told before"
    rig.core.memory.cache.forget()
    rig.submit(request("again", prompt, 25))
    rig.step(3)
    forget_cache(rig.core.scheduler)
    rig.run()
    assert cached(rig, "last", prompt) == 0, "what ran at the reset keeps nothing"
    assert rig.reclaimable()


def test_a_reset_in_the_middle_of_a_prompt() -> None:
    rig = Rig(step_tokens_max=8)
    prompt = tokens(60)
    rig.submit(request("long", prompt, 4), request("waits", prompt, 4))
    rig.step(3)
    forget_cache(rig.core.scheduler)
    rig.run()
    rig.assert_exact("long", "waits")
    assert rig.usage("waits").cached_tokens == 0, "what it waited for is not to be had any more"
    assert rig.reclaimable()


def test_no_copy_goes_into_the_tiers() -> None:
    rig = TierRig(host=400)
    prompt = tokens(8 * BLOCK)
    assert cached(rig, "a", prompt) == 0
    forget_cache(rig.core.scheduler)
    assert rig.store.host.stats().blocks == 0
    assert cached(rig, "b", prompt) == 0
    rig.core.memory.cache.clear()
    assert rig.store.host.stats().blocks > 0, "else it goes down"
    rig.store.clear(5.0)
    assert rig.store.host.stats().blocks == 0 and cached(rig, "c", prompt) == 0
    rig.close()


def test_without_a_cache_there_is_nothing() -> None:
    rig = Rig(cache=False)
    rig.submit(request("a", tokens(20), 8))
    rig.step(2)
    assert forget_cache(rig.core.scheduler).blocks == 0
    rig.run()
    rig.assert_exact("a")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="worker.engine.core")  # injected faults are logged


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize(("shape", "seed"), CASES, ids=str)
def test_conservation_with_resets(shape: str, seed: int, totals: Counter[str]) -> None:
    test = "tests/engine/test_forgetting.py::test_conservation_with_resets"
    with replayable(test, f"{shape}-{seed}"):
        machine = Machine(shape, seed, resets=True)
        machine.run(250)
        totals.update(machine.counts)


@pytest.mark.parametrize(("shape", "seed"), TIERED, ids=str)
def test_conservation_with_resets_over_tiers(shape: str, seed: int) -> None:
    test = "tests/engine/test_forgetting.py::test_conservation_with_resets_over_tiers"
    with replayable(test, f"{shape}-{seed}"):
        Machine(shape, seed, tiered=True, resets=True).run(200)


def test_the_resets_hit_something(totals: Counter[str]) -> None:
    """Runs after the cases above."""
    print(totals)
    assert totals["forgotten"] > 100 and totals["in use"] > 20 and totals["cached"] > 100


@pytest.mark.soak
@pytest.mark.parametrize("tiered", [False, True], ids=["device", "tiers"])
@pytest.mark.parametrize("seed", range(4200, 4260))
def test_conservation_with_resets_full(seed: int, tiered: bool) -> None:
    shape = SHAPES[seed % len(SHAPES)]
    test = "tests/engine/test_forgetting.py::test_conservation_with_resets_full"
    with replayable(test, f"{seed}-{tiered}"):
        Machine(shape, seed, tiered=tiered, resets=True).run(4000)
