"""Rng: the only source of chance for the synchronous core, so that every run can be replayed."""

from __future__ import annotations

import random
import secrets
from typing import Protocol


class Rng(Protocol):
    """Uniform random numbers. Not for sampling tokens: that is keyed (worker sampler)."""

    def random(self) -> float:
        """The next float in [0, 1). Mutates the generator."""
        ...

    def bits(self, count: int) -> int:
        """The next `count` random bits as a non-negative integer. Mutates the generator."""
        ...


class SystemRng:
    """Numbers from the operating system: seeds, request ids, nonces."""

    def random(self) -> float:
        return secrets.randbits(53) / (1 << 53)

    def bits(self, count: int) -> int:
        return secrets.randbits(count)


class SeededRng:
    """A replayable generator for tests and simulations."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)

    def random(self) -> float:
        return self._random.random()

    def bits(self, count: int) -> int:
        return self._random.getrandbits(count)
