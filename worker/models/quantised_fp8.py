"""FP8 weights: float8 e4m3 numbers and their scales -> dense float32. Pure; knows no files.

Three stores are read, which differ in names and in how many numbers share a scale: one scale a
tensor or an output row (`weight_scale`: AutoFP8, compressed-tensors, FBGEMM), and one per block of
128 x 128 (`weight_scale_inv`: DeepSeek-V3's, used by Qwen's FP8 models too). All three multiply;
"inv" means the inverse of the factor that was used when quantising.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from seams.errors import ModelLoadError

SCALES = ("weight_scale_inv", "weight_scale")
BLOCK_DEFAULT = (128, 128)


class Fp8Format:
    """`weight` float8_e4m3fn [out, in] and one of SCALES.

    The scale is [] or [1] (the tensor), [out] or [out, 1] (each row), or [ceil(out / rows),
    ceil(in / columns)] of the block size that the configuration names.
    """

    marker = SCALES
    parts = frozenset({"weight", *SCALES})

    def __init__(self, block: tuple[int, int]) -> None:
        """`block`: rows and columns that share a scale, where scales are per block."""
        self._block = block

    def dense(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightFormat.dense."""
        weight = parts.get("weight")
        if weight is None or weight.dim() != 2:
            raise ValueError("has no two-dimensional weight")
        if weight.dtype is not torch.float8_e4m3fn:
            raise ValueError(f"is of type {weight.dtype}, not float8_e4m3fn")
        found = [parts[name] for name in SCALES if name in parts]
        scale = found[0].float()
        if len(found) != 1 or not bool(torch.isfinite(scale).all()):
            raise ValueError("has no finite scale, or two of them")
        return weight.float().mul_(self._expanded(scale, weight.shape[0], weight.shape[1]))

    def _expanded(self, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Something that broadcasts with [rows, columns]."""
        if scale.numel() == 1:
            return scale.reshape(1, 1)
        if scale.numel() == rows and scale.shape in ((rows,), (rows, 1)):
            return scale.reshape(rows, 1)
        high, wide = self._block
        if scale.shape != (-(-rows // high), -(-columns // wide)):
            raise ValueError("has scales for neither a tensor, a row nor a block of its size")
        spread = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        return spread[:rows, :columns]


def fp8_format(settings: Mapping[str, Any]) -> Fp8Format:
    """From a quantization_config; raises ModelLoadError for another float8 or an absurd block."""
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelLoadError("FP8 weights other than e4m3 are not supported.")
    return Fp8Format(_block_size(settings))


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int]:
    given = settings.get("weight_block_size")
    for group in (settings.get("config_groups") or {}).values():
        given = group["weights"].get("block_structure") or given
    if given is None:
        return BLOCK_DEFAULT
    whole = isinstance(given, list) and len(given) == 2
    if not whole or not all(type(n) is int and 0 < n <= 1 << 20 for n in given):
        raise ModelLoadError("The model's weight_block_size is not two positive integers.")
    return given[0], given[1]
