"""GGML's stored numbers -> dense float32, type by type, in numpy. Pure; knows no file.

A quantised row is a run of blocks; each holds float16 scales and small integers. The layouts are
those of ggml's block_* structures; "K" types have eight or sixteen scales per block of 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

CHUNK_VALUES = 1 << 22  # dequantised at once: bounds the memory of what lies between


@dataclass(frozen=True)
class BlockType:
    """One of ggml's types: `dequantise` takes uint8 [blocks, block_bytes] and gives float32
    [blocks, block_values].
    """

    name: str
    block_values: int
    block_bytes: int
    dequantise: Callable[[Bytes], Floats]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of every block, float32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """[blocks, n] -> [blocks, 2 n]: all low halves, then all high ones."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=1).astype(np.float32)


def _fifth_bits(blocks: Bytes, at: int) -> Floats:
    """16 for every bit that is set of the 32 at a byte of every block, float32 [blocks, 32]."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits.astype(np.float32) * 16


def _q4_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 2:]) - 8) * _half(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 6:]) + _fifth_bits(blocks, 2) - 16) * _half(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    numbers = _nibbles(blocks[:, 8:]) + _fifth_bits(blocks, 4)
    return numbers * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and minima of 12 bytes, each float32 [blocks, 8].

    The first four of each lie in the low six bits of bytes 0-3 and 4-7; of the last four the low
    halves share bytes 8-11, and the two bits above lie on top of the first eight bytes.
    """
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & 63, high & 15 | low >> 6 << 4), axis=1)
    minima = np.concatenate((middle & 63, high >> 4 | middle >> 6 << 4), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_affine(blocks: Bytes, numbers: Floats) -> Floats:
    """numbers [blocks, 8, 32] of a type whose blocks start with d, dmin and packed scales."""
    scales, minima = _k_scales(blocks[:, 4:16])
    step = (_half(blocks, 0) * scales)[:, :, None]
    return (step * numbers - (_half(blocks, 2) * minima)[:, :, None]).reshape(-1, 256)


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes -> [blocks, 8, 32]: a run of 32 bytes holds two runs of 32 numbers, low first."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((runs & 0x0F, runs >> 4), axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:]).astype(np.float32))


def _q5_k(blocks: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8)[:, None]  # bit i of byte l: number l of run i
    fifth = (blocks[:, 16:48].reshape(-1, 1, 32) >> shifts & 1) << 4
    return _k_affine(blocks, (_k_nibbles(blocks[:, 48:]) | fifth).astype(np.float32))


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 0x0F, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    numbers = (low | high).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return ((_half(blocks, 208) * scales)[:, :, None] * numbers).reshape(-1, 256)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _bf16),
}
"""By ggml's number."""


def dequantise(data: Bytes, kind: BlockType) -> Floats:
    """The values of `data`, a whole number of blocks one after the other: float32 [values].

    Raises ValueError if a value is not finite, as scales of damaged files are.
    """
    assert data.dtype == np.uint8 and len(data) % kind.block_bytes == 0
    blocks = data.reshape(-1, kind.block_bytes)
    values = np.empty((len(blocks), kind.block_values), dtype=np.float32)
    step = max(1, CHUNK_VALUES // kind.block_values)
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), step):
            part = kind.dequantise(np.ascontiguousarray(blocks[first : first + step]))
            if not np.isfinite(part).all():
                raise ValueError("not finite")
            values[first : first + step] = part
    return values.reshape(-1)
