"""FP8 while cold: how far off, idempotent, and the arithmetic of its bytes."""

import pytest
import torch
from cold_trip import run

from kernels.cold import Fp8Cold
from kernels.layout import DTYPES, PageLayout

LAYOUTS = [
    PageLayout(layers=3, kv_heads=2, block_tokens=16, qk_dim=64, v_dim=64, dtype="bf16"),
    PageLayout(layers=2, kv_heads=1, block_tokens=16, qk_dim=96, v_dim=64, dtype="bf16"),
    PageLayout(layers=2, kv_heads=3, block_tokens=8, qk_dim=32, v_dim=32, dtype="fp32"),
    PageLayout(layers=2, kv_heads=3, block_tokens=8, qk_dim=32, v_dim=32, dtype="fp16"),
]


def random_block(layout: PageLayout, seed: int, scale: float) -> torch.Tensor:
    """Heads of very different sizes, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    count = layout.layers * layout.layer_elements
    numbers = torch.randn(count, generator=generator)
    sizes = torch.exp(2 * torch.randn(count // 16, generator=generator)).repeat_interleave(16)
    return (numbers * sizes * scale).to(DTYPES[layout.dtype])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_are_half_and_a_scale_per_head(layout: PageLayout) -> None:
    codec = Fp8Cold(layout)
    numbers = layout.layers * layout.layer_elements
    assert codec.encoded_bytes == numbers + 2 * layout.layers * layout.kv_heads


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_error_is_within_e4m3_of_each_head(layout: PageLayout, seed: int) -> None:
    """Half a step of three mantissa bits, or of the smallest number of the head's scale."""
    codec = Fp8Cold(layout)
    block = random_block(layout, seed, 10.0 ** (seed - 3))
    _, decoded = run(codec, block)
    rows = codec._runs(block.float())
    for (_, before), (_, after) in zip(rows, codec._runs(decoded.float()), strict=True):
        largest = before.abs().amax(dim=1, keepdim=True)
        allowed = (before.abs() / 16).maximum(largest / 232 * 2.0**-10)
        if layout.dtype == "fp16":  # its own smallest numbers are coarser
            allowed = allowed.maximum(torch.tensor(2.0**-24))
        assert bool(((before - after).abs() <= allowed).all())


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_encoding_what_was_decoded_changes_nothing(layout: PageLayout, seed: int) -> None:
    codec = Fp8Cold(layout)
    encoded, decoded = run(codec, random_block(layout, seed, 1.0))
    again, twice = run(codec, decoded)
    assert again == encoded
    assert torch.equal(twice, decoded)


def test_zeros_and_numbers_that_are_none() -> None:
    layout = LAYOUTS[0]
    codec = Fp8Cold(layout)
    block = torch.zeros(layout.layers * layout.layer_elements, dtype=torch.bfloat16)
    _, decoded = run(codec, block)
    assert torch.equal(decoded, block)
    block[5] = float("nan")
    block[6] = 3.0
    _, decoded = run(codec, block)
    assert bool(decoded[5].isnan()) and float(decoded[6]) == 3.0
