"""A GGUF file as a model: its metadata as a config.json, its tensors by Hugging Face names.

llama.cpp's writer changes some weights on the way, which is undone here: query and key rows of
Llama files are ordered for interleaved RoPE, and Gemma's norms have their offset of 1 added.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from seams.errors import ModelLoadError
from worker.models.config import ModelConfig, parse_config
from worker.models.gguf_file import GgufFile
from worker.models.rope import RopeConfig, inverse_frequencies

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""general.architecture -> model_type. "llama" covers Mistral and SmolLM too."""

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
POST_NORMED = {  # Gemma 2 and 3
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {  # of every Llama 3.1-3.3; a file holds only the factors that follow from it
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED_BY_HIDDEN = {("gemma2", 46), ("gemma3_text", 62)}  # the 27B models, by their layers
END_TOKENS = ("eos", "eot", "eom")


class GgufModel:
    """A TensorSource over one file."""

    def __init__(self, path: Path) -> None:
        """Reads everything but the tensors; raises ModelLoadError."""
        self._file = GgufFile(path)
        self._bytes_read = 0
        self.config = parse_config(self._document())
        self._stored_name = {_hugging_face_name(n, self.config): n for n in self._file.tensors}
        self._stored_name.pop(ROPE_FACTORS, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The mapping goes with the last reference."""

    @property
    def names(self) -> list[str]:
        """Of all tensors, in Hugging Face's words where there is one, sorted."""
        return sorted(self._stored_name)

    @property
    def files(self) -> list[Path]:
        """The one file."""
        return [self._file.path]

    @property
    def bytes_total(self) -> int:
        """Of the file."""
        return self._file.path.stat().st_size

    @property
    def bytes_read(self) -> int:
        """Of the stored tensors."""
        return self._bytes_read

    @property
    def dtype(self) -> torch.dtype:
        """The embedding's; bf16 where that is quantised."""
        kind = self._file.tensors["token_embd.weight"].kind.name
        return {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)

    @property
    def settings(self) -> str:
        """What is undone on reading follows from the architecture, so it is part of identity."""
        return f"gguf {self._file.metadata['general.architecture']}"

    def tensor(self, name: str) -> torch.Tensor:
        """See TensorSource.tensor; float32."""
        stored = self._stored_name.get(name)
        if stored is None:
            raise ModelLoadError(f"The GGUF file lacks the tensor {name}.")
        self._bytes_read += self._file.tensors[stored].bytes
        values = self._file.dense(stored)
        if self.config.model_type == "llama" and ".attn_q." in stored:
            values = _half_split(values, self.config.query_heads)
        elif self.config.model_type == "llama" and ".attn_k." in stored:
            values = _half_split(values, self.config.kv_heads)
        elif self.config.norm_offset and name.endswith("norm.weight"):
            values = values - np.float32(self.config.norm_offset)
        return torch.from_numpy(np.ascontiguousarray(values))

    def stored(self) -> Iterator[tuple[list[object], torch.Tensor]]:
        """See TensorSource.stored: under the file's own names."""
        for name, tensor in sorted(self._file.tensors.items()):
            self._bytes_read += tensor.bytes
            data = torch.from_numpy(self._file.raw(name).copy())
            yield [name, tensor.kind.name, list(tensor.shape)], data

    # --- metadata ----------------------------------------------------------------------------

    def _document(self) -> dict[str, Any]:
        """The file's metadata as the config.json that it was made from."""
        metadata, tensors = self._file.metadata, self._file.tensors
        architecture = str(metadata.get("general.architecture"))
        kind = MODEL_TYPES.get(architecture)
        if kind is None:
            known = ", ".join(MODEL_TYPES)
            raise ModelLoadError(
                f"GGUF architecture {architecture[:64]!r} is not supported ({known})."
            )
        if metadata.get("split.count", 0) not in (0, 1):
            raise ModelLoadError("The GGUF file is one part of several; merge them into one first.")
        if metadata.get(f"{architecture}.expert_count", 0):
            raise ModelLoadError("GGUF files of mixtures of experts are not supported.")
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelLoadError("The GGUF file lacks the tensor token_embd.weight.")
        given = {
            key: metadata.get(f"{architecture}.{name}")
            for key, name in (
                ("hidden_size", "embedding_length"),
                ("intermediate_size", "feed_forward_length"),
                ("num_hidden_layers", "block_count"),
                ("num_attention_heads", "attention.head_count"),
                ("num_key_value_heads", "attention.head_count_kv"),
                ("head_dim", "attention.key_length"),
                ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
                ("max_position_embeddings", "context_length"),
                ("rope_theta", "rope.freq_base"),
                ("sliding_window", "attention.sliding_window"),
                ("attn_logit_softcapping", "attn_logit_softcapping"),
                ("final_logit_softcapping", "final_logit_softcapping"),
            )
        }
        document: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        document |= {
            "model_type": kind,
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "rope_scaling": self._rope_scaling(architecture, document),
            "eos_token_id": self._end_tokens(embedding.shape[0]),
        }
        self._check_heads(architecture, document)
        if kind in ("gemma2", "gemma3_text"):
            document["query_pre_attn_scalar"] = _query_scalar(kind, document)
        return document

    def _end_tokens(self, vocab: int) -> list[int]:
        found = [self._file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in END_TOKENS]
        return [token for token in found if isinstance(token, int) and token < vocab]

    def _check_heads(self, architecture: str, document: dict[str, Any]) -> None:
        metadata = self._file.metadata
        width = metadata.get(f"{architecture}.attention.key_length")
        heads, hidden = document.get("num_attention_heads"), document.get("hidden_size")
        if width is None and type(heads) is int and type(hidden) is int and heads > 0:
            width = document["head_dim"] = hidden // heads
        for name in ("attention.value_length", "rope.dimension_count"):
            if metadata.get(f"{architecture}.{name}", width) != width:
                raise ModelLoadError(f"GGUF files whose {name} is not the head's are unsupported.")

    def _rope_scaling(self, architecture: str, document: dict[str, Any]) -> dict[str, Any] | None:
        metadata, prefix = self._file.metadata, f"{architecture}.rope.scaling."
        if ROPE_FACTORS in self._file.tensors:
            return self._llama3_scaling(document)
        kind = metadata.get(prefix + "type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": metadata.get(prefix + "factor")}

    def _llama3_scaling(self, document: dict[str, Any]) -> dict[str, Any]:
        """Llama 3.1's RoPE from the factors that the file has for every frequency."""
        factors = self._file.dense(ROPE_FACTORS).reshape(-1)
        theta, dim = document.get("rope_theta", 10_000.0), 2 * len(factors)
        factor = float(factors.max())
        if isinstance(theta, int | float) and 1 <= theta <= 1e15 and 1 <= factor <= 1e6:
            original = int(LLAMA3_ROPE["original_max_position_embeddings"])
            guess = RopeConfig(float(theta), "llama3", factor, original_tokens=original)
            plain = inverse_frequencies(RopeConfig(float(theta)), dim)
            wanted = plain / inverse_frequencies(guess, dim)
            if torch.allclose(wanted, torch.from_numpy(factors), rtol=1e-4, atol=0.0):
                return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
        raise ModelLoadError("The GGUF file's rope_freqs are not those of a Llama 3 model.")


def _query_scalar(kind: str, document: dict[str, Any]) -> Any:
    """What a query is scaled by, before the root: no metadata says so, but llama.cpp knows."""
    hidden, heads = document.get("hidden_size"), document.get("num_attention_heads")
    by_hidden = (kind, document.get("num_hidden_layers")) in SCALED_BY_HIDDEN
    if by_hidden and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden / heads
    return document.get("head_dim")


def _hugging_face_name(name: str, config: ModelConfig) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; others stay as they are."""
    stem, _, ending = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{ending}"
    prefix, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    names = LAYER | POST_NORMED if config.post_norms else LAYER
    if config.model_type == "phi3":
        names = LAYER | {"ffn_up": "mlp.gate_up_proj"}
    if prefix != "blk" or part not in names or not (number.isascii() and number.isdecimal()):
        return name
    return f"model.layers.{number}.{names[part]}.{ending}"


def _half_split(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from pairs side by side (0, h, 1, h+1, ...) to halves (0, 1, ..., h, ...).

    A tensor whose rows are no multiple of the heads is left to the check of its shape.
    """
    rows = len(values)
    if rows % (2 * heads):
        return values
    paired = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)
