"""Slots of real pages: moved and read alike in both orders, whole and head by head."""

import numpy as np
import pytest
import torch

from kernels.layout import DTYPES, PageLayout
from kernels.slots import CodedSlots, Slots

BLOCKS = 5
LAYOUTS = [
    (PageLayout(2, 3, 16, 32, 32, "bf16"), True),
    (PageLayout(2, 3, 16, 32, 32, "fp32"), True),
    (PageLayout(2, 3, 16, 32, 32, "bf16"), False),
    (PageLayout(3, 2, 4, 8, 24, "fp16"), False),
    (PageLayout(1, 1, 1, 8, 8, "fp32"), False),
]
every_layout = pytest.mark.parametrize(
    ("layout", "paired"), LAYOUTS, ids=lambda v: getattr(v, "dtype", v and "paired")
)


def numbered(layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of distinct numbers, as bytes, and as numbers [blocks, layers, numbers of a layer]."""
    dtype = DTYPES[layout.dtype]
    count = BLOCKS * layout.layers * layout.layer_elements
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(count, generator=generator).to(dtype)
    pool = numbers.view(torch.uint8).view(BLOCKS, layout.block_bytes)
    return pool, numbers.view(BLOCKS, layout.layers, -1)


def dense(layout: PageLayout, numbers: torch.Tensor, paired: bool) -> tuple[torch.Tensor, ...]:
    """Keys and values [layers, heads, slots, dim], by the formulas of the two layouts."""
    step = 4 // DTYPES[layout.dtype].itemsize
    size, parts, at = layout.block_tokens, [], 0
    for dim, is_key in ((layout.qk_dim, True), (layout.v_dim, False)):
        width = size * dim
        out = torch.zeros(layout.layers, layout.kv_heads, BLOCKS * size, dim)
        for head in range(layout.kv_heads):
            page = numbers[:, :, at : at + width].float()
            at += width
            for t in range(size):
                for d in range(dim):
                    index = t * dim + d
                    if paired and is_key:
                        index = (d // step * size + t) * step + d % step
                    elif paired:
                        index = (t // step * dim + d) * step + t % step
                    out[:, head, t::size, d] = page[:, :, index].T
        parts.append(out)
    return tuple(parts)


@every_layout
def test_keys_are_those_of_the_layout(layout: PageLayout, paired: bool) -> None:
    pool, numbers = numbered(layout)
    keys, _ = dense(layout, numbers, paired)
    slots = np.array([3 * layout.block_tokens, 0, 5 * layout.block_tokens - 1])
    assert torch.equal(Slots(layout, pool, paired=paired).keys(slots), keys[:, :, slots])


@every_layout
def test_moves_touch_their_slots_alone(layout: PageLayout, paired: bool) -> None:
    pool, numbers = numbered(layout)
    before = dense(layout, numbers, paired)
    chosen = np.random.default_rng(2).permutation(BLOCKS * layout.block_tokens)
    half = max(1, len(chosen) // 3)
    sources, targets = chosen[:half], chosen[-half:]
    Slots(layout, pool, paired=paired).move(sources, targets)
    for old, new in zip(before, dense(layout, numbers, paired), strict=True):
        old[:, :, targets] = old[:, :, sources]
        assert torch.equal(old, new)


@every_layout
def test_heads_move_by_themselves(layout: PageLayout, paired: bool) -> None:
    pool, numbers = numbered(layout)
    before = dense(layout, numbers, paired)
    chance = np.random.default_rng(3)
    rows = layout.layers * layout.kv_heads
    total = BLOCKS * layout.block_tokens
    picked = [chance.permutation(total)[:4] for _ in range(rows)]
    row = np.repeat(np.arange(rows), 2)
    sources = np.concatenate([p[:2] for p in picked])
    targets = np.concatenate([p[2:] for p in picked])
    Slots(layout, pool, paired=paired).move(sources, targets, row)
    for old, new in zip(before, dense(layout, numbers, paired), strict=True):
        by_row = old.view(rows, total, -1)
        by_row[row, targets] = by_row[row, sources]
        assert torch.equal(old, new)


def test_many_moves_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PageLayout(2, 3, 16, 32, 32, "bf16")
    pool, numbers = numbered(layout)
    before = dense(layout, numbers, True)
    monkeypatch.setattr("kernels.slots.MOVED_BYTES_MAX", 3 * layout.block_bytes // 16)
    sources, targets = np.arange(0, 32), np.arange(40, 72)
    Slots(layout, pool, paired=True).move(sources, targets)
    after = dense(layout, numbers, True)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, :, sources], new[:, :, targets])


@pytest.mark.parametrize("by_head", [False, True])
def test_codes_are_moved_as_they_are(by_head: bool) -> None:
    """Layer by layer, as pages of codes have it: the same as all layers at once."""
    layout = PageLayout(3, 2, 4, 8, 24, "fp16")
    (pool, numbers), (other, others) = numbered(layout), numbered(layout)
    chance = np.random.default_rng(4)
    chosen = chance.permutation(BLOCKS * 4)
    rows = chance.integers(0, 6, 8) if by_head else None
    pages = layout.pages(pool)
    CodedSlots([(page.keys, page.values) for page in pages]).move(chosen[:8], chosen[8:16], rows)
    Slots(layout, other).move(chosen[:8], chosen[8:16], rows)
    assert torch.equal(numbers, others)
