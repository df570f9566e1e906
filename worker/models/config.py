"""ModelConfig: a checkpoint's config.json, checked; knows nothing of tensors or devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seams.errors import ModelLoadError
from seams.limits import TOKENS_MAX
from worker.models.rope import RopeConfig

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm")
CONFIG_BYTES_MAX = 1 << 24
WINDOW_IMPLIED = 4096  # where sliding_window is absent, not null
LAYER_FULL, LAYER_SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder. `windows` has one entry per layer: 0 = the layer sees everything,
    else a position sees itself and the window-1 before it.
    """

    model_type: str
    vocab_tokens: int
    hidden: int
    intermediate: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_tokens: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query/key/value projection."""
        return (self.query_heads + 2 * self.kv_heads) * self.head_dim


def read_config(folder: Path) -> ModelConfig:
    """Parse config.json (and generation_config.json, if there, for more end tokens).

    Raises ModelLoadError, one sentence, for anything missing, foreign or absurd.
    """
    document = read_json(folder / "config.json")
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
    return parse_config(document, generation)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder, or ModelLoadError naming the file."""
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ModelLoadError(f"The model's {path.name} is too large to be one.")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ModelLoadError(f"The model folder has no readable {path.name}.") from None
    except (ValueError, RecursionError):
        raise ModelLoadError(f"The model's {path.name} is not valid JSON.") from None
    if not isinstance(document, dict):
        raise ModelLoadError(f"The model's {path.name} is not a JSON object.")
    return document


def parse_config(
    document: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """config.json as parsed -> ModelConfig; raises ModelLoadError."""
    kind = document.get("model_type")
    if kind not in MODEL_TYPES:
        supported = ", ".join(MODEL_TYPES)
        raise ModelLoadError(f"Model type {str(kind)[:64]!r} is not supported ({supported}).")
    if document.get("quantization_config") is not None:
        raise ModelLoadError("Quantised checkpoints are not supported; use an unquantised one.")
    activation = document.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"Activation {str(activation)[:64]!r} is not supported (only silu).")
    layers = _integer(document, "num_hidden_layers", 1, 1024)
    context = min(_integer(document, "max_position_embeddings", 1, 1 << 30), TOKENS_MAX)
    vocab = _integer(document, "vocab_size", 1, 1 << 24)
    heads, kv_heads, head_dim, hidden = _heads(document, kind)
    biased = _flag(document, "attention_bias") and kind != "mistral"
    return ModelConfig(
        model_type=kind,
        vocab_tokens=vocab,
        hidden=hidden,
        intermediate=_integer(document, "intermediate_size", 1, 1 << 22),
        layers=layers,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(document, "rms_norm_eps", 1e-12, 0.1, default=1e-6),
        context_tokens=context,
        tied=_flag(document, "tie_word_embeddings"),
        qkv_bias=kind == "qwen2" or biased,
        output_bias=kind != "qwen2" and biased,
        mlp_bias=kind in ("llama", "smollm") and _flag(document, "mlp_bias"),
        qk_norm=kind == "qwen3",
        rope=_rope(document, context),
        windows=_windows(document, kind, layers, context),
        eos_token_ids=_eos(document, generation or {}, vocab),
    )


def _integer(
    document: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None
) -> int:
    value = document.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"The model's config.json lacks {key}.")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelLoadError(f"The model's {key} is not an integer from {low} to {high}.")
    return value


def _number(
    document: Mapping[str, Any], key: str, low: float, high: float, default: float | None = None
) -> float:
    value = document.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"The model's config.json lacks {key}.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ModelLoadError(f"The model's {key} is not a number from {low} to {high}.")
    return float(value)


def _flag(document: Mapping[str, Any], key: str) -> bool:
    value = document.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ModelLoadError(f"The model's {key} is neither true nor false.")
    return value


def _heads(document: Mapping[str, Any], kind: str) -> tuple[int, int, int, int]:
    """query heads, KV heads, head_dim, hidden; absent fields mean what transformers takes."""
    hidden = _integer(document, "hidden_size", 1, 1 << 18)
    heads = _integer(document, "num_attention_heads", 1, 4096)
    implied = heads if kind in ("llama", "smollm") else None
    kv_heads = _integer(document, "num_key_value_heads", 1, 4096, default=implied)
    if heads % kv_heads:
        raise ModelLoadError("The model's attention heads are not a multiple of its KV heads.")
    if document.get("head_dim") is None and kind != "qwen3" and hidden % heads:
        raise ModelLoadError("The model's hidden_size is not a multiple of its attention heads.")
    implied = 128 if kind == "qwen3" else hidden // heads
    head_dim = _integer(document, "head_dim", 2, 1024, default=implied)
    if head_dim % 2:
        raise ModelLoadError("The model's head_dim is odd, which RoPE cannot rotate.")
    return heads, kv_heads, head_dim, hidden


def _rope(document: Mapping[str, Any], context: int) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    fields: dict[str, Any] = {"rope_theta": document.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        given = document.get(key)
        if given is not None and not isinstance(given, dict):
            raise ModelLoadError(f"The model's {key} is not a JSON object.")
        fields.update(given or {})
    if document.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1):
        raise ModelLoadError("Partial rotary embeddings are not supported.")
    theta = _number(fields, "rope_theta", 1.0, 1e15, default=10_000.0)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ("linear", "llama3"):
        raise ModelLoadError(f"RoPE type {str(kind)[:64]!r} is not supported.")
    factor = _number(fields, "factor", 1e-3, 1e6)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low = _number(fields, "low_freq_factor", 1e-3, 1e6)
    high = _number(fields, "high_freq_factor", 1e-3, 1e6)
    if high <= low:
        raise ModelLoadError("The model's high_freq_factor is not above its low_freq_factor.")
    original = _integer(fields, "original_max_position_embeddings", 1, 1 << 30, default=context)
    return RopeConfig(theta, kind, factor, low, high, original)


def _windows(document: Mapping[str, Any], kind: str, layers: int, context: int) -> tuple[int, ...]:
    """Per layer; a window that reaches over the whole context is none."""
    slides = kind == "mistral" or (
        kind in ("qwen2", "qwen3") and _flag(document, "use_sliding_window")
    )
    if not slides or document.get("sliding_window", WINDOW_IMPLIED) is None:
        return (0,) * layers
    window = _integer(document, "sliding_window", 1, 1 << 30, default=WINDOW_IMPLIED)
    if window >= context:
        return (0,) * layers
    if kind == "mistral":
        return (window,) * layers
    types = document.get("layer_types")
    if types is None:
        first = _integer(document, "max_window_layers", 0, 1 << 20, default=28)
        types = [LAYER_FULL if i < first else LAYER_SLIDING for i in range(layers)]
    known = isinstance(types, list) and all(t in (LAYER_FULL, LAYER_SLIDING) for t in types)
    if not known or len(types) != layers:
        raise ModelLoadError("The model's layer_types do not name one known type per layer.")
    return tuple(window if t == LAYER_SLIDING else 0 for t in types)


def _eos(document: Mapping[str, Any], generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """End tokens of both files, config.json's first; chat models often name theirs in the other."""
    found: dict[int, None] = {}
    for source in (document, generation):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise ModelLoadError("The model's eos_token_id is not a token of its vocabulary.")
            found[token] = None
    return tuple(found)
