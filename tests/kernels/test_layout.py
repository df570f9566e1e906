"""PageLayout: where bytes lie, and that loaders are views and copies where they say so."""

from __future__ import annotations

import pytest
import torch

from kernels.layout import DTYPES, PageLayout

SHAPES = [
    PageLayout(3, 2, 4, 8, 8, "fp32"),
    PageLayout(2, 3, 16, 16, 8, "bf16"),
    PageLayout(1, 1, 1, 4, 12, "fp16"),
]


def _pool(layout: PageLayout, blocks: int = 5) -> torch.Tensor:
    return torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8)


def _number(pool: torch.Tensor, layout: PageLayout, block: int, at: int) -> float:
    size = DTYPES[layout.dtype].itemsize
    return float(pool[block, at * size : (at + 1) * size].view(DTYPES[layout.dtype]))


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_order_of_the_bytes(layout: PageLayout) -> None:
    """[layers][K, V][kv_heads][block_tokens][dim], counted by hand."""
    pool, tokens = _pool(layout), layout.block_tokens
    layer, block, offset, head = layout.layers - 1, 3, tokens - 1, layout.kv_heads - 1
    keys = torch.zeros(1, layout.kv_heads, layout.qk_dim, dtype=DTYPES[layout.dtype])
    values = torch.zeros(1, layout.kv_heads, layout.v_dim, dtype=DTYPES[layout.dtype])
    keys[0, head, 1], values[0, head, 2] = 5.0, 7.0
    layout.pages(pool)[layer].write(torch.tensor([block * tokens + offset]), keys, values)
    per_head = tokens * (layout.qk_dim + layout.v_dim)
    start = layer * layout.kv_heads * per_head
    key_at = start + (head * tokens + offset) * layout.qk_dim + 1
    middle = start + layout.kv_heads * tokens * layout.qk_dim
    value_at = middle + (head * tokens + offset) * layout.v_dim + 2
    assert _number(pool, layout, block, key_at) == 5.0
    assert _number(pool, layout, block, value_at) == 7.0
    assert int((pool.view(DTYPES[layout.dtype]) != 0).sum()) == 2, "a write touches its slot only"


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_gather_returns_what_was_written(layout: PageLayout) -> None:
    pool = _pool(layout)
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(5 * layout.block_tokens, generator=generator)
    shape = (len(slots), layout.kv_heads)
    dtype = DTYPES[layout.dtype]
    loaders = layout.pages(pool)
    rows = [
        (
            torch.randn(*shape, layout.qk_dim, generator=generator).to(dtype),
            torch.randn(*shape, layout.v_dim, generator=generator).to(dtype),
        )
        for _ in loaders
    ]
    for loader, (keys, values) in zip(loaders, rows, strict=True):
        loader.write(slots, keys, values)
    blocks = torch.tensor([4, 0, 2, 4])
    back = torch.argsort(slots).view(5, layout.block_tokens)[blocks]  # [B, tokens] -> row
    for loader, (keys, values) in zip(loaders, rows, strict=True):
        got_keys, got_values = loader.gather(blocks)
        assert torch.equal(got_keys, keys[back].transpose(1, 2))
        assert torch.equal(got_values, values[back].transpose(1, 2))
        got_keys.zero_()  # a copy: the pool must not notice
        assert torch.equal(loader.gather(blocks)[0], keys[back].transpose(1, 2))


def test_heads_with_slots_of_their_own() -> None:
    layout = SHAPES[0]
    pages = layout.pages(_pool(layout))[1]
    keys = torch.arange(16, dtype=torch.float32).view(1, 2, 8)
    pages.write(torch.tensor([[3, 9]]), keys, keys)
    assert torch.equal(pages.keys[0, 0, 3], keys[0, 0])
    assert torch.equal(pages.values[2, 1, 1], keys[0, 1])
    assert int((pages.keys != 0).sum()) == 15


def test_new_slots_and_blocks_are_not_mistaken_for_old_ones() -> None:
    """What is kept between calls follows the tensor, not its address or its length."""
    layout = SHAPES[0]
    pages = layout.pages(_pool(layout))[0]
    for slot in range(20):
        row = torch.full((1, 2, 8), float(slot))
        pages.write(torch.tensor([slot]), row, row)
    for block in range(5):
        keys, _ = pages.gather(torch.tensor([block]))
        assert keys[0, 0, :, 0].tolist() == [block * 4.0 + i for i in range(4)]


def test_loaders_are_views() -> None:
    layout = SHAPES[0]
    pool = _pool(layout)
    pages = layout.pages(pool)[2]
    pool.fill_(255)
    assert pages.keys.isnan().all() and pages.values.isnan().all()


def test_a_pool_of_another_layout_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        SHAPES[0].pages(torch.zeros(2, SHAPES[0].block_bytes + 4, dtype=torch.uint8))
