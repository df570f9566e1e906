"""The torch path against the reference: fault scenario 4, on the CPU."""

from __future__ import annotations

import pytest
import torch
from attention_cases import LAYER, check, compare, make_case

from kernels.attention import AttentionSpec
from kernels.backends import backend_for
from kernels.batch import build_batch
from kernels.layout import PageLayout
from kernels.paged import PagedAttention
from kernels.reference import ReferenceAttention


def _check(seed: int, dtype: str, pure_decode: bool) -> None:
    case = make_case(seed, dtype, pure_decode)
    got = PagedAttention().attend(case.q, case.pages, case.batch, case.spec, want_lse=True)
    check(compare(case, got), dtype, seed)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("seed", range(50))
def test_equals_reference(seed: int, dtype: str) -> None:
    _check(seed, dtype, pure_decode=seed % 3 == 0)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_equals_reference_full_size(dtype: str) -> None:
    for seed in range(500):
        _check(seed, dtype, pure_decode=seed % 3 == 0)


def _pool(length_max: int, sequences: int, dtype: str) -> tuple[PageLayout, torch.Tensor]:
    layout = PageLayout(2, 3, 16, 64, 64, dtype)
    blocks = sequences * -(-length_max // 16)
    return layout, torch.full((blocks, layout.block_bytes), 255, dtype=torch.uint8)


def _written(lengths: list[int], dtype: str) -> tuple[PageLayout, torch.Tensor, list[list[int]]]:
    """A pool whose sequences were written through the loader, in shuffled blocks."""
    layout, pool = _pool(max(lengths), len(lengths), dtype)
    generator = torch.Generator().manual_seed(7)
    free = torch.randperm(pool.shape[0], generator=generator).tolist()
    tables = [[free.pop() for _ in range(-(-length // 16))] for length in lengths]
    pages = layout.pages(pool)[LAYER]
    for table, length in zip(tables, lengths, strict=True):
        place = torch.arange(length)
        slots = torch.tensor(table)[place // 16] * 16 + place % 16
        rows = torch.randn(2, length, 3, 64, generator=generator).to(pages.keys.dtype)
        pages.write(slots, rows[0], rows[1])
    return layout, pool, tables


def _batch(lengths: list[int], rows: list[int], tables: list[list[int]]):
    starts, positions = [0], []
    for length, n in zip(lengths, rows, strict=True):
        starts.append(starts[-1] + n)
        positions += range(length - n, length)
    return build_batch(starts, lengths, positions, tables, [0] * starts[-1], 16, "cpu")


@pytest.mark.parametrize("window", [0, 100])
def test_long_prefill_in_tiles_and_long_decode(window: int) -> None:
    """More rows than a tile, more keys than the row padding needs, and buckets of unlike length."""
    lengths, rows = [500, 150, 1, 290, 17], [1, 150, 1, 130, 1]
    layout, pool, tables = _written(lengths, "fp32")
    batch = _batch(lengths, rows, tables)
    spec = AttentionSpec(3, 3, 64, 64, 0.125, window)
    q = torch.randn(sum(rows), 3, 64, generator=torch.Generator().manual_seed(1))
    pages = layout.pages(pool)[LAYER]
    got = PagedAttention().attend(q, pages, batch, spec, want_lse=True)
    expected = ReferenceAttention().attend(q, pages, batch, spec)
    torch.testing.assert_close(got.out, expected.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_few_rows_after_a_long_prefix(rows: int, group: int) -> None:
    """Where the CPU path pads rows and folds heads."""
    lengths = [290, 258]
    layout, pool, tables = _written(lengths, "fp32")
    batch = _batch(lengths, [rows, 1], tables)
    spec = AttentionSpec(3 * group, 3, 64, 64, 0.125)
    q = torch.randn(rows + 1, 3 * group, 64, generator=torch.Generator().manual_seed(1))
    pages = layout.pages(pool)[LAYER]
    got = PagedAttention().attend(q, pages, batch, spec, want_lse=True)
    expected = ReferenceAttention().attend(q, pages, batch, spec)
    torch.testing.assert_close(got.out, expected.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.lse, expected.lse, rtol=0, atol=1e-5)


def test_layers_share_a_step_and_keep_their_own_pages() -> None:
    lengths = [40, 33]
    layout, pool, tables = _written(lengths, "fp32")
    batch = _batch(lengths, [1, 1], tables)
    spec = AttentionSpec(3, 3, 64, 64, 0.125)
    q = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    first, second = layout.pages(pool)
    everywhere = torch.tensor([b * 16 + i for table in tables for b in table for i in range(16)])
    ones = torch.ones(len(everywhere), 3, 64)
    first.write(everywhere, ones, ones)
    backend = backend_for("cpu")
    assert torch.equal(backend.attend(q, first, batch, spec).out, torch.ones(2, 3, 64))
    got = backend.attend(q, second, batch, spec).out
    expected = ReferenceAttention().attend(q, second, batch, spec).out
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_where_blocks_lie_changes_no_bit() -> None:
    lengths = [70, 300, 16]
    layout, pool, tables = _written(lengths, "bf16")
    order = torch.randperm(pool.shape[0], generator=torch.Generator().manual_seed(3))
    moved = torch.empty_like(pool)
    moved[order] = pool
    moved_tables = [[int(order[b]) for b in table] for table in tables]
    spec = AttentionSpec(9, 3, 64, 64, 0.125)
    q = torch.randn(3, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = [
        PagedAttention().attend(q, layout.pages(p)[LAYER], _batch(lengths, [1, 1, 1], t), spec).out
        for p, t in ((pool, tables), (moved, moved_tables))
    ]
    assert torch.equal(*results)


def test_a_row_that_sees_nothing_is_zero() -> None:
    """A head whose retained keys all left the window."""
    layout, pool, tables = _written([20], "fp32")
    batch = build_batch([0, 1], [[4, 20, 20]], [19], tables, [0], 16, "cpu")
    spec = AttentionSpec(3, 3, 64, 64, 0.125, window=8)
    got = PagedAttention().attend(
        torch.ones(1, 3, 64), layout.pages(pool)[LAYER], batch, spec, want_lse=True
    )
    assert got.lse is not None
    assert (got.out[0, 0] == 0).all() and got.lse[0, 0] == -torch.inf
    assert (got.out[0, 1:] != 0).any() and got.lse[0, 1:].isfinite().all()


def test_empty_step() -> None:
    layout, pool, _ = _written([5], "fp32")
    batch = build_batch([0], [], [], [], [], 16, "cpu")
    spec = AttentionSpec(3, 3, 64, 64, 0.125)
    got = PagedAttention().attend(torch.empty(0, 3, 64), layout.pages(pool)[LAYER], batch, spec)
    assert got.out.shape == (0, 3, 64) and got.lse is None
