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

GEMMAS = ("gemma", "gemma2", "gemma3_text")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm", "phi3", *GEMMAS)
CONFIG_BYTES_MAX = 1 << 24
WINDOW_IMPLIED = 4096  # where sliding_window is absent, not null
LAYER_FULL, LAYER_SLIDING = "full_attention", "sliding_attention"
HEAD_DIM_IMPLIED = {"qwen3": 128} | dict.fromkeys(GEMMAS, 256)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class NotNative(ModelLoadError):
    """A sound configuration of something that this decoder lacks; transformers may have it."""


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder. `windows` has one entry per layer: 0 = the layer sees everything,
    else a position sees itself and the window-1 before it.

    A cap c turns logits x into c * tanh(x / c). `embedding_scale` is rounded to the model's dtype
    before it is applied, as in training. With a `local_rope` the layers that have a window use it.
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
    attention_scale: float  # of query times key, before the softmax
    activation: str = "silu"  # or gelu_tanh
    attention_cap: float = 0.0  # of attention's logits; 0 = off
    final_cap: float = 0.0  # of the vocabulary's logits; 0 = off
    embedding_scale: float = 1.0
    local_rope: RopeConfig | None = None  # None = `rope` everywhere
    post_norms: bool = False  # attention's and the MLP's output are normed too
    norm_offset: float = 0.0  # added to every norm's weight

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
        raise NotNative(f"Model type {str(kind)[:64]!r} is not supported ({supported}).")
    layers = _integer(document, "num_hidden_layers", 1, 1024)
    context = min(_integer(document, "max_position_embeddings", 1, 1 << 30), TOKENS_MAX)
    vocab = _integer(document, "vocab_size", 1, 1 << 24)
    heads, kv_heads, head_dim, hidden = _heads(document, kind)
    biased = _flag(document, "attention_bias") and kind not in ("mistral", "phi3")
    gemma = kind in GEMMAS
    if gemma and _flag(document, "use_bidirectional_attention"):
        raise ModelLoadError("Models whose tokens see later ones are not supported.")
    rope, local_rope = _ropes(document, kind, context)
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
        tied=_flag(document, "tie_word_embeddings", default=gemma),
        qkv_bias=kind == "qwen2" or biased,
        output_bias=kind != "qwen2" and biased,
        mlp_bias=kind in ("llama", "smollm") and _flag(document, "mlp_bias"),
        qk_norm=kind in ("qwen3", "gemma3_text"),
        rope=rope,
        windows=_windows(document, kind, layers, context),
        eos_token_ids=end_tokens(document, generation or {}, vocab),
        attention_scale=_attention_scale(document, kind, head_dim),
        activation=_activation(document, kind),
        attention_cap=_cap(document, "attn_logit_softcapping", 50.0) if kind == "gemma2" else 0.0,
        final_cap=_final_cap(document, kind),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        local_rope=local_rope,
        post_norms=kind in ("gemma2", "gemma3_text"),
        norm_offset=1.0 if gemma else 0.0,
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


def _flag(document: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = document.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelLoadError(f"The model's {key} is neither true nor false.")
    return value


def _heads(document: Mapping[str, Any], kind: str) -> tuple[int, int, int, int]:
    """query heads, KV heads, head_dim, hidden; absent fields mean what transformers takes."""
    hidden = _integer(document, "hidden_size", 1, 1 << 18)
    heads = _integer(document, "num_attention_heads", 1, 4096)
    implied = heads if kind in ("llama", "smollm", "phi3") else None
    kv_heads = _integer(document, "num_key_value_heads", 1, 4096, default=implied)
    if heads % kv_heads:
        raise ModelLoadError("The model's attention heads are not a multiple of its KV heads.")
    implied = HEAD_DIM_IMPLIED.get(kind)
    if document.get("head_dim") is None and implied is None and hidden % heads:
        raise ModelLoadError("The model's hidden_size is not a multiple of its attention heads.")
    implied = implied or hidden // heads
    head_dim = _integer(document, "head_dim", 2, 1024, default=implied)
    if head_dim % 2:
        raise ModelLoadError("The model's head_dim is odd, which RoPE cannot rotate.")
    return heads, kv_heads, head_dim, hidden


def _activation(document: Mapping[str, Any], kind: str) -> str:
    """silu or gelu_tanh; the first Gemma's "gelu" has always meant the latter."""
    key = "hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act"
    name = document.get(key, "gelu_pytorch_tanh" if kind in GEMMAS else "silu")
    if kind == "gemma" and name == "gelu":
        name = "gelu_pytorch_tanh"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise NotNative(f"Activation {str(name)[:64]!r} is not supported ({supported}).")
    return ACTIVATIONS[name]


def _attention_scale(document: Mapping[str, Any], kind: str, head_dim: int) -> float:
    if kind not in ("gemma2", "gemma3_text"):
        return float(head_dim**-0.5)
    return float(_number(document, "query_pre_attn_scalar", 1e-3, 1e6, default=256.0) ** -0.5)


def _cap(document: Mapping[str, Any], key: str, implied: float) -> float:
    """A soft cap, 0 for none: written null, which is not the same as absent."""
    if key in document and document[key] is None:
        return 0.0
    return _number(document, key, 1e-3, 1e9, default=implied) if implied or key in document else 0.0


def _final_cap(document: Mapping[str, Any], kind: str) -> float:
    if kind not in ("gemma2", "gemma3_text"):
        return 0.0
    return _cap(document, "final_logit_softcapping", 30.0 if kind == "gemma2" else 0.0)


def _ropes(
    document: Mapping[str, Any], kind: str, context: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The model's RoPE, and that of its sliding layers where it is another (Gemma 3)."""
    if kind != "gemma3_text":
        return _rope(document, context), None
    given = document.get("rope_parameters")
    if given is None:  # before transformers 5; rope_scaling is of the full layers
        theta = {"rope_theta": document.get("rope_theta") or 1_000_000.0}
        local = {"rope_theta": document.get("rope_local_base_freq") or 10_000.0}
        return _rope({**document, **theta}, context), _rope(local, context)
    if not isinstance(given, dict) or not given.keys() <= {LAYER_FULL, LAYER_SLIDING}:
        raise ModelLoadError("The model's rope_parameters do not name the RoPE of layer types.")
    full, sliding = (
        {"rope_theta": theta, "rope_parameters": given.get(name)}
        for name, theta in ((LAYER_FULL, 1_000_000.0), (LAYER_SLIDING, 10_000.0))
    )
    return _rope(full, context), _rope(sliding, context)


def _rope(document: Mapping[str, Any], context: int) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    fields: dict[str, Any] = {"rope_theta": document.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        given = document.get(key)
        if given is not None and not isinstance(given, dict):
            raise ModelLoadError(f"The model's {key} is not a JSON object.")
        fields.update(given or {})
    if document.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1):
        raise NotNative("Partial rotary embeddings are not supported.")
    theta = _number(fields, "rope_theta", 1.0, 1e15, default=10_000.0)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ("linear", "llama3"):
        raise NotNative(f"RoPE type {str(kind)[:64]!r} is not supported.")
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
    """Per layer. A window that reaches over the whole context is none, except where it also says
    which RoPE a layer has.
    """
    if not _slides(document, kind):
        return (0,) * layers
    window = _integer(document, "sliding_window", 1, 1 << 30, default=WINDOW_IMPLIED)
    if window >= context and kind != "gemma3_text":
        return (0,) * layers
    if kind in ("mistral", "phi3"):
        return (window,) * layers
    types = document.get("layer_types")
    if types is None:
        types = _implied_types(document, kind, layers)
    known = isinstance(types, list) and all(t in (LAYER_FULL, LAYER_SLIDING) for t in types)
    if not known or len(types) != layers:
        raise ModelLoadError("The model's layer_types do not name one known type per layer.")
    return tuple(window if t == LAYER_SLIDING else 0 for t in types)


def _slides(document: Mapping[str, Any], kind: str) -> bool:
    """Whether some layers have windows."""
    if kind in ("gemma2", "gemma3_text"):
        if document.get("sliding_window", WINDOW_IMPLIED) is None:
            raise ModelLoadError("The model's sliding_window is null, which its type needs.")
        return True
    if kind == "phi3":
        return document.get("sliding_window") is not None
    flagged = kind in ("qwen2", "qwen3") and _flag(document, "use_sliding_window")
    return (kind == "mistral" or flagged) and document.get("sliding_window", 1) is not None


def _implied_types(document: Mapping[str, Any], kind: str, layers: int) -> list[str]:
    """What an absent layer_types means."""
    if kind in ("gemma2", "gemma3_text"):
        every = 2
        if kind == "gemma3_text":
            every = _integer(document, "sliding_window_pattern", 1, 1 << 20, default=6)
        return [LAYER_SLIDING if (i + 1) % every else LAYER_FULL for i in range(layers)]
    first = _integer(document, "max_window_layers", 0, 1 << 20, default=28)
    return [LAYER_FULL if i < first else LAYER_SLIDING for i in range(layers)]


def end_tokens(
    document: Mapping[str, Any], generation: Mapping[str, Any], vocab: int
) -> tuple[int, ...]:
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
