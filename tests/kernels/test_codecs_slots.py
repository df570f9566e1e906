"""Token slots in pages of codes: moved byte for byte, read as what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_cases import HEADS, vectors

from kernels.codecs.choose import make_codec
from kernels.codecs.names import parse_codec
from kernels.codecs.pages import CodecLayout
from kernels.codecs.slots import CodeSlots

TOKENS, DIM, LAYERS, BLOCKS = 8, 32, 4, 6


def pool_of(text: str) -> tuple[CodecLayout, torch.Tensor, torch.Tensor]:
    """Blocks 0 to 2 full of keys [24, HEADS, DIM], the same in every layer; others poisoned."""
    name = parse_codec(text)
    assert name is not None
    codec = make_codec(name, LAYERS, DIM, torch.bfloat16)
    assert codec is not None
    layout = CodecLayout(codec.layers, HEADS, TOKENS)
    pool = torch.full((BLOCKS, layout.block_bytes), 255, dtype=torch.uint8)
    keys = vectors(1, 3 * TOKENS, DIM).transpose(0, 1)
    for pages in layout.pages(pool):
        pages.write(torch.arange(3 * TOKENS), keys, keys.flip(0))
    return layout, pool, keys


@pytest.mark.parametrize("text", ["fp8", "turboquant:k4v2", "turboquant:k3v3,boundary=1"])
def test_whole_slots_move_byte_for_byte(text: str) -> None:
    layout, pool, _ = pool_of(text)
    sources, targets = np.array([3, 9, 22]), np.array([24, 40, 47])
    CodeSlots(layout, pool).move(sources, targets)
    for pages in layout.pages(pool):
        for source, target in zip(sources, targets, strict=True):
            for part in (pages.keys, pages.values):
                moved = part[target // TOKENS, :, target % TOKENS]
                assert torch.equal(moved, part[source // TOKENS, :, source % TOKENS])
    assert bool((pool[4] == 255).all()), "nothing else was written"


def test_one_head_of_one_layer_moves_alone() -> None:
    layout, pool, _ = pool_of("turboquant:k4v4,boundary=1")
    before = pool.clone()
    layer, head = 2, 1
    rows = np.array([layer * HEADS + head])
    CodeSlots(layout, pool).move(np.array([5]), np.array([30]), rows)
    pages, old = layout.pages(pool), layout.pages(before)
    for number in range(LAYERS):
        for part, was in ((pages[number].keys, old[number].keys),
                          (pages[number].values, old[number].values)):  # fmt: skip
            if number == layer:
                assert torch.equal(part[3, head, 6], was[0, head, 5])
                part[3, head, 6] = was[3, head, 6]
    assert torch.equal(pool, before)


@pytest.mark.parametrize(("text", "error"), [("fp8", 0.07), ("turboquant:k4v2,boundary=1", 0.2)])
def test_keys_are_read_in_the_models_basis(text: str, error: float) -> None:
    layout, pool, keys = pool_of(text)
    slots = np.array([0, 17, 8])
    found = CodeSlots(layout, pool).keys(slots)
    assert found.shape == (LAYERS, HEADS, 3, DIM) and found.dtype == torch.float32
    exact = keys[torch.from_numpy(slots)].transpose(0, 1).float()
    for layer in found:
        assert float((layer - exact).norm() / exact.norm()) < error
