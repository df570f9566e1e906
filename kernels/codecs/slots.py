"""Single token slots inside pages of codes: moved from page to page, and read. Knows no sequence.

As kernels/slots.py does for pages of numbers. A vector's code depends on that vector alone, so its
bytes move as they are. A slot is block * block_tokens + offset, as in a StepPlan.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.codecs.pages import CodecLayout, CodecPages
from kernels.layout import LayerPages

Longs = npt.NDArray[np.int64]


class CodeSlots:
    """Views of one group's pool, uint8 [blocks, block_bytes], contiguous, by token slot."""

    def __init__(self, layout: CodecLayout, pool: torch.Tensor) -> None:
        local = (layer.keys.token_local and layer.values.token_local for layer in layout.layers)
        assert all(local), "codes that depend on each other cannot be moved one by one"
        self._heads, self._tokens = layout.kv_heads, layout.block_tokens
        self._layers = layout.pages(pool)
        self._device = pool.device

    def move(self, sources: Longs, targets: Longs, rows: Longs | None = None) -> None:
        """Copy slots, int64 [n] each. No target may be a source: nobody promises an order.

        With `rows` [n], layer * kv_heads + head, only that layer's head of each slot is copied.
        """
        assert len(sources) == len(targets) and (rows is None or len(rows) == len(sources))
        for number, layer in enumerate(self._layers):
            if rows is None:
                self._move(layer, sources, targets, slice(None))
                continue
            mine = rows // self._heads == number
            head = torch.from_numpy(rows[mine] % self._heads).to(self._device)
            self._move(layer, sources[mine], targets[mine], head)

    def keys(self, slots: Longs) -> torch.Tensor:
        """The keys in `slots` [n], as the codes stand for them: float32 [layers, kv_heads, n, dim],
        on the pool's device, in the model's own basis."""
        block, offset = self._places(slots)
        found = []
        for layer in self._layers:
            stored = layer.keys[block, :, offset].transpose(0, 1)  # [Hkv, n, ...]
            if isinstance(layer, CodecPages):
                codec = layer.codec.keys
                stored = codec.turn_back(codec.decode(stored))
            found.append(stored.float())
        return torch.stack(found)

    def _move(
        self,
        layer: CodecPages | LayerPages,
        sources: Longs,
        targets: Longs,
        head: torch.Tensor | slice,
    ) -> None:
        block, offset = self._places(sources)
        into, place = self._places(targets)
        for pages in (layer.keys, layer.values):
            pages[into, head, place] = pages[block, head, offset]

    def _places(self, slots: Longs) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int64)).to(self._device)
        return torch.div(index, self._tokens, rounding_mode="floor"), index % self._tokens
