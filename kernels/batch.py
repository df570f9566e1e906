"""Builds an AttentionBatch from a step's lists or arrays; knows no scheduler and no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention import AttentionBatch

Ints = npt.NDArray[np.int32]
Row = Sequence[int] | Ints
Rows = Sequence[Sequence[int]] | Ints


def _tensor(values: Ints, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, dtype)


def _table(tables: Rows) -> Ints:
    if isinstance(tables, np.ndarray):
        return np.ascontiguousarray(tables, dtype=np.int32)
    width = max((len(table) for table in tables), default=0)
    padded = np.full((len(tables), width), -1, dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def build_batch(
    starts: Row,
    lengths: Row | Rows,
    positions: Row,
    tables: Rows,
    slots: Row | Rows,
    block_tokens: int,
    device: torch.device | str,
    kv_positions: torch.Tensor | None = None,
) -> AttentionBatch:
    """The step of one KV group as tensors on `device`: one copy to the device per argument.

    Arguments as the fields of AttentionBatch. `lengths` and `slots` may have a head axis;
    `tables[s]` has at least the blocks that hold lengths[s] positions. Valid for one step, in
    which arrays of int32 that are given must not be changed.
    """
    device = torch.device(device)
    begins, ends, places = (np.asarray(v, dtype=np.int32) for v in (starts, lengths, slots))
    longest = ends if ends.ndim == 1 else ends.max(axis=1, initial=0)
    rows = np.diff(begins)
    assert len(begins) == len(longest) + 1 == len(tables) + 1 and begins[0] == 0
    assert begins[-1] == len(positions) == len(places)
    room = [len(table) * block_tokens for table in tables]
    assert (longest <= room).all(), "a table has fewer blocks than its sequence needs"
    return AttentionBatch(
        starts=_tensor(begins, torch.int32, device),
        lengths=_tensor(ends, torch.int32, device),
        tables=_tensor(_table(tables), torch.int32, device),
        slots=_tensor(places, torch.int64, device),
        positions=_tensor(np.asarray(positions, dtype=np.int32), torch.int64, device),
        block_tokens=block_tokens,
        rows_max=int(rows.max(initial=0)),
        length_max=int(longest.max(initial=0)),
        starts_list=tuple(begins.tolist()),
        lengths_list=tuple(longest.tolist()),
        kv_positions=kv_positions,
    )
