"""Writes GGUF files from Hugging Face checkpoints as llama.cpp's converter does, with gguf-py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind

ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
FLOAT_FIELDS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
Quantise = Callable[[np.ndarray], np.ndarray]


def gguf_name(name: str, post_norms: bool) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    stem, _, ending = name.rpartition(".")
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in whole:
        return f"{whole[stem]}.{ending}"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    if part == "post_attention_layernorm":
        return f"blk.{number}.{'post_attention_norm' if post_norms else 'ffn_norm'}.{ending}"
    return f"blk.{number}.{NAMES[part]}.{ending}"


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of every head from two halves to pairs side by side, written out row by row."""
    per_head = len(values) // heads
    order = []
    for head in range(heads):
        for pair in range(per_head // 2):
            order += [head * per_head + pair, head * per_head + per_head // 2 + pair]
    return values[order]


def converted(name: str, tensor: torch.Tensor, document: Mapping[str, Any]) -> np.ndarray:
    """float32, changed as llama.cpp wants it."""
    values = tensor.float().numpy()
    kind = document["model_type"]
    if kind in ("llama", "mistral") and ".q_proj." in name:
        return interleaved(values, document["num_attention_heads"])
    if kind in ("llama", "mistral") and ".k_proj." in name:
        return interleaved(values, document["num_key_value_heads"])
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    return values


def write_gguf(
    path: Path,
    document: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    kinds: Callable[[str, np.ndarray], Kind] = lambda name, values: Kind.F32,
    quantise: Mapping[Kind, Quantise] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> None:
    """`kinds` names the type of a tensor (GGUF name, values); `extra` are tensors as they are."""
    architecture = ARCHITECTURES.get(document["model_type"], document["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    for key, name in FIELDS.items():
        if document.get(key) is not None:
            writer.add_uint32(f"{architecture}.{name}", document[key])
    for key, name in FLOAT_FIELDS.items():
        if document.get(key) is not None:
            writer.add_float32(f"{architecture}.{name}", document[key])
    writer.add_token_list([f"<\u00e9{i}>" for i in range(document["vocab_size"])])
    if "eos_token_id" in document:
        writer.add_eos_token_id(document["eos_token_id"])
    metadata(writer)
    post_norms = document["model_type"] in ("gemma2", "gemma3_text")
    for name, tensor in tensors.items():
        stored_name = gguf_name(name, post_norms)
        values = converted(name, tensor, document)
        kind = kinds(stored_name, values)
        data = (quantise or {}).get(kind, lambda v, k=kind: gguf.quants.quantize(v, k))(values)
        writer.add_tensor(stored_name, data, raw_dtype=kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise_q4_k(values: np.ndarray) -> np.ndarray:
    """Q4_K by rounding to nearest: per 32 values a 6-bit scale and minimum, no search."""
    runs = values.reshape(-1, 8, 32).astype(np.float32)
    low = np.minimum(runs.min(axis=2), 0)
    step = (runs.max(axis=2) - low) / 15
    d = (step.max(axis=1) / 63).astype(np.float16)
    dmin = (-low.min(axis=1) / 63).astype(np.float16)
    safe, safe_min = (np.where(x == 0, 1, x).astype(np.float32)[:, None] for x in (d, dmin))
    scales = np.clip(np.round(step / safe), 0, 63).astype(np.uint8)
    minima = np.clip(np.round(-low / safe_min), 0, 63).astype(np.uint8)
    steps = safe * scales
    shifted = (runs + (safe_min * minima)[:, :, None]) / np.where(steps == 0, 1, steps)[:, :, None]
    numbers = np.clip(np.round(shifted), 0, 15).astype(np.uint8)
    blocks = np.zeros((len(runs), 144), dtype=np.uint8)
    blocks[:, 0:2] = d[:, None].view(np.uint8)
    blocks[:, 2:4] = dmin[:, None].view(np.uint8)
    for j in range(4):
        blocks[:, 4 + j] = scales[:, j] | (scales[:, j + 4] >> 4) << 6
        blocks[:, 8 + j] = minima[:, j] | (minima[:, j + 4] >> 4) << 6
        blocks[:, 12 + j] = (scales[:, j + 4] & 15) | (minima[:, j + 4] & 15) << 4
    for run in range(8):
        first = 16 + 32 * (run // 2)
        blocks[:, first : first + 32] |= numbers[:, run] << 4 * (run % 2)
    return blocks.reshape(*values.shape[:-1], -1)
