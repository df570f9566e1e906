"""config.json: what is understood, and the one sentence for what is not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seams.errors import ModelLoadError
from worker.models.config import ModelConfig, parse_config, read_config
from worker.models.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: Any) -> ModelConfig:
    document = {**LLAMA, **changes}
    return parse_config({k: v for k, v in document.items() if v is not ...})


def test_plain_llama() -> None:
    config = parse()
    assert (config.query_heads, config.kv_heads, config.head_dim) == (4, 2, 16)
    assert config.qkv_rows == 128
    assert config.rope == RopeConfig(10_000.0)
    assert config.windows == (0, 0, 0, 0)
    assert config.eos_token_ids == (2,)
    assert not (config.tied or config.qkv_bias or config.output_bias or config.mlp_bias)


@pytest.mark.parametrize("kind", ["llama", "smollm"])
def test_llama_reads_its_flags(kind: str) -> None:
    config = parse(
        model_type=kind, attention_bias=True, mlp_bias=True, head_dim=32, tie_word_embeddings=True
    )
    assert config.qkv_bias and config.output_bias and config.mlp_bias and config.tied
    assert config.head_dim == 32


def test_qwen_biases_and_norms() -> None:
    qwen2, qwen3 = parse(model_type="qwen2"), parse(model_type="qwen3", num_hidden_layers=1)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen3.head_dim == 128  # what an absent head_dim means there


def test_absent_kv_heads() -> None:
    assert parse(num_key_value_heads=...).kv_heads == 4
    with pytest.raises(ModelLoadError, match="num_key_value_heads"):
        parse(model_type="mistral", num_key_value_heads=...)


@pytest.mark.parametrize(
    "old_and_new",
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
        ),
    ],
)
def test_both_ways_to_write_rope(old_and_new: tuple[dict[str, Any], dict[str, Any]]) -> None:
    old, new = old_and_new
    assert parse(**old) == parse(**new)
    assert parse(**old).rope.theta == 5e5
    assert parse(**old) != parse()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 100}, (100,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (0,) * 4),
        ({"model_type": "mistral", "sliding_window": 512}, (0,) * 4),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, (4096,) * 4),
        ({"model_type": "llama", "sliding_window": 100}, (0,) * 4),
        ({"model_type": "qwen2", "sliding_window": 100}, (0,) * 4),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 100,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (0, 0, 0, 100),
        ),
        ({"model_type": "phi3", "sliding_window": 100}, (100,) * 4),
        ({"model_type": "phi3"}, (0,) * 4),
        ({"model_type": "gemma"}, (0,) * 4),
        ({"model_type": "gemma2", "sliding_window": 100}, (100, 0, 100, 0)),
        ({"model_type": "gemma2", "sliding_window": 512}, (0,) * 4),
        ({"model_type": "gemma3_text", "sliding_window": 512}, (512,) * 4),
        (
            {"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 3},
            (9, 9, 0, 9),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, 0, 7, 0),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse(**changes).windows == windows


def test_gemmas_differ_from_llama() -> None:
    plain = parse()
    assert (plain.activation, plain.attention_cap, plain.final_cap) == ("silu", 0.0, 0.0)
    assert (plain.embedding_scale, plain.attention_scale) == (1.0, 0.25)
    assert plain.local_rope is None and not plain.post_norms and plain.norm_offset == 0.0
    first, second, third = (parse(model_type=t) for t in ("gemma", "gemma2", "gemma3_text"))
    for gemma in (first, second, third):
        assert gemma.activation == "gelu_tanh" and gemma.tied and gemma.head_dim == 256
        assert gemma.embedding_scale == 8.0 and gemma.norm_offset == 1.0
    assert (second.attention_cap, second.final_cap) == (50.0, 30.0)
    assert (third.attention_cap, third.final_cap) == (0.0, 0.0)
    uncapped = parse(model_type="gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_cap, uncapped.final_cap) == (0.0, 0.0)
    assert (first.post_norms, second.post_norms, third.post_norms) == (False, True, True)
    assert (first.qk_norm, second.qk_norm, third.qk_norm) == (False, False, True)
    assert parse(model_type="gemma", hidden_act="gelu").activation == "gelu_tanh"
    assert parse(model_type="gemma2", query_pre_attn_scalar=64).attention_scale == 0.125
    assert parse(model_type="gemma", head_dim=64).attention_scale == 0.125


def test_both_ways_to_write_the_two_ropes_of_gemma_3() -> None:
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    gemma = parse(model_type="gemma3_text", **old)
    assert gemma == parse(model_type="gemma3_text", rope_parameters=new)
    assert gemma.rope == RopeConfig(5e5, "linear", 8.0) and gemma.local_rope == RopeConfig(2e4)
    implied = parse(model_type="gemma3_text")
    assert (implied.rope, implied.local_rope) == (RopeConfig(1e6), RopeConfig(1e4))


def test_end_tokens_of_both_files() -> None:
    assert parse_config(LLAMA, {"eos_token_id": [5, 2, 9]}).eos_token_ids == (2, 5, 9)
    assert parse_config({**LLAMA, "eos_token_id": None}).eos_token_ids == ()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma3"}, "gemma3"),
    ({"model_type": ...}, "None"),
    ({"model_type": ["llama"]}, "not supported"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"vocab_size": ...}, "vocab_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": 1e3}, "vocab_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 1 << 40}, "hidden_size"),
    ({"hidden_size": 66}, "hidden_size"),
    ({"intermediate_size": -1}, "intermediate_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "KV heads"),
    ({"head_dim": 15}, "head_dim"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"eos_token_id": 320}, "eos_token_id"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ({"rope_parameters": {"rope_type": "llama3", **LLAMA3_ROPE, "high_freq_factor": 1}}, "high"),
    ({"partial_rotary_factor": 0.5}, "Partial"),
    ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "longrope"),
    ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "Partial"),
    ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e6}}, "layer types"),
    ({"model_type": "gemma2", "sliding_window": None}, "sliding_window"),
    ({"model_type": "gemma2", "final_logit_softcapping": 0}, "final_logit_softcapping"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "later ones"),
    ({"model_type": "gemma2", "hidden_activation": "gelu"}, "gelu"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"],
        },
        "layer_types",
    ),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=[str(c)[:60] for c, _ in REFUSED])
def test_refused_with_one_sentence(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        parse(**changes)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and len(text) < 200


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*LLAMA, "rope_parameters", "layer_types"]), JUNK))
def test_junk_is_refused_or_sound(changes: dict[str, Any]) -> None:
    try:
        config = parse(**changes)
    except ModelLoadError:
        return
    assert len(config.windows) == config.layers
    assert config.query_heads % config.kv_heads == 0 and config.head_dim % 2 == 0
    json.dumps(asdict(config))


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no readable config\.json"):
        read_config(tmp_path)
    for text in ("{", "[1]", "\x00", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json is not"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text("7")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not"):
        read_config(tmp_path)
