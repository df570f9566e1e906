"""Small whole numbers in few bits: packing, and unpacking through a table. Knows no meaning.

Numbers follow each other in the bits of little-endian bytes, the first in the lowest: two of four
bits per byte, low nibble first; eight of three bits in three bytes. A tail is filled with zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

WIDTHS = (1, 2, 3, 4)
# Numbers and bytes of the smallest run that ends at a byte's end.
_RUNS = {1: (8, 1), 2: (4, 1), 3: (8, 3), 4: (2, 1)}


def packed_bytes(count: int, bits: int) -> int:
    """That `count` numbers take."""
    return -(-count * bits // 8)


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., count] whole numbers below 2 ** bits -> uint8 [..., packed_bytes(count, bits)]."""
    count, (run, run_bytes) = numbers.shape[-1], _RUNS[bits]
    padded = F.pad(numbers, (0, -count % run))
    numbers = padded.reshape(*padded.shape[:-1], padded.shape[-1] // run, run)
    if run_bytes == 1:
        numbers = numbers.to(torch.uint8)
        packed = numbers[..., 0].clone()
        for place in range(1, run):
            packed |= numbers[..., place] << (place * bits)
        return packed
    shifts = torch.arange(0, run * bits, bits, device=numbers.device, dtype=torch.int32)
    words = (numbers.to(torch.int32) << shifts).sum(-1, dtype=torch.int32)
    parts = [(words >> (8 * place)).to(torch.uint8) for place in range(run_bytes)]
    return torch.stack(parts, -1).flatten(-2)[..., : packed_bytes(count, bits)].contiguous()


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """uint8 [..., packed_bytes(count, bits)] -> uint8 [..., count]; the inverse of `pack`."""
    table = torch.arange(1 << bits, dtype=torch.uint8, device=packed.device)
    return lookup(packed, bits, count, run_table(table, bits))


def run_table(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Of [2 ** bits] values, for `lookup`: all that a byte (of three bits: half of three bytes)
    can hold, one row each."""
    run = 4 if bits == 3 else 8 // bits
    word = torch.arange(1 << (run * bits), device=values.device).unsqueeze(1)
    shifts = torch.arange(0, run * bits, bits, device=values.device)
    return values[(word >> shifts) & ((1 << bits) - 1)]


def lookup(packed: torch.Tensor, bits: int, count: int, table: torch.Tensor) -> torch.Tensor:
    """The value of each number: uint8 [..., packed bytes], a run_table -> [..., count]."""
    words = _words(packed, bits)
    found = F.embedding(words, table).flatten(-2)
    return found[..., :count]


def _words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of a run_table, int32 [..., words]."""
    if bits != 3:
        return packed.int()
    missing = -packed.shape[-1] % 3
    padded = F.pad(packed, (0, missing))
    threes = padded.reshape(*padded.shape[:-1], padded.shape[-1] // 3, 3).int()
    low = threes[..., 0] | ((threes[..., 1] & 15) << 8)
    high = (threes[..., 1] >> 4) | (threes[..., 2] << 4)
    return torch.stack((low, high), -1).flatten(-2)
