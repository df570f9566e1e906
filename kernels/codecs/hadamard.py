"""An orthonormal mixing of a vector's coordinates that spreads each of them over all: a Hadamard
matrix after random signs. Knows no codec.

Sylvester's matrix exists for powers of two. For dim = 2^k * m with m odd the rest is mixed by the
Hartley matrix of m, (cos + sin)(2 pi i j / m), which is symmetric, its own inverse and has no zero.
The seed fixes the signs: without them a vector that equals a row would end in one coordinate.
"""

from __future__ import annotations

import hashlib
import math

import torch


def sylvester(dim: int) -> torch.Tensor:
    """The Hadamard matrix of a power of two: float64 [dim, dim] of 1 and -1, symmetric."""
    assert dim > 0 and dim & (dim - 1) == 0, "a power of two"
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def hartley(dim: int) -> torch.Tensor:
    """float64 [dim, dim], symmetric; its square is dim times the identity."""
    place = torch.arange(dim, dtype=torch.float64)
    angle = torch.outer(place, place) * (2 * math.pi / dim)
    return torch.cos(angle) + torch.sin(angle)


def signs(dim: int, seed: int) -> torch.Tensor:
    """float64 [dim] of 1 and -1, the same on every machine and in every version of torch."""
    bits: list[int] = []
    while len(bits) < dim:
        digest = hashlib.sha256(f"signs {seed} {len(bits)}".encode()).digest()
        bits += [byte >> place & 1 for byte in digest for place in range(8)]
    return 1.0 - 2.0 * torch.tensor(bits[:dim], dtype=torch.float64)


def mixing(dim: int, seed: int) -> torch.Tensor:
    """float64 [dim, dim]: a row vector times this, divided by sqrt(dim), is the vector turned.

    For a power of two all are 1 or -1, so that sums of bf16 or fp16 numbers in float64 are exact
    and do not depend on the order, hence on what else is in a batch.
    """
    return signs(dim, seed).unsqueeze(1) * unsigned_mixing(dim)


def unsigned_mixing(dim: int) -> torch.Tensor:
    """The same without signs: symmetric, and its square is dim times the identity."""
    odd = dim
    while odd % 2 == 0:
        odd //= 2
    return torch.kron(sylvester(dim // odd), hartley(odd))
