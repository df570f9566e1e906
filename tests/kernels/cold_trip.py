"""A block through a cold codec and back."""

from __future__ import annotations

import torch

from kernels.cold import ColdCodec


def run(codec: ColdCodec, block: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    encoded = bytearray(codec.encoded_bytes)
    data = bytearray(block.view(torch.uint8).numpy().tobytes())
    codec.encode(memoryview(data), memoryview(encoded))
    decoded = bytearray(len(data))
    codec.decode(memoryview(encoded), memoryview(decoded))
    return bytes(encoded), torch.frombuffer(decoded, dtype=block.dtype)
