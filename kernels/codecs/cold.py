"""TurboQuant below the device: blocks in the model's dtype there, four bits a number in the tiers.

Knows layouts, no tiers. Needs no kernel and no calibration, and loses something once: a block that
was loaded and leaves again is written as the same bytes. Blocks of bf16 go through the compiled
library where it is built, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

from kernels.codecs.turboquant import TurboVectors
from kernels.layout import DTYPES, PageLayout
from kernels.native.settled import SettledVectors, settled_vectors

BITS = 4
SEED = 0


class TurboCold:
    """Implements kernels.cold.ColdCodec for blocks of one PageLayout.

    Encoded: the block's vectors in its own order, each as TurboVectors writes it.
    """

    name = f"turboquant-k{BITS}v{BITS}-s{SEED}-cold"

    def __init__(self, layout: PageLayout, *, compiled: bool = True) -> None:
        """Without `compiled` torch computes everything."""
        self._uses_library = compiled
        self._dtype = DTYPES[layout.dtype]
        keys, values = (
            TurboVectors(dim, BITS, seed=SEED, returns_as=self._dtype)
            for dim in (layout.qk_dim, layout.v_dim)
        )
        rows = layout.kv_heads * layout.block_tokens
        # What is encoded in one piece: vectors of one width that follow each other.
        self._pieces = [(rows, codec) for _ in range(layout.layers) for codec in (keys, values)]
        if layout.qk_dim == layout.v_dim:
            self._pieces = [(2 * rows * layout.layers, keys)]

    @property
    def encoded_bytes(self) -> int:
        """Of any block."""
        return sum(rows * codec.vector_bytes for rows, codec in self._pieces)

    def encode(self, block: memoryview, into: memoryview) -> None:
        """See ColdCodec."""
        numbers = torch.frombuffer(block, dtype=self._dtype)
        encoded = torch.frombuffer(into, dtype=torch.uint8)
        for codec, vectors, codes in self._split(numbers, encoded):
            compiled = self._compiled[codec]
            if compiled is None:
                codes.copy_(codec.encode(vectors.unsqueeze(0)).squeeze(0))
            else:
                compiled.encode(vectors, codes)

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """See ColdCodec."""
        numbers = torch.frombuffer(into, dtype=self._dtype)
        codes_of_all = torch.frombuffer(encoded, dtype=torch.uint8)
        for codec, vectors, codes in self._split(numbers, codes_of_all):
            compiled = self._compiled[codec]
            if compiled is None:
                vectors.copy_(codec.restore(codes))
            else:
                compiled.decode(codes, vectors)

    @cached_property
    def _compiled(self) -> dict[TurboVectors, SettledVectors | None]:
        """By codec. Looked up when it is first needed: by then a model that uses the library has
        built it."""
        codecs = {codec for _, codec in self._pieces}
        return {codec: settled_vectors(codec) if self._uses_library else None for codec in codecs}

    def _split(
        self, numbers: torch.Tensor, encoded: torch.Tensor
    ) -> Iterator[tuple[TurboVectors, torch.Tensor, torch.Tensor]]:
        """Each piece's codec, its vectors [rows, dim] and its codes [rows, bytes], views."""
        at = code_at = 0
        for rows, codec in self._pieces:
            size, code_size = rows * codec.dim, rows * codec.vector_bytes
            vectors = numbers[at : at + size].view(rows, codec.dim)
            codes = encoded[code_at : code_at + code_size].view(rows, codec.vector_bytes)
            yield codec, vectors, codes
            at, code_at = at + size, code_at + code_size
