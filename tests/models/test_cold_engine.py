"""FP8 below the device: what comes back is close, half as large, and never taken for exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_decoders import compiled, config_of, random_weights, token_ids

from seams.clock import SystemClock
from seams.errors import LaunchError
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest
from worker.engine.sampling import SamplingParams
from worker.models.base import ModelSpec
from worker.models.fake import fake_model
from worker.service.tiers import capacities, open_tiers, served_spec, tier_loads


def replica(folder: Path, codec: str) -> ReplicaConfig:
    return ReplicaConfig(
        "r", "m", "m", (), "", host_gib=0.05, nvme=str(folder), nvme_gib=0.2, cold_codec=codec
    )


def ask(core: EngineCore, name: str, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Logprob of the first token, and cached tokens."""
    params = SamplingParams(0, 1, ignore_eos=True, logprobs=1)
    core.submit(EngineRequest(name, prompt, len(prompt), params))
    while True:
        output = core.step()
        for emission in output.emissions if output else ():
            if emission.last:
                assert emission.usage is not None and emission.error is None
                return emission.logprobs[0].chosen[1], emission.usage.cached_tokens


def inexact(spec: ModelSpec) -> ModelSpec:
    """As torch computes."""
    return replace(spec, numeric_class=spec.numeric_class.replace("-invariant-", "-variant-"))


@pytest.mark.parametrize("codec", ["none", "fp8"])
def test_a_prefix_comes_back_through_the_codec(tmp_path: Path, codec: str) -> None:
    config = config_of("untied")  # a tied one of random weights is too sure of itself to show it
    model = compiled(config, random_weights(config, torch.bfloat16))
    store = open_tiers(replica(tmp_path, codec), inexact(model.spec))
    assert store is not None
    core = EngineCore(model, EngineConfig((64,)), SystemClock(), tiers=store)
    core.scheduler._times.prefill_s_per_token = 0.0
    prompt = token_ids(200, config.vocab_tokens, seed=1)
    before, _ = ask(core, "first", prompt)
    core.memory.cache.clear()
    after, cached = ask(core, "second", prompt)
    assert cached == 192
    group = model.spec.groups[0]
    held = store.stats()[1]
    expected = {"none": group.block_bytes, "fp8": group.block_bytes // 2}[codec]
    [told] = [load for load in tier_loads(store, model.spec) if load.tier == "host"]
    assert told.logical_bytes == held.blocks * group.block_bytes > 0
    assert held.loaded_bytes / held.hits == pytest.approx(expected, rel=0.02)
    assert (after == before) == (codec == "none")
    assert after == pytest.approx(before, abs=0.05)
    core.close()


def test_a_lossy_codec_is_refused_where_answers_are_exact(tmp_path: Path) -> None:
    config = config_of("llama")
    spec = compiled(config, random_weights(config, torch.bfloat16)).spec
    assert served_spec(replica(tmp_path, "none"), spec) == spec
    with pytest.raises(LaunchError, match="computes exactly: --compute torch does not"):
        open_tiers(replica(tmp_path, "fp8"), spec)
    assert served_spec(replica(tmp_path, "fp8"), inexact(spec)).numeric_class.endswith("-cold-fp8")


def test_capacities_count_blocks_as_they_are_written(tmp_path: Path) -> None:
    """With a cold codec twice as many fit; blocks on the device stay what they are, and of those
    alone a hello's representation speaks."""
    config = config_of("llama")
    spec = inexact(compiled(config, random_weights(config, torch.bfloat16)).spec)
    held = {}
    for codec in ("none", "fp8"):
        asked = replica(tmp_path, codec)
        store = open_tiers(asked, spec)
        assert store is not None
        host, _ = capacities(store, asked, served_spec(asked, spec))
        assert host.blocks > 0
        held[codec] = host.blocks
        assert served_spec(asked, spec).representation == spec.representation
        store.close()
    assert held["fp8"] == pytest.approx(2 * held["none"], rel=0.05)


def test_blocks_nobody_may_look_into_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError):
        open_tiers(replica(tmp_path, "fp8"), fake_model("full", context_tokens=64).spec)


def test_another_arithmetic_finds_nothing_of_an_invariant_one(tmp_path: Path) -> None:
    """A replica that starts anew in the same directory with another numeric class: 0 hits."""
    config = config_of("llama")
    prompt = token_ids(200, config.vocab_tokens, seed=1)
    cached = {}
    for numerics in ("a-invariant-x", "a-invariant-x", "b-invariant-x"):
        model = compiled(config, random_weights(config, torch.bfloat16))
        spec = replace(model.spec, numeric_class=numerics)
        store = open_tiers(replica(tmp_path, "none"), spec)
        assert store is not None
        core = EngineCore(model, EngineConfig((64,)), SystemClock(), tiers=store)
        core.scheduler._times.prefill_s_per_token = 1.0
        core.scheduler._times.record = lambda *_: None
        cached.setdefault(numerics, []).append(ask(core, numerics, prompt)[1])
        core.close(5.0)
    assert cached["a-invariant-x"][0] == 0 and cached["b-invariant-x"] == [0]
    assert cached["a-invariant-x"][1] >= 128  # but for what was faster to compute
