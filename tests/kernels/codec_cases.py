"""Every way of storing vectors that there is, and vectors to store: what the suites run over."""

from __future__ import annotations

import torch

from kernels.codecs.base import VectorCodec
from kernels.codecs.fp8 import Fp8Vectors
from kernels.codecs.model_dtype import PlainVectors
from kernels.codecs.oscar import fit_rotation, second_moment
from kernels.codecs.turboquant import TurboVectors
from kernels.codecs.uniform import UniformVectors

HEADS = 2


def rotations(dim: int, heads: int = HEADS, seed: int = 5) -> torch.Tensor:
    """Fitted to random activations whose directions differ in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(dim, generator=generator))
    rows = torch.randn(heads, 4 * dim, dim, generator=generator) * sizes
    mixed = rows @ torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    return fit_rotation(second_moment(mixed))


def vector_codecs(dim: int, device: str = "cpu") -> dict[str, VectorCodec]:
    """All of them for vectors of this many numbers, HEADS heads where heads differ."""
    found: dict[str, VectorCodec] = {
        "bf16": PlainVectors(dim, torch.bfloat16),
        "fp16": PlainVectors(dim, torch.float16),
        "fp32": PlainVectors(dim, torch.float32),
        "fp8": Fp8Vectors(dim),
        "fp8-scaled": Fp8Vectors(dim, torch.tensor([1.0, 4.0], device=device)),
    }
    for bits in (1, 2, 3, 4):
        found[f"turbo{bits}"] = TurboVectors(dim, bits, device=device)
        found[f"turbo{bits}-cold"] = TurboVectors(
            dim, bits, returns_as=torch.bfloat16, device=device
        )
    for bits in (2, 4):
        found[f"uniform{bits}"] = UniformVectors(dim, bits)
    if dim & (dim - 1) == 0:
        found["oscar"] = UniformVectors(dim, 2, rotation=rotations(dim).to(device), clip=0.96)
    return found


NAMES = tuple(vector_codecs(64))


def vectors(
    seed: int, tokens: int, dim: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[HEADS, tokens, dim] with a few large channels, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(HEADS, tokens, dim, generator=generator)
    found[..., :: dim // 4] *= 12.0
    return (found * scale).to(dtype)


def restored(codec: VectorCodec, codes: torch.Tensor) -> torch.Tensor:
    """What codes stand for, in the model's basis, float32."""
    if isinstance(codec, TurboVectors):
        return codec.restore(codes).float()
    return codec.turn_back(codec.decode(codes)).float()


def relative_error(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Mean square error over mean square."""
    exact, found = exact.double(), found.double()
    return float((exact - found).square().mean() / exact.square().mean())
