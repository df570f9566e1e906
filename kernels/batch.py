"""Builds an AttentionBatch from a step's plain lists; knows no scheduler and no model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from kernels.attention import AttentionBatch

Ragged = Sequence[int] | Sequence[Sequence[int]]


def _tensor(values: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _table_tensor(tables: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    width = max((len(table) for table in tables), default=0)
    padded = np.full((len(tables), width), -1, dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(padded).to(device)


def build_batch(
    starts: Sequence[int],
    lengths: Ragged,
    positions: Sequence[int],
    tables: Sequence[Sequence[int]],
    slots: Ragged,
    block_tokens: int,
    device: torch.device | str,
    kv_positions: torch.Tensor | None = None,
) -> AttentionBatch:
    """The step of one KV group as tensors on `device`: one copy to the device per list.

    Arguments as the fields of AttentionBatch. `lengths` and `slots` may have a head axis;
    `tables[s]` has at least the blocks that hold lengths[s] positions. Valid for one step.
    """
    device = torch.device(device)
    longest = tuple(n if isinstance(n, int) else max(n, default=0) for n in lengths)
    assert len(starts) == len(longest) + 1 == len(tables) + 1 and starts[0] == 0
    assert starts[-1] == len(positions) == len(slots)
    assert all(
        len(table) * block_tokens >= length for table, length in zip(tables, longest, strict=True)
    ), "a table has fewer blocks than its sequence needs"
    rows = [b - a for a, b in pairwise(starts)]
    return AttentionBatch(
        starts=_tensor(starts, torch.int32, device),
        lengths=_tensor(lengths, torch.int32, device),
        tables=_table_tensor(tables, device),
        slots=_tensor(slots, torch.int64, device),
        positions=_tensor(positions, torch.int64, device),
        block_tokens=block_tokens,
        rows_max=max(rows, default=0),
        length_max=max(longest, default=0),
        starts_list=tuple(starts),
        lengths_list=longest,
        kv_positions=kv_positions,
    )
