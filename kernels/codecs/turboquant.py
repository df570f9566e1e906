"""TurboQuant's vectors: turned by a fixed Hadamard matrix, so that every coordinate looks normal,
then each rounded to a Lloyd-Max codebook. Knows no page and needs no calibration.

Source: Zandieh et al., "TurboQuant" (arXiv:2504.19874), its mean-square variant. The variant with
unbiased inner products is not used: on attention it is several times worse at the same bits. The
decoded vector gets exactly its stored norm ("norm correction"), or it would shrink a little with
every round trip.
"""

from __future__ import annotations

import torch

from kernels.codecs.codebook import lloyd_max
from kernels.codecs.hadamard import mixing
from kernels.codecs.packing import lookup, pack, packed_bytes, run_table

NORM_BYTES = 2
ROUNDING = 2.0**-8  # what rounding to bf16 may change of a vector, in shares of its length
SETTLE_STEPS_MAX = 64


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
        self.dim, self.bits = dim, bits
        self.index_bytes = packed_bytes(dim, bits)
        self.vector_bytes = self.index_bytes + NORM_BYTES
        self._returns_as = returns_as
        book = lloyd_max(bits)
        self._stretches = book.scale_range(ROUNDING * dim**0.5)
        self.centroids = torch.tensor(book.centroids, device=device)  # float32 [2 ** bits]
        self._boundaries = torch.tensor(book.boundaries, device=device)
        self._table = run_table(self.centroids, bits)
        self._mixing = mixing(dim, seed).to(device)
        self.rotation: torch.Tensor = (self._mixing / dim**0.5).float()  # float32 [dim, dim]

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """See VectorCodec. In float64, so that no byte depends on what else is encoded with it.

        A vector that is not finite gets the norm NaN; one longer than fp16 allows the longest.
        """
        exact = vectors.double()
        length = _length(exact)
        norm = _stored(length)
        live = norm > 0
        normal = torch.where(live, (exact @ self._mixing) / length, 0.0).float()
        indices = torch.bucketize(normal, self._boundaries, out_int32=True)
        if self._returns_as is None:
            return torch.cat((pack(indices, self.bits), norm.view(torch.uint8)), -1)
        indices = self._settled(indices, live)
        codes = torch.cat((pack(indices, self.bits), norm.view(torch.uint8)), -1)
        return self._with_settled_norms(codes)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """See VectorCodec."""
        packed, norm = codes[..., : self.index_bytes], codes[..., self.index_bytes :]
        values = lookup(packed, self.bits, self.dim, self._table)
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        stored = norm.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
        found: torch.Tensor = values * (stored / length)
        return found

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
        low, high = self._stretches
        for _ in range(SETTLE_STEPS_MAX):
            values = self.centroids[indices.long()]
            stretch = values.square().mean(-1, keepdim=True).rsqrt()
            wrong = (live & ~((stretch >= low) & (stretch <= high))).squeeze(-1)
            if not bool(wrong.any()):
                break
            stretched = (values * stretch)[wrong]
            indices = indices.clone()
            indices[wrong] = torch.bucketize(stretched, self._boundaries, out_int32=True)
        return indices

    def _with_settled_norms(self, codes: torch.Tensor) -> torch.Tensor:
        """Norms that the decoded vector has once it is rounded. Rounding can change a norm by more
        than a step of fp16 where one number holds most of it.

        A longer vector is never rounded to a shorter one, so norms that are replaced by what comes
        back move in one direction, and they stop.
        """
        flat = codes.view(-1, self.vector_bytes)
        wrong = torch.arange(len(flat), device=codes.device)
        for _ in range(SETTLE_STEPS_MAX):
            again = self.turn_back(self.decode(flat[wrong])).to(self._returns_as)
            norm = _stored(_length(again.double())).view(torch.uint8)
            moved = (norm != flat[wrong, self.index_bytes :]).any(-1)
            if not bool(moved.any()):
                break
            wrong = wrong[moved]
            flat[wrong, self.index_bytes :] = norm[moved]
        return codes


def _length(exact: torch.Tensor) -> torch.Tensor:
    """float64 [..., dim] -> [..., 1]."""
    return exact.square().sum(-1, keepdim=True).sqrt()


def _stored(length: torch.Tensor) -> torch.Tensor:
    """float64 -> fp16, NaN if it is not finite."""
    stored = length.clamp(max=torch.finfo(torch.float16).max).half()
    return stored.masked_fill(~length.isfinite(), torch.nan)
