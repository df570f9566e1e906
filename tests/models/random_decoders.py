"""Small random decoders of every kind, built without files, and a dense float64 one beside them.

The dense decoder is written from the papers' formulas, without pages, batches or our modules, so
that an error of ours is not in it too. Only the rotary table is shared: its rounding is training's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.backends import backend_for
from worker.models.compiled import CompiledModel
from worker.models.config import ModelConfig, read_config
from worker.models.llama import LlamaModel
from worker.models.rope import RopeConfig, build_table
from worker.models.weights import Checkpoint, LayerWeights, Weights, load_weights

CPU = torch.device("cpu")
CONTEXT = 512

BASE = ModelConfig(
    model_type="llama",
    vocab_tokens=320,
    hidden=64,
    intermediate=96,
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    context_tokens=CONTEXT,
    tied=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig(10_000.0),
    windows=(0, 0),
    eos_token_ids=(2,),
    attention_scale=32**-0.5,
)


def _heads(query: int, kv: int, dim: int = 32, **more: Any) -> dict[str, Any]:
    scale = dim**-0.5
    return {"query_heads": query, "kv_heads": kv, "head_dim": dim, "attention_scale": scale, **more}


_GEMMA: dict[str, Any] = {
    "activation": "gelu_tanh",
    "embedding_scale": 64**0.5,
    "post_norms": True,
    "attention_cap": 20.0,
    "final_cap": 10.0,
    "attention_scale": 48**-0.5,
    "windows": (21, 0),
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mha": _heads(4, 4),
    "mqa": _heads(4, 1),
    "group_3": _heads(9, 3),
    "group_8": _heads(8, 1),
    "group_16": _heads(32, 2),
    "group_32": _heads(32, 1),
    "group_40": _heads(40, 1),
    "dim_64": _heads(6, 2, 64),
    "dim_96": _heads(4, 2, 96),
    "dim_128": _heads(4, 1, 128),
    "dim_256": _heads(2, 1, 256),
    "ragged": {"hidden": 72, "intermediate": 81, "vocab_tokens": 331},
    "narrow": {"hidden": 33, "intermediate": 17, "vocab_tokens": 5},
    "ragged_biased": {
        **{"hidden": 100, "intermediate": 119, "vocab_tokens": 301},
        **{"qkv_bias": True, "output_bias": True, "mlp_bias": True, "tied": False},
    },
    "untied": {"tied": False},
    "qwen2": {"qkv_bias": True},
    "biased": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen3": _heads(4, 2, 64, qk_norm=True),
    "mistral_window": {"windows": (21, 21)},
    "long_window": {"windows": (150, 150)},
    "mixed_window": {"layers": 4, "windows": (0, 37, 0, 37)},
    "gemma2": _GEMMA,
    "gemma3": {
        **_GEMMA,
        **{"attention_cap": 0.0, "final_cap": 0.0, "qk_norm": True, "layers": 3},
        **{"windows": (40, 0, 40), "local_rope": RopeConfig(100.0)},
        "rope": RopeConfig(1e6, "linear", 8.0),
    },
}


def config_of(name: str) -> ModelConfig:
    return replace(BASE, **CASES[name])


def random_weights(config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Wide enough that attention is far from uniform; norms and biases are no ones and zeros."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return (normal(outputs, inputs) * gain * inputs**-0.5).to(dtype)

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.3 * normal(width)

    def bias(present: bool, width: int) -> torch.Tensor | None:
        return (0.3 * normal(width)).to(dtype) if present else None

    def layer() -> LayerWeights:
        attended, inner = config.query_heads * config.head_dim, config.intermediate
        post, heads = config.post_norms, config.qk_norm
        return LayerWeights(
            input_norm=norm(config.hidden),
            qkv=matrix(config.qkv_rows, config.hidden, 1.5),
            qkv_bias=bias(config.qkv_bias, config.qkv_rows),
            query_norm=norm(config.head_dim) if heads else None,
            key_norm=norm(config.head_dim) if heads else None,
            output=matrix(config.hidden, attended),
            output_bias=bias(config.output_bias, config.hidden),
            mlp_norm=norm(config.hidden),
            gate_up=matrix(2 * inner, config.hidden),
            gate_up_bias=bias(config.mlp_bias, 2 * inner),
            down=matrix(config.hidden, inner),
            down_bias=bias(config.mlp_bias, config.hidden),
            attention_post_norm=norm(config.hidden) if post else None,
            mlp_post_norm=norm(config.hidden) if post else None,
        )

    embedding = normal(config.vocab_tokens, config.hidden).to(dtype)
    layers = tuple(layer() for _ in range(config.layers))
    head = embedding if config.tied else matrix(config.vocab_tokens, config.hidden, 2.0)
    return Weights(embedding, layers, norm(config.hidden), head)


def of_folder(folder: Path, dtype: torch.dtype) -> tuple[ModelConfig, Weights]:
    """A real decoder, in the same form."""
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        return config, load_weights(checkpoint, config, dtype, CPU)


def compiled(
    config: ModelConfig, weights: Weights, block_tokens: int = 16, threads: int = 1, isa: str = ""
) -> CompiledModel:
    return CompiledModel(
        config,
        weights,
        name="small",
        fingerprint="small",
        block_tokens=block_tokens,
        context_tokens=config.context_tokens,
        threads=threads,
        isa=isa,
    )


def in_torch(config: ModelConfig, weights: Weights, block_tokens: int = 16) -> LlamaModel:
    return LlamaModel(
        config,
        weights,
        backend_for(CPU),
        name="small",
        fingerprint="small",
        block_tokens=block_tokens,
        context_tokens=config.context_tokens,
    )


def token_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


class DenseDecoder:
    """The whole sequence at once, in float64, from weights of any dtype."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype)
        self._scale = float(scale)  # in the model's dtype, as in training

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """float64 [len(ids), vocab]."""
        weights, config = self._weights, self._config
        hidden = weights.embedding[torch.tensor(ids)].double() * self._scale
        for i, layer in enumerate(weights.layers):
            attended = self._attention(i, layer, self._norm(hidden, layer.input_norm))
            hidden = hidden + self._norm(attended, layer.attention_post_norm)
            fed = self._feed_forward(layer, self._norm(hidden, layer.mlp_norm))
            hidden = hidden + self._norm(fed, layer.mlp_post_norm)
        logits = self._norm(hidden, weights.norm) @ weights.head.double().T
        return _capped(logits, config.final_cap)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        mean = x.pow(2).mean(-1, keepdim=True)
        return x / (mean + self._config.norm_eps).sqrt() * weight.double()

    def _attention(self, number: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        config, count = self._config, len(x)
        heads = _linear(x, layer.qkv, layer.qkv_bias).view(count, -1, config.head_dim)
        q, k, v = heads.split([config.query_heads, config.kv_heads, config.kv_heads], dim=1)
        q, k = self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)
        q, k = self._rotated(number, q), self._rotated(number, k)
        group = config.query_heads // config.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.attention_scale
        scores = _capped(scores, config.attention_cap)
        distance = torch.arange(count).unsqueeze(1) - torch.arange(count)
        visible = (distance >= 0) & (distance < (config.windows[number] or count))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return _linear(attended, layer.output, layer.output_bias)

    def _rotated(self, number: int, x: torch.Tensor) -> torch.Tensor:
        config = self._config
        local = config.local_rope if config.windows[number] else None
        table = build_table(local or config.rope, config.head_dim, len(x), CPU)
        cos, sin = table.cos.double().unsqueeze(1), table.sin.double().unsqueeze(1)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def _feed_forward(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = _linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        gelu = self._config.activation == "gelu_tanh"
        active = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
        return _linear(active * up, layer.down, layer.down_bias)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ weight.double().T
    return y if bias is None else y + bias.double()


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return (x / cap).tanh() * cap if cap else x
