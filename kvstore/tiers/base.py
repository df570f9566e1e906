"""The tier contract: places outside the device that hold blocks, and may lose any of them.

A tier knows block names and opaque bytes; no model, no request, no other tier. It is blocking and
thread-safe: who must not wait puts a TierQueue in front (queue.py). Whatever goes wrong inside a
tier is a status of the block it happened to; no method raises for what a disk, a network or another
process does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol


class BlockName(NamedTuple):
    """Which record, and what it must say of itself: a load compares all of it.

    `key` alone (with group and rank) finds it. `tokens` are the block's ids, u32 little endian
    (kvstore.keys.tokens_u32le); `parent` is the key before, the first 16 bytes of the root id for
    a chain's first block.
    """

    key: bytes  # 16
    parent: bytes  # 16
    tokens: bytes  # 4 * block_tokens
    group: int = 0
    rank: int = 0

    @property
    def slot(self) -> tuple[bytes, int, int]:
        """What finds it: two names of one slot are one place in a tier."""
        return self.key, self.group, self.rank


class Status(StrEnum):
    """What became of one block of a call."""

    OK = "ok"
    MISS = "miss"  # not there
    CORRUPT = "corrupt"  # there, but not what it was stored as: a miss that is counted by cause
    FAILED = "failed"  # the disk or the network said so
    LATE = "late"  # the deadline came first
    DROPPED = "dropped"  # no room, queue full, breaker open, or read only


@dataclass
class TierStats:
    """Counts since the start, but for the first four. Bytes are physical: what lies in the tier."""

    blocks: int = 0  # held now
    bytes: int = 0  # held now, with headers
    bytes_max: int = 0  # the cap; 0 = none of ours
    state: str = "ok"  # ok | broken (breaker open) | readonly | full
    hits: int = 0  # blocks loaded
    misses: int = 0
    stored: int = 0
    dropped: int = 0  # stores not made
    evicted: int = 0
    failed: int = 0  # loads and stores that the disk or the network refused, or that were late
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0  # time inside `load`, over all threads
    store_s: float = 0.0
    corrupt: Counter[str] = field(default_factory=Counter)  # by cause (record.FAULTS)


class Tier(Protocol):
    """One place for blocks. All calls may come from any thread, at the same time too.

    `deadline_s` is what a whole call may take, in seconds from now; a call comes back soon after
    it, with LATE for what was not done. A stored block is immutable: storing a name that is there
    is OK and may do nothing. Eviction is least recently used, leaf before parent: a call's names
    are ordered parent before child, and a hit on a child makes its parents at least as new.
    """

    @property
    def name(self) -> str:
        """host | disk | shared."""
        ...

    def lookup(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        """Per name, whether a load would probably find it. Counts as no use."""
        ...

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        """Fill into[i] (writable, contiguous, exactly as long as was stored) with names[i].
        Where the status is not OK its content is undefined. Nothing writes to it after the return.
        """
        ...

    def store(
        self, names: Sequence[BlockName], data: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        """Keep a copy of data[i] under names[i]. Nothing reads it after the return."""
        ...

    def discard(self, names: Sequence[BlockName]) -> None:
        """Forget these; unknown ones are ignored. Best effort where the tier is remote."""
        ...

    def names(self) -> list[BlockName]:
        """What it holds now; empty where only another process could tell."""
        ...

    def clear(self) -> None:
        """Forget everything of ours."""
        ...

    def stats(self) -> TierStats:
        """A copy."""
        ...

    def close(self) -> None:
        """Give everything back. Safe to repeat; other calls afterwards find nothing."""
        ...
