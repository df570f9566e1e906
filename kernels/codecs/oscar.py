"""OSCAR: two-bit keys and values in bases fitted to a model's own activations. Knows no page.

Source: Together AI, "Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization"
(arXiv:2605.17757). Keys err least where queries are large, so their basis is that of the queries'
second moments; values' that of what attention makes of them. Eigenvectors are mixed by a Hadamard
matrix, after which every coordinate has the same energy. Per KV head: one basis for all heads of a
layer costs models with many heads a sixth of their perplexity.

The codec alone is not the method: sinks and recent tokens stay in the model's dtype, which is what
kernels/hybrid.py computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.codecs.base import KVCodec, LayerCodec
from kernels.codecs.hadamard import unsigned_mixing
from kernels.codecs.uniform import UniformVectors

BITS = 2
CLIP_KEYS, CLIP_VALUES = 0.96, 0.92


@dataclass(frozen=True)
class LayerRotations:
    """float32 [Hkv, dim, dim] each, orthonormal: columns are the new basis."""

    keys: torch.Tensor
    values: torch.Tensor


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """[..., n, dim] -> float64 [..., dim, dim]: mean of each row's outer product."""
    exact = rows.double()
    return exact.transpose(-1, -2) @ exact / rows.shape[-2]


def fit_rotation(moment: torch.Tensor) -> torch.Tensor:
    """Second moments float64 [..., dim, dim] -> rotation float32 of the same shape.

    Eigenvectors by descending eigenvalue, then Hadamard: then every coordinate's mean square is the
    trace over dim (about so for a dim that is no power of two, mixed by Hartley's matrix too).
    """
    vectors = torch.linalg.eigh(moment).eigenvectors.flip(-1)
    # An eigenvector's sign is anybody's choice: the largest number of each is made positive.
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    vectors = vectors * torch.where(largest < 0, -1.0, 1.0)
    dim = moment.shape[-1]
    mixed = vectors @ unsigned_mixing(dim).to(moment.device)
    rotation: torch.Tensor = mixed / dim**0.5
    return rotation.float()


def fit_layer(queries: torch.Tensor, attended: torch.Tensor, kv_heads: int) -> LayerRotations:
    """From one layer's rotated queries and attention's output, both [N, Hq, dim], of real text.

    The output of a query head is the sum of values weighted as attention weighs them, so its second
    moment says along which directions errors of values are kept.
    """

    def pooled(rows: torch.Tensor) -> torch.Tensor:
        """[N, Hq, dim] -> [Hkv, N * group, dim]."""
        grouped = rows.reshape(len(rows), kv_heads, -1, rows.shape[2])
        return grouped.transpose(0, 1).flatten(1, 2)

    return LayerRotations(
        fit_rotation(second_moment(pooled(queries))), fit_rotation(second_moment(pooled(attended)))
    )


def calibration_of(layers: Sequence[LayerRotations]) -> str:
    """Names the rotations: two replicas read each other's blocks if theirs are the same bytes."""
    digest = hashlib.sha256()
    for layer in layers:
        for rotation in (layer.keys, layer.values):
            digest.update(rotation.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def oscar_layer(rotations: LayerRotations) -> LayerCodec:
    """The codec of one layer."""
    dim = rotations.keys.shape[-1]
    return LayerCodec(
        UniformVectors(dim, BITS, rotation=rotations.keys, clip=CLIP_KEYS),
        UniformVectors(dim, BITS, rotation=rotations.values, clip=CLIP_VALUES),
    )


def oscar(layers: Sequence[LayerRotations], suffix: str = "") -> KVCodec:
    """The codec of a model, its calibration named by the rotations. `suffix` of its id says what
    else decides the codes: those of deeper layers depend on what was read exactly before them."""
    coded = tuple(oscar_layer(layer) for layer in layers)
    return KVCodec(f"oscar-int2{suffix}", coded, calibration_of(layers))
