"""TurboQuant while cold: the arithmetic of its bytes, how far off, and that it loses once."""

import pytest
import torch
from codec_cases import relative_error
from cold_trip import run

from kernels.codecs.cold import TurboCold
from kernels.layout import DTYPES, PageLayout

LAYOUTS = [
    PageLayout(layers=3, kv_heads=2, block_tokens=16, qk_dim=64, v_dim=64, dtype="bf16"),
    PageLayout(layers=2, kv_heads=1, block_tokens=16, qk_dim=96, v_dim=64, dtype="bf16"),
    PageLayout(layers=2, kv_heads=3, block_tokens=8, qk_dim=32, v_dim=32, dtype="fp32"),
    PageLayout(layers=1, kv_heads=1, block_tokens=16, qk_dim=128, v_dim=128, dtype="fp16"),
]


def random_block(layout: PageLayout, seed: int) -> torch.Tensor:
    """With channels of very different sizes, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    count = layout.layers * layout.layer_elements
    sizes = torch.exp(1.5 * torch.randn(32, generator=generator)).repeat(count // 32)
    return (torch.randn(count, generator=generator) * sizes).to(DTYPES[layout.dtype])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_are_four_bits_a_number_and_a_norm_a_vector(layout: PageLayout) -> None:
    vectors = layout.layers * layout.kv_heads * layout.block_tokens
    expected = vectors * (layout.qk_dim // 2 + layout.v_dim // 2 + 4)
    assert TurboCold(layout).encoded_bytes == expected


def test_a_block_of_128_wide_bf16_heads_shrinks_as_computed() -> None:
    layout = PageLayout(32, 8, 16, 128, 128, "bf16")
    assert layout.block_bytes / TurboCold(layout).encoded_bytes == pytest.approx(512 / 132)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_error_is_that_of_four_bits(layout: PageLayout) -> None:
    block = random_block(layout, 1)
    _, decoded = run(TurboCold(layout), block)
    assert 0.003 < relative_error(block, decoded) < 0.0125


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_encoding_what_was_decoded_changes_nothing(layout: PageLayout, seed: int) -> None:
    codec = TurboCold(layout)
    encoded, decoded = run(codec, random_block(layout, seed))
    for _ in range(3):
        again, twice = run(codec, decoded)
        assert again == encoded
        assert torch.equal(twice, decoded)


def test_zeros_and_numbers_that_are_none() -> None:
    layout = LAYOUTS[0]
    block = torch.zeros(layout.layers * layout.layer_elements, dtype=torch.bfloat16)
    codec = TurboCold(layout)
    assert torch.equal(run(codec, block)[1], block)
    block[5], block[70] = float("nan"), 3.0
    decoded = run(codec, block)[1]
    assert bool(decoded[:64].isnan().all()), "a vector with one is none"
    assert float(decoded[64:128].float().norm()) == pytest.approx(3.0, rel=0.01)
