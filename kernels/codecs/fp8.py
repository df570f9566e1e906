"""FP8 (e4m3) vectors with one scale per KV head, fixed beforehand. Knows no page.

The scale is no part of a vector's bytes, or a page would depend on which token came first: it is
fitted once (`fit_scales`) and named by the codec's calibration, or it is 1. A power of two loses
nothing; e4m3 keeps its three mantissa bits from 2^-6 to 448, so 1 does for most models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LARGEST = 448.0
HEADROOM = 4.0  # between the largest number seen when scales were fitted and e4m3's largest


class Fp8Vectors:
    """Implements VectorCodec; beyond 448 times the scale numbers saturate, NaN stays."""

    token_local = True

    def __init__(self, dim: int, scales: torch.Tensor | None = None) -> None:
        """`scales` float32 [heads], powers of two; None is 1 for all."""
        self.dim = self.vector_bytes = dim
        self.heads = 1 if scales is None else len(scales)
        self._scales = None if scales is None else scales.float().view(-1, 1, 1)

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        scaled = vectors.float()
        if self._scales is not None:
            scaled = scaled / self._scales
        return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        numbers = codes.view(torch.float8_e4m3fn).float()
        return numbers if self._scales is None else numbers * self._scales

    def scales(self, kv_heads: int, device: torch.device) -> torch.Tensor:
        """float32 [kv_heads], for kernels that multiply themselves."""
        if self._scales is None:
            return torch.ones(kv_heads, device=device)
        return self._scales.flatten()

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return vectors

    def turn_back(self, vectors: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return vectors


@dataclass(frozen=True)
class LayerScales:
    """float32 [kv_heads] each, powers of two."""

    keys: torch.Tensor
    values: torch.Tensor


def fit_scales(vectors: torch.Tensor) -> torch.Tensor:
    """Of vectors [..., H, T, dim]: float32 [H], the least powers of two, 1 at least, that leave
    HEADROOM above the largest number seen."""
    largest = vectors.abs().transpose(-3, -1).flatten(0, -2).float().amax(0)
    scale = torch.exp2(torch.ceil(torch.log2(largest * HEADROOM / LARGEST)))
    return torch.where(largest > 0, scale, torch.ones_like(scale)).clamp(min=1.0)


def calibration_of(scales: Sequence[torch.Tensor]) -> str:
    """Names a model's scales; "" if all of them are 1."""
    if all(bool((each == 1).all()) for each in scales):
        return ""
    numbers = [float(number) for each in scales for number in each]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]
