"""Weights of a Llama-family decoder from safetensors files; knows nothing of pages or steps.

Projections that read the same input are fused at load: query, key, value into one matrix, gate and
up into one. No pickle: only safetensors are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from seams.errors import ModelLoadError
from worker.models.config import ModelConfig, read_json
from worker.models.source import TensorSource

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) now and then during a load, on the loading thread."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; absent biases and norms are None. Norms are
    float32, with the offset of their model type added; the rest has the model's dtype.
    """

    input_norm: torch.Tensor  # float32 [hidden]
    qkv: torch.Tensor  # [(Hq + 2 Hkv) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # float32 [head_dim]
    key_norm: torch.Tensor | None
    output: torch.Tensor  # [hidden, Hq * head_dim]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # float32 [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None
    attention_post_norm: torch.Tensor | None = None  # float32 [hidden], of attention's output
    mlp_post_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """All of a decoder, on one device, in one dtype. `head` is `embedding` where they are tied."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # float32 [hidden]
    head: torch.Tensor  # [vocab, hidden]


class Checkpoint:
    """The tensors of a folder, by name, whatever shard they lie in. Close it after use."""

    def __init__(self, folder: Path) -> None:
        """Opens (maps) every shard; raises ModelLoadError if one is missing or damaged."""
        self._folder = folder
        self._open_files = ExitStack()
        self._shards: dict[str, Any] = {}
        self._bytes_read = 0
        try:
            self._shard_of = self._index()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; tensors read before stay valid."""
        self._open_files.close()
        self._shards.clear()

    @property
    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        return sorted(self._shard_of)

    @property
    def files(self) -> list[Path]:
        """Of all shards, sorted."""
        return sorted(self._folder / shard for shard in set(self._shard_of.values()))

    @property
    def bytes_total(self) -> int:
        """Of all shards."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def bytes_read(self) -> int:
        """Of the tensors."""
        return self._bytes_read

    @property
    def dtype(self) -> torch.dtype:
        """What the checkpoint is stored in, as its embedding shows."""
        return self.tensor(EMBEDDING).dtype

    @property
    def settings(self) -> str:
        """None: the tensors are what they are."""
        return ""

    def stored(self) -> Iterator[tuple[list[object], torch.Tensor]]:
        """See TensorSource.stored."""
        for name in self.names:
            tensor = self.tensor(name)
            yield [name, str(tensor.dtype), list(tensor.shape)], tensor

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, as stored; ModelLoadError if it is not there or unreadable."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise ModelLoadError(f"The checkpoint lacks the tensor {name}.")
        try:
            tensor = self._shards[shard].get_tensor(name)
        except SafetensorError:
            raise ModelLoadError(f"The checkpoint's {shard} is damaged or incomplete.") from None
        assert isinstance(tensor, torch.Tensor)
        self._bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def _index(self) -> dict[str, str]:
        """tensor name -> shard file name."""
        if (self._folder / SINGLE).is_file():
            return dict.fromkeys(self._keys(SINGLE), SINGLE)
        if not (self._folder / INDEX).is_file():
            raise ModelLoadError(
                "The model folder has no model.safetensors and no index of shards."
            )
        weight_map = read_json(self._folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError("The model's index of shards has no weight_map.")
        shards = set(weight_map.values())
        # A shard is a plain name beside the index: nothing outside the folder is ever opened.
        if not all(isinstance(shard, str) and Path(shard).name == shard for shard in shards):
            raise ModelLoadError("The model's index of shards names something that is no file.")
        held = {shard: self._keys(shard) for shard in sorted(shards)}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise ModelLoadError(f"The checkpoint's {shard} lacks the tensor {name}.")
        return weight_map

    def _keys(self, shard: str) -> frozenset[str]:
        path = self._folder / shard
        if not path.is_file():
            raise ModelLoadError(f"The model folder lacks the shard {shard}.")
        try:
            opened = self._open_files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError):
            raise ModelLoadError(f"The checkpoint's {shard} is damaged or incomplete.") from None
        self._shards[shard] = opened
        return frozenset(opened.keys())


def checkpoint_dtype(source: TensorSource) -> torch.dtype:
    """What the model is meant to be computed in, or ModelLoadError if we do not compute in it."""
    dtype = source.dtype
    if dtype not in FLOATS:
        raise ModelLoadError(f"Weights of type {dtype} are not supported (bf16, fp16, fp32).")
    return dtype


class _Reader:
    """Copies tensors to the device, fused and cast, and counts what was used."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        norm_offset: float,
    ) -> None:
        self._source = source
        self._norm_offset = norm_offset
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._bytes_before = source.bytes_read
        self.used: set[str] = set()

    def norm(self, name: str, width: int) -> torch.Tensor:
        """A norm's weight: float32 [width], the offset added in float32."""
        return self.rows([(name, width)], None, torch.float32).add_(self._norm_offset)

    def rows(
        self,
        parts: Sequence[tuple[str, int]],
        columns: int | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The tensors `name` [rows, columns] (or [rows]) one below the other, in a new tensor."""
        shape = [sum(rows for _, rows in parts)] + ([] if columns is None else [columns])
        try:
            fused = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        except (RuntimeError, MemoryError):
            raise ModelLoadError("The device has no memory left for the model's weights.") from None
        first = 0
        for name, rows in parts:
            self._copy(name, fused[first : first + rows])
            first += rows
        return fused

    def _copy(self, name: str, target: torch.Tensor) -> None:
        stored = self._source.tensor(name)
        if stored.shape != target.shape:
            raise ModelLoadError(f"The tensor {name} does not have the shape its config says.")
        if stored.dtype not in FLOATS:
            raise ModelLoadError(f"The tensor {name} is of a type that is not supported.")
        target.copy_(stored)
        if target.dtype is torch.float16 and stored.dtype is not torch.float16:
            self._check_overflow(name, target)
        self.used.add(name)
        if self._progress is not None:
            done = self._source.bytes_read - self._bytes_before
            self._progress(done, self._source.bytes_total)

    @staticmethod
    def _check_overflow(name: str, target: torch.Tensor) -> None:
        if not bool(torch.isfinite(target).all()):
            raise ModelLoadError(f"The tensor {name} does not fit fp16; use bf16 or fp32.")


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Weights:
    """Read every tensor the decoder needs; raises ModelLoadError if one is missing, misshapen or
    left over (a leftover means that the model is not the one its config claims).
    """
    reader = _Reader(source, dtype, device, progress, config.norm_offset)
    embedding = reader.rows([(EMBEDDING, config.vocab_tokens)], config.hidden)
    layers = tuple(_layer(reader, config, f"model.layers.{i}.") for i in range(config.layers))
    norm = reader.norm("model.norm.weight", config.hidden)
    head = embedding
    if not config.tied:
        head = reader.rows([(HEAD, config.vocab_tokens)], config.hidden)
    _check_leftover(source, reader.used, config)
    return Weights(embedding, layers, norm, head)


def _layer(reader: _Reader, config: ModelConfig, prefix: str) -> LayerWeights:
    def rows(parts: Sequence[tuple[str, int]], columns: int | None) -> torch.Tensor:
        return reader.rows([(prefix + name, count) for name, count in parts], columns)

    def bias(present: bool, parts: Sequence[tuple[str, int]]) -> torch.Tensor | None:
        if not present:
            return None
        return rows([(name.removesuffix("weight") + "bias", count) for name, count in parts], None)

    def norm(present: bool, name: str, width: int = config.hidden) -> torch.Tensor | None:
        return reader.norm(prefix + name, width) if present else None

    query, key = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = [(f"self_attn.{n}_proj.weight", r) for n, r in (("q", query), ("k", key), ("v", key))]
    gate_up = [(f"mlp.{n}_proj.weight", config.intermediate) for n in ("gate", "up")]
    if config.model_type == "phi3":  # stored as we fuse them
        qkv = [("self_attn.qkv_proj.weight", config.qkv_rows)]
        gate_up = [("mlp.gate_up_proj.weight", 2 * config.intermediate)]
    output = [("self_attn.o_proj.weight", config.hidden)]
    down = [("mlp.down_proj.weight", config.hidden)]
    post = config.post_norms
    mlp_norm = "pre_feedforward_layernorm" if post else "post_attention_layernorm"
    return LayerWeights(
        input_norm=reader.norm(prefix + "input_layernorm.weight", config.hidden),
        qkv=rows(qkv, config.hidden),
        qkv_bias=bias(config.qkv_bias, qkv),
        query_norm=norm(config.qk_norm, "self_attn.q_norm.weight", config.head_dim),
        key_norm=norm(config.qk_norm, "self_attn.k_norm.weight", config.head_dim),
        output=rows(output, query),
        output_bias=bias(config.output_bias, output),
        mlp_norm=reader.norm(f"{prefix}{mlp_norm}.weight", config.hidden),
        gate_up=rows(gate_up, config.hidden),
        gate_up_bias=bias(config.mlp_bias, gate_up),
        down=rows(down, config.intermediate),
        down_bias=bias(config.mlp_bias, down),
        attention_post_norm=norm(post, "post_attention_layernorm.weight"),
        mlp_post_norm=norm(post, "post_feedforward_layernorm.weight"),
    )


def _check_leftover(source: TensorSource, used: set[str], config: ModelConfig) -> None:
    harmless = {HEAD} if config.tied else set()  # some writers store a tied head twice
    for name in source.names:
        # Old checkpoints carry RoPE's frequencies, which follow from the configuration.
        if name not in used | harmless and not name.endswith("rotary_emb.inv_freq"):
            raise ModelLoadError(f"The checkpoint's tensor {name} has no place in this model type.")
