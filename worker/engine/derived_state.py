"""DerivedState: what the pruned state of a conversation is, beside its blocks, and its name. Values
only; it knows neither tiers nor pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import numpy as np

from kvstore.keys import BlockKey, ChainSpec, tokens_u32le
from kvstore.objectnames import ObjectName, object_name
from worker.engine.retention.base import Ints

MAGIC = b"BDS\x01"  # the last byte: the layout's version
_HEAD = Struct("<4sIIIIII")  # magic, computed, fixed, plain blocks, tail, rows, stored


@dataclass(frozen=True, eq=False)
class DerivedState:
    """A pruned sequence between two steps.

    Of `computed` tokens as many are stored as `positions` [R, stored] has columns, position by
    slot. The first `plain_blocks` blocks of them are those of the plain chain of tokens, and no
    part of the object; `tail` are the ids behind the last full block of all computed tokens.
    """

    computed: int
    fixed: int  # Retained.fixed: it tells the first turn's prompt
    plain_blocks: int
    tail: tuple[int, ...]
    positions: Ints

    @property
    def stored(self) -> int:
        """Slots."""
        return int(self.positions.shape[1])

    def encode(self) -> bytes:
        """For `decode`. Pure."""
        rows, stored = self.positions.shape
        head = _HEAD.pack(
            MAGIC, self.computed, self.fixed, self.plain_blocks, len(self.tail), rows, stored
        )
        return head + tokens_u32le(self.tail) + self.positions.astype("<i4").tobytes()

    @classmethod
    def decode(cls, meta: bytes, block_tokens: int) -> DerivedState | None:
        """What `encode` wrote; None for anything else, another version's too."""
        if len(meta) < _HEAD.size:
            return None
        magic, computed, fixed, plain_blocks, tail, rows, stored = _HEAD.unpack_from(meta)
        size = _HEAD.size + 4 * (tail + rows * stored)
        if magic != MAGIC or tail != computed % block_tokens or not rows or len(meta) != size:
            return None
        ids = np.frombuffer(meta, "<u4", tail, _HEAD.size)
        positions = np.frombuffer(meta, "<i4", rows * stored, _HEAD.size + 4 * tail)
        positions = positions.reshape(rows, stored).astype(np.int32)
        state = cls(computed, fixed, plain_blocks, tuple(ids.tolist()), positions)
        return state if state._is_whole(block_tokens) else None

    def _is_whole(self, block_tokens: int) -> bool:
        """Whether every slot holds another token that was computed, and the leading ones their
        own."""
        leading = max(self.fixed, self.plain_blocks * block_tokens)
        if not 0 < self.stored < self.computed or leading > self.stored:
            return False
        ordered = np.sort(self.positions, axis=1)
        own = np.arange(leading, dtype=np.int32)
        return bool(
            ordered[:, 0].min() >= 0
            and ordered[:, -1].max() < self.computed
            and (ordered[:, 1:] > ordered[:, :-1]).all()
            and (self.positions[:, :leading] == own).all()
        )


def state_name(chain: ChainSpec, key: BlockKey, state_hash: str) -> ObjectName:
    """Of the state that the policy of this hash leaves of tokens whose last full block has this
    key. The tenant's salt is in it even where the key stands for blocks that all tenants share: the
    tail is not."""
    return object_name("turn", key, chain.salt, state_hash.encode())
