"""Safetensors folders: whole, sharded, damaged, foreign; and the fingerprint over them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from seams.errors import ModelLoadError
from worker.models import fingerprint as fingerprint_module
from worker.models.config import ModelConfig, parse_config
from worker.models.fingerprint import model_fingerprint, tensors_digest
from worker.models.weights import INDEX, SINGLE, Checkpoint, Weights, load_weights

CPU = torch.device("cpu")
DOCUMENT: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "attention_bias": True,
}


def config(**changes: Any) -> ModelConfig:
    return parse_config({**DOCUMENT, **changes})


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """What a checkpoint of DOCUMENT holds."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (24, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (24, 8),
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {layer + f"self_attn.{n}_proj.weight": (4, 8) for n in ("k", "v")}
        shapes |= {layer + f"self_attn.{n}_proj.bias": (4,) for n in ("k", "v")}
        shapes |= {layer + f"self_attn.{n}_norm.weight": (4,) for n in ("q", "k")}
        shapes |= {layer + f"mlp.{n}_proj.weight": (12, 8) for n in ("gate", "up")}
        shapes |= {layer + f"{n}_layernorm.weight": (8,) for n in ("input", "post_attention")}
        shapes |= {
            layer + "self_attn.q_proj.weight": (8, 8),
            layer + "self_attn.q_proj.bias": (8,),
            layer + "self_attn.o_proj.weight": (8, 8),
            layer + "self_attn.o_proj.bias": (8,),
            layer + "mlp.down_proj.weight": (8, 12),
        }
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in sorted(shapes.items())}


def read(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Weights:
    with Checkpoint(folder) as checkpoint:
        return load_weights(checkpoint, config(**changes), dtype, CPU)


def write_sharded(folder: Path, held: dict[str, torch.Tensor]) -> None:
    names = sorted(held)
    weight_map = {}
    for number in range(2):
        shard = f"model-{number}.safetensors"
        part = names[number::2]
        save_file({n: held[n] for n in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_projections_are_fused_in_order_and_cast(tmp_path: Path) -> None:
    held = tensors()
    save_file(held, tmp_path / SINGLE)
    told: list[tuple[int, int]] = []
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_weights(
            checkpoint, config(), torch.float32, CPU, lambda *done: told.append(done)
        )
    layer, prefix = weights.layers[1], "model.layers.1."

    def stacked(*names: str) -> torch.Tensor:
        return torch.cat([held[prefix + n] for n in names]).float()

    attention = [f"self_attn.{n}_proj" for n in "qkv"]
    assert torch.equal(layer.qkv, stacked(*(f"{n}.weight" for n in attention)))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, stacked(*(f"{n}.bias" for n in attention)))
    assert torch.equal(layer.gate_up, stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"))
    assert torch.equal(layer.down, stacked("mlp.down_proj.weight"))
    assert layer.gate_up_bias is None and layer.down_bias is None
    assert torch.equal(weights.head, held["lm_head.weight"].float())
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    sizes = sum(t.numel() * t.element_size() for t in held.values())
    assert told[-1][0] == sizes <= told[-1][1]


def test_norms_stay_float32(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    weights = read(tmp_path)
    assert weights.norm.dtype is weights.layers[0].mlp_norm.dtype is torch.float32
    assert weights.layers[0].input_norm.dtype is torch.float32
    query_norm, key_norm = weights.layers[0].query_norm, weights.layers[0].key_norm
    assert query_norm is not None and query_norm.dtype is torch.float32
    assert key_norm is not None and key_norm.dtype is torch.float32
    assert weights.layers[0].qkv.dtype is weights.embedding.dtype is torch.bfloat16


def test_gemma_norms_hold_their_offset_unrounded(tmp_path: Path) -> None:
    held = tensors()
    layer = "model.layers.1."
    for i in range(2):
        for name in ("pre_feedforward", "post_feedforward"):
            held[f"model.layers.{i}.{name}_layernorm.weight"] = torch.full((8,), 2.0**-9 * (i + 1))
    save_file({n: t.bfloat16() for n, t in held.items()}, tmp_path / SINGLE)
    weights = read(tmp_path, model_type="gemma3_text")
    made = weights.layers[1]
    assert torch.equal(made.mlp_norm, torch.full((8,), 1 + 2.0**-8))  # no bfloat16 number
    assert made.mlp_post_norm is not None and torch.equal(made.mlp_post_norm, made.mlp_norm)
    for norm, name in (
        (made.input_norm, "input_layernorm"),
        (made.attention_post_norm, "post_attention_layernorm"),
        (made.query_norm, "self_attn.q_norm"),
        (made.key_norm, "self_attn.k_norm"),
    ):
        assert norm is not None
        assert torch.equal(norm, 1 + held[f"{layer}{name}.weight"].float())
    assert torch.equal(weights.norm, 1 + held["model.norm.weight"].float())


def test_phi_checkpoints_are_fused_already(tmp_path: Path) -> None:
    held = tensors()
    fused = {n: t for n, t in held.items() if "attn" not in n and "_proj" not in n}
    for i in range(2):
        layer = f"model.layers.{i}."
        for joined, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            names = [f"{layer}{joined.split('.')[0]}.{part}_proj.weight" for part in parts]
            fused[f"{layer}{joined}_proj.weight"] = torch.cat([held[n] for n in names])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            fused[layer + name] = held[layer + name]
    for folder, kept, kind in (("fused", fused, "phi3"), ("apart", held, "qwen3")):
        (tmp_path / folder).mkdir()
        save_file(kept, tmp_path / folder / SINGLE)
        layer_weights = read(tmp_path / folder, model_type=kind).layers[1]
        assert torch.equal(layer_weights.qkv, fused["model.layers.1.self_attn.qkv_proj.weight"])
        assert torch.equal(layer_weights.gate_up, fused["model.layers.1.mlp.gate_up_proj.weight"])


def test_a_tied_head_is_the_embedding_even_if_stored_twice(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    weights = read(tmp_path, tie_word_embeddings=True)
    assert weights.head is weights.embedding


def test_shards_give_the_same_weights_and_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    save_file(tensors(), tmp_path / "one" / SINGLE)
    write_sharded(tmp_path / "many", tensors())
    one, many = read(tmp_path / "one"), read(tmp_path / "many")
    assert torch.equal(one.layers[1].qkv, many.layers[1].qkv)
    with Checkpoint(tmp_path / "one") as a, Checkpoint(tmp_path / "many") as b:
        assert a.names == b.names and tensors_digest(a) == tensors_digest(b)


def test_weights_outlive_the_checkpoint(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    weights = read(tmp_path)
    before = weights.embedding.clone()
    (tmp_path / SINGLE).unlink()
    assert torch.equal(weights.embedding, before)


def refused(folder: Path, named: str, **changes: Any) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        read(folder, **changes)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text
    assert str(folder) not in text


def test_missing_files(tmp_path: Path) -> None:
    refused(tmp_path, r"no model\.safetensors")
    write_sharded(tmp_path, tensors())
    (tmp_path / "model-1.safetensors").unlink()
    refused(tmp_path, "lacks the shard")


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated_file(tmp_path: Path, keep: float) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    size = int(len(whole) * keep) if isinstance(keep, float) else keep % len(whole)
    (tmp_path / SINGLE).write_bytes(whole[:size])
    refused(tmp_path, "damaged")


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / SINGLE)
    refused(tmp_path, "damaged")


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_broken_index(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    refused(tmp_path, "index")


def test_an_index_cannot_point_outside_the_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    save_file(tensors(), tmp_path / "outside.safetensors")
    for target in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..", ""):
        (inner / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), target)}))
        refused(inner, "names something that is no file|lacks the shard")


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    write_sharded(tmp_path, tensors())
    document = json.loads((tmp_path / INDEX).read_text())
    document["weight_map"]["extra.weight"] = "model-0.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(document))
    refused(tmp_path, r"lacks the tensor extra\.weight")


def test_missing_foreign_and_misshapen_tensors(tmp_path: Path) -> None:
    held = tensors()
    path = tmp_path / SINGLE
    save_file({n: t for n, t in held.items() if n != "model.layers.1.mlp.up_proj.weight"}, path)
    refused(tmp_path, r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight")
    save_file({**held, "score.weight": torch.ones(2)}, path)
    refused(tmp_path, r"score\.weight has no place")
    save_file({**held, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, path)
    read(tmp_path)
    save_file({**held, "model.norm.weight": torch.ones(9)}, path)
    refused(tmp_path, r"model\.norm\.weight does not have the shape")
    save_file({**held, "model.norm.weight": torch.ones(8, dtype=torch.int8)}, path)
    refused(tmp_path, "type that is not supported")
    save_file(held, path)
    refused(tmp_path, "has no place", attention_bias=False)


def test_weights_that_do_not_fit_fp16(tmp_path: Path) -> None:
    held = tensors()
    held["model.layers.0.mlp.up_proj.weight"][3, 3] = 1e5
    save_file(held, tmp_path / SINGLE)
    with pytest.raises(ModelLoadError, match="does not fit fp16"):
        read(tmp_path, torch.float16)
    read(tmp_path, torch.float32)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def fingerprint(folder: Path, **changes: Any) -> str:
    with Checkpoint(folder) as checkpoint:
        return model_fingerprint(checkpoint, config(**changes))


def test_fingerprint_sees_every_bit(tmp_path: Path, home: Path) -> None:
    held = tensors()
    save_file(held, tmp_path / SINGLE)
    seen = {fingerprint(tmp_path)}
    assert len(next(iter(seen))) == 64

    def changed(new: dict[str, torch.Tensor]) -> str:
        save_file(new, tmp_path / SINGLE)
        os.utime(tmp_path / SINGLE, ns=(0, len(seen)))
        return fingerprint(tmp_path)

    bit = held["lm_head.weight"].clone()
    bit.view(torch.int16)[0, 0] ^= 1
    for variant in (
        {**held, "lm_head.weight": bit},
        {**held, "lm_head.weight": held["lm_head.weight"].reshape(8, 24)},
        {**held, "lm_head.weight": held["lm_head.weight"].view(torch.float16)},
        {**{n: t for n, t in held.items() if n != "lm_head.weight"}, "lm_tail.weight": bit},
    ):
        found = changed(variant)
        assert found not in seen
        seen.add(found)
    assert changed(held) in seen
    assert fingerprint(tmp_path, rope_theta=5e5) not in seen
    assert fingerprint(tmp_path, eos_token_id=3) in seen


def test_fingerprint_is_remembered_until_a_file_changes(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    real = tensors_digest

    def counted(checkpoint: Checkpoint, progress: Any = None) -> str:
        hashed.append(1)
        return real(checkpoint, progress)

    monkeypatch.setattr(fingerprint_module, "tensors_digest", counted)
    save_file(tensors(), tmp_path / SINGLE)
    first = fingerprint(tmp_path)
    assert [fingerprint(tmp_path), len(hashed)] == [first, 1]
    os.utime(tmp_path / SINGLE, ns=(5, 5))
    assert [fingerprint(tmp_path), len(hashed)] == [first, 2]
    (remembered,) = (home / "fingerprints").iterdir()
    for broken in ("{", "[]", "{}", remembered.read_text().replace(SINGLE, "x")):
        remembered.write_text(broken)
        assert fingerprint(tmp_path) == first
    assert len(hashed) == 6
    assert (home / "fingerprints").stat().st_mode & 0o077 == 0


def test_fingerprint_without_a_place_to_remember(tmp_path: Path, home: Path) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    home.write_text("a file where the folder should be")
    assert fingerprint(tmp_path) == fingerprint(tmp_path)
