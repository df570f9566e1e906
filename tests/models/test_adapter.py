"""Decoders that only transformers has, served through its attention interface over our pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_stepper import Stepper, run_chunked
from transformers_yardstick import (
    WHOLE,
    Yardstick,
    load,
    reference_models,
    save_small,
    small_prompts,
)

from kvstore.groups import GroupKind
from seams.errors import ModelLoadError
from worker.config import ReplicaConfig
from worker.models.adapter import AdaptedModel, adapted_groups
from worker.models.adapter_probe import AttentionLayer, window_of
from worker.models.llama import LlamaModel
from worker.models.load import load_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    **{"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    "v_head_dim": 24,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0},
    **{"short_factor": [1.1] * 8, "long_factor": [2.0] * 8},
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3}),
    "stablelm": ("StableLmConfig", {}),  # rotates a part of each head
    "starcoder2_window": ("Starcoder2Config", {"sliding_window": 21}),
    "cohere2_window": ("Cohere2Config", {"sliding_window": 21}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}),
    "gpt_oss_window": (  # sinks
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 16, "sliding_window": 21},
    ),
    "deepseek_v3": ("DeepseekV3Config", LATENT),  # keys and values of unequal width
    "llama_yarn": (
        "LlamaConfig",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}},
    ),
}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", SMALL)
def test_small_model(name: str, tmp_path: Path) -> None:
    save_small(tmp_path, *SMALL[name])
    yardstick = Yardstick(reference_models(tmp_path), small_prompts())
    model = load(tmp_path)
    assert isinstance(model, AdaptedModel)
    assert len(model.spec.groups) == (2 if "window" in name else 1)
    stepper = Stepper(model, blocks=60)
    for chunk in (WHOLE, 19, 1):
        for number, prompt in enumerate(yardstick.prompts):
            ours = run_chunked(stepper, prompt, chunk)
            yardstick.check(number, ours, f"{name} in chunks of {chunk}", chunk=chunk)
    _check_side_by_side(stepper, yardstick, name)
    _check_prefix_hit(stepper, yardstick, name)


def _check_side_by_side(stepper: Stepper, yardstick: Yardstick, name: str) -> None:
    """Prefill chunks of one sequence and single tokens of others in the same calls."""
    streams, chunks = [stepper.add(prompt) for prompt in yardstick.prompts], (1, 1, 19)
    while work := [
        (s, min(size, len(s.token_ids) - s.computed))
        for s, size in zip(streams, chunks, strict=True)
        if s.computed < len(s.token_ids)
    ]:
        stepper.step(work)
    for number, (stream, chunk) in enumerate(zip(streams, chunks, strict=True)):
        yardstick.check(number, torch.stack(stream.logits), f"{name} side by side", chunk=chunk)
        stepper.remove(stream)


def _check_prefix_hit(stepper: Stepper, yardstick: Yardstick, name: str) -> None:
    """Cached is uncached: blocks by reference, the boundary block by copy."""
    prompt, shared, chunk = yardstick.prompts[2], 38, 19
    first = stepper.add(prompt[:60])
    stepper.step([(first, shared)])
    second, copies = stepper.share(first, prompt, shared)
    stepper.step([(second, len(prompt) - shared)], copies)
    logits = torch.stack(second.logits)
    yardstick.check(2, logits, f"{name} after a hit", chunk=chunk, first=shared)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("MambaConfig", {}, "0 keep their state"),
    "lfm2": ("Lfm2Config", {"full_attn_idxs": [1]}, "1 keep their state"),
    "falcon_h1": (  # every layer has attention, and a recurrent state beside it
        "FalconH1Config",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
        "do not compute the same",
    ),
    "llama4": (
        "Llama4TextConfig",
        {"num_local_experts": 2, "attention_chunk_size": 21, "intermediate_size_mlp": 96},
        "neither causal nor a window",
    ),
    "diffllama": ("DiffLlamaConfig", {}, "more than once"),
    "deepseek_v32": (  # its attention chooses keys by a mask that it makes itself
        "DeepseekV32Config",
        {**LATENT, "index_head_dim": 32, "index_n_heads": 2},
        "cannot run over pages",
    ),
    "bloom": ("BloomConfig", {"n_head": 4, "n_layer": 4}, "do not let"),
    "falcon": ("FalconConfig", {}, "do not let"),
    "dynamic": (
        "OlmoConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_sentence(name: str, tmp_path: Path) -> None:
    config_class, changes, named = REFUSED[name]
    save_small(tmp_path, config_class, changes)
    with pytest.raises(ModelLoadError, match=named) as caught:
        load(tmp_path)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "t5"}, "not a decoder"),
        ({"model_type": "nonesuch"}, "'nonesuch'"),
        ({"model_type": None}, "None"),
        ({"hidden_size": "wide"}, r"config\.json"),
        ({"quantization_config": {"quant_method": "fp8"}}, "Quantised"),
        ({"max_position_embeddings": 0}, "no context length"),
        ({"num_hidden_layers": 5}, "lacks the tensor"),
    ],
)
def test_foreign_folders(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    save_small(tmp_path, "OlmoConfig", {})
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**document, **changes}))
    with pytest.raises(ModelLoadError, match=named) as caught:
        load(tmp_path)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_damaged_weights(tmp_path: Path) -> None:
    save_small(tmp_path, "OlmoConfig", {})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="damaged"):
        load(tmp_path)


def test_half_precision_is_told_from_an_error(tmp_path: Path) -> None:
    save_small(tmp_path / "sound", *SMALL["gpt_oss_window"])
    assert load(tmp_path / "sound", dtype="bf16").spec.representation.dtype == "bf16"
    config_class, changes, named = REFUSED["falcon_h1"]
    save_small(tmp_path / "unsound", config_class, changes)
    with pytest.raises(ModelLoadError, match=named):
        load(tmp_path / "unsound", dtype="bf16")


def test_spec_says_what_computes(tmp_path: Path) -> None:
    save_small(tmp_path / "one", "OlmoConfig", {"eos_token_id": [2, 7]})
    save_small(tmp_path / "other", "OlmoConfig", {"clip_qkv": 5.0})
    one, other = load(tmp_path / "one").spec, load(tmp_path / "other").spec
    again = load(tmp_path / "one", dtype="bf16", context_tokens=100).spec
    assert "transformers" in one.numeric_class and one.numeric_class.endswith("-fp32")
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert (again.context_tokens, again.representation.dtype) == (100, "bf16")
    assert (one.vocab_tokens, one.eos_token_ids, one.context_tokens) == (320, (2, 7), 512)
    with pytest.raises(ModelLoadError, match="context of 513"):
        load(tmp_path / "one", context_tokens=513)


def test_progress_runs_once_from_start_to_end(tmp_path: Path) -> None:
    save_small(tmp_path, "OlmoConfig", {})
    told: list[tuple[int, int]] = []
    config = ReplicaConfig("r0", str(tmp_path), "model", (), "", device="cpu")
    load_model(config, lambda *step: told.append(step))
    assert told == sorted(told) and len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1]


def test_what_we_have_ourselves_is_not_adapted(tmp_path: Path) -> None:
    save_small(tmp_path / "ours", "LlamaConfig", {})
    assert isinstance(load(tmp_path / "ours"), LlamaModel)


def test_longrope_ends_where_its_factors_would_change(tmp_path: Path) -> None:
    changes = {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE}
    save_small(tmp_path, "Phi3Config", changes)
    assert load(tmp_path).spec.context_tokens == 256
    with pytest.raises(ModelLoadError, match="context of 257"):
        load(tmp_path, context_tokens=257)


def test_masks_are_read_over_the_whole_context() -> None:
    from transformers.masking_utils import (
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    assert window_of(causal_mask_function, 5000) == 0
    assert window_of(sliding_window_causal_mask_function(4096), 5000) == 4096
    assert window_of(sliding_window_causal_mask_function(4096), 4096) == 0
    chunked = chunked_causal_mask_function(100, torch.zeros(1, dtype=torch.int64))
    for foreign in (chunked, lambda b, h, q, k: k >= 0, lambda b, h, q, k: k < q):
        with pytest.raises(ModelLoadError, match="neither"):
            window_of(foreign, 250)


def test_layers_that_are_alike_share_a_group() -> None:
    full, slim = AttentionLayer(4, 2, 16, 16, 0), AttentionLayer(4, 1, 16, 24, 0)
    short, long = AttentionLayer(4, 2, 16, 16, 8), AttentionLayer(4, 2, 16, 16, 64)

    def groups(*layers: AttentionLayer) -> list[tuple[GroupKind, tuple[int, ...], int]]:
        made = adapted_groups(layers, 16, torch.float32)
        assert [group.id for group, _ in made] == list(range(len(made)))
        assert all(group.block_bytes == layout.block_bytes for group, layout in made)
        return [(group.kind, group.layers, group.window_tokens) for group, _ in made]

    assert groups(short, full, long, full, slim, short) == [
        (GroupKind.FULL, (1, 3), 0),
        (GroupKind.FULL, (4,), 0),
        (GroupKind.WINDOW, (0, 5), 8),
        (GroupKind.WINDOW, (2,), 64),
    ]
    assert groups(short) == [(GroupKind.FULL, (0,), 0)]
    assert groups(short, short) == [(GroupKind.FULL, (0,), 0), (GroupKind.WINDOW, (1,), 8)]
