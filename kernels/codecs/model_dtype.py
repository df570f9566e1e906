"""Vectors as the model computes them: no codec at all, as one. Knows no page."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PlainVectors:
    """Implements VectorCodec; `decode` answers in the dtype itself. Boundary layers use it."""

    dim: int
    dtype: torch.dtype
    heads = 1
    token_local = True

    @property
    def vector_bytes(self) -> int:
        """That one vector takes."""
        return self.dim * self.dtype.itemsize

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """Exact for numbers of the dtype."""
        return vectors.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Copies nothing where memory allows a view."""
        if codes.stride(-1) != 1 or codes.storage_offset() % self.dtype.itemsize:
            codes = codes.contiguous()
        return codes.view(self.dtype)

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return vectors

    def turn_back(self, vectors: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return vectors
