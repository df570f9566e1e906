"""Cuts a step's rows into tiles and their keys into splits, for attention that is batch invariant;
knows no keys, no values and no Triton.

Made once a step and kind of layer. Where a row lies in which tile changes nothing of its result, so
tiles follow the batch; where keys are cut does, so splits follow positions alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import AttentionBatch, AttentionSpec

SPLIT_KEYS = 512  # keys one program reads; a constant, or results would depend on the batch
TILE_ROWS = 64  # rows of one program: the query heads of a KV head, of one token after the other
# Parts of this many bytes at most are there at once; more rows are attended to in several launches.
WORKSPACE_BYTES_MAX = 256 << 20


@dataclass(frozen=True)
class Launch:
    """Rows that are attended to together: all, unless their parts would need too much memory.

    tiles int32 [T, 3]: sequence; first and end of its places row * group + query head of the group,
    at most TILE_ROWS of them from the first on.
    """

    row_first: int
    row_end: int
    tiles: torch.Tensor


@dataclass(frozen=True)
class RowPlan:
    """What is constant over a step for layers of one kind, on the pools' device."""

    spans: torch.Tensor  # int32 [N, Hkv, 2] first and end of the physical positions a row looks at
    splits: int  # most of any row
    tile_splits: int  # most of any tile
    launches: tuple[Launch, ...]
    kv_positions: torch.Tensor  # int64 [S, (Hkv,) length_max], or anything if there are none
    kv_strides: tuple[int, int]  # of sequence and KV head


def plan_rows(batch: AttentionBatch, spec: AttentionSpec) -> RowPlan:
    """The plan of `batch` for layers like `spec`. Kept in batch.plans."""
    group = spec.query_heads // spec.kv_heads
    key = ("rows", spec.kv_heads, group, spec.v_dim, spec.window)
    found: RowPlan | None = batch.plans.get(key)
    if found is None:
        found = _plan(batch, spec, group)
        batch.plans[key] = found
    return found


def _plan(batch: AttentionBatch, spec: AttentionSpec, group: int) -> RowPlan:
    reach = tile_reach = batch.length_max
    kv_positions, kv_strides = batch.positions, (0, 0)
    windowed = spec.window > 0 and batch.kv_positions is None  # spans say all of it
    if batch.kv_positions is not None:
        kv_positions = batch.kv_positions.contiguous()
        head_stride = kv_positions.stride(1) if kv_positions.dim() == 3 else 0
        kv_strides = (kv_positions.stride(0), head_stride)
    elif windowed:
        reach = min(reach, spec.window + SPLIT_KEYS)
        tile_reach = min(tile_reach, spec.window + SPLIT_KEYS + TILE_ROWS)
    splits = -(-reach // SPLIT_KEYS)
    row_bytes = 4 * spec.query_heads * max(splits, 1) * spec.v_dim
    return RowPlan(
        _spans(batch, spec.kv_heads, spec.window if windowed else 0),
        splits,
        -(-tile_reach // SPLIT_KEYS),
        tuple(_launches(batch, group, max(1, WORKSPACE_BYTES_MAX // row_bytes))),
        kv_positions,
        kv_strides,
    )


def _spans(batch: AttentionBatch, kv_heads: int, window: int) -> torch.Tensor:
    starts = np.asarray(batch.starts_list)
    counts = np.diff(starts)
    owner = np.repeat(np.arange(len(counts)), counts)
    behind = starts[1:][owner] - 1 - np.arange(len(owner))  # rows of the sequence after this one
    device = batch.tables.device
    lengths = batch.lengths if batch.lengths.dim() == 2 else batch.lengths.unsqueeze(1)
    ends = lengths.index_select(0, torch.from_numpy(owner).to(device))
    ends = ends - torch.from_numpy(behind).to(device, torch.int32).unsqueeze(1)
    ends = ends.clamp(min=0).expand(len(owner), kv_heads)
    firsts = torch.zeros_like(ends)
    if window:
        first = (batch.positions - (window - 1)).clamp(min=0).to(torch.int32)
        firsts = first.unsqueeze(1).expand_as(ends)
    return torch.stack([firsts, ends], 2).contiguous()


def _launches(batch: AttentionBatch, group: int, rows_max: int) -> list[Launch]:
    total = batch.starts_list[-1]
    bounds = [(first, min(first + rows_max, total)) for first in range(0, total, rows_max)]
    return [Launch(first, end, _tiles(batch, group, first, end)) for first, end in bounds]


def _tiles(batch: AttentionBatch, group: int, row_first: int, row_end: int) -> torch.Tensor:
    """The tiles of rows row_first ... row_end - 1, never two sequences in one."""
    tiles = []
    for sequence, end in enumerate(batch.starts_list[1:]):
        first = max(batch.starts_list[sequence], row_first) * group
        last = min(end, row_end) * group
        tiles += [(sequence, place, last) for place in range(first, last, TILE_ROWS)]
    return torch.tensor(tiles, dtype=torch.int32).to(batch.tables.device)
