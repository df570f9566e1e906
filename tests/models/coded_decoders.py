"""Small random decoders in torch with their keys and values in a codec."""

from __future__ import annotations

from dataclasses import replace

import torch
from random_decoders import CPU, config_of, random_weights

from kernels.backends import backend_for
from kernels.codecs.choose import make_codec
from kernels.codecs.names import parse_codec
from worker.models.llama import LlamaModel

CODECS = ("fp8", "turboquant:k4v4", "turboquant:k8v3", "turboquant:k4v2,boundary=1")


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
    found = make_codec(name, config.layers, config.head_dim, dtype)
    if found is not None:
        model.recode(found)
    return model
