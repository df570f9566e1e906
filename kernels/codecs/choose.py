"""From a codec's name to a codec for a model's layers; knows shapes, no weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.codecs.base import KVCodec, LayerCodec, VectorCodec
from kernels.codecs.fp8 import Fp8Vectors, LayerScales, calibration_of
from kernels.codecs.model_dtype import PlainVectors
from kernels.codecs.names import FP8, KEY_FP8, OSCAR, TURBOQUANT, CodecName
from kernels.codecs.oscar import LayerRotations, oscar
from kernels.codecs.turboquant import TurboVectors

SEED = 0  # of the signs before TurboQuant's Hadamard matrix; part of the codec's id


def make_codec(
    name: CodecName,
    layers: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scales: Sequence[LayerScales] | None = None,
    rotations: Sequence[LayerRotations] | None = None,
) -> KVCodec | None:
    """None for `model`: pages then hold the dtype, read in place. By layer: `scales` for what is
    stored in FP8, 1 without; `rotations` for OSCAR, which needs them.

    Boundaries that meet leave no layer to encode; that is allowed and saves nothing.
    """
    if name.kind == OSCAR:
        assert rotations is not None and len(rotations) == layers, "OSCAR is calibrated"
        there = [LayerRotations(r.keys.to(device), r.values.to(device)) for r in rotations]
        return oscar(there, f"-s{name.sink_tokens}-w{name.window_tokens}")
    if name.kind not in (FP8, TURBOQUANT):
        return None
    turbo = {
        bits: TurboVectors(dim, bits, seed=SEED, device=device)
        for bits in {name.key_bits, name.value_bits} - {0, KEY_FP8}
    }
    plain = LayerCodec(PlainVectors(dim, dtype), PlainVectors(dim, dtype))
    chosen: list[LayerCodec] = []
    used: list[torch.Tensor] = []
    for layer in range(layers):
        fitted = scales[layer] if scales is not None else None
        if min(layer, layers - 1 - layer) < name.boundary_layers:
            chosen.append(plain)
            continue
        keys: VectorCodec | None = turbo.get(name.key_bits)
        values: VectorCodec | None = turbo.get(name.value_bits)
        if keys is None:
            keys = Fp8Vectors(dim, fitted.keys.to(device) if fitted else None)
            used += [fitted.keys] if fitted else []
        if values is None:
            values = Fp8Vectors(dim, fitted.values.to(device) if fitted else None)
            used += [fitted.values] if fitted else []
        chosen.append(LayerCodec(keys, values))
    return KVCodec(codec_id(name), tuple(chosen), calibration_of(used))


def codec_id(name: CodecName) -> str:
    """What blocks of this codec are called in representations and numeric classes."""
    if name.kind == FP8:
        return "fp8-e4m3"
    edge = f"-b{name.boundary_layers}" if name.boundary_layers else ""
    return f"turboquant-k{name.key_bits}v{name.value_bits}-s{SEED}{edge}"
