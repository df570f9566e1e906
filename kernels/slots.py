"""Single token slots inside pages: moved from page to page, and read. Knows how the numbers of a
page are ordered; knows no sequence and no reason.

Two orders: `plain` (kernels/layout.py) and `paired` (kernels/native/decoder.py), in which one
head's keys are [dim/STEP][block_tokens][STEP] and its values [block_tokens/STEP][dim][STEP]. A slot
is block * block_tokens + offset, as in a StepPlan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.layout import DTYPES, PageLayout

Longs = npt.NDArray[np.int64]

PAIR_BYTES = 4  # STEP numbers of the paired order
MOVED_BYTES_MAX = 32 << 20  # copied aside at once

_Rows = tuple[Any, Any]  # layer and KV head of each slot, or slices
_EVERY: _Rows = (slice(None), slice(None))


class SlotMover(Protocol):
    """The token slots of one group's pool."""

    def move(self, sources: Longs, targets: Longs, rows: Longs | None = None) -> None:
        """Copy slots, int64 [n] each. No target may be a source: nobody promises an order.

        With `rows` [n], layer * kv_heads + head, only that layer's head of each slot is copied.
        """
        ...

    def keys(self, slots: Longs) -> torch.Tensor:
        """Copies of the keys in `slots` [n]: float32 [layers, kv_heads, n, qk_dim], on the pool's
        device, rotated as they are stored."""
        ...


class Slots:
    """Views of one group's pool, uint8 [blocks, block_bytes], by token slot. It may be part of a
    pool with longer blocks."""

    def __init__(self, layout: PageLayout, pool: torch.Tensor, *, paired: bool = False) -> None:
        assert pool.dtype == torch.uint8 and pool.stride(1) == 1
        assert pool.dim() == 2 and pool.shape[1] == layout.block_bytes
        self._layout = layout
        self._device = pool.device
        dtype = DTYPES[layout.dtype]
        self._step = PAIR_BYTES // dtype.itemsize if paired else 0
        heads, tokens = layout.kv_heads, layout.block_tokens
        pages = pool.view(dtype).view(len(pool), layout.layers, layout.layer_elements)
        width = heads * tokens * layout.qk_dim
        keys, values = pages[..., :width], pages[..., width:]
        shape = (len(pool), layout.layers, heads)
        if step := self._step:
            assert tokens % step == 0 and layout.qk_dim % step == 0
            self._keys = keys.view(*shape, layout.qk_dim // step, tokens, step)
            self._values = values.view(*shape, tokens // step, layout.v_dim, step)
        else:
            self._keys = keys.view(*shape, tokens, layout.qk_dim)
            self._values = values.view(*shape, tokens, layout.v_dim)

    def move(self, sources: Longs, targets: Longs, rows: Longs | None = None) -> None:
        """As SlotMover.move."""
        assert len(sources) == len(targets) and (rows is None or len(rows) == len(sources))
        layout = self._layout
        slot_bytes = layout.block_bytes // layout.block_tokens
        if rows is not None:
            slot_bytes //= layout.layers * layout.kv_heads
        most = max(1, MOVED_BYTES_MAX // slot_bytes)
        for first in range(0, len(sources), most):
            part = slice(first, first + most)
            heads = _EVERY if rows is None else self._heads(rows[part])
            self._move(self._index(sources[part]), self._index(targets[part]), heads)

    def keys(self, slots: Longs) -> torch.Tensor:
        """As SlotMover.keys."""
        found: torch.Tensor = self._keys[self._key_place(self._index(slots), _EVERY)]
        if self._step:
            found = found.flatten(3)  # [n, layers, heads, dim/STEP, STEP]
        return found.permute(1, 2, 0, 3).float()

    def _move(self, sources: torch.Tensor, targets: torch.Tensor, heads: _Rows) -> None:
        self._keys[self._key_place(targets, heads)] = self._keys[self._key_place(sources, heads)]
        moved = self._values[self._value_place(sources, heads)]
        self._values[self._value_place(targets, heads)] = moved

    def _key_place(self, slots: torch.Tensor, heads: _Rows) -> tuple[Any, ...]:
        block, offset = self._places(slots)
        return (block, *heads, slice(None), offset) if self._step else (block, *heads, offset)

    def _value_place(self, slots: torch.Tensor, heads: _Rows) -> tuple[Any, ...]:
        block, offset = self._places(slots)
        if not self._step:
            return (block, *heads, offset)
        pair = torch.div(offset, self._step, rounding_mode="floor")
        return (block, *heads, pair, slice(None), offset % self._step)

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self._layout.block_tokens
        return torch.div(slots, tokens, rounding_mode="floor"), slots % tokens

    def _heads(self, rows: Longs) -> _Rows:
        index, heads = self._index(rows), self._layout.kv_heads
        return torch.div(index, heads, rounding_mode="floor"), index % heads

    def _index(self, values: Longs) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device)


class CodedSlots:
    """Slots of pages that hold codes, which are copied as they are: a code depends on its own token
    alone. `layers` are views [blocks, kv_heads, block_tokens, bytes or numbers] of keys and values.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._layers = list(layers)
        keys = self._layers[0][0]
        self._heads, self._tokens = keys.shape[1:3]

    def move(self, sources: Longs, targets: Longs, rows: Longs | None = None) -> None:
        """As SlotMover.move."""
        for number, layer in enumerate(self._layers):
            if rows is None:
                self._move(layer, sources, targets, slice(None))
                continue
            mine = rows // self._heads == number
            heads = self._index(rows[mine] % self._heads)
            self._move(layer, sources[mine], targets[mine], heads)

    def _move(
        self, layer: tuple[torch.Tensor, torch.Tensor], sources: Longs, targets: Longs, heads: Any
    ) -> None:
        (block, offset), (to_block, to_offset) = self._places(sources), self._places(targets)
        for part in layer:
            part[to_block, heads, to_offset] = part[block, heads, offset]

    def _places(self, slots: Longs) -> tuple[torch.Tensor, torch.Tensor]:
        return self._index(slots // self._tokens), self._index(slots % self._tokens)

    def _index(self, values: Longs) -> torch.Tensor:
        return torch.from_numpy(values).to(self._layers[0][0].device)

    def keys(self, slots: Longs) -> torch.Tensor:
        """Not to be had: what a code stands for is its codec's to say."""
        raise NotImplementedError("Keys in a codec are not read.")
