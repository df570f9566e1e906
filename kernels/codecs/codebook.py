"""Lloyd-Max codebooks of the standard normal distribution: the least mean square error that
2 ** bits values can have. Pure arithmetic; knows no tensors.

Source: Max, "Quantizing for minimum distortion" (1960); Lloyd, "Least squares quantization in PCM".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

STEPS_MAX = 100_000
CHANGE_MAX = 1e-13


@dataclass(frozen=True)
class Codebook:
    """Both ascending and symmetric about 0; boundaries[i] parts centroids i and i + 1."""

    centroids: tuple[float, ...]
    boundaries: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean square error on a standard normal variable."""
        edges = (-math.inf, *self.boundaries, math.inf)
        return 1.0 - sum(
            _mass(low, high) * centroid**2
            for low, high, centroid in zip(edges, edges[1:], self.centroids, strict=False)
        )

    def scale_range(self, slack: float) -> tuple[float, float]:
        """Factors (lowest, highest) by which all centroids may be multiplied and still lie `slack`
        inside their own cells."""
        low, high = 0.0, math.inf
        half = len(self.centroids) // 2
        edges = (0.0, *self.boundaries[half:], math.inf)
        for index, centroid in enumerate(self.centroids[half:]):
            low = max(low, (edges[index] + slack) / centroid)
            high = min(high, (edges[index + 1] - slack) / centroid)
        return low, high


@cache
def lloyd_max(bits: int) -> Codebook:
    """The codebook of 2 ** bits centroids, by Lloyd's iteration from equal shares of probability.

    A centroid is its cell's mean, a boundary the middle of two centroids.
    """
    half = 1 << (bits - 1)
    upper = [_quantile(0.5 + (i + 0.5) / (2 * half)) for i in range(half)]
    for _ in range(STEPS_MAX):
        edges = [0.0, *_middles(upper), math.inf]
        moved = [_mean(low, high) for low, high in pairwise(edges)]
        change = max(abs(a - b) for a, b in zip(upper, moved, strict=True))
        upper = moved
        if change < CHANGE_MAX:
            break
    else:
        raise ArithmeticError("Lloyd's iteration has not settled")
    middles = _middles(upper)
    centroids = (*(-c for c in reversed(upper)), *upper)
    return Codebook(centroids, (*(-m for m in reversed(middles)), 0.0, *middles))


def _middles(values: list[float]) -> list[float]:
    return [(a + b) / 2 for a, b in pairwise(values)]


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _mass(low: float, high: float) -> float:
    """Probability of [low, high]; by the tail that keeps its digits."""
    if low >= 0:
        return (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
    if high <= 0:
        return _mass(-high, -low)
    return 1.0 - _mass(-math.inf, low) - _mass(high, math.inf)


def _mean(low: float, high: float) -> float:
    return (_density(low) - _density(high)) / _mass(low, high)


def _quantile(share: float) -> float:
    """Of the normal distribution, by bisection: only where the iteration starts."""
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mass(-10.0, middle) < share else (low, middle)
    return (low + high) / 2
