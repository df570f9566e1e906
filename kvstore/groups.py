"""KV groups and representations: which blocks a model has, how they are written."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_BLOCK_TOKENS = 16


class GroupKind(StrEnum):
    """How far attention of a group's layers looks back, and what a block holds."""

    FULL = "full"  # keys and values of every position
    WINDOW = "window"  # keys and values of the last `window_tokens` positions
    LATENT = "latent"  # one compressed vector per position (MLA)
    STATE = "state"  # a recurrent state, not per position


@dataclass(frozen=True)
class KVGroup:
    """Layers whose blocks live and die together. Group 0 is always FULL or LATENT. A layer may be
    in two groups, which store it in different ways: codes of every position, and some exactly.

    `block_bytes` is the size of one block on one rank: one contiguous run that only the model's
    page layout can read. A block has `ranks` rectangles and is present once every rank has its own.
    """

    id: int
    kind: GroupKind
    layers: tuple[int, ...]
    block_bytes: int
    window_tokens: int = 0
    ranks: int = 1
    sink_tokens: int = 0  # of a WINDOW: leading positions that stay in sight of every row

    def __post_init__(self) -> None:
        assert self.block_bytes > 0 and self.ranks > 0
        assert (self.kind is GroupKind.WINDOW) == (self.window_tokens > 0)
        assert self.sink_tokens >= 0 and (self.window_tokens or not self.sink_tokens)
        assert self.id > 0 or self.kind in (GroupKind.FULL, GroupKind.LATENT)

    def repeats(self, other: KVGroup) -> bool:
        """Whether it holds in another form what `other` holds."""
        return self.id != other.id and not set(self.layers).isdisjoint(other.layers)

    def sink_blocks(self, block_tokens: int) -> int:
        """Leading blocks that a window never passes: those that hold any of its sinks."""
        return -(-self.sink_tokens // block_tokens)


@dataclass(frozen=True)
class Representation:
    """How the bytes of a block are written. Beside the key in records, never in it."""

    dtype: str  # bf16, fp16, fp32, or a codec's own
    codec: str = "none"
    calibration: str = ""  # hash of a codec's calibration file
    layout: str = "lkhtd"  # order of the dimensions inside a block
    rectangle: str = "all"  # which layers x heads a rank holds
    numerics: str = ""  # whose arithmetic alone may have computed them; empty = anybody's

    @property
    def id(self) -> str:
        """Short, stable, equal only for equal representations."""
        fields: tuple[str, ...] = (
            self.dtype,
            self.codec,
            self.calibration,
            self.layout,
            self.rectangle,
        )
        fields += (self.numerics,) if self.numerics else ()
        framed = b"".join(len(f).to_bytes(4, "little") + f.encode() for f in fields)
        return f"{self.dtype}-{hashlib.sha256(framed).hexdigest()[:12]}"
