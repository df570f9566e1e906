"""Token slots of pages of codes, whose keys can be read too: only a codec says what a code stands
for. Knows no sequence.
"""

from __future__ import annotations

import torch

from kernels.codecs.pages import CodecLayout, CodecPages
from kernels.slots import CodedSlots, Longs


class CodeSlots(CodedSlots):
    """Implements SlotMover on one group's pool, uint8 [blocks, block_bytes], contiguous."""

    def __init__(self, layout: CodecLayout, pool: torch.Tensor) -> None:
        local = (layer.keys.token_local and layer.values.token_local for layer in layout.layers)
        assert all(local), "codes that depend on each other cannot be moved one by one"
        self._pages = layout.pages(pool)
        super().__init__([(page.keys, page.values) for page in self._pages])

    def keys(self, slots: Longs) -> torch.Tensor:
        """The keys in `slots` [n], as the codes stand for them: float32 [layers, kv_heads, n, dim],
        on the pool's device, in the model's own basis."""
        block, offset = self._places(slots)
        found = []
        for page in self._pages:
            stored = page.keys[block, :, offset].transpose(0, 1)  # [Hkv, n, ...]
            if isinstance(page, CodecPages):
                codec = page.codec.keys
                stored = codec.turn_back(codec.decode(stored))
            found.append(stored.float())
        return torch.stack(found)
