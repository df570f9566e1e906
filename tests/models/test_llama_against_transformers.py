"""Our logits against transformers', in float32, through shuffled and poisoned pages."""

from __future__ import annotations

from collections.abc import Iterator
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

TEXT = (
    "A banyan is a fig that begins its life on another tree. Its seeds are spread by birds, and a "
    "seedling sends roots down towards the ground; the old tree may be enclosed by them. In time "
    "the aerial roots become trunks of their own, so that one tree covers several hectares: "
    "def grove(trunks: int) -> str:\n    return 'one canopy' if trunks > 1 else 'a tree'\n"
)
PROMPT_TOKENS = (1, 9, 26, 83, 150)


@pytest.fixture(scope="module", autouse=True)
def _home(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fingerprints of these models are not remembered in the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BANYAN_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def real(demo_model: Path) -> Yardstick:
    from tokenizers import Tokenizer

    token_ids = Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(TEXT * 3).ids
    assert len(token_ids) > max(PROMPT_TOKENS)
    return Yardstick(reference_models(demo_model), [token_ids[:n] for n in PROMPT_TOKENS])


@pytest.fixture(scope="module")
def stepper(demo_model: Path) -> Stepper:
    return Stepper(load(demo_model), blocks=100)


@pytest.mark.parametrize("chunk", [512, 33])
def test_real_model_in_chunks(real: Yardstick, stepper: Stepper, chunk: int) -> None:
    for number, prompt in enumerate(real.prompts):
        real.check(number, run_chunked(stepper, prompt, chunk), f"chunks of {chunk}")


def test_real_model_token_by_token(real: Yardstick, stepper: Stepper) -> None:
    decode = Yardstick(real.models, real.prompts[2:3])
    decode.check(0, run_chunked(stepper, decode.prompts[0], 1), "decode", chunk=1)


def test_real_model_mixed_steps(real: Yardstick, stepper: Stepper) -> None:
    """Prefill chunks and single tokens of several sequences in the same calls."""
    streams = [stepper.add(prompt) for prompt in real.prompts]
    sizes = (1, 2, 2, 16, 61)
    while work := [
        (s, min(size, len(s.token_ids) - s.computed))
        for s, size in zip(streams, sizes, strict=True)
        if s.computed < len(s.token_ids)
    ]:
        stepper.step(work)
    for number, stream in enumerate(streams):
        real.check(number, torch.stack(stream.logits), "mixed steps")
        stepper.remove(stream)


@pytest.mark.parametrize("shared", [47, 48, 75])
def test_real_model_prefix_hit(real: Yardstick, stepper: Stepper, shared: int) -> None:
    """Whole blocks by reference and the boundary block by copy give the uncached logits."""
    first = stepper.add(real.prompts[3])
    stepper.step([(first, len(first.token_ids))])
    second, copies = stepper.share(first, real.prompts[4], shared)
    stepper.step([(second, len(second.token_ids) - shared)], copies)
    real.check(4, torch.stack(second.logits), f"hit of {shared}", first=shared)


GEMMA3_LAYERS = {"layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_head_dim": ("LlamaConfig", {"head_dim": 32}),
    "llama_mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama_llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_linear_rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.0}},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_biased": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": 21}),
    "phi3": ("Phi3Config", {}),
    "phi3_window": ("Phi3Config", {"sliding_window": 21}),
    "gemma": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2_window": ("Gemma2Config", {"sliding_window": 21, "head_dim": 32}),
    "gemma2_bare_window": (
        "Gemma2Config",
        {
            "sliding_window": 21,
            "head_dim": 256,
            "query_pre_attn_scalar": 144,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
    ),
    "gemma3_window": (
        "Gemma3TextConfig",
        {"sliding_window": 21, "head_dim": 256, "num_key_value_heads": 1, **GEMMA3_LAYERS},
    ),
    "gemma3_capped_window": (
        "Gemma3TextConfig",
        {
            "sliding_window": 21,
            "head_dim": 32,
            "query_pre_attn_scalar": 48,
            "final_logit_softcapping": 10.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            **GEMMA3_LAYERS,
        },
    ),
    "gemma3_long_window": (  # longer than the context: the layers still have their own RoPE
        "Gemma3TextConfig",
        {"sliding_window": 512, "head_dim": 32, **GEMMA3_LAYERS},
    ),
}


def make_small(name: str, folder: Path, **save: Any) -> None:
    config_class, changes = SMALL[name]
    save_small(folder, config_class, changes, **save)


@pytest.mark.parametrize("name", SMALL)
def test_small_model(name: str, tmp_path: Path) -> None:
    make_small(name, tmp_path)
    yardstick = Yardstick(reference_models(tmp_path), small_prompts())
    # Where the compiled path can, it computes by default; torch always can.
    for compute in ("auto", "torch"):
        stepper = Stepper(load(tmp_path, compute=compute), blocks=40)
        assert len(stepper.model.spec.groups) == (2 if "window" in name else 1)
        for chunk in (200, 19, 1):
            for number, prompt in enumerate(yardstick.prompts):
                ours = run_chunked(stepper, prompt, chunk)
                label = f"{name} ({compute}) in chunks of {chunk}"
                yardstick.check(number, ours, label, chunk=1 if chunk == 1 else WHOLE)


def test_sharded_model_is_the_same(tmp_path: Path) -> None:
    make_small("llama", tmp_path / "one")
    make_small("llama", tmp_path / "many", max_shard_size="100KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert one.spec == many.spec
    prompt = small_prompts()[1]
    first = run_chunked(Stepper(one, 8), prompt, 40)
    assert torch.equal(first, run_chunked(Stepper(many, 8), prompt, 40))


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.015), ("fp16", 1e-3)])
def test_real_model_in_half_precision(
    real: Yardstick, demo_model: Path, dtype: str, bound: float
) -> None:
    """KL to float32 transformers, in nats, per position."""
    model = load(demo_model, dtype=dtype)
    assert dtype in model.spec.numeric_class and model.spec.representation.dtype == dtype
    ours = run_chunked(Stepper(model, 16), real.prompts[4], 64).log_softmax(-1)
    theirs = real.logits()[4]["eager"].log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    print(f"{dtype}: KL mean {float(divergence.mean()):.1e}, max {float(divergence.max()):.1e}")
    assert float(divergence.max()) < bound
