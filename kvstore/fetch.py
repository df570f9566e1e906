"""A fetch: which blocks of one prompt are outside the device, and how far on their way back.

Values only; who moves them is TieredStore. It knows block names, no bytes and no tier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvstore.tiers.base import BlockName

FETCH_S_MAX = 60.0  # a fetch that lasts longer is given up


class Place(IntEnum):
    """Where a block of a fetch is."""

    ABSENT = 0  # nowhere, or given up: to be computed
    ASKED = 1  # a remote tier is being asked
    COMING = 2  # on its way into host memory
    READY = 3  # in host memory


class Level(IntEnum):
    """Tiers as routers know them: numbers of banyan.v1.Tier."""

    HOST = 1
    DISK = 2
    SHARED = 3


LEVELS = {"host": Level.HOST, "disk": Level.DISK, "shared": Level.SHARED}


@dataclass(frozen=True, slots=True)
class TierOp:
    """`level` gained (stored) or lost these keys of a group."""

    level: Level
    stored: bool
    group: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One KV group of a fetch: per block the names of its ranks. `window` blocks before the end of
    what is reused are all that is ever read of them; 0 = all."""

    names: list[tuple[BlockName, ...]]
    block_bytes: int  # of one rank
    window: int = 0
    sinks: int = 0


class Fetch:
    """The blocks of one prompt that are not on the device, per KV group; entry i of a row is block
    `first + i`. Written by the store and, but for `front`, read by the engine's thread.

    What it says is ready may have been evicted since; what it says is absent may have come.
    """

    def __init__(self, first: int, rows: Sequence[Row]) -> None:
        count = len(rows[0].names)
        assert all(len(row.names) == count for row in rows)
        self.first = first
        self.rows = rows
        self.places = [bytearray(count) for _ in rows]  # Place
        self.sources = [bytearray(count) for _ in rows]  # Level it comes from
        self.missing = [[0] * count for _ in rows]  # names of a block that are still to come
        self.began_s = time.monotonic()
        self.asking = False
        self.asked_s = 0.0
        self.cancelled = False
        self.front = first  # blocks before it are computed: nobody wants them; the engine's
        self.due: dict[int, int] = {}  # level -> TierQueue.due of our last load there

    @property
    def end(self) -> int:
        """The block after the last one of the fetch."""
        return self.first + len(self.places[0])

    def place(self, group: int, block: int) -> Place:
        """Of a block of the prompt; ABSENT outside of what is fetched."""
        at = block - self.first
        if self.cancelled or not 0 <= at < len(self.places[group]):
            return Place.ABSENT
        return Place(self.places[group][at])

    def is_read(self, group: int, at: int, near: int) -> bool:
        """Whether entry `at` is worth a load, where the group's window begins at entry `near`."""
        return at >= near or self.first + at < self.rows[group].sinks

    def next_held(self, block: int) -> int | None:
        """The first block from `block` on that group 0 has or will have."""
        if self.cancelled:
            return None
        places = self.places[0]
        for at in range(max(0, block - self.first), len(places)):
            if places[at]:
                return self.first + at
        return None

    def cancel(self) -> None:
        """Nothing of it is wanted any more; what is queued is not loaded."""
        self.cancelled = True
