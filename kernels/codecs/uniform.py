"""Vectors rounded to equal steps between their own least and largest number: the quantiser under
OSCAR, and of other codecs' values. Knows no calibration.

Two numbers in fp16 per vector: the step and the least number. (Writing the place of zero in steps
instead, as is usual, overflows where a vector's numbers are nearly equal.)
"""

from __future__ import annotations

import torch

from kernels.codecs.packing import lookup, pack, packed_bytes, run_table

SCALE_BYTES = 4  # step and least number
FLAT = 2.0**-10  # of the least number: steps below this are lost in its fp16
SETTLE_PASSES_2_BITS = 3  # two were enough for four million vectors of many shapes
SETTLE_PASSES = 16  # more steps take longer: eight were needed of four bits
FP16_MAX = 65504.0


class UniformVectors:
    """Implements VectorCodec. `rotation` float32 [heads or 1, dim, dim], orthonormal, is applied to
    row vectors from the right; None leaves the basis."""

    token_local = True

    def __init__(
        self, dim: int, bits: int, *, rotation: torch.Tensor | None = None, clip: float = 0.0
    ) -> None:
        """`clip`: the share of a vector's numbers that keep their size; larger ones are cut to the
        largest of these. 0 = none are cut."""
        assert 0 <= clip <= 1
        self.dim, self.bits = dim, bits
        self.heads = 1 if rotation is None else len(rotation)
        self.index_bytes = packed_bytes(dim, bits)
        self.vector_bytes = self.index_bytes + SCALE_BYTES
        self.rotation = rotation
        self._kept = min(int(clip * dim), dim - 1) if clip else dim - 1
        passes = SETTLE_PASSES_2_BITS if bits <= 2 else SETTLE_PASSES
        self._settle_passes = passes if self._kept < dim - 1 else 0
        device = "cpu" if rotation is None else rotation.device
        self._table = run_table(torch.arange(1 << bits, device=device).float(), bits)

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """See VectorCodec. A vector that is not finite becomes NaN. Turned in float64, so that what
        is encoded with it moves no number past the edge of a step.

        Where numbers are cut, the code is one that its own vector is encoded to: the two ends are
        rounded to fp16 apart, and the longer of them would be cut again, a little. A GPU makes all
        the passes, as to ask it whether codes still change is to wait for it; the codes are alike.
        """
        exact = vectors.double() if self.rotation is not None else vectors.float()
        codes = self._rounded(_by_head(exact, self.rotation).float())
        for _ in range(self._settle_passes):
            before, codes = codes, self._rounded(self.decode(codes))
            if codes.device.type == "cpu" and torch.equal(before, codes):
                break
        return codes

    def _rounded(self, turned: torch.Tensor) -> torch.Tensor:
        """Codes of vectors float32 that are turned already. Numbers beyond fp16's are its ends."""
        turned = torch.where(turned.isfinite(), turned.clamp(-FP16_MAX, FP16_MAX), turned)
        if self._kept < self.dim - 1:
            larger = turned.abs().topk(self.dim - self._kept, -1).values
            limit = larger[..., -1:]
            turned = turned.clamp(-limit, limit)
        least = turned.amin(-1, keepdim=True).half().float()
        step = (turned.amax(-1, keepdim=True) - least) / ((1 << self.bits) - 1)
        step = torch.where(step < least.abs() * FLAT, 0.0, step).half().float()
        places = torch.where(step > 0, (turned - least) / step + 0.5, 0.0)
        numbers = places.nan_to_num(0.0).clamp(0, (1 << self.bits) - 1).to(torch.uint8)
        stored = torch.cat((step, least), -1).half()
        return torch.cat((pack(numbers, self.bits), stored.view(torch.uint8)), -1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        packed, stored = codes[..., : self.index_bytes], codes[..., self.index_bytes :]
        halves = stored.clone(memory_format=torch.contiguous_format).view(torch.float16)
        step, least = halves[..., :1].float(), halves[..., 1:].float()
        return lookup(packed, self.bits, self.dim, self._table.to(codes.device)) * step + least

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        return vectors if self.rotation is None else _by_head(vectors.float(), self.rotation)

    def turn_back(self, vectors: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        if self.rotation is None:
            return vectors
        return _by_head(vectors.float(), self.rotation.transpose(1, 2))


def _by_head(vectors: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    """[..., H, T, dim] times [H or 1, dim, dim], in the vectors' dtype: one product per head.
    Left to broadcasting every token would get a copy of the matrices."""
    if rotation is None:
        return vectors
    rotation = rotation.to(vectors.dtype)
    if len(rotation) == 1:
        return vectors @ rotation[0]
    heads, tokens, dim = vectors.shape[-3:]
    rows = vectors.reshape(-1, heads, tokens, dim).transpose(0, 1).reshape(heads, -1, dim)
    turned = torch.bmm(rows, rotation).view(heads, -1, tokens, dim)
    return turned.transpose(0, 1).reshape(vectors.shape)
