"""A window group whose first tokens stay in sight: blocks, matches, eviction and tiers, exact."""

from __future__ import annotations

from collections import Counter

import pytest
from dict_tier import DictTier
from engine_machine import Machine, replayable
from engine_rig import BLOCK, Rig, request, tokens
from test_radix import CHAIN, FULL, SIZE, Bench
from test_tiers_engine import TierRig, evict_all

from kvstore.groups import GroupKind, KVGroup
from worker.engine.messages import EngineLoad
from worker.models.fake import fake_model
from worker.service.convert import heartbeat

GROUP = fake_model("sinks", block_tokens=BLOCK).spec.groups[1]
SINKS = GROUP.sink_blocks(BLOCK)
WINDOWED = (FULL, KVGroup(1, GroupKind.WINDOW, (0,), 64, window_tokens=6, sink_tokens=7))


def test_sinks_are_of_windows_and_end_inside_a_block() -> None:
    assert GROUP.sink_tokens % BLOCK and SINKS == 2
    with pytest.raises(AssertionError):
        KVGroup(0, GroupKind.FULL, (0,), 64, sink_tokens=4)


def test_a_window_passes_all_but_the_sinks() -> None:
    rig = Rig("sinks", blocks=64, step_tokens_max=8)
    rig.submit(request("a", tokens(40), max_tokens=60, no_cache=True))
    pool, most = rig.core.memory.pools[1], 0
    while rig.core.has_work():
        rig.step()
        most = max(most, pool.total - pool.free)
    for plan in rig.model.plans:
        first_visible = plan.positions[0] - GROUP.window_tokens + 1
        for index, block in enumerate(plan.tables[1][0]):
            passed = index >= SINKS and (index + 1) * BLOCK <= first_visible
            assert (block == -1) == passed
    assert most <= SINKS + (GROUP.window_tokens + 8) // BLOCK + 2
    rig.assert_exact()


def test_a_request_fits_where_sinks_and_window_do() -> None:
    rig = Rig("sinks", blocks=SINKS + 3)
    memory = rig.core.memory
    memory.pools[0].__init__(rig.model.spec.groups[0], 30)  # type: ignore[misc]
    assert memory.blocks_held(1, 1000) == SINKS + 3 and memory.fits_alone(100)
    rig.submit(request("a", tokens(10), max_tokens=10))
    rig.run()
    assert rig.last("a").error is None
    rig.assert_exact()


def test_others_share_sinks_and_go_on_inside_a_block() -> None:
    rig = Rig("sinks", blocks=128)
    rig.submit(request("first", tokens(60), 4))
    rig.run()
    for cut in (58, 41, 30, 7, 3):
        rig.submit(request(f"cut{cut}", tokens(60)[:cut] + tokens(9, cut), 4))
        rig.run()
        assert rig.usage(f"cut{cut}").cached_tokens >= cut
    rig.assert_exact()


@pytest.mark.parametrize("shape", ["sinks", "window"])
def test_a_branch_off_an_early_chunk_is_found(shape: str) -> None:
    """The window of every place in a prompt of many chunks, not that of its end alone."""
    rig = Rig(shape, blocks=256, step_tokens_max=16)
    rig.submit(request("first", tokens(150), 4))
    rig.run()
    for cut in (90, 40, 140):
        rig.submit(request(f"cut{cut}", tokens(150)[:cut] + tokens(60, cut), 4))
        rig.run()
        assert rig.usage(f"cut{cut}").cached_tokens >= cut - 16
    rig.assert_exact()
    assert rig.reclaimable()


def test_bytes_of_a_token_are_those_of_both_groups() -> None:
    """Codes of all tokens and a bounded number of exact ones: less, the longer the text."""
    rig, told = Rig("sinks", blocks=128), []
    rig.submit(request("a", tokens(8), max_tokens=200, no_cache=True))
    assert rig.core.memory.token_bytes() == 0
    while rig.core.has_work():
        rig.step()
        told.append(rig.core.memory.token_bytes())
    every, windowed = (group.block_bytes // BLOCK for group in rig.model.spec.groups)
    assert told[0] == every + windowed
    held = SINKS + 3
    assert every < min(filter(None, told)) <= every + windowed * held * BLOCK / 200


# --- the radix cache -------------------------------------------------------------------------


def windowed(drop: list[int]) -> tuple[Bench, list[list[int]]]:
    """24 tokens inserted by an owner who has dropped blocks of the window group."""
    bench = Bench(*WINDOWED)
    blocks = [pool.allocate(6) or [] for pool in bench.pools]
    bench.pools[1].release([blocks[1][i] for i in drop])
    blocks[1] = [-1 if i in drop else block for i, block in enumerate(blocks[1])]
    bench.insert([1] * 24, blocks)
    for pool, run in zip(bench.pools, blocks, strict=True):
        pool.release(run)
    bench.check()
    return bench, blocks


def test_a_match_has_sinks_and_its_window() -> None:
    bench, blocks = windowed([])
    match = bench.cache.match(CHAIN, [1] * 24, 22)
    assert match.blocks[1] == (*blocks[1][:2], -1, -1, blocks[1][4])
    assert match.boundary == (blocks[0][5], blocks[1][5])


@pytest.mark.parametrize(
    ("drop", "limit", "usable"),
    [
        ([2, 3], 24, 24),
        ([0], 24, 0),
        ([1], 24, 4),  # block 0 alone serves the first four tokens
        ([1, 2, 3], 24, 4),
        ([2, 3], 20, 8),
        ([5], 24, 20),
        ([2, 5], 24, 20),
    ],
)
def test_a_match_ends_where_sinks_and_window_are_whole(
    drop: list[int], limit: int, usable: int
) -> None:
    bench, _ = windowed(drop)
    assert bench.cache.match(CHAIN, [1] * 24, limit).tokens == usable


def test_what_lies_between_goes_first_and_sinks_last() -> None:
    bench = Bench(*WINDOWED, blocks=12)
    bench.put([1] * 40)  # ten blocks: two of sinks, two in the window at the end
    assert bench.cache.evict([0, 8])
    assert bench.depth([1] * 40) == 40 and bench.pools[1].free == 8
    bench.check()
    hold = bench.cache.hold(bench.cache.match(CHAIN, [1] * 40, 40))
    bench.pools[1].release(hold.blocks[1])  # its owner's window has moved on
    assert bench.cache.evict([0, 10])
    assert bench.depth([1] * 40) == 2 * SIZE, "sinks are all that is left"
    assert len(bench.cache.holders()[1]) == 2
    assert bench.cache.evict([0, 12]) and not bench.cache.holders()[1]
    bench.cache.unlock(hold)
    bench.pools[0].release(hold.blocks[0])
    bench.check()


def test_a_node_cut_inside_the_sinks_keeps_them() -> None:
    bench = Bench(*WINDOWED, blocks=32)
    bench.put([1] * 40)
    bench.put([1] * 6 + [2] * 30)  # branches off inside block 1, a sink's
    assert bench.cache.evict([0, 25])
    for text in ([1] * 40, [1] * 6 + [2] * 30):
        assert bench.depth(text) == len(text)
    bench.check()
    assert SIZE == BLOCK


# --- everything at once ----------------------------------------------------------------------


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("seed", [1])
def test_conservation_with_sinks(seed: int, tiered: bool) -> None:
    test = "tests/engine/test_sinks_engine.py::test_conservation_with_sinks"
    with replayable(test, f"{tiered}-{seed}"):
        machine = Machine("sinks", seed, tiered=tiered)
        machine.run(400)
        assert machine.counts["cached"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3000, 3020))
def test_conservation_with_sinks_full(seed: int) -> None:
    totals: Counter[str] = Counter()
    for tiered in (False, True):
        machine = Machine("sinks/inverted", seed, tiered=tiered)
        machine.run(6000)
        totals.update(machine.counts)
    assert totals["preemptions"] and totals["HOST"], "the machine did not go everywhere"


@pytest.mark.parametrize("lower", [False, True])
def test_sinks_come_back_from_tiers(lower: bool) -> None:
    tier = DictTier("disk", load_s=0.0005)
    rig = TierRig("sinks", host=400, lower=[tier] if lower else [])
    rig.price()
    rig.submit(request("first", tokens(64), 4))
    rig.run()
    evict_all(rig)
    if lower:
        assert rig.store.flush(5.0)
        rig.host.clear()
    rig.submit(request("second", tokens(64), 4))
    rig.run()
    rig.assert_exact()
    assert rig.usage("second").cached_tokens >= 60
    assert bool(tier.loaded) == lower
    rig.close()


def test_routers_are_told_the_bytes_of_a_token() -> None:
    rig = Rig("sinks", blocks=64)
    rig.submit(request("a", tokens(40), max_tokens=4, no_cache=True))
    rig.step(2)
    load = rig.core.load()
    told = heartbeat(load, EngineLoad(), draining=False, stalled=False).load
    assert told.kv_token_bytes == load.kv_token_bytes == rig.core.memory.token_bytes() > 0
