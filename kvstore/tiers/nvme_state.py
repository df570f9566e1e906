"""What the calls of one disk tier share: the lock, what it guards, and what it does not. No logic.

`lock` guards everything that changes; it is never held over a disk operation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.tiers.base import TierStats
from kvstore.tiers.disk_health import DiskHealth
from kvstore.tiers.nvme_index import SlotIndex
from kvstore.tiers.slot_io import SlotIO
from kvstore.tiers.slot_supply import SlotSupply
from seams.clock import Clock


@dataclass(slots=True)
class DiskState:
    """One per tier."""

    supply: SlotSupply
    io: SlotIO
    clock: Clock
    sizes: Mapping[int, int]  # group -> bytes of a block
    slot_bytes: Mapping[int, int]  # group -> bytes of its slot
    health: DiskHealth = field(default_factory=DiskHealth)
    stats: TierStats = field(default_factory=TierStats)
    closed: bool = False
    seq: int = 0  # of the record written last
    listed_seq: int = 0  # the highest when the snapshot of the start was made

    @property
    def lock(self) -> threading.Lock:
        """The supply's: one for all."""
        return self.supply.lock

    @property
    def index(self) -> SlotIndex:
        """What can be found."""
        return self.supply.index
