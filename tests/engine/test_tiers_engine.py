"""The engine over tiers: what left the device comes back, exact, whatever the tiers do."""

import random
import time
from pathlib import Path

import pytest
from dict_tier import DictTier
from engine_rig import BLOCK, Rig, request, tokens

from kvstore.fetch import Level
from kvstore.keys import ChainSpec
from kvstore.tiered import TieredStore
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.queue import TierQueue
from seams.clock import SystemClock
from worker.engine.core import EngineCore
from worker.engine.messages import CacheOpKind
from worker.engine.promotion import Promoter
from worker.engine.thread import ThreadEngine

Promoter.strict = True
SHAPES = ("full", "latent", "ranks", "window", "full/inverted")
PREFILL_S = 0.01  # per token, as the engine is told: waiting for a tier nearly always pays


class TierRig(Rig):
    """A Rig with a host tier of so many blocks and lower tiers behind queues."""

    def __init__(self, shape: str = "full", *, host: int = 64, lower=(), blocks=24, **config):
        super().__init__(shape, blocks=blocks, **config)
        groups = self.model.spec.groups
        sizes = {group.id: group.block_bytes for group in groups}
        ranks = sum(group.ranks for group in groups)
        self.host = HostTier(sizes, host * 4096 * ranks + (8 << 20), prefault=False)
        self.store = TieredStore(self.host, [TierQueue(tier, threads=1) for tier in lower])
        self.clock = SystemClock()
        # The pools were made by the first core: the second has the same model, made again.
        self.model._pools = []
        self.core = EngineCore(self.model, self.config, self.clock, tiers=self.store)

    def step(self, count: int = 1):
        output = None
        for _ in range(count):
            output = self.core.step()
            self.core.check_integrity()
            if output is not None:
                self.emissions += output.emissions
        return output

    def run(self, steps_max: int = 5000) -> None:
        while self.core.scheduler.can_step() or self.core.has_work():
            if not self.core.has_work():
                time.sleep(0.0005)
                continue
            self.step()
            steps_max -= 1
            assert steps_max > 0, "no end"

    def price(self, prefill_s_per_token: float = PREFILL_S) -> None:
        """What the engine believes a token costs."""
        times = self.core._times
        times.record = lambda *_: None
        times.prefill_s_per_token = prefill_s_per_token

    def close(self) -> None:
        self.core.close()


def evict_all(rig: TierRig, count: int = 6) -> None:
    """Other prompts push everything out of the device pool."""
    for i in range(count):
        rig.submit(request(f"other-{time.monotonic_ns()}", tokens(60, 40 + i), 2))
        rig.run()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_pushed_out_comes_back_from_host(shape: str) -> None:
    rig = TierRig(shape, host=400)
    rig.price()
    prompt = tokens(64)
    rig.submit(request("first", prompt, 4))
    rig.run()
    evict_all(rig)
    rig.submit(request("second", prompt, 4))
    rig.run()
    rig.assert_exact()
    assert rig.usage("first").cached_tokens == 0
    assert rig.usage("second").cached_tokens >= 60
    assert rig.store.loaded_blocks[Level.HOST] > 0
    rig.close()


@pytest.mark.parametrize("shape", ["window", "sinks"])
def test_windows_lost_on_the_device_come_back_from_host(shape: str) -> None:
    rig = TierRig(shape, host=400, blocks=40)
    rig.price()
    prompt = tokens(64)
    rig.submit(request("first", prompt, 4))
    rig.run()
    evict_all(rig, 10)
    rig.submit(request("second", prompt, 4))
    rig.run()
    memory = rig.core.scheduler.memory
    chain, limit = ChainSpec(next(iter(memory.cache._tree.roots)), BLOCK), len(prompt) - 1
    assert memory.cache.matched(chain, prompt, limit) >= 60
    lost = rig.model.spec.groups[1].id
    memory.cache._tree.strip_everywhere(lost, memory.pools[lost].total)
    assert memory.cache.matched(chain, prompt, limit) == 0
    loaded = rig.store.loaded_blocks[Level.HOST]
    rig.submit(request("third", prompt, 4))
    rig.run()
    rig.assert_exact()
    assert rig.usage("third").cached_tokens >= 60
    assert rig.store.loaded_blocks[Level.HOST] > loaded
    assert memory.cache.matched(chain, prompt, limit) >= 60, "for the next one too"
    rig.close()


@pytest.mark.parametrize("name", ["disk", "shared"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_comes_back_from_a_lower_tier(shape: str, name: str) -> None:
    tier = DictTier(name, load_s=0.0005)
    rig = TierRig(shape, host=400, lower=[tier])
    rig.price()
    prompt = tokens(64)
    rig.submit(request("first", prompt, 4))
    rig.run()
    evict_all(rig)
    assert rig.store.flush(5.0)
    rig.host.clear()
    loaded = tier.loaded
    rig.submit(request("second", prompt, 4))
    rig.run()
    rig.assert_exact()
    assert rig.usage("second").cached_tokens >= 60
    assert tier.loaded > loaded
    rig.close()


def test_another_replica_reads_what_the_first_left() -> None:
    tier = DictTier("shared")
    first = TierRig(host=400, lower=[tier])
    prompt = tokens(64)
    first.submit(request("first", prompt, 4))
    first.run()
    first.core.close(5.0)
    assert len(tier.blocks) >= 16
    second = TierRig(host=400, lower=[tier])
    second.price()
    second.submit(request("second", prompt, 4))
    second.run()
    second.assert_exact("second")
    assert second.usage("second").cached_tokens >= 60
    second.close()


def test_tenants_do_not_meet_in_a_tier() -> None:
    rig = TierRig(host=400)
    rig.price()
    prompt = tokens(64)
    rig.submit(request("a", prompt, 4, salt=b"a" * 32, tenant="a"))
    rig.run()
    evict_all(rig)
    rig.submit(request("b", prompt, 4, salt=b"b" * 32, tenant="b"))
    rig.run()
    assert rig.usage("b").cached_tokens == 0
    rig.submit(request("a2", prompt, 4, salt=b"a" * 32, tenant="a"))
    rig.run()
    assert rig.usage("a2").cached_tokens >= 60
    rig.close()


def test_a_slow_tier_is_computed_against() -> None:
    """Loading takes far longer than computing: the request does not wait for it."""
    tier = DictTier("disk", load_s=0.3)
    rig = TierRig(host=400, lower=[tier])
    prompt = tokens(64)
    rig.submit(request("first", prompt, 4))
    rig.run()
    evict_all(rig)
    assert rig.store.flush(5.0)
    rig.host.clear()
    rig.price(0.0001)
    rig.store.lower[Level.DISK]._s_per_byte = 0.3 / 64
    began = time.monotonic()
    rig.submit(request("second", prompt, 4))
    rig.run()
    assert time.monotonic() - began < 3.0  # all from the tier: 4.5 s
    rig.assert_exact()
    rig.close()


def test_a_burst_is_computed_once_while_a_tier_is_asked() -> None:
    """Nothing is known of the shared tier before it has answered: then a prompt that is being
    computed is worth the wait, as it is without tiers."""

    class Asked(DictTier):
        def lookup(self, names, deadline_s):
            time.sleep(0.2)
            return super().lookup(names, deadline_s)

    rig = TierRig(host=400, lower=[Asked("shared")])
    rig.price(0.00001)
    prompt = tokens(48)
    rig.submit(*(request(f"r{i}", prompt, 4) for i in range(4)))
    rig.run()
    rig.assert_exact()
    assert [rig.usage(f"r{i}").cached_tokens for i in range(4)] == [0, 47, 47, 47]
    rig.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_random_prompts_over_failing_tiers_are_exact(shape: str) -> None:
    """Shared prefixes, a device pool and a host tier far too small, tiers that lose a third."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    lower = [
        DictTier("disk", load_s=0.0002, losing=0.3, seed=seed),
        DictTier("shared", load_s=0.0002, losing=0.3, seed=seed + 1),
    ]
    rig = TierRig(shape, host=40, lower=lower, blocks=40, step_tokens_max=32)
    rig.price(draw.choice([0.00001, 0.0005, 0.01]))
    stems = [tokens(draw.randrange(10, 60), i) for i in range(5)]
    for i in range(60):
        prompt = draw.choice(stems) + tokens(draw.randrange(1, 30), 100 + draw.randrange(8))
        rig.submit(request(f"r{i}", prompt, draw.randrange(1, 12), n=draw.choice([1, 1, 1, 2])))
        for _ in range(draw.randrange(4)):
            rig.step()
        if draw.random() < 0.1:
            rig.cancel(f"r{draw.randrange(i + 1)}")
    rig.run()
    cancelled = {e.request_id for e in rig.emissions if e.last and e.error is not None}
    rig.assert_exact(*(name for name in rig.requests if name not in cancelled))
    for name in rig.requests:
        usage = rig.usage(name)
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    assert rig.reclaimable()
    rig.close()


def test_what_the_tiers_hold_is_told() -> None:
    """Replaying the ops gives what the tiers hold, and so does the snapshot."""
    tier = DictTier("disk")
    rig = TierRig(host=20, lower=[tier])
    held: dict[int, set[bytes]] = {1: set(), 2: set()}

    def apply(ops) -> None:
        for op in ops:
            if op.tier:
                change = held[op.tier].update if op.kind is CacheOpKind.STORED else None
                (change or held[op.tier].difference_update)(op.keys)

    for i in range(12):
        rig.submit(request(f"r{i}", tokens(60, i), 2))
        while rig.core.has_work():
            output = rig.step()
            if output is not None:
                apply(output.cache_ops)
    assert rig.store.flush(5.0)
    apply(rig.core._tiers.take_ops())
    assert held[1] == {name.key for name in rig.host.names()}
    assert held[2] == {name.key for name in tier.blocks}
    below = [op for op in rig.core.snapshot() if op.tier]
    assert {key for op in below for key in op.keys if op.tier == 1} == held[1]
    assert {key for op in below for key in op.keys if op.tier == 2} == held[2]
    assert len(held[2]) > 100 // BLOCK
    rig.close()


@pytest.mark.parametrize("name", ["disk", "shared"])
def test_a_frozen_tier_holds_nobody_up(name: str) -> None:
    """Loads, stores and look-ups hang: every request ends, exact, in about the time that computing
    takes (0.1 s for 64 tokens, as priced)."""
    tier = DictTier(name)
    rig = TierRig(host=400, lower=[tier])
    prompt = tokens(64)
    rig.submit(request("first", prompt, 4))
    rig.run()
    evict_all(rig)
    assert rig.store.flush(5.0)
    rig.host.clear()
    rig.price(0.0016)
    tier.frozen.set()
    began = time.monotonic()
    rig.submit(request("second", prompt, 4))
    rig.run()
    took_s = time.monotonic() - began
    evict_all(rig)
    rig.assert_exact()
    assert took_s < 3.0
    tier.frozen.clear()
    rig.close()


def test_what_a_full_disk_loses_is_told(tmp_path: Path) -> None:
    """A disk of a few blocks evicts all the time: routers hear of it."""
    rig = TierRig(host=400)
    sizes = {0: rig.model.spec.groups[0].block_bytes}
    disk = NvmeTier(
        tmp_path / "disk", 3 << 20, rig.model.spec.representation.id, sizes,
        free_space_floor_bytes=0,
    )  # fmt: skip
    rig.store = TieredStore(rig.host, [TierQueue(disk, threads=2)])
    rig.model._pools = []
    rig.core = EngineCore(rig.model, rig.config, rig.clock, tiers=rig.store)
    held: set[bytes] = set()

    def apply(ops) -> None:
        for op in ops:
            if op.tier == int(Level.DISK):
                change = held.update if op.kind is CacheOpKind.STORED else held.difference_update
                change(op.keys)

    for i in range(40):
        rig.submit(request(f"r{i}", tokens(60, i), 1))
        while rig.core.has_work():
            output = rig.step()
            apply(output.cache_ops if output else ())
        rig.store.flush(5.0)
    apply(rig.core._tiers.take_ops())
    assert disk.stats().evicted > 0
    assert held == {name.key for name in disk.names()}
    rig.close()


@pytest.mark.parametrize("broken", ["demote", "fetch", "promote", "refresh", "wait_s"])
def test_a_fault_of_the_tiers_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Whatever fails in there: prompts are computed, exactly, and the blocks stay conserved."""
    monkeypatch.setattr(Promoter, "strict", False)
    rig = TierRig(host=400, lower=[DictTier("disk")])
    rig.price()
    prompt = tokens(64)
    rig.submit(request("first", prompt, 4))
    rig.run()
    evict_all(rig)
    assert rig.store.flush(5.0)
    if broken == "wait_s":
        rig.host.clear()

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.store, broken, fail)
    rig.submit(request("second", prompt, 4))
    rig.run()
    evict_all(rig)
    rig.assert_exact()
    assert rig.core._tiers.faults > 0
    rig.close()


def test_an_idle_engine_tells_what_its_tiers_took() -> None:
    """Writes end after the last step: routers hear of them all the same."""
    tier = DictTier("disk")
    rig = TierRig(host=400, lower=[tier])
    told: list[bytes] = []
    engine = ThreadEngine(rig.core)

    def on_step(output) -> None:
        for op in output.cache_ops:
            if op.tier == int(Level.DISK) and op.kind is CacheOpKind.STORED:
                told.extend(op.keys)

    tier.frozen.set()
    engine.start(on_step)
    for i in range(4):
        engine.submit(request(f"r{i}", tokens(60, i), 2))
    began = time.monotonic()
    while not rig.host.names() or engine.load().running or engine.load().waiting:
        assert time.monotonic() - began < 10
        time.sleep(0.01)
    time.sleep(0.1)
    assert not told
    tier.frozen.clear()
    while not told or set(told) != {name.key for name in tier.blocks}:
        assert time.monotonic() - began < 20
        time.sleep(0.01)
    engine.stop()


def test_a_window_wider_than_its_blocks_has_no_hole_beside_decoders() -> None:
    """A match that ends inside a block, whose whole block the tiers have, but not all at once."""
    for size in (8, 16):
        rig = TierRig("window", host=400, blocks=60, block_tokens=size, step_tokens_max=64)
        rig.price()
        prompt = tokens(20 * size)
        rig.submit(request("first", prompt, 4))
        rig.run()
        for i in range(8):
            rig.submit(request(f"other{i}", tokens(20 * size, 40 + i), 2))
            rig.run()
        rig.submit(request("decoder", tokens(3 * size, 9), 40))
        rig.step(3)
        for cut in range(1, size):
            head = prompt[: 6 * size + cut]
            rig.submit(request(f"part{cut}", head, 1))
            rig.step(2)
            rig.submit(request(f"whole{cut}", prompt, 2))
            rig.step(2)
        rig.run()
        rig.assert_exact()
        rig.close()


def cancel_rounds(rounds: int) -> None:
    """Scenario 5: a cancel at any moment of a fetch; whatever is in flight lands nowhere else."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    tier = DictTier("disk", load_s=0.0004)
    rig = TierRig(host=400, lower=[tier], blocks=40)
    rig.price()
    prompts = [tokens(64, i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        rig.submit(request(f"first{i}", prompt, 2))
        rig.run()
    evict_all(rig)
    assert rig.store.flush(5.0)
    for i in range(rounds):
        rig.host.clear()
        one, other = draw.sample(prompts, 2)
        rig.submit(request(f"cancelled{i}", one, 4), request(f"kept{i}", other, 4))
        for _ in range(draw.randrange(6)):
            rig.step()
            time.sleep(draw.random() * 0.003)
        rig.cancel(f"cancelled{i}")
        rig.run()
        rig.assert_exact(f"kept{i}")
        began = time.monotonic()
        while not rig.reclaimable():
            assert time.monotonic() - began < 5.0
            time.sleep(0.001)
        rig.emissions.clear()
        rig.requests.clear()
    rig.close()


def test_cancels_with_loads_in_flight() -> None:
    cancel_rounds(20)


@pytest.mark.soak
def test_cancels_with_loads_in_flight_1000_rounds() -> None:
    cancel_rounds(1000)
