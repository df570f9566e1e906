"""Integer weights of 4 and 8 bits: GPTQ, AWQ and compressed-tensors -> dense float32. Pure.

All are affine: value = (number - zero) * scale, with one scale (and zero) per output column and
group of inputs. They differ in what lies where in a 32-bit word, and in how a zero is written.
Sources: Frantar et al., "GPTQ" (2022) and the AutoGPTQ store; Lin et al., "AWQ" (2023) and its
"gemm" store; the compressed-tensors "pack-quantized" and "int-quantized" stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from seams.errors import ModelLoadError

# AWQ's gemm kernel wants the eight 4-bit numbers of a word in this order of columns.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 words -> the unsigned numbers in them, lowest bits first, along `dim` of a matrix.

    int32, 32 / bits as long along `dim`.
    """
    if words.dtype is not torch.int32 or words.dim() != 2:
        raise ValueError("has packed numbers that are no matrix of 32-bit words")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if dim == 1:
        return (words[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)
    return (words[:, None, :] >> shifts[:, None] & (1 << bits) - 1).flatten(0, 1)


def _need(parts: Mapping[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    for name in names:
        if name not in parts:
            raise ValueError(f"lacks {name}")
    return [parts[name] for name in names]


def _finite(scales: torch.Tensor) -> torch.Tensor:
    if not scales.is_floating_point() or not bool(torch.isfinite(scales).all()):
        raise ValueError("has scales that are not finite numbers")
    return scales.float()


def _check(agree: bool) -> None:
    if not agree:
        raise ValueError("has tensors whose shapes do not fit each other")


@dataclass(frozen=True)
class GptqFormat:
    """qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales
    [groups, out], g_idx int32 [in]: the group of every input (absent: equal groups in order).

    The first version of the store writes zero - 1; gptq_v2 writes the zero itself.
    """

    bits: int
    zero_offset: int  # added to the stored zeros, modulo 2^bits
    marker = ("qweight",)
    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def dense(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightFormat.dense."""
        packed, packed_zeros, scales = _need(parts, "qweight", "qzeros", "scales")
        numbers = unpack(packed, self.bits, 0)
        zeros = unpack(packed_zeros, self.bits, 1) + self.zero_offset & (1 << self.bits) - 1
        scales = _finite(scales)
        inputs, outputs = numbers.shape
        _check(scales.shape == zeros.shape and zeros.shape[1] == outputs)
        group = self._groups(parts.get("g_idx"), inputs, len(scales))
        return ((numbers - zeros[group]).float() * scales[group]).T.contiguous()

    @staticmethod
    def _groups(given: torch.Tensor | None, inputs: int, groups: int) -> torch.Tensor:
        _check(inputs > 0 and groups > 0)
        if given is None:
            _check(inputs % groups == 0)
            return torch.arange(inputs) // (inputs // groups)
        group = given.long()
        _check(group.shape == (inputs,) and int(group.min()) >= 0 and int(group.max()) < groups)
        return group


@dataclass(frozen=True)
class AwqFormat:
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]; groups
    are equal runs of inputs. The "gemm" order of columns within a word.
    """

    marker = ("qweight",)
    parts = frozenset({"qweight", "qzeros", "scales"})

    def dense(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightFormat.dense."""
        packed, packed_zeros, scales = _need(parts, "qweight", "qzeros", "scales")
        numbers, zeros = self._columns(packed), self._columns(packed_zeros)
        scales = _finite(scales)
        inputs, outputs = numbers.shape
        groups = len(scales)
        _check(scales.shape == zeros.shape == (groups, outputs))
        _check(groups > 0 and inputs % groups == 0)
        grouped = numbers.view(groups, inputs // groups, outputs) - zeros[:, None]
        return (grouped.float() * scales[:, None]).flatten(0, 1).T.contiguous()

    @staticmethod
    def _columns(words: torch.Tensor) -> torch.Tensor:
        numbers = unpack(words, 4, 1)
        ordered = torch.empty_like(numbers)
        for place, column in enumerate(AWQ_COLUMNS):
            ordered[:, column::8] = numbers[:, place::8]
        return ordered


@dataclass(frozen=True)
class CompressedIntFormat:
    """compressed-tensors: weight_packed int32 [out, in * bits / 32] (numbers shifted to be
    unsigned) with weight_shape, or weight int8 [out, in]; weight_scale [out, groups], [out] or [1];
    weight_zero_point like the scale, packed along the outputs where the weight is packed;
    weight_g_idx: the group of every input.
    """

    bits: int
    marker = ("weight_scale",)
    parts = frozenset(
        {"weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point"}
        | {"weight_g_idx"}
    )

    def dense(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightFormat.dense."""
        numbers = self._numbers(parts)
        outputs, inputs = numbers.shape
        scales = _finite(_need(parts, "weight_scale")[0])
        if scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(outputs, 1)
        scales = scales.reshape(len(scales), -1)
        zeros = self._zeros(parts, outputs, scales)
        groups = scales.shape[1]
        _check(len(scales) == outputs and zeros.shape == scales.shape)
        group = GptqFormat._groups(parts.get("weight_g_idx"), inputs, groups)
        return (numbers - zeros[:, group]).float() * scales[:, group]

    def _numbers(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """int32 [out, in], signed."""
        if "weight_packed" in parts:
            packed, shape = _need(parts, "weight_packed", "weight_shape")
            numbers = self._signed(packed, 1)
            _check(shape.numel() == 2)
            outputs, inputs = (int(n) for n in shape)
            _check(outputs == len(numbers) and 0 < inputs <= numbers.shape[1])
            return numbers[:, :inputs]  # the last word of a row may be padded
        weight = _need(parts, "weight")[0]
        if weight.dtype is not torch.int8 or weight.dim() != 2:
            raise ValueError("has a weight that is no matrix of 8-bit integers")
        return weight.int()

    def _zeros(
        self, parts: Mapping[str, torch.Tensor], outputs: int, scales: torch.Tensor
    ) -> torch.Tensor:
        """int32 [out, groups]."""
        zeros = parts.get("weight_zero_point")
        if zeros is None:
            return torch.zeros(scales.shape, dtype=torch.int32)
        if zeros.dtype is torch.int32 and zeros.dim() == 2 and len(zeros) != outputs:
            return self._signed(zeros, 0)[:outputs]
        zeros = zeros.int()
        if zeros.numel() == 1:
            return zeros.reshape(1, 1).expand(outputs, 1)
        return zeros.reshape(len(zeros), -1)

    def _signed(self, words: torch.Tensor, dim: int) -> torch.Tensor:
        return unpack(words, self.bits, dim) - (1 << self.bits - 1)


def gptq_format(settings: Mapping[str, Any]) -> GptqFormat:
    """From a quantization_config; raises ModelLoadError for bits or a store we cannot read."""
    bits, store = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8) or isinstance(bits, bool):
        raise ModelLoadError(f"GPTQ with {str(bits)[:16]} bits is not supported (2, 4, 8).")
    if store not in ("gptq", "gptq_v2"):
        raise ModelLoadError(f"GPTQ store {str(store)[:64]!r} is not supported (gptq, gptq_v2).")
    return GptqFormat(bits, int(store == "gptq"))


def awq_format(settings: Mapping[str, Any]) -> AwqFormat:
    """From a quantization_config; raises ModelLoadError for bits or an order we cannot read."""
    bits, order = settings.get("bits"), str(settings.get("version", "gemm")).lower()
    if bits != 4:
        raise ModelLoadError(f"AWQ with {str(bits)[:16]} bits is not supported (4).")
    if order != "gemm":
        raise ModelLoadError(f"AWQ store {order[:64]!r} is not supported (gemm).")
    return AwqFormat()


def compressed_int_format(bits: int) -> CompressedIntFormat:
    """Of 4 or 8 bits."""
    return CompressedIntFormat(bits)
