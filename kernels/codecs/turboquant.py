"""TurboQuant's vectors: turned by a fixed Hadamard matrix, so that every coordinate looks normal,
then each rounded to a Lloyd-Max codebook. Knows no page and needs no calibration.

Source: Zandieh et al., "TurboQuant" (arXiv:2504.19874), its mean-square variant. The variant with
unbiased inner products is not used: on attention it is several times worse at the same bits. The
decoded vector gets exactly its stored norm ("norm correction"), or it would shrink a little with
every round trip.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import torch

from kernels.codecs.codebook import Codebook, lloyd_max
from kernels.codecs.hadamard import mixing
from kernels.codecs.packing import lookup, pack, packed_bytes, run_table

NORM_BYTES = 2
ROUNDING = 2.0**-8  # what rounding to bf16 may change of a vector, in shares of its length
SETTLE_STEPS_MAX = 64
CENTROID_STEPS = 1 << 13  # of a unit
GRID_STEPS, GRID_END = 16, 4  # steps of a unit; beyond the end lies no boundary


class TurboVectors:
    """Implements VectorCodec: indices of `bits` bits each, packed, then the norm in two bytes."""

    heads = 1
    token_local = True

    def __init__(
        self,
        dim: int,
        bits: int,
        *,
        seed: int = 0,
        returns_as: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`returns_as`: the dtype to which decoded vectors are rounded and from which they may be
        encoded again, as between tiers and device. Codes are settled then: a second encoding writes
        the same bytes. Without it that holds for what was not rounded.
        """
        self.dim, self.bits, self.seed = dim, bits, seed
        self.index_bytes = packed_bytes(dim, bits)
        self.vector_bytes = self.index_bytes + NORM_BYTES
        self.returns_as = returns_as
        book = lloyd_max(bits)
        # Factors, lowest and highest, to which a codeword of a settled code may be stretched.
        self.stretches = book.scale_range(ROUNDING * dim**0.5)
        # float32 [2 ** bits]; of few bits, so that sums of `dim` of them are exact in float32 too.
        self.centroids = torch.tensor(
            [round(centroid * CENTROID_STEPS) / CENTROID_STEPS for centroid in book.centroids],
            device=device,
        )
        self._below, self._next = _grid(book, device)
        self._table = run_table(self.centroids, bits)
        self._mixing = mixing(dim, seed).to(device)
        self._back = self._mixing.T.float()
        self.rotation: torch.Tensor = (self._mixing / dim**0.5).float()  # float32 [dim, dim]

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """See VectorCodec. In float64, so that no byte depends on what else is encoded with it.

        A vector that is not finite, or longer than float32 can say, gets the norm NaN; one longer
        than fp16 allows the longest.
        """
        settles = self.returns_as is not None
        exact = vectors.double()
        length = _length(exact)
        norm = _stored(length)
        live = norm > 0
        normal = torch.where(live, (exact @ self._mixing).float() / length.float(), 0.0)
        indices = self._nearest(normal)
        if settles:
            indices = self._settled(indices, live)
        codes = torch.cat((pack(indices, self.bits), norm.view(torch.uint8)), -1)
        return self._with_settled_norms(codes) if settles else codes

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        values, length = self._codewords(codes)
        found: torch.Tensor = values * (self._norms(codes) / length)
        return found

    def restore(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes stand for in the model's own basis, float32 [..., dim]: `turn_back(decode)` in
        the same bits in any company, for sums of centroids are exact. Settled codes rely on it.
        """
        values, length = self._restored(codes)
        return values * (self._norms(codes) / length)

    def _restored(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codewords in the model's basis, float32 [..., dim], and their length [..., 1]."""
        values, _ = self._codewords(codes)
        return values @ self._back, (_length(values.double()) * self.dim**0.5).float()

    def _codewords(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Centroids [..., dim] and their vector's length [..., 1]."""
        values = lookup(codes[..., : self.index_bytes], self.bits, self.dim, self._table)
        return values, _length(values)

    def _norms(self, codes: torch.Tensor) -> torch.Tensor:
        """Stored norms, float32 [..., 1]."""
        norm = codes[..., self.index_bytes :].clone(memory_format=torch.contiguous_format)
        return norm.view(torch.float16).float()

    def _nearest(self, normal: torch.Tensor) -> torch.Tensor:
        """int32, the centroid nearest to each number: how many boundaries lie below it. Looked up
        on a grid so fine that one comparison is left: several times faster than a search."""
        flat = normal.reshape(-1)
        place = ((flat + GRID_END) * GRID_STEPS).clamp_(0, len(self._below) - 1).int()
        above = (flat > self._next.index_select(0, place)).int()
        return (self._below.index_select(0, place) + above).view(normal.shape)

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        return vectors.float() @ self.rotation

    def turn_back(self, vectors: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        return vectors.float() @ self.rotation.T

    def _settled(self, indices: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """Indices that their own decoded vector is encoded to.

        Norm correction stretches the codeword to the right length. That leaves every coordinate in
        its cell unless one or two coordinates hold most of the vector, which after turning by
        random signs no real one does; such a vector is replaced by what many round trips would
        make of it.
        """
        low, high = self.stretches
        flat, left = indices.view(-1, self.dim), live.view(-1)
        rows = torch.arange(len(flat), device=flat.device)
        for _ in range(SETTLE_STEPS_MAX):
            values = self.centroids.index_select(0, flat[rows].view(-1)).view(-1, self.dim)
            stretch = values.square().mean(-1).rsqrt()
            wrong = left & ~((stretch >= low) & (stretch <= high))
            if not bool(wrong.any()):
                break
            found = self._nearest(values[wrong] * stretch[wrong, None])
            rows = rows[wrong]
            moved = (found != flat[rows]).any(-1)  # others lie near an edge and stay where they are
            rows = rows[moved]
            flat[rows], left = found[moved], torch.ones_like(rows, dtype=torch.bool)
        return indices

    def _with_settled_norms(self, codes: torch.Tensor) -> torch.Tensor:
        """Norms that the decoded vector has once it is rounded. Rounding can change a norm by more
        than a step of fp16 where one number holds most of it.

        A longer vector is never rounded to a shorter one, so norms that are replaced by what comes
        back move in one direction, and they stop.
        """
        flat = codes.view(-1, self.vector_bytes)
        values, length = self._restored(flat)
        norm = self._norms(flat)
        wrong = torch.arange(len(flat), device=codes.device)
        for _ in range(SETTLE_STEPS_MAX):
            again = (values * (norm / length)).to(self.returns_as)
            found = _stored(_length(again.double())).float()
            moved = (found != norm).squeeze(-1) & found.isfinite().squeeze(-1)
            if not bool(moved.any()):
                break
            wrong, norm = wrong[moved], found[moved]
            values, length = values[moved], length[moved]
            flat[wrong, self.index_bytes :] = norm.half().view(torch.uint8)
        return codes


def _grid(book: Codebook, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each cell of a grid over [-GRID_END, GRID_END]: how many boundaries lie below it, int32,
    and the next one. No cell holds two, nor does one with half a step before it."""
    steps = range(2 * GRID_END * GRID_STEPS + 1)
    starts = [(step - 0.5) / GRID_STEPS - GRID_END for step in steps]
    below = [bisect_left(book.boundaries, start) for start in starts]
    following = [(*book.boundaries, math.inf)[count] for count in below]
    return torch.tensor(below, dtype=torch.int32, device=device), torch.tensor(
        following, device=device
    )


def _length(numbers: torch.Tensor) -> torch.Tensor:
    """[..., dim] -> [..., 1]. In float64 exact for numbers of bf16 and fp16, in any order."""
    length: torch.Tensor = torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
    return length


def _stored(length: torch.Tensor) -> torch.Tensor:
    """As a code holds it: fp16, NaN if it is not finite in float32."""
    stored = length.clamp(max=torch.finfo(torch.float16).max).half()
    return stored.masked_fill(~length.float().isfinite(), torch.nan)
