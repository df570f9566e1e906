"""A replica's host tier: the production store and promoter over blocks of a few bytes.

Which blocks are kept, come back, or are computed again is decided by production code
(TieredStore, HostTier, Promoter) without any thread; only the time a copy takes is the engine's
model to charge. Tiers below host memory work on threads in real time and are left out.
"""

from __future__ import annotations

from kvstore.fetch import Level
from kvstore.tiered import TieredStore
from kvstore.tiers.host import HostTier
from simulate.workload import Grain
from worker.engine.paging import PagedMemory
from worker.engine.promotion import Promoter
from worker.engine.timing import StepTimes
from worker.models.fake import fake_model

SLOT_BYTES = 4096  # the smallest that the arena cuts


class HostMemory:
    """`host_blocks` blocks behind the `blocks` of the device."""

    def __init__(
        self, blocks: int, host_blocks: int, memory: PagedMemory, times: StepTimes, grain: Grain
    ) -> None:
        model = fake_model("full", block_tokens=grain.block_cells)
        model.allocate((blocks,))
        (group,) = model.spec.groups
        assert group.block_bytes <= SLOT_BYTES, "a block of so many cells has no slot"
        tier = HostTier(
            {0: group.block_bytes}, host_blocks * SLOT_BYTES, write_back=False, prefault=False
        )
        self._store = TieredStore(tier)
        self._block_tokens = grain.block_tokens
        self.promoter = Promoter(model, memory, self._store, times)

    @property
    def loaded_tokens(self) -> int:
        """Brought back to the device so far."""
        return self._store.loaded_blocks[Level.HOST] * self._block_tokens

    def close(self) -> None:
        """Give the memory back."""
        self._store.close()
