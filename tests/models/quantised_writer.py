"""Writes quantised checkpoints by rounding to nearest, number by number from each store's format.

Slow and plain on purpose: these are the yardstick of the loader. Every writer gives the stored
tensors of one layer and the dense weight that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Stored = dict[str, torch.Tensor]
Layer = Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned [rows, columns] -> int32 [rows, columns * bits / 32], packed along the columns:
    place i of a word holds column order[i] of its own.
    """
    each = 32 // bits
    rows, columns = numbers.shape
    assert columns % each == 0
    packed = np.zeros((rows, columns // each), dtype=np.uint32)
    for place in range(each):
        column = order[place] if order else place
        packed |= numbers[:, column::each].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32))


def affine(weight: torch.Tensor, group: int, bits: int, symmetric: bool) -> tuple[np.ndarray, ...]:
    """[out, in] -> numbers [out, in], zeros and float16 scales [out, groups]."""
    outputs, inputs = weight.shape
    runs = weight.float().numpy().reshape(outputs, inputs // group, group)
    top = (1 << bits) - 1
    if symmetric:
        high = np.abs(runs).max(axis=2)
        scales = np.maximum(high * 2 / top, 1e-6).astype(np.float16)
        zeros = np.full(scales.shape, 1 << bits - 1)
    else:
        low, high = np.minimum(runs.min(axis=2), 0), np.maximum(runs.max(axis=2), 0)
        scales = np.maximum((high - low) / top, 1e-6).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, top).astype(int)
    numbers = np.round(runs / scales.astype(np.float32)[:, :, None]) + zeros[:, :, None]
    numbers = np.clip(numbers, 0, top).astype(int)
    return numbers.reshape(outputs, inputs), zeros, scales


def meaning(
    numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray
) -> torch.Tensor:
    """(number - zero) * scale in float32, input by input; `groups` [in]."""
    dense = np.empty(numbers.shape, dtype=np.float32)
    for i, group in enumerate(groups):
        difference = (numbers[:, i] - zeros[:, group]).astype(np.float32)
        dense[:, i] = difference * scales[:, group].astype(np.float32)
    return torch.from_numpy(dense)


def gptq(
    weight: torch.Tensor, group: int = 32, bits: int = 4, symmetric: bool = False,
    version: int = 1, shuffled: bool = False, index: bool = True,
) -> tuple[Stored, torch.Tensor]:  # fmt: skip
    """qweight packs along the inputs, qzeros along the outputs. `shuffled`: act-order."""
    inputs = weight.shape[1]
    groups = np.arange(inputs) // group
    order = np.random.default_rng(inputs).permutation(inputs) if shuffled else np.arange(inputs)
    numbers, zeros, scales = affine(weight[:, torch.from_numpy(order)], group, bits, symmetric)
    back = np.argsort(order)
    numbers, groups = numbers[:, back], groups[back]
    written = zeros if version == 2 else (zeros - 1) % (1 << bits)
    stored = {
        "qweight": words(np.ascontiguousarray(numbers), bits).T.contiguous(),
        "qzeros": words(np.ascontiguousarray(written.T), bits),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
    }
    if index:
        stored["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return stored, meaning(numbers, zeros, scales, groups)


def awq(weight: torch.Tensor, group: int = 32) -> tuple[Stored, torch.Tensor]:
    """Everything is [in, out]-like and packs along the outputs, in the gemm kernel's order."""
    numbers, zeros, scales = affine(weight, group, 4, symmetric=False)
    stored = {
        "qweight": words(np.ascontiguousarray(numbers.T), 4, AWQ_ORDER),
        "qzeros": words(np.ascontiguousarray(zeros.T), 4, AWQ_ORDER),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
    }
    return stored, meaning(numbers, zeros, scales, np.arange(weight.shape[1]) // group)


def packed(
    weight: torch.Tensor, group: int = 32, bits: int = 4, symmetric: bool = True
) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors "pack-quantized": signed numbers shifted up, zeros packed by outputs."""
    outputs, inputs = weight.shape
    numbers, zeros, scales = affine(weight, group, bits, symmetric)
    each, half = 32 // bits, 1 << bits - 1
    padded = np.pad(numbers, ((0, 0), (0, -inputs % each)))
    stored = {
        "weight_packed": words(padded, bits),
        "weight_shape": torch.tensor([outputs, inputs], dtype=torch.int64),
        "weight_scale": torch.from_numpy(scales),
    }
    if symmetric:
        assert (zeros == half).all()
    else:
        rows = np.pad(zeros, ((0, -outputs % each), (0, 0)))
        stored["weight_zero_point"] = words(np.ascontiguousarray(rows.T), bits).T.contiguous()
    return stored, meaning(numbers, zeros, scales, np.arange(inputs) // group)


def int8(weight: torch.Tensor, per_row: bool = True) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors "int-quantized": one scale a row (or a tensor), no zeros."""
    values = weight.float()
    high = values.abs().amax(1, keepdim=True) if per_row else values.abs().max().reshape(1)
    scale = (high / 127).to(torch.bfloat16)
    numbers = (values / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale.float()


def fp8(
    weight: torch.Tensor, per: str = "block", name: str = "weight_scale_inv", block: int = 128
) -> tuple[Stored, torch.Tensor]:
    """float8 e4m3 with a float32 scale per tensor, row or square block."""
    values, top = weight.float(), 448.0
    if per == "tensor":
        scale = values.abs().max() / top
        spread = scale
    elif per == "row":
        scale = values.abs().amax(1, keepdim=True) / top
        spread = scale
    else:
        high, wide = (-(-n // block) for n in values.shape)
        scale = torch.empty(high, wide)
        spread = torch.empty_like(values)
        for i in range(high):
            for j in range(wide):
                part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                scale[i, j] = values[part].abs().max() / top
                spread[part] = scale[i, j]
    numbers = (values / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, name: scale}, numbers.float() * spread


def compressed(weights: Mapping[str, Any], form: str) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights)}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


STORES: dict[str, tuple[dict[str, Any], Layer]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq symmetric": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"},
        lambda w: gptq(w, symmetric=True, index=False),
    ),
    "gptq act-order": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, shuffled=True)),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, version=2),
    ),
    "gptq 8 bits": ({"quant_method": "gptq", "bits": 8}, lambda w: gptq(w, bits=8)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "packed 4 bits": (compressed({"type": "int", "num_bits": 4}, "pack-quantized"), packed),
    "packed with zeros": (
        compressed({"type": "int", "num_bits": 4}, "pack-quantized"),
        lambda w: packed(w, symmetric=False),
    ),
    "packed 8 bits": (
        compressed({"type": "int", "num_bits": 8}, "pack-quantized"),
        lambda w: packed(w, bits=8, group=w.shape[1]),
    ),
    "int8 by rows": (compressed({"type": "int", "num_bits": 8}, "int-quantized"), int8),
    "int8": (
        compressed({"type": "int", "num_bits": 8}, "int-quantized"),
        lambda w: int8(w, per_row=False),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        fp8,
    ),
    "fp8 small blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 24]},
        lambda w: fp8(w, block=24),
    ),
    "fp8 by tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: fp8(w, "tensor", "weight_scale"),
    ),
    "fp8 by rows": (
        compressed({"type": "float", "num_bits": 8}, "float-quantized"),
        lambda w: fp8(w, "row", "weight_scale"),
    ),
}
"""A quantization_config and how a layer of it is stored."""


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a layer that these stores quantise."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def write_quantised(
    folder: Path, store: str, document: Mapping[str, Any], held: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A folder of `held` in a store of STORES; returns the dense tensors that it stands for."""
    settings, layer = STORES[store]
    stored: Stored = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in held.items():
        if not is_linear(name):
            stored[name] = dense[name] = tensor
            continue
        parts, dense[name] = layer(tensor)
        stored |= {f"{name.removesuffix('.weight')}.{k}": v for k, v in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    whole = {**document, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(whole))
    return dense
