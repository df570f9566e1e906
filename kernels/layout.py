"""How the bytes of a block are laid out; knows nothing of sequences or attention.

One block of a KV group is one contiguous run: [layers][keys, values][kv_heads][block_tokens][dim].
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class PageLayout:
    """The layout of one group's blocks on one rank. `dtype` is a key of DTYPES."""

    layers: int
    kv_heads: int
    block_tokens: int
    qk_dim: int
    v_dim: int
    dtype: str

    def __post_init__(self) -> None:
        assert self.dtype in DTYPES, f"unknown dtype {self.dtype}"
        assert min(self.layers, self.kv_heads, self.block_tokens, self.qk_dim, self.v_dim) > 0

    @property
    def layer_elements(self) -> int:
        """Numbers in one page: keys, then values."""
        return self.kv_heads * self.block_tokens * (self.qk_dim + self.v_dim)

    @property
    def block_bytes(self) -> int:
        """Size of one block, all layers."""
        return self.layers * self.layer_elements * DTYPES[self.dtype].itemsize

    def pages(self, pool: torch.Tensor) -> list[LayerPages]:
        """One loader per layer, views into `pool` (uint8 [blocks, block_bytes], contiguous)."""
        assert pool.dtype == torch.uint8 and pool.is_contiguous()
        assert pool.dim() == 2 and pool.shape[1] == self.block_bytes, "pool does not fit the layout"
        numbers = pool.view(DTYPES[self.dtype])
        shared = StepPlaces(self)
        return [LayerPages(self, numbers, layer, shared) for layer in range(self.layers)]


class _Gathered(NamedTuple):
    """Where the pages of one `blocks` tensor are copied to, whatever the layer."""

    rows: torch.Tensor  # int64, head rows in order [K, V][kv_heads][B], from a layer's first
    into: torch.Tensor  # [rows, block_tokens * dim], part of the scratch buffer
    keys: torch.Tensor  # views of it, [B, Hkv, block_tokens, dim]
    values: torch.Tensor


class StepPlaces:
    """What the layers of one pool share: what is derived once a step, and one scratch buffer."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._places: MutableMapping[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
        self._places = WeakTensorKeyDictionary()
        self._gathered: MutableMapping[torch.Tensor, _Gathered] = WeakTensorKeyDictionary()
        self._scratch: torch.Tensor | None = None

    def places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of each slot."""
        found = self._places.get(slots)
        if found is None:
            tokens = self._layout.block_tokens
            found = (torch.div(slots, tokens, rounding_mode="floor"), slots % tokens)
            self._places[slots] = found
        return found

    def gathered(self, blocks: torch.Tensor) -> _Gathered:
        """Rows and destination of `blocks`; needs keys and values of equal width."""
        found = self._gathered.get(blocks)
        if found is None:
            layout = self._layout
            heads = 2 * layout.kv_heads
            first = torch.arange(heads, device=blocks.device).unsqueeze(1)
            rows = (first + blocks * (heads * layout.layers)).flatten()
            width = layout.block_tokens * layout.qk_dim
            into = self._buffer(rows.numel() * width, blocks.device).view(rows.numel(), width)
            shape = (2, layout.kv_heads, blocks.numel(), layout.block_tokens, layout.qk_dim)
            keys, values = into.view(shape).transpose(1, 2)
            found = _Gathered(rows, into, keys, values)
            self._gathered[blocks] = found
        return found

    def _buffer(self, count: int, device: torch.device) -> torch.Tensor:
        """`count` numbers, reused: fresh memory for every layer would cost its page faults."""
        if self._scratch is None or self._scratch.numel() < count:
            self._scratch = torch.empty(count, dtype=DTYPES[self._layout.dtype], device=device)
        return self._scratch[:count]


class LayerPages:
    """PageLoader of one layer. `keys` [blocks, Hkv, block_tokens, qk_dim] and `values` [..., v_dim]
    are strided views into the pool, for kernels that read pages in place."""

    def __init__(
        self, layout: PageLayout, numbers: torch.Tensor, layer: int, shared: StepPlaces
    ) -> None:
        """`numbers` [blocks, ...] of the layout's dtype; a row may be part of a larger block."""
        self.layout = layout
        self._shared = shared
        heads, tokens = layout.kv_heads, layout.block_tokens
        first = layer * layout.layer_elements
        width = heads * tokens * layout.qk_dim  # of the keys
        page = numbers[:, first : first + layout.layer_elements]
        blocks = numbers.shape[0]
        self.keys = page[:, :width].view(blocks, heads, tokens, layout.qk_dim)
        self.values = page[:, width:].view(blocks, heads, tokens, layout.v_dim)
        self._head_rows: torch.Tensor | None = None
        if layout.qk_dim == layout.v_dim and numbers.shape[0] > 0 and numbers.is_contiguous():
            # Keys and values alike: the pool is rows of one head's page, all of one size.
            flat = numbers.view(-1, tokens * layout.qk_dim)
            self._head_rows = flat[2 * heads * layer :]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As PageLoader.write; mutates the pool."""
        block, offset = self._shared.places(slots)
        if slots.dim() == 1:
            self.keys[block, :, offset] = keys
            self.values[block, :, offset] = values
            return
        head = torch.arange(self.layout.kv_heads, device=slots.device)
        self.keys[block, head, offset] = keys
        self.values[block, head, offset] = values

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As PageLoader.gather; memory order is head first, so one head's pages are contiguous."""
        if self._head_rows is None:
            return self.keys.index_select(0, blocks), self.values.index_select(0, blocks)
        gathered = self._shared.gathered(blocks)
        torch.index_select(self._head_rows, 0, gathered.rows, out=gathered.into)
        return gathered.keys, gathered.values
