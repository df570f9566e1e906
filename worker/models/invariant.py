"""What a decoder's sums are computed with, linear layers and norms: as torch does it, or so that a
row's result has the same bits whatever other rows are there. Knows no layer.

Everything else in a LlamaModel's step is a look-up or works element by element, which torch does to
each element alike wherever it lies; attention is the backend's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.attention import AttentionBackend
from worker.models.linear import Linear

Prepared = Callable[[torch.Tensor], torch.Tensor]
"""A linear layer: x [N, in] of the weight's dtype to a new [N, out]."""


@dataclass(frozen=True)
class Arithmetic:
    """One way to compute them; `numerics` names it in a model's numeric class."""

    numerics: str
    linear: Callable[[torch.Tensor, torch.Tensor | None], Prepared]
    """Of weight [out, in] and bias [out]."""
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """RMS norm over the last axis of x float32 [..., width]: x, weight float32 [width], epsilon."""


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


VARIANT = Arithmetic("variant", Linear, _norm)


def serves_invariant(device: torch.device) -> bool:
    """Whether the invariant kernels run there: on GPUs, and where Triton is interpreted."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def invariant() -> tuple[Arithmetic, AttentionBackend]:
    """The batch-invariant arithmetic and the attention that belongs to it."""
    import triton  # Linux only, and slow to import

    from kernels import triton_invariant
    from kernels.triton_rows import RowAttention

    def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Prepared:
        weight = triton_invariant.settled(weight)
        bias = None if bias is None else triton_invariant.settled(bias)
        return lambda x: triton_invariant.linear(x, weight, bias)

    numerics = f"triton{triton.__version__}-banyan{triton_invariant.NUMERICS}-invariant"
    return Arithmetic(numerics, linear, triton_invariant.rms_norm), RowAttention()
