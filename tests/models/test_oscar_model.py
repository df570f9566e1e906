"""OSCAR as a replica serves it: codes of every token, sinks and windows as they are; that batches,
chunks, cached prefixes and tiers change nothing, and what it is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from coded_decoders import OSCAR, coded
from model_stepper import Stepper, run_chunked
from random_decoders import config_of, random_weights, token_ids
from test_cold_engine import ask

from kvstore.groups import GroupKind
from seams.clock import SystemClock
from seams.errors import InvalidRequest, LaunchError, ModelLoadError
from worker.calibration.capture import capture
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.engine.retention.policies import Policies
from worker.models.base import Model
from worker.models.llama import LlamaModel
from worker.models.load import plan_blocks
from worker.models.making import make_model
from worker.service.settings import check_oscar
from worker.service.tiers import open_tiers

CONFIG = config_of("untied")
VOCAB = CONFIG.vocab_tokens


def asked(**fields: Any) -> ReplicaConfig:
    given = {"model": "", "device": "cpu", "compute": "torch", **fields}
    return ReplicaConfig(replica="r0", served_name="m", routers=(), secret_file="", **given)


def test_a_mixed_batch_equals_each_request_alone() -> None:
    """A fresh prefill, a prefix hit that ends inside a block, and a decode, in one step; all of
    them longer than sinks and window together."""
    model = coded(OSCAR)
    stepper = Stepper(model, 64)
    prompts = [token_ids(110, VOCAB, seed) for seed in (1, 2, 3)]
    hit = prompts[1][:87] + token_ids(20, VOCAB, 9)
    alone = [run_chunked(Stepper(coded(OSCAR), 64), ids, len(ids)) for ids in (*prompts, hit)]
    donor, decoder = stepper.add(prompts[1]), stepper.add(prompts[2])
    stepper.step([(donor, 110), (decoder, 109)])
    fresh = stepper.add(prompts[0])
    sharer, copies = stepper.share(donor, hit, 87)
    stepper.step([(fresh, 110), (sharer, 20), (decoder, 1)], copies)
    for found, expected in (
        (fresh.logits, alone[0]),
        (sharer.logits, alone[3][87:]),
        (decoder.logits, alone[2]),
        (donor.logits, alone[1]),
    ):
        assert torch.allclose(torch.stack(found), expected, atol=2e-3)


@pytest.mark.parametrize(
    ("case", "chunk"),
    [("untied", 1), ("gemma3", 1)]
    + [(case, 17) for case in ("untied", "gemma2", "gemma3", "qwen3", "dim_96", "mqa")],
)
def test_chunks_change_nothing(case: str, chunk: int) -> None:
    """Token by token is decode all along: other kernels' order, the same text."""
    ids = token_ids(90, config_of(case).vocab_tokens, 4)
    whole = run_chunked(Stepper(coded(OSCAR, case), 40), ids, 90)
    parts = run_chunked(Stepper(coded(OSCAR, case), 40), ids, chunk)
    assert torch.allclose(whole, parts, atol=5e-3)


def test_what_fits_sinks_and_window_is_exact() -> None:
    """As without a codec, up to the order of sums; one token more and something is not."""
    ids = token_ids(60, VOCAB, 5)
    exact = run_chunked(Stepper(coded("model"), 16), ids, 60)
    found = run_chunked(Stepper(coded(OSCAR), 16), ids, 60)
    assert torch.allclose(found[:40], exact[:40], atol=1e-4)
    assert not torch.allclose(found[40], exact[40], atol=1e-3)


def _kl(exact: torch.Tensor, found: torch.Tensor) -> float:
    exact, found = exact.log_softmax(-1), found.log_softmax(-1)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_more_that_is_exact_is_nearer() -> None:
    ids = token_ids(200, VOCAB, 6)
    exact = run_chunked(Stepper(coded("model"), 32), ids, 200)
    found = {
        window: _kl(exact, run_chunked(Stepper(coded(f"oscar:window={window}"), 32), ids, 200))
        for window in (1, 64, 200)
    }
    print(found)
    assert found[200] < 1e-6 < found[64] < found[1]


def test_what_it_says_of_itself() -> None:
    plain, spec = coded("model").spec, coded(OSCAR).spec
    codes, near = spec.groups
    assert codes.layers == near.layers == plain.groups[0].layers
    assert near.kind is GroupKind.WINDOW and near.block_bytes == plain.groups[0].block_bytes
    assert (near.sink_tokens, near.window_tokens) == (16, 24)
    assert codes.block_bytes == 2 * 16 * CONFIG.kv_heads * 2 * (CONFIG.head_dim // 4 + 4)
    others = [coded(name).spec for name in ("oscar", "oscar:sinks=0,window=24")]
    assert len({s.representation.id for s in (plain, spec, *others)}) == 4
    assert len({s.numeric_class for s in (plain, spec, *others)}) == 4
    assert spec.layouts == ()


def test_sinks_are_rounded_up_to_whole_blocks() -> None:
    near = coded("oscar:sinks=17,window=24").spec.groups[-1]
    assert near.sink_tokens == 32


def test_layers_that_slide_are_as_they_were() -> None:
    plain, spec = coded("model", "gemma3").spec, coded(OSCAR, "gemma3").spec
    assert spec.groups[1:-1] == plain.groups[1:]
    assert spec.groups[-1].layers == spec.groups[0].layers == plain.groups[0].layers


def test_memory_is_shared_between_codes_and_windows() -> None:
    """In a small pool windows get half of it, so that codes have room; in a large one a quarter."""
    spec = coded("oscar").spec
    plain = coded("model").spec
    config = asked(pool_gib=0.05, running_max=64)
    codes, near = plan_blocks(config, spec)
    half = 0.05 * 2**30 / 2
    assert near == int(half // spec.groups[1].block_bytes)
    assert codes > 3 * plan_blocks(config, plain)[0]
    _, near = plan_blocks(asked(pool_gib=8.0, running_max=2), spec)
    assert near == int(8.0 * 2**30) // spec.groups[1].block_bytes // 4 > 2 * (2 * (16 + 1 + 4) + 32)


def engine(model: LlamaModel, folder: Path) -> EngineCore:
    """That always loads what a tier has."""
    store = open_tiers(asked(nvme=str(folder), nvme_gib=0.2, host_gib=0.05), model.spec)
    assert store is not None
    config = EngineConfig((40, 40), poison_freed=True)
    core = EngineCore(model, config, SystemClock(), tiers=store)
    core.scheduler._times.prefill_s_per_token = 1.0
    core.scheduler._times.record = lambda *_: None  # type: ignore[method-assign]
    return core


def test_an_engine_over_tiers_gives_what_it_gave(tmp_path: Path) -> None:
    """Pushed out of the device and back, codes and exact blocks alike."""
    prompt = tuple(token_ids(200, VOCAB, seed=1))
    model = coded(OSCAR)
    core = engine(model, tmp_path)
    before, cached = ask(core, "first", prompt)
    assert cached == 0
    again, cached = ask(core, "again", prompt)
    assert cached == 199
    part, cached = ask(core, "part", prompt[:101] + prompt[:3])
    assert cached == 101
    core.memory.cache.clear()
    after, cached = ask(core, "second", prompt)
    assert cached == 192
    assert after == pytest.approx(before, abs=1e-3) and again == pytest.approx(before, abs=1e-3)
    alone = engine(coded(OSCAR), tmp_path / "other")
    assert part == pytest.approx(ask(alone, "part", prompt[:101] + prompt[:3])[0], abs=1e-3)
    core.close()
    alone.close()


def _made(calibration: Path | str, fingerprint: str = "small") -> Model:
    return make_model(
        asked(kv_codec="oscar", calibration=str(calibration)),
        CONFIG,
        random_weights(CONFIG, torch.float32),
        fingerprint=fingerprint,
        context_tokens=CONFIG.context_tokens,
        compiled=False,
    )


def test_a_calibration_of_the_model_is_needed(tmp_path: Path) -> None:
    statistics = capture(coded("model"), CONFIG, token_ids(300, VOCAB, 7))
    path = tmp_path / "small.calibration"
    statistics.save(path)
    written = _made(path).spec.representation
    assert written.calibration and written.codec == "oscar-int2-s64-w256"
    for given, fingerprint, sentence in (
        ("", "small", "needs a calibration of this model"),
        (tmp_path / "none", "small", "cannot be read"),
        (path, "another", "is of another model"),
    ):
        with pytest.raises(ModelLoadError, match=sentence):
            _made(given, fingerprint)


def test_a_model_whose_layers_all_slide_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="this model has none"):
        coded("oscar", "mistral_window")


def test_what_it_excludes() -> None:
    with pytest.raises(InvalidRequest, match="needs a calibration of the model"):
        check_oscar("oscar", "", "")
    with pytest.raises(InvalidRequest, match="one of the two, not both"):
        check_oscar("oscar:sinks=0", "file", "streaming")
    check_oscar("oscar", "file", "")
    check_oscar("fp8", "", "streaming")
    with pytest.raises(LaunchError, match="without sliding windows"):
        Policies(coded("oscar").spec)
