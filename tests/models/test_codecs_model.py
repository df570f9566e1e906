"""A decoder over pages of codes: what it says of itself, that batches, chunks and cached prefixes
change nothing, and how far its logits are from those over pages in the model's dtype."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_decoders import CODECS, coded
from model_stepper import Stepper, run_chunked
from random_decoders import config_of, token_ids

from kernels.codecs.choose import make_codec
from kernels.codecs.names import CodecName
from seams.errors import ModelLoadError
from worker.config import ReplicaConfig
from worker.models.calibrating import fp8_scales
from worker.models.load import load_model, plan_blocks

VOCAB = config_of("untied").vocab_tokens
# Mean KL to the same decoder without a codec, at most: random weights attend sharply.
KL_MAX = {"fp8": 0.01, "turboquant:k4v4": 0.1, "turboquant:k8v3": 0.12}


def together(logits: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(logits)


def config(**fields: Any) -> ReplicaConfig:
    given = {"model": "fake:full", "device": "cpu", **fields}
    return ReplicaConfig(replica="r0", served_name="m", routers=(), secret_file="", **given)


@pytest.mark.parametrize("codec", CODECS)
def test_a_mixed_batch_equals_each_request_alone(codec: str) -> None:
    """A fresh prefill, a prefix hit that ends inside a block, and a decode, in one step."""
    model = coded(codec)
    stepper = Stepper(model, 48)
    prompts = [token_ids(60, VOCAB, seed) for seed in (1, 2, 3)]
    hit = prompts[1][:37] + token_ids(20, VOCAB, 9)
    alone = [run_chunked(Stepper(coded(codec), 48), ids, len(ids)) for ids in (*prompts, hit)]
    donor, decoder = stepper.add(prompts[1]), stepper.add(prompts[2])
    stepper.step([(donor, 60), (decoder, 59)])
    fresh = stepper.add(prompts[0])
    sharer, copies = stepper.share(donor, hit, 37)
    stepper.step([(fresh, 60), (sharer, 20), (decoder, 1)], copies)
    for found, expected in (
        (fresh.logits, alone[0]),
        (sharer.logits, alone[3][37:]),
        (decoder.logits, alone[2]),
        (donor.logits, alone[1]),
    ):
        assert torch.allclose(together(found), expected, atol=2e-3), codec


@pytest.mark.parametrize("case", ["mixed_window", "gemma2", "gemma3", "qwen3", "dim_96", "mqa"])
def test_chunks_change_nothing_in_any_kind_of_decoder(case: str) -> None:
    """What is attended to is what was stored, a step's own tokens too."""
    ids = token_ids(90, config_of(case).vocab_tokens, 4)
    whole = run_chunked(Stepper(coded("turboquant:k4v4", case), 32), ids, 90)
    parts = run_chunked(Stepper(coded("turboquant:k4v4", case), 32), ids, 17)
    assert torch.allclose(whole, parts, atol=5e-3)


def test_logits_are_near_those_without_a_codec() -> None:
    ids = token_ids(120, VOCAB, 5)
    exact = run_chunked(Stepper(coded("model"), 16), ids, 120).log_softmax(-1)
    found = {}
    for codec in (*KL_MAX, "turboquant:k2v2"):
        logits = run_chunked(Stepper(coded(codec), 16), ids, 120).log_softmax(-1)
        found[codec] = float((exact.exp() * (exact - logits)).sum(-1).mean())
    print(found)
    for codec, most in KL_MAX.items():
        assert 0 < found[codec] < most
    assert found["turboquant:k4v4"] < found["turboquant:k2v2"] / 3


def test_boundary_layers_alone_are_no_codec_at_all() -> None:
    ids = token_ids(40, VOCAB, 6)
    exact = run_chunked(Stepper(coded("model"), 8), ids, 40)
    found = run_chunked(Stepper(coded("turboquant:k1v1,boundary=1"), 8), ids, 40)
    assert torch.allclose(exact, found, atol=1e-4), "two layers, both at an end"


def test_what_a_coded_model_says_of_itself() -> None:
    plain, specs = coded("model").spec, {codec: coded(codec).spec for codec in CODECS}
    every = [plain, *specs.values()]
    assert len({spec.representation.id for spec in every}) == len(every)
    assert len({spec.numeric_class for spec in every}) == len(every)
    for spec in specs.values():
        assert spec.layouts == () and spec.fingerprint == plain.fingerprint
        assert spec.numeric_class.startswith(plain.numeric_class)
    heads = config_of("untied").kv_heads
    k4v4 = specs["turboquant:k4v4"].groups[0].block_bytes
    assert k4v4 == 2 * 16 * heads * (2 * 32 // 2 + 4)
    one_at_each_end = specs["turboquant:k4v2,boundary=1"].groups[0].block_bytes
    assert one_at_each_end == plain.groups[0].block_bytes, "two layers: both are boundaries"


def test_a_pool_of_the_same_memory_has_more_blocks() -> None:
    asked = config(model="", pool_gib=0.01)
    plain, four = (plan_blocks(asked, coded(c).spec)[0] for c in ("model", "turboquant:k4v4"))
    assert four / plain == pytest.approx(2 * 32 * 4 / 36, rel=0.01)


def test_blocks_hold_nothing_but_codes(tmp_path: Path) -> None:
    """A written block read and written back, elsewhere, is the same block."""
    model = coded("turboquant:k3v2")
    stepper = Stepper(model, 8)
    stream = stepper.add(token_ids(20, VOCAB, 7))
    stepper.step([(stream, 20)])
    block = stream.tables[0][0]
    stored = model.read_block(0, block)
    free = next(b for b in range(8) if b not in stream.tables[0])
    model.write_block(0, free, stored)
    stream.tables[0][0] = free
    stepper.take(0, [free])
    stepper.step([(_again(stepper, stream), 1)])
    assert model.read_block(0, free) == stored


def test_token_slots_move_and_keys_are_read() -> None:
    """As of a model without a codec, but for what the codec rounds."""
    plain, model = coded("model"), coded("turboquant:k4v4,boundary=0")
    ids = token_ids(30, VOCAB, 8)
    slots: dict[str, Any] = {}
    for name, each in (("plain", plain), ("coded", model)):
        stepper = Stepper(each, 6)
        stream = stepper.add(ids)
        stepper.step([(stream, 30)])
        slots[name] = np.array([stream.tables[0][0] * 16 + 3, stream.tables[0][1] * 16 + 9])
    exact, found = plain.read_keys(0, slots["plain"]), model.read_keys(0, slots["coded"])
    assert found.shape == exact.shape
    first = (found[0] - exact[0]).norm() / exact[0].norm()
    assert 0.05 < float(first) < 0.15, "four bits"
    free = next(b for b in range(6) if b not in slots["coded"] // 16)
    target = np.array([free * 16, free * 16 + 1])
    model.move_slots(0, slots["coded"], target)
    assert torch.equal(model.read_keys(0, target), found)


def _again(stepper: Stepper, stream: Any) -> Any:
    stream.token_ids.append(3)
    return stream


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kv_codec": "fp8"}, "A fake model keeps keys and values as it computes them"),
        ({"kv_codec": "fp8", "model": "/no/folder"}, "There is no such model folder."),
    ],
)
def test_refusals(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelLoadError, match=expected):
        load_model(config(**fields))


def test_scales_follow_the_keys_and_name_the_calibration() -> None:
    """Keys beyond what e4m3 can hold with room to spare get scales of their own, and blocks written
    with them are other blocks."""
    small, large = coded("model"), coded("model", gain=400.0)
    ones = fp8_scales(small)
    assert all(bool((s.keys == 1).all() and (s.values == 1).all()) for s in ones)
    fitted = fp8_scales(large)
    largest = max(float(scale.keys.max()) for scale in fitted)
    assert largest > 1 and largest == 2 ** round(math.log2(largest))
    name, config_ = CodecName("fp8"), config_of("untied")
    shape = (config_.layers, config_.head_dim, torch.float32, "cpu")
    plain, scaled = make_codec(name, *shape, ones), make_codec(name, *shape, fitted)
    assert plain is not None and scaled is not None
    assert plain.calibration == "" != scaled.calibration
    small.recode(plain)
    large.recode(scaled)
    first, second = small.spec.representation, large.spec.representation
    assert first.codec == second.codec and first.id != second.id
    assert scaled.calibration in large.spec.numeric_class
