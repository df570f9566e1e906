"""build_batch: plain lists in, the documented tensors out."""

from __future__ import annotations

import pytest
import torch

from kernels.batch import build_batch


def test_fields() -> None:
    batch = build_batch([0, 1, 4], [5, 3], [4, 0, 1, 2], [[7, 2], [9]], [9, 36, 37, 38], 4, "cpu")
    assert batch.starts.tolist() == [0, 1, 4] and batch.starts.dtype == torch.int32
    assert batch.lengths.tolist() == [5, 3] and batch.lengths.dtype == torch.int32
    assert batch.tables.tolist() == [[7, 2], [9, -1]] and batch.tables.dtype == torch.int32
    assert batch.slots.tolist() == [9, 36, 37, 38] and batch.slots.dtype == torch.int64
    assert batch.positions.tolist() == [4, 0, 1, 2] and batch.positions.dtype == torch.int64
    assert (batch.rows_max, batch.length_max) == (3, 5)
    assert batch.starts_list == (0, 1, 4) and batch.lengths_list == (5, 3)


def test_heads_of_unlike_length() -> None:
    batch = build_batch([0, 1], [[5, 2]], [9], [[1, 2]], [[4, 1]], 4, "cpu")
    assert batch.lengths.tolist() == [[5, 2]] and batch.slots.tolist() == [[4, 1]]
    assert batch.lengths_list == (5,)


def test_a_table_too_short_for_its_sequence_is_refused() -> None:
    with pytest.raises(AssertionError, match="fewer blocks"):
        build_batch([0, 1], [5], [4], [[1]], [3], 4, "cpu")
