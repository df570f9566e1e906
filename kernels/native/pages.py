"""Where the compiled step finds keys and values in its blocks, and how they are written there.

Knows no sequence and no step. One block is one contiguous run, layer after layer. A layer in the
model's dtype lies there as kernels/native/decoder.py says; one in a codec has key codes
[kv_heads][bytes][block_tokens], so that one load takes one byte of 16 tokens, then value codes
[kv_heads][block_tokens][bytes]. The bytes themselves are the codec's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch

from kernels.codecs.base import VectorCodec
from kernels.codecs.codebook import lloyd_max
from kernels.codecs.fp8 import Fp8Vectors
from kernels.codecs.hadamard import hartley, signs
from kernels.codecs.model_dtype import PlainVectors
from kernels.codecs.names import FP8, KEY_FP8, MODEL, TURBOQUANT, CodecName
from kernels.codecs.pages import CodecLayout
from kernels.codecs.turboquant import TurboVectors
from kernels.layout import DTYPES, PageLayout
from kernels.slots import CodedSlots, Longs, SlotMover, Slots

CODE_LAYOUT = "lkh-planes"  # the Representation.layout of blocks with codes
BOOK_ENTRIES = 16
TABLES = ("scales", "centroids", "boundaries", "signs", "hartley")


@dataclass(frozen=True)
class VectorWay:
    """How the compiled step reads and writes one layer's keys, or its values.

    `bits` of a number: 0 is the model's dtype, 8 FP8, 1 to 4 TurboQuant.
    """

    bits: int = 0
    vector_bytes: int = 0
    scales: torch.Tensor | None = None  # float32 [kv_heads]
    centroids: torch.Tensor | None = None  # float32 [BOOK_ENTRIES], fewer ones repeated
    boundaries: torch.Tensor | None = None  # float32 [2 ** bits - 1], ascending
    signs: torch.Tensor | None = None  # float64 [dim]
    hartley: torch.Tensor | None = None  # float64 [odd, odd]
    odd: int = 1


class Vectors(ctypes.Structure):
    """A VectorWay as the compiled side reads it."""

    _fields_ = [
        ("bits", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in TABLES),
        ("odd", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class LayerPlaces:
    """One layer's share of its group's blocks: bytes from block to block, and in a block to its
    keys and values."""

    block_bytes: int
    keys_at: int
    values_at: int
    keys: VectorWay = VectorWay()
    values: VectorWay = VectorWay()


def as_vectors(way: VectorWay) -> Vectors:
    """Points into the tables of `way`, which must outlive it."""
    vectors = Vectors(bits=way.bits, bytes=way.vector_bytes, odd=way.odd)
    for name in TABLES:
        table = getattr(way, name)
        if table is not None:
            assert table.is_contiguous()
            setattr(vectors, name, table.data_ptr())
    return vectors


def unsupported_codec(name: CodecName) -> str:
    """Why the compiled step cannot store keys and values so, one sentence; empty if it can."""
    if name.kind in (MODEL, FP8, TURBOQUANT):
        return ""
    return f"The compiled CPU path has no KV codec {name.kind}."


def plain_places(layout: PageLayout) -> list[LayerPlaces]:
    """Of blocks in the model's dtype, in the group's order."""
    item = DTYPES[layout.dtype].itemsize
    keys = layout.kv_heads * layout.block_tokens * layout.qk_dim * item
    firsts = (layer * layout.layer_elements * item for layer in range(layout.layers))
    return [LayerPlaces(layout.block_bytes, first, first + keys) for first in firsts]


def coded_places(layout: CodecLayout) -> list[LayerPlaces]:
    """Of blocks in a codec, in the group's order; boundary layers hold the model's dtype."""
    rows = layout.kv_heads * layout.block_tokens
    return [
        LayerPlaces(
            layout.block_bytes,
            first,
            first + codec.keys.vector_bytes * rows,
            _way(codec.keys, layout.kv_heads),
            _way(codec.values, layout.kv_heads),
        )
        for codec, first in zip(layout.layers, _firsts(layout), strict=False)
    ]


def coded_views(layout: CodecLayout, layer: int, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of one coded layer's key codes and value codes in `pool` (uint8 [blocks, block_bytes]):
    [blocks, kv_heads, block_tokens, bytes] each, keys strided."""
    codec, first = layout.layers[layer], _firsts(layout)[layer]
    heads, tokens = layout.kv_heads, layout.block_tokens
    middle = first + codec.keys.vector_bytes * heads * tokens
    end = middle + codec.values.vector_bytes * heads * tokens
    keys = pool[:, first:middle].view(len(pool), heads, codec.keys.vector_bytes, tokens)
    values = pool[:, middle:end].view(len(pool), heads, tokens, codec.values.vector_bytes)
    return keys.transpose(2, 3), values


class LayeredSlots:
    """Implements SlotMover on one group's pool of codes: each layer by itself, since boundary
    layers hold numbers."""

    def __init__(self, layout: CodecLayout, pool: torch.Tensor) -> None:
        self._heads = layout.kv_heads
        self._layers = [_slots(layout, layer, pool) for layer in range(len(layout.layers))]

    def move(self, sources: Longs, targets: Longs, rows: Longs | None = None) -> None:
        """As SlotMover.move."""
        for number, layer in enumerate(self._layers):
            if rows is None:
                layer.move(sources, targets)
                continue
            mine = rows // self._heads == number
            layer.move(sources[mine], targets[mine], rows[mine] % self._heads)

    def keys(self, slots: Longs) -> torch.Tensor:
        """As SlotMover.keys: what codes stand for, in the model's own basis."""
        return torch.cat([layer.keys(slots) for layer in self._layers])


class _CodeSlots(CodedSlots):
    """Of one coded layer."""

    def __init__(self, layout: CodecLayout, layer: int, pool: torch.Tensor) -> None:
        keys, values = coded_views(layout, layer, pool)
        super().__init__([(keys, values)])
        self._codes, self._codec = keys, layout.layers[layer].keys

    def keys(self, slots: Longs) -> torch.Tensor:
        block, offset = self._places(slots)
        codes = self._codes[block, :, offset].transpose(0, 1).contiguous()
        return self._codec.turn_back(self._codec.decode(codes)).float().unsqueeze(0)


def _slots(layout: CodecLayout, layer: int, pool: torch.Tensor) -> SlotMover:
    plain = _plain(layout, layer)
    if plain is None:
        return _CodeSlots(layout, layer, pool)
    first = _firsts(layout)[layer]
    return Slots(plain, pool[:, first : first + plain.block_bytes], paired=True)


def _plain(layout: CodecLayout, layer: int) -> PageLayout | None:
    """The layout of one layer that has no codec."""
    keys = layout.layers[layer].keys
    if not isinstance(keys, PlainVectors):
        return None
    [name] = [name for name, dtype in DTYPES.items() if dtype is keys.dtype]
    return PageLayout(1, layout.kv_heads, layout.block_tokens, keys.dim, keys.dim, name)


def _firsts(layout: CodecLayout) -> list[int]:
    """Where each layer's page begins in a block."""
    sizes = (layout.page_bytes(layer) for layer in range(len(layout.layers)))
    return list(accumulate(sizes, initial=0))


def _way(codec: VectorCodec, kv_heads: int) -> VectorWay:
    if isinstance(codec, PlainVectors):
        return VectorWay()
    if isinstance(codec, Fp8Vectors):
        scales = codec.scales(kv_heads, torch.device("cpu")).float().contiguous()
        return VectorWay(KEY_FP8, codec.vector_bytes, scales)
    assert isinstance(codec, TurboVectors), "codecs of unsupported_codec are refused before"
    return turbo_way(codec)


def turbo_way(codec: TurboVectors) -> VectorWay:
    """The codec's; its tables live for ever, and codecs that write alike share them."""
    return _turbo_way(codec.dim, codec.bits, codec.seed, codec.vector_bytes)


@cache
def _turbo_way(dim: int, bits: int, seed: int, vector_bytes: int) -> VectorWay:
    """The matrix has a factor for the powers of two and one for the rest."""
    odd = dim
    while odd % 2 == 0:
        odd //= 2
    centroids = TurboVectors(dim, bits, seed=seed).centroids
    return VectorWay(
        bits,
        vector_bytes,
        centroids=centroids.repeat(BOOK_ENTRIES >> bits).contiguous(),
        boundaries=torch.tensor(lloyd_max(bits).boundaries, dtype=torch.float32),
        signs=signs(dim, seed),
        hartley=hartley(odd).contiguous(),
        odd=odd,
    )
