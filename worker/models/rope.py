"""Rotary position embedding: angles per position and their application; knows nothing of a model.

Source: Su et al., "RoFormer" (2021), in the half-split form of the Hugging Face checkpoints: entry
i of a head is rotated together with entry i + dim/2. Long-context variants change frequencies only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies of one model. `kind` is default, linear or llama3; the rest is off for default.

    `factor` stretches wavelengths. llama3 stretches only those longer than original_tokens /
    low_freq_factor, leaves those shorter than original_tokens / high_freq_factor, and blends
    between.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 0


def inverse_frequencies(config: RopeConfig, dim: int) -> torch.Tensor:
    """Radians per position, float32 [dim/2], fastest first.

    float32 on purpose: the checkpoints were trained with angles rounded this way, and at position
    10,000 the rounding is already worth 1e-3 of a radian.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    assert config.kind == "default"
    return frequencies


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = (config.original_tokens / wavelengths - low) / (high - low)
    blended = (1 - kept) * frequencies / config.factor + kept * frequencies
    slow = wavelengths > config.original_tokens / low
    fast = wavelengths < config.original_tokens / high
    stretched = torch.where(slow, frequencies / config.factor, blended)
    return torch.where(fast, frequencies, stretched)


@dataclass(frozen=True)
class RopeTable:
    """cos and sin of every position's angles, float32 [positions, dim/2].

    A table rather than cos() per step: vectorised cos may round one element differently depending
    on where it lies in the batch, a look-up cannot.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [N] -> cos, sin [N, 1, dim/2], to broadcast over heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def build_table(config: RopeConfig, dim: int, positions: int, device: torch.device) -> RopeTable:
    """The table of positions 0 .. positions-1; 8 bytes x positions x dim/2."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32), inverse_frequencies(config, dim)
    )
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [N, heads, dim] rotated; computed in float32, returned as a new tensor of x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return out.to(x.dtype)
