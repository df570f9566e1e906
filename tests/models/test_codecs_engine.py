"""Codecs under an engine with tiers: TurboQuant below the device alone, and codes on it that travel
as they are. Records of another codec are no hits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_decoders import coded
from random_decoders import compiled, config_of, random_weights, token_ids
from test_cold_engine import ask, inexact

from kvstore.tiered import TieredStore
from seams.clock import SystemClock
from seams.errors import LaunchError
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.models.llama import LlamaModel
from worker.service.tiers import capacities, open_tiers, served_spec, tier_loads

PROMPT = tuple(token_ids(200, config_of("untied").vocab_tokens, seed=1))
CACHED = 192


def replica(folder: Path, **fields: Any) -> ReplicaConfig:
    disk = {"nvme": str(folder), "nvme_gib": 0.2, "host_gib": 0.05}
    return ReplicaConfig("r", "m", "m", (), "", **{**disk, **fields})


def engine(
    model: LlamaModel, config: ReplicaConfig, store: TieredStore | None = None, **fields: Any
) -> EngineCore:
    """That always loads what a tier has."""
    store = store or open_tiers(config, model.spec)
    assert store is not None
    core = EngineCore(model, EngineConfig((32,), **fields), SystemClock(), tiers=store)
    core.scheduler._times.prefill_s_per_token = 1.0
    core.scheduler._times.record = lambda *_: None  # type: ignore[method-assign]
    return core


def test_four_bits_below_the_device(tmp_path: Path) -> None:
    """What comes back is close, and took an eighth of fp32's bytes and a norm per vector."""
    model = coded("model")
    asked = replica(tmp_path, cold_codec="turboquant4")
    store = open_tiers(asked, model.spec)
    assert store is not None
    core = engine(model, asked, store)
    before, _ = ask(core, "first", PROMPT)
    core.memory.cache.clear()
    after, cached = ask(core, "second", PROMPT)
    assert cached == CACHED
    assert after != before and after == pytest.approx(before, abs=0.2)
    held, group = store.stats()[1], model.spec.groups[0]
    assert held.loaded_bytes / held.hits == group.block_bytes * 18 / (32 * 4)
    [told] = [load for load in tier_loads(store, model.spec) if load.tier == "host"]
    assert told.logical_bytes == held.blocks * group.block_bytes > 0
    core.close()


def test_losing_once_is_losing_once(tmp_path: Path) -> None:
    """Down, up, down and up again: the second trip changes no byte on the device."""
    model = coded("model", dtype=torch.bfloat16)
    core = engine(model, replica(tmp_path, cold_codec="turboquant4"), poison_freed=True)
    ask(core, "first", PROMPT)
    seen: list[set[bytes]] = []
    for name in ("second", "third"):
        core.memory.cache.clear()
        ask(core, name, PROMPT)
        seen.append({model.read_block(0, block) for block in range(32)})
    assert len(seen[0] & seen[1]) >= CACHED // 16
    core.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("codec", ["turboquant:k4v4", "turboquant:k8v2,boundary=1", "fp8"])
def test_codes_come_back_as_they_left(tmp_path: Path, codec: str, tier: str) -> None:
    model = coded(codec)
    core = engine(model, replica(tmp_path), poison_freed=True)
    before, _ = ask(core, "first", PROMPT)
    blocks = {model.read_block(0, block) for block in range(32)}
    core.memory.cache.clear()
    if tier == "disk":
        core.close(5.0)
        model = coded(codec)
        core = engine(model, replica(tmp_path), poison_freed=True)
    after, cached = ask(core, "second", PROMPT)
    assert cached == CACHED if tier == "host" else cached >= 128  # the front may be computed
    found = {model.read_block(0, block) for block in range(32)}
    assert len(blocks & found) >= cached // 16
    assert after == pytest.approx(before, abs=1e-3)
    core.close()


def test_records_of_another_codec_are_no_hits(tmp_path: Path) -> None:
    """One directory, one replica after the other; the same codec again finds what it wrote."""
    found = []
    for codec in ("turboquant:k4v4", "turboquant:k4v4", "turboquant:k4v3"):
        core = engine(coded(codec), replica(tmp_path))
        found.append(ask(core, "request", PROMPT)[1])
        core.close(5.0)
    assert found[0] == 0 and found[2] == 0 and found[1] >= 128


def test_cold_codecs_differ_in_what_tiers_call_their_records(tmp_path: Path) -> None:
    spec, held = coded("model").spec, {}
    for codec in ("none", "fp8", "turboquant4"):
        asked = replica(tmp_path, cold_codec=codec)
        store = open_tiers(asked, spec)
        assert store is not None
        host, _ = capacities(store, asked, served_spec(asked, spec))
        held[codec] = host.blocks
        store.close()
    assert held["turboquant4"] == pytest.approx(held["none"] * 32 * 4 / 18, rel=0.05)
    assert held["turboquant4"] > 1.7 * held["fp8"]
    assert served_spec(replica(tmp_path, cold_codec="turboquant4"), spec).numeric_class.endswith(
        "-cold-turboquant4"
    )


def test_where_turboquant_cannot_be_had(tmp_path: Path) -> None:
    config = config_of("llama")
    exact = compiled(config, random_weights(config, torch.bfloat16)).spec
    asked = replica(tmp_path, cold_codec="turboquant4")
    with pytest.raises(LaunchError, match="computes exactly: --compute torch does not"):
        open_tiers(asked, exact)
    with pytest.raises(LaunchError, match="cannot read this model's blocks"):
        open_tiers(asked, inexact(exact))  # whose numbers lie in another order
    with pytest.raises(LaunchError, match="cannot read this model's blocks"):
        open_tiers(asked, coded("fp8").spec)
    assert replace(asked, cold_codec="none").kv_codec == "model"
