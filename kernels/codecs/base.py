"""The contract of KV codecs: how the vectors of a layer are stored. Knows no page, pool or model.

A vector is the keys or the values of one token and KV head, keys after RoPE. A codec may store it
in another orthonormal basis ("turned"); queries are turned once per step instead of every key, and
attention's output is turned back once, since dot products and weighted sums do not mind the basis.
Tensors are [..., heads, tokens, dim]: what differs by head broadcasts over the third axis from the
end. Every function is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class VectorCodec(Protocol):
    """One layer's keys, or its values."""

    @property
    def dim(self) -> int:
        """Of a vector."""
        ...

    @property
    def heads(self) -> int:
        """KV heads that each have a way of their own; 1 if all are alike."""
        ...

    @property
    def vector_bytes(self) -> int:
        """That one vector takes."""
        ...

    @property
    def token_local(self) -> bool:
        """Whether a vector's bytes depend on that vector alone: then a token may be moved."""
        ...

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """[..., H, T, dim] of any float type -> uint8 [..., H, T, vector_bytes]."""
        ...

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 [..., H, T, vector_bytes] -> [..., H, T, dim], turned; float32, or the float type
        that they are stored in. Bytes that `encode` never wrote give any numbers, or NaN."""
        ...

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        """Into the basis that `decode` answers in: [..., H, T, dim] -> float32."""
        ...

    def turn_back(self, vectors: torch.Tensor) -> torch.Tensor:
        """The inverse of `turn`."""
        ...


@dataclass(frozen=True)
class LayerCodec:
    """How one layer's keys and values are stored; chosen separately, since they differ in kind."""

    keys: VectorCodec
    values: VectorCodec

    @property
    def token_bytes(self) -> int:
        """Of one token and KV head, keys and values."""
        return self.keys.vector_bytes + self.values.vector_bytes

    def rotate_q(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries [N, Hq, dim] for keys as they are stored; float32 if that is another basis."""
        return _by_kv_head(self.keys, queries, back=False)

    def unrotate_o(self, out: torch.Tensor) -> torch.Tensor:
        """Attention's output [N, Hq, dim] over values as they are stored, in the model's basis."""
        return _by_kv_head(self.values, out, back=True)


def _by_kv_head(codec: VectorCodec, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
    """Query heads that share a KV head are turned as that head's vectors are."""
    grouped = rows.reshape(len(rows), codec.heads, rows.shape[1] // codec.heads, rows.shape[2])
    turned = codec.turn_back(grouped) if back else codec.turn(grouped)
    return turned.flatten(1, 2)


@dataclass(frozen=True)
class KVCodec:
    """How a model's blocks are stored, layer by layer.

    `id` and `calibration` say what another replica must share to read the blocks: they are part of
    a representation (kvstore/groups.py), never of a block's key.
    """

    id: str
    layers: tuple[LayerCodec, ...]  # by the model's layer number
    calibration: str = ""  # hash of what was fitted to the model's activations; "" = nothing was

    @property
    def token_local(self) -> bool:
        """Whether any token's bytes may be moved without the rest of its block."""
        return all(layer.keys.token_local and layer.values.token_local for layer in self.layers)

    def bytes_per_block(self, layer: int, block_tokens: int, kv_heads: int) -> int:
        """That one layer's share of a block takes."""
        return self.layers[layer].token_bytes * block_tokens * kv_heads

    def bytes_per_token(self, kv_heads: int) -> int:
        """Of all layers."""
        return sum(layer.token_bytes for layer in self.layers) * kv_heads
