"""Quantised checkpoints: every store exact against plain code, refusals, and the real model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from model_stepper import Stepper, run_chunked
from quantised_writer import STORES, is_linear, write_quantised
from safetensors.torch import load_file, save_file
from transformers_yardstick import load, save_small

from seams.errors import ModelLoadError
from worker.models.opening import open_model

TEXT = (
    "A banyan is a fig that begins its life on another tree. Its seeds are spread by birds, and a "
    "seedling sends its roots down towards the ground. Paris is the capital of France, Rome is the "
    "capital of Italy, and the capital of Germany is"
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    save_small(folder, "Qwen2Config", {"eos_token_id": 2})
    return folder


def parts_of(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    document = json.loads((folder / "config.json").read_text())
    return document, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("store", STORES)
def test_every_store_is_exact(store: str, dense: Path, tmp_path: Path) -> None:
    document, held = parts_of(dense)
    meant = write_quantised(tmp_path, store, document, held)
    config, source = open_model(tmp_path)
    with source:
        assert source.names == sorted(held)
        assert source.dtype is held["model.embed_tokens.weight"].dtype
        for name, tensor in meant.items():
            found = source.tensor(name)
            assert torch.equal(found, tensor), name
            if is_linear(name):
                assert found.shape == held[name].shape and not torch.equal(found, held[name])
    assert config == open_model(dense)[0]


@pytest.mark.parametrize("store", ["awq", "fp8 blocks"])
def test_it_computes_what_the_dense_tensors_do(store: str, dense: Path, tmp_path: Path) -> None:
    document, held = parts_of(dense)
    meant = write_quantised(tmp_path / "stored", store, document, held)
    (tmp_path / "meant").mkdir()
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    (tmp_path / "meant" / "config.json").write_text(json.dumps(document))
    ours, theirs = load(tmp_path / "stored"), load(tmp_path / "meant")
    prompt = [3, 5, 8, 13, 21, 34, 55, 89, 144] * 4
    logits = run_chunked(Stepper(ours, 20), prompt, 16)
    assert torch.equal(logits, run_chunked(Stepper(theirs, 20), prompt, 16))
    assert ours.spec.fingerprint != theirs.spec.fingerprint


def test_scales_of_activations_and_caches_are_left_alone(dense: Path, tmp_path: Path) -> None:
    document, held = parts_of(dense)
    write_quantised(tmp_path, "fp8 by tensor", document, held)
    stored = load_file(tmp_path / "model.safetensors")
    before = load(tmp_path).spec
    layer = "model.layers.0.self_attn."
    stored |= {layer + "q_proj.input_scale": torch.ones(1), layer + "k_scale": torch.ones(1)}
    save_file(stored, tmp_path / "model.safetensors")
    assert load(tmp_path).spec.groups == before.groups


def test_the_way_of_reading_is_part_of_identity(dense: Path, tmp_path: Path) -> None:
    """The same bytes with another convention for zeros are another model."""
    document, held = parts_of(dense)
    write_quantised(tmp_path, "gptq", document, held)
    one = load(tmp_path).spec.fingerprint
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert load(tmp_path).spec.fingerprint != one


GROUP = {"config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}}
UNKNOWN: list[tuple[Any, str]] = [
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not supported"),
    ({}, "'None' are not supported"),
    ([], "not a JSON object"),
    ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    ({"quant_method": "awq", "bits": 8}, "AWQ with 8 bits"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "other than e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive integers"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two positive integers"),
    ({"quant_method": "compressed-tensors"}, "no config_groups"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "has no weights"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                **GROUP["config_groups"],
                "b": {"weights": {"type": "float", "num_bits": 8}},
            },
        },
        "mix several kinds",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"type": "float", "num_bits": 4}}},
        },
        "float weights of 4 bits",
    ),
]


@pytest.mark.parametrize(("settings", "named"), UNKNOWN)
def test_unknown_formats_are_one_sentence(
    settings: Any, named: str, dense: Path, tmp_path: Path
) -> None:
    document, held = parts_of(dense)
    save_file(held, tmp_path / "model.safetensors")
    document["quantization_config"] = settings
    (tmp_path / "config.json").write_text(json.dumps(document))
    refused(tmp_path, named)


def refused(folder: Path, named: str) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        load(folder)
    assert caught.value.message.endswith(".") and "\n" not in caught.value.message


LAYER = "model.layers.1.mlp.up_proj"
SPOILT: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("gptq", "qzeros", None, "lacks qzeros"),
    ("gptq", "qweight", torch.zeros(8, 96), "no matrix of 32-bit words"),
    ("gptq", "scales", torch.full((2, 96), math.nan), "not finite"),
    ("gptq", "scales", torch.ones(3, 96), "do not fit each other"),
    ("gptq", "g_idx", torch.full((64,), 2, dtype=torch.int32), "do not fit each other"),
    ("gptq", "g_idx", torch.full((64,), -1, dtype=torch.int32), "do not fit each other"),
    ("awq", "scales", torch.ones(5, 96), "do not fit each other"),
    ("awq", "qweight", torch.zeros(63, 12, dtype=torch.int32), "do not fit each other"),
    ("packed 4 bits", "weight_shape", torch.tensor([96, 65]), "do not fit each other"),
    ("packed 4 bits", "weight_shape", None, "lacks weight_shape"),
    ("packed 4 bits", "weight_scale", torch.ones(96, 3), "do not fit each other"),
    ("int8", "weight", torch.zeros(96, 64), "no matrix of 8-bit integers"),
    ("fp8 blocks", "weight_scale_inv", torch.ones(2, 2), "neither a tensor, a row nor a block"),
    ("fp8 blocks", "weight_scale_inv", torch.full((1, 1), math.inf), "finite scale"),
    ("fp8 blocks", "weight", torch.zeros(96, 64), r"torch\.float32, not float8_e4m3fn"),
    ("fp8 blocks", "weight_scale_inv", None, "type that is not supported"),
]


@pytest.mark.parametrize(("store", "part", "value", "named"), SPOILT)
def test_a_spoilt_layer_is_named(
    store: str, part: str, value: torch.Tensor | None, named: str, dense: Path, tmp_path: Path
) -> None:
    document, held = parts_of(dense)
    write_quantised(tmp_path, store, document, held)
    stored = load_file(tmp_path / "model.safetensors")
    del stored[f"{LAYER}.{part}"]
    if value is not None:
        stored[f"{LAYER}.{part}"] = value
    save_file(stored, tmp_path / "model.safetensors")
    refused(tmp_path, f"{LAYER}.* {named}")


REAL = {"fp8 blocks": (0.03, 0.85), "awq": (0.5, 0.55)}


@pytest.mark.parametrize("store", REAL)
def test_the_real_model_quantised(store: str, demo_model: Path, tmp_path: Path) -> None:
    """Rounded to nearest, the plainest way; KL is to the dense model, mean over the prompt."""
    from tokenizers import Tokenizer

    kl_max, agreed_min = REAL[store]
    document, held = parts_of(demo_model)
    write_quantised(tmp_path, store, document, held)
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT).ids
    quantised = Stepper(load(tmp_path), 16)
    ours = run_chunked(quantised, prompt, 64).log_softmax(-1)
    theirs = run_chunked(Stepper(load(demo_model), 16), prompt, 64).log_softmax(-1)
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    agreed = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    size = (tmp_path / "model.safetensors").stat().st_size / 1e6
    print(f"{store}: {size:.0f} MB, mean KL to the dense model {kl:.1e} nats")
    print(f"{agreed:.0%} of the likeliest tokens are the dense model's")
    stream = quantised.add(prompt)
    quantised.step([(stream, len(prompt))])
    for _ in range(12):
        stream.token_ids.append(int(stream.logits[-1].argmax()))
        quantised.step([(stream, 1)])
    text = tokenizer.decode(stream.token_ids)
    print(text)
    assert 0 < kl <= kl_max and agreed >= agreed_min
    assert "Berlin" in text.removeprefix(TEXT)
