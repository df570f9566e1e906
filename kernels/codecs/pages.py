"""Pages of codes: how a block of encoded vectors is laid out, and the loader that reads and writes
them. Knows no sequence and no attention.

One block is one contiguous run, layer after layer: key codes [kv_heads][block_tokens][bytes], then
value codes. Layers may differ in size: boundary layers hold the model's dtype.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.attention import Attended, AttentionBackend, AttentionBatch, AttentionSpec, PageLoader
from kernels.codecs.base import LayerCodec
from kernels.codecs.model_dtype import PlainVectors
from kernels.layout import DTYPES, LayerPages, PageLayout, StepPlaces

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT_BYTES = 4  # of pages, so that those in a float type can be viewed as numbers


@dataclass(frozen=True)
class CodecLayout:
    """The layout of one group's blocks on one rank; `layers` in the group's order."""

    layers: tuple[LayerCodec, ...]
    kv_heads: int
    block_tokens: int

    def __post_init__(self) -> None:
        assert self.layers and min(self.kv_heads, self.block_tokens) > 0

    def page_bytes(self, layer: int) -> int:
        """Of one page: keys and values of one layer."""
        size = self.layers[layer].token_bytes * self.kv_heads * self.block_tokens
        return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def block_bytes(self) -> int:
        """Size of one block, all layers."""
        return sum(self.page_bytes(layer) for layer in range(len(self.layers)))

    def pages(self, pool: torch.Tensor) -> list[CodecPages | LayerPages]:
        """One loader per layer, views into `pool` (uint8 [blocks, block_bytes], contiguous)."""
        assert pool.dtype == torch.uint8 and pool.is_contiguous()
        assert pool.dim() == 2 and pool.shape[1] == self.block_bytes, "pool does not fit the layout"
        sizes = [self.page_bytes(layer) for layer in range(len(self.layers))]
        firsts = accumulate(sizes, initial=0)
        places = _Places(self.block_tokens)
        made: list[CodecPages | LayerPages] = []
        for codec, first, size in zip(self.layers, firsts, sizes, strict=False):
            part, plain = pool[:, first : first + size], self._plain(codec)
            if plain is None:
                made.append(CodecPages(self, codec, part, places))
            else:
                numbers = part.view(DTYPES[plain.dtype])
                made.append(LayerPages(plain, numbers, 0, StepPlaces(plain)))
        return made

    def _plain(self, codec: LayerCodec) -> PageLayout | None:
        """The layout of a page without a codec, read in place like any other."""
        keys, values = codec.keys, codec.values
        if not (isinstance(keys, PlainVectors) and isinstance(values, PlainVectors)):
            return None
        assert keys.dtype == values.dtype
        name = _NAMES[keys.dtype]
        return PageLayout(1, self.kv_heads, self.block_tokens, keys.dim, values.dim, name)


class _Places:
    """Block and offset of a step's slots, derived once for all layers."""

    def __init__(self, block_tokens: int) -> None:
        self._tokens = block_tokens
        self._found: MutableMapping[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
        self._found = WeakTensorKeyDictionary()

    def of(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._found.get(slots)
        if found is None:
            block = torch.div(slots, self._tokens, rounding_mode="floor")
            found = self._found[slots] = (block, slots % self._tokens)
        return found


class CodecPages:
    """PageLoader of one layer. `keys` uint8 [blocks, Hkv, block_tokens, bytes] and `values` are
    strided views into the pool, for kernels that read pages in place. What `gather` gives is in the
    codec's own basis: CodecAttention turns queries and output."""

    def __init__(
        self, layout: CodecLayout, codec: LayerCodec, pages: torch.Tensor, places: _Places
    ) -> None:
        self.layout, self.codec = layout, codec
        self._places = places
        heads, tokens, blocks = layout.kv_heads, layout.block_tokens, pages.shape[0]
        key_bytes, value_bytes = codec.keys.vector_bytes, codec.values.vector_bytes
        width, end = heads * tokens * key_bytes, heads * tokens * codec.token_bytes
        self.keys = pages[:, :width].view(blocks, heads, tokens, key_bytes)
        self.values = pages[:, width:end].view(blocks, heads, tokens, value_bytes)

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As PageLoader.write; mutates the pool. A row's bytes depend on that row alone."""
        block, offset = self._places.of(slots)
        key_codes = self.codec.keys.encode(keys.unsqueeze(2)).squeeze(2)
        value_codes = self.codec.values.encode(values.unsqueeze(2)).squeeze(2)
        if slots.dim() == 1:
            self.keys[block, :, offset] = key_codes
            self.values[block, :, offset] = value_codes
            return
        head = torch.arange(self.layout.kv_heads, device=slots.device)
        self.keys[block, head, offset] = key_codes
        self.values[block, head, offset] = value_codes

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As PageLoader.gather, float32 (the model's dtype in boundary layers)."""
        return (
            self.codec.keys.decode(self.keys.index_select(0, blocks)),
            self.codec.values.decode(self.values.index_select(0, blocks)),
        )


class CodecAttention:
    """AttentionBackend over pages of any kind: another backend's, with queries in the basis in
    which keys are stored and output brought back from that of values, each once a call."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name

    def attend(
        self,
        q: torch.Tensor,
        pages: PageLoader,
        batch: AttentionBatch,
        spec: AttentionSpec,
        want_lse: bool = False,
    ) -> Attended:
        """As AttentionBackend.attend."""
        if not isinstance(pages, CodecPages):
            return self._inner.attend(q, pages, batch, spec, want_lse)
        return attend_coded(self._inner, pages.codec, q, pages, batch, spec, want_lse)


def attend_coded(
    backend: AttentionBackend,
    codec: LayerCodec,
    q: torch.Tensor,
    pages: PageLoader,
    batch: AttentionBatch,
    spec: AttentionSpec,
    want_lse: bool = True,
) -> Attended:
    """Attention of `backend` over pages in the codec's basis: queries are turned into it and output
    is turned back, once each. As AttentionBackend.attend."""
    turned = codec.rotate_q(q).to(q.dtype)
    attended = backend.attend(turned, pages, batch, spec, want_lse)
    return Attended(codec.unrotate_o(attended.out).to(q.dtype), attended.lse)
