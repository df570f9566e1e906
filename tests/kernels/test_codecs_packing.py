"""Packing small numbers: every width, odd tails, and the bits' own order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.codecs.packing import WIDTHS, lookup, pack, packed_bytes, run_table, unpack


@pytest.mark.parametrize("bits", WIDTHS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 70), rows=st.integers(1, 4))
def test_unpack_is_the_inverse_at_any_length(bits: int, seed: int, count: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << bits, (2, rows, count), generator=generator)
    packed = pack(numbers, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, rows, packed_bytes(count, bits)) and packed.is_contiguous()
    assert torch.equal(unpack(packed, bits, count).long(), numbers), f"seed {seed}"


@pytest.mark.parametrize("bits", WIDTHS)
def test_bits_follow_each_other_from_the_lowest(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (24,), generator=torch.Generator().manual_seed(bits))
    whole = sum(int(number) << (place * bits) for place, number in enumerate(numbers))
    assert bytes(pack(numbers, bits).tolist()) == whole.to_bytes(3 * bits, "little")


def test_four_bits_have_the_low_nibble_first() -> None:
    assert pack(torch.tensor([1, 2, 3]), 4).tolist() == [0x21, 0x03]


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_table_is_looked_up_number_by_number(bits: int) -> None:
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(1 << bits, generator=generator)
    numbers = torch.randint(0, 1 << bits, (3, 40), generator=generator)
    found = lookup(pack(numbers, bits), bits, 40, run_table(values, bits))
    assert torch.equal(found, values[numbers])
