"""The bytes of a model's KV blocks on one device; knows no layer and no layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from kernels.native.decoder import PAGE_LAYOUT
from kernels.slots import Longs, SlotMover, Slots
from kvstore.groups import KVGroup
from seams.errors import OutOfBlocks
from worker.engine.plan import BlockCopy, StepPlan
from worker.models.base import ModelSpec
from worker.models.memory import available_bytes

POISON = 0xFF  # a float of any of our types whose bytes are all 0xFF is NaN

NewBytes = Callable[[int], torch.Tensor]
"""uint8 [count], zeros, on the pools' device; raises MemoryError or RuntimeError."""


class BlockPools:
    """One pool per group, uint8 [blocks, block_bytes]."""

    def __init__(self, groups: Sequence[KVGroup], device: torch.device) -> None:
        self._groups = tuple(groups)
        self._device = device
        self.pools: list[torch.Tensor] = []

    def allocate(self, blocks: tuple[int, ...], new_bytes: NewBytes | None = None) -> None:
        """Zeroed pools; raises OutOfBlocks if the device has not the memory for them now."""
        groups = self._groups
        assert not self.pools and len(blocks) == len(groups) and min(blocks) > 0
        shapes = [(count, group.block_bytes) for count, group in zip(blocks, groups, strict=True)]
        needed = sum(count * size for count, size in shapes)
        message = f"The device has no memory left for {needed / 2**30:.2f} GiB of KV blocks."
        if needed > available_bytes(self._device):
            raise OutOfBlocks(message)
        new_bytes = new_bytes or self._zeros
        try:
            self.pools = [new_bytes(count * size).view(count, size) for count, size in shapes]
        except (RuntimeError, MemoryError):
            raise OutOfBlocks(message) from None

    def read(self, group: int, block: int) -> bytes:
        """The block's bytes as they lie in the pool."""
        assert 0 <= block < len(self.pools[group])
        return self.pools[group][block].cpu().numpy().tobytes()

    def write(self, group: int, block: int, data: bytes) -> None:
        """Overwrite a block's bytes; len(data) == block_bytes."""
        pool = self.pools[group]
        assert 0 <= block < len(pool) and len(data) == pool.shape[1]
        pool[block].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def view(self, group: int, block: int) -> memoryview | None:
        """The block's own bytes; None if they are not in host memory."""
        if self._device.type != "cpu":
            return None
        return self.pools[group][block].numpy().data

    def poison(self, group: int, blocks: list[int]) -> None:
        """Make every key and value of the blocks NaN."""
        self.pools[group][torch.tensor(blocks, dtype=torch.int64, device=self._device)] = POISON

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Carry out a plan's copies: whole blocks, one run of bytes each; what lies behind
        copy.tokens is never read."""
        for copy in copies:
            pool = self.pools[copy.group]
            pool[copy.target].copy_(pool[copy.source])

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self._device)


class PooledModel:
    """What every model of one rank has of worker.models.base.Model: its spec and its blocks. Who
    derives from it sets `_spec` and `_pools`."""

    _spec: ModelSpec
    _pools: BlockPools

    @property
    def spec(self) -> ModelSpec:
        """Constant."""
        return self._spec

    @cached_property
    def _slots(self) -> list[SlotMover]:
        return self._make_slots()

    def _make_slots(self) -> list[SlotMover]:
        """Of every group, once the pools are there."""
        paired = self._spec.representation.layout == PAGE_LAYOUT
        pools = zip(self._spec.layouts, self._pools.pools, strict=True)
        return [Slots(layout, pool, paired=paired) for layout, pool in pools]

    def move_slots(
        self, group: int, sources: Longs, targets: Longs, rows: Longs | None = None
    ) -> None:
        """Copy token slots, all heads of them or one each."""
        self._slots[group].move(sources, targets, rows)

    def read_keys(self, group: int, slots: Longs) -> torch.Tensor:
        """The keys in these slots, float32 [layers, KV heads, n, dim]."""
        return self._slots[group].keys(slots)

    def read_queries(self, plan: StepPlan) -> torch.Tensor:
        """Not to be had unless a model overrides it."""
        raise NotImplementedError("This model does not tell its queries.")

    def read_block(self, group: int, block: int, rank: int = 0) -> bytes:
        """The block's bytes as they lie in the pool."""
        assert rank == 0
        return self._pools.read(group, block)

    def write_block(self, group: int, block: int, data: bytes, rank: int = 0) -> None:
        """Overwrite a block's bytes; len(data) == block_bytes."""
        assert rank == 0
        self._pools.write(group, block, data)

    def block_view(self, group: int, block: int, rank: int = 0) -> memoryview | None:
        """The block's own bytes; None if they are not in host memory."""
        assert rank == 0
        return self._pools.view(group, block)

    def poison(self, group: int, blocks: list[int]) -> None:
        """Make every key and value of the blocks NaN."""
        self._pools.poison(group, blocks)
