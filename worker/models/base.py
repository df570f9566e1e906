"""The model contract: what the engine knows of a model, which owns its pools' bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.layout import PageLayout
from kernels.slots import Longs
from kvstore.groups import KVGroup, Representation
from worker.engine.plan import StepPlan


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter that a model can compute; a request names it by its place, from 1."""

    name: str
    fingerprint: str  # of its weights and scales: part of the key root


@dataclass(frozen=True)
class ModelSpec:
    """What a model is, apart from its weights."""

    name: str
    fingerprint: str  # hash of configuration and tensors: part of the key root
    vocab_tokens: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    block_tokens: int
    groups: tuple[KVGroup, ...]
    representation: Representation
    numeric_class: str  # replicas of one class give the same tokens
    adapters: tuple[AdapterSpec, ...] = ()
    layouts: tuple[PageLayout, ...] = ()  # of each group's blocks; none: bytes nobody may look into
    reads_keys: bool = False  # whether the model has `read_keys`
    reads_queries: bool = False  # and `read_queries`


class Model(Protocol):
    """A decoder over paged KV."""

    @property
    def spec(self) -> ModelSpec:
        """Constant."""
        ...

    def allocate(self, blocks: tuple[int, ...]) -> None:
        """Make one pool per group (uint8[blocks[g], block_bytes] on every rank); once, before use.

        Raises OutOfBlocks if the memory is not there.
        """
        ...

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Run the copies, write the step's KV into the plan's slots, return float32 logits.

        Shape [len(plan.samples), vocab]: row i belongs to plan.samples[i], until the next call.
        """
        ...

    def move_slots(
        self, group: int, sources: Longs, targets: Longs, rows: Longs | None = None
    ) -> None:
        """Copy token slots (block * block_tokens + offset) of a group on every rank, between steps.

        int64 [n] each; no target is a source. With `rows` [n], layer * KV heads + head (of the
        group's layers), only that head of each slot is copied; a model without `layouts` has none.
        """
        ...

    def read_keys(self, group: int, slots: Longs) -> torch.Tensor:
        """Copies of the keys in these slots, as stored: float32 [layers of the group, KV heads, n,
        dim]. Only of a model whose spec says reads_keys."""
        ...

    def read_queries(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step again that was computed before, and tell its queries: float32 [layers,
        query heads, N, dim], after RoPE, scaled. Only of a model whose spec says reads_queries."""
        ...

    def read_block(self, group: int, block: int, rank: int = 0) -> bytes:
        """The block's bytes as they lie in the pool."""
        ...

    def write_block(self, group: int, block: int, data: bytes, rank: int = 0) -> None:
        """Overwrite a block's bytes; len(data) == block_bytes."""
        ...

    def block_view(self, group: int, block: int, rank: int = 0) -> memoryview | None:
        """The block's own bytes, writable, as long as the pools live; None where they are not in
        host memory (then read_block and write_block copy)."""
        ...

    def poison(self, group: int, blocks: list[int]) -> None:
        """Fill freed blocks with what must never be read (NaN or a canary). Tests only."""
        ...
