"""Small random decoders in torch with their keys and values in a codec."""

from __future__ import annotations

from dataclasses import replace

import torch
from random_decoders import CPU, config_of, random_weights

from kernels.backends import backend_for
from kernels.codecs.choose import make_codec
from kernels.codecs.names import parse_codec
from kernels.codecs.oscar import LayerRotations, fit_rotation, second_moment
from worker.models.config import ModelConfig
from worker.models.llama import LlamaModel
from worker.models.making import recode_oscar

CODECS = ("fp8", "turboquant:k4v4", "turboquant:k8v3", "turboquant:k4v2,boundary=1")
OSCAR = "oscar:sinks=16,window=24"  # so that short texts have all three kinds of tokens


def rotations(config: ModelConfig) -> list[LayerRotations]:
    """Bases of random directions, of each layer and KV head."""
    generator, dim = torch.Generator().manual_seed(3), config.head_dim
    shape = (config.layers, 2, config.kv_heads, 4 * dim, dim)
    rows = torch.randn(shape, generator=generator) * torch.rand(dim, generator=generator)
    return [LayerRotations(*fit_rotation(second_moment(layer))) for layer in rows]


def coded(
    codec: str, case: str = "untied", dtype: torch.dtype = torch.float32, gain: float = 1.0
) -> LlamaModel:
    """A decoder of random_decoders.CASES, queries, keys and values `gain` times as large; codec as
    an option says it."""
    config, name = config_of(case), parse_codec(codec)
    assert name is not None
    weights = random_weights(config, dtype)
    model = LlamaModel(
        config,
        replace(weights, layers=tuple(replace(w, qkv=w.qkv * gain) for w in weights.layers)),
        backend_for(CPU),
        name="small",
        fingerprint="small",
        block_tokens=16,
        context_tokens=config.context_tokens,
    )
    if name.kind == "oscar":
        recode_oscar(model, name, config, rotations(config), weights.embedding)
        return model
    found = make_codec(name, config.layers, config.head_dim, dtype)
    if found is not None:
        model.recode(found)
    return model
