"""Linear: a weight prepared once for the device it is on; knows nothing of layers.

On a CPU a half-precision weight is packed by oneDNN where this torch can: F.linear passes a weight
that oneDNN would rather read in blocks. The operators are those that torch.compile emits; they are
private, so what they compute is looked at first.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

# What was measured to gain (docs/log.md). Not float32: faster in batches, but oneDNN then sums so
# that few rows have three times the rounding error, too much for the tests of logits.
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = "AVX512"

_log = logging.getLogger(__name__)


class Linear:
    """y = x W^T + b. Called with x [N, in] of the weight's dtype, N >= 0; gives a new [N, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out, in]; bias [out]. Where it packs, it holds a copy and not `weight`."""
        assert weight.dim() == 2
        self._packed = packs(weight.device, weight.dtype)
        self._weight = _pack(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights are packed there, which rounds otherwise than F.linear does."""
    return device.type == "cpu" and _works(dtype)


@cache
def _works(dtype: torch.dtype) -> bool:
    """Whether torch packs and gets F.linear's result. The numbers are small and whole, so both are
    exact in any float, whatever the order of sums."""
    if dtype not in DTYPES or torch.backends.cpu.get_cpu_capability() != CAPABILITY:
        return False
    weight = torch.arange(48 * 32).remainder_(5).sub_(2).view(48, 32).to(dtype)
    bias = torch.arange(48).remainder_(7).to(dtype)
    x = torch.arange(5 * 32).remainder_(3).sub_(1).view(5, 32).to(dtype)
    try:
        found = _packed_linear(x, _pack(weight), bias)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        # gone, another signature, or no such instructions
        _log.info("linear layers in %s are not packed: %s", dtype, str(error).split("\n")[0])
        return False
    if torch.equal(found, F.linear(x, weight, bias)):
        return True
    _log.warning("linear layers in %s are not packed: a wrong result", dtype)
    return False


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """An opaque tensor of the same shape, in the order that oneDNN reads."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    assert isinstance(packed, torch.Tensor)
    return packed


def _packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    made = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    assert isinstance(made, torch.Tensor)
    return made
