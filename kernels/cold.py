"""Cold codecs: a block in fewer bytes while it is away from the device. Knows layouts, no tiers.

FP8 (e4m3), one scale per layer, keys or values, and head. Scales are powers of two, so a decoded
block is exact in bfloat16 and encoding it again gives the same bytes: a block that moves between
tiers and device loses something once, never twice.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.layout import DTYPES, PageLayout

FP8 = "fp8-e4m3-head"  # Representation.codec of such records
_LARGEST = 464.0  # what still rounds to e4m3's largest number, 448, and not beyond it


class ColdCodec(Protocol):
    """How one KV group's blocks are written below the device. Pure; any thread."""

    @property
    def name(self) -> str:
        """Representation.codec of what it writes."""
        ...

    @property
    def encoded_bytes(self) -> int:
        """Of any block."""
        ...

    def encode(self, block: memoryview, into: memoryview) -> None:
        """Write the block into `into`, of encoded_bytes."""
        ...

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Fill `into`, a block, from what `encode` wrote."""
        ...


class Fp8Cold:
    """Blocks of one PageLayout in e4m3: half the bytes of bf16, and a scale per head.

    Encoded: int8 exponents [layers, 2, kv_heads], then e4m3 numbers in the block's own order. What
    a head's page looks like inside does not matter, as long as it is one run.
    """

    name = FP8

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._dtype = DTYPES[layout.dtype]
        self._heads = 2 * layout.layers * layout.kv_heads
        self._numbers = layout.layers * layout.layer_elements

    @property
    def encoded_bytes(self) -> int:
        """Of any block."""
        return self._heads + self._numbers

    def encode(self, block: memoryview, into: memoryview) -> None:
        """Not a number stays so; infinities become the largest number of their head's scale."""
        runs = self._runs(torch.frombuffer(block, dtype=self._dtype).float())
        out = torch.frombuffer(into, dtype=torch.uint8)
        exponents, numbers = out[: self._heads], out[self._heads :].view(torch.float8_e4m3fn)
        at = 0
        for first, rows in runs:
            largest = rows.nan_to_num(0.0, posinf=0.0, neginf=0.0).abs().amax(dim=1, keepdim=True)
            exponent = torch.ceil(torch.log2(largest / _LARGEST)).clamp(-127, 127)
            exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
            scaled = torch.ldexp(rows, -exponent).clamp(-448.0, 448.0)
            exponents[first].copy_(exponent[:, 0].to(torch.int8).view(torch.uint8))
            numbers[at : at + rows.numel()].copy_(scaled.flatten().to(torch.float8_e4m3fn))
            at += rows.numel()

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """See ColdCodec."""
        packed = torch.frombuffer(encoded, dtype=torch.uint8)
        exponents = packed[: self._heads].view(torch.int8).float()
        numbers = packed[self._heads :].view(torch.float8_e4m3fn).float()
        out = torch.frombuffer(into, dtype=self._dtype)
        at = 0
        for first, rows in self._runs(numbers):
            values = torch.ldexp(rows, exponents[first, None])
            out[at : at + rows.numel()].copy_(values.flatten())
            at += rows.numel()

    def _runs(self, numbers: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        """A block's numbers as rows of one head each, with the rows' place among all heads; in one
        piece where keys and values are of one width."""
        layout = self._layout
        if layout.qk_dim == layout.v_dim:
            return [(slice(0, self._heads), numbers.view(self._heads, -1))]
        pieces, at, head = [], 0, 0
        for _ in range(layout.layers):
            for width in (layout.qk_dim, layout.v_dim):
                count = layout.kv_heads * layout.block_tokens * width
                rows = numbers[at : at + count].view(layout.kv_heads, -1)
                pieces.append((slice(head, head + layout.kv_heads), rows))
                at, head = at + count, head + layout.kv_heads
        return pieces
