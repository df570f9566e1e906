"""Which implementation computes a model: the compiled CPU path where it can, torch elsewhere, with
batch-invariant kernels on a GPU if that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kernels.backends import backend_for
from kernels.codecs.choose import make_codec
from kernels.codecs.names import MODEL, OSCAR, CodecName, parse_codec
from kernels.codecs.oscar import LayerRotations
from kernels.hybrid import Reach
from kernels.native.build import NativeUnavailable, load_library
from kernels.native.pages import unsupported_codec
from seams.errors import LaunchError, ModelLoadError
from worker.calibration.statistics import Statistics
from worker.config import ReplicaConfig
from worker.models.base import Model
from worker.models.calibrating import fp8_scales
from worker.models.compiled import CompiledModel, decoder_shape
from worker.models.config import ModelConfig
from worker.models.invariant import VARIANT, invariant, serves_invariant
from worker.models.llama import LlamaModel
from worker.models.lora import Adapter
from worker.models.weights import FLOATS, Weights

COMPUTES = ("auto", "compiled", "torch")
NAMES = {name: dtype for dtype, name in FLOATS.items()}

_log = logging.getLogger(__name__)


def compiled_dtype(
    config: ReplicaConfig, parsed: ModelConfig, stored: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """The dtype in which the compiled path will compute the model; None if torch shall.

    With dtype auto that is the stored one (fp32 for fp16, which it has not): there bf16 is exact,
    batch by batch. Builds the library if need be. Raises ModelLoadError if the compiled path was
    asked for and is not to be had.
    """
    if config.compute not in COMPUTES:
        raise ModelLoadError(f"The compute must be one of {', '.join(COMPUTES)}.")
    if config.compute == "torch":
        refuse_variant(config, "torch was asked for.", device)
        return None
    dtype = stored if config.dtype == "auto" else NAMES.get(config.dtype)
    if dtype is torch.float16 and config.dtype == "auto":
        dtype = torch.float32
    if dtype is None:
        return None  # an unknown name: refused where dtypes are chosen
    if config.adapters:
        reason = "The compiled path computes no adapters."
    else:
        name = parse_codec(config.kv_codec)  # no name at all is refused where codecs are made
        reason = unsupported_codec(name) if name is not None else ""
        reason = reason or _unavailable(parsed, dtype, device, config.block_tokens)
    if not reason:
        return dtype
    if config.compute == "compiled":
        raise ModelLoadError(reason)
    refuse_variant(config, reason, device)
    if device.type == "cpu":
        _log.warning("computing with torch, slower and not batch invariant: %s", reason)
    return None


def refuse_variant(config: ReplicaConfig, reason: str, device: torch.device | None = None) -> None:
    """The compiled path will not compute: raises ModelLoadError if nothing batch invariant can
    where that is asked for. `device`: where a LlamaModel would."""
    if not config.batch_invariant:
        return
    if device is not None and serves_invariant(device):
        if config.kv_codec != MODEL:
            reason = "codecs of keys and values are computed by torch."
        elif config.adapters:
            reason = "adapters are computed by torch."
        else:
            return
    raise ModelLoadError(f"No batch-invariant path serves this model here: {reason}")


def _unavailable(
    parsed: ModelConfig, dtype: torch.dtype, device: torch.device, block_tokens: int
) -> str:
    if device.type != "cpu":
        return "The compiled path computes on CPUs only."
    reason = decoder_shape(parsed, dtype, block_tokens).unsupported()
    if reason:
        return reason
    try:
        load_library()
    except NativeUnavailable as error:
        return str(error)
    return ""


def make_model(
    config: ReplicaConfig,
    parsed: ModelConfig,
    weights: Weights,
    *,
    fingerprint: str,
    context_tokens: int,
    compiled: bool,
    adapters: Sequence[Adapter] = (),
) -> Model:
    """The model, without pools. Raises ModelLoadError if memory is short."""
    name, block_tokens = config.served_name, config.block_tokens
    if not compiled:
        arithmetic, backend = VARIANT, backend_for(weights.embedding.device)
        if config.batch_invariant:
            arithmetic, backend = invariant()
        model = LlamaModel(
            parsed,
            weights,
            backend,
            name=name,
            fingerprint=fingerprint,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            adapters=adapters,
            arithmetic=arithmetic,
        )
        _recode(model, config, parsed, weights)
        return model
    assert not adapters
    try:
        exact = CompiledModel(
            parsed,
            weights,
            name=name,
            fingerprint=fingerprint,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            threads=config.threads,
        )
    except MemoryError:
        raise ModelLoadError("The device has no memory left for the model's weights.") from None
    _recode(exact, config, parsed, weights)
    return exact


def _recode(
    model: LlamaModel | CompiledModel,
    config: ReplicaConfig,
    parsed: ModelConfig,
    weights: Weights,
) -> None:
    """Put the model's keys and values into the codec that was asked for, if that is one."""
    name = parse_codec(config.kv_codec)
    if name is None:
        raise ModelLoadError("The KV codec must be model, fp8, turboquant:kAvB or oscar.")
    if name.kind == OSCAR:
        assert isinstance(model, LlamaModel), "the compiled path has no OSCAR"
        rotations = _rotations(config, model.spec.fingerprint)
        recode_oscar(model, name, parsed, rotations, weights.embedding)
        return
    scales = fp8_scales(model) if name.has_fp8 else None
    dtype, device = weights.embedding.dtype, weights.embedding.device
    codec = make_codec(name, parsed.layers, parsed.head_dim, dtype, device, scales)
    if codec is not None:
        model.recode(codec)


def recode_oscar(
    model: LlamaModel,
    name: CodecName,
    parsed: ModelConfig,
    rotations: Sequence[LayerRotations],
    like: torch.Tensor,
) -> None:
    """OSCAR's codes, and sinks (whole blocks of them) and windows in the model's dtype. `rotations`
    by layer, on any device; `like` is of the weights' dtype and device. Raises ModelLoadError for a
    model in which every layer slides."""
    if min(parsed.windows) > 0:
        raise ModelLoadError(
            "The KV codec oscar needs layers that look back without a window; this model has none."
        )
    size, shape = model.spec.block_tokens, (parsed.layers, parsed.head_dim)
    name = replace(name, sink_tokens=-(-name.sink_tokens // size) * size)
    codec = make_codec(name, *shape, like.dtype, like.device, rotations=rotations)
    assert codec is not None
    model.recode_behind(codec, Reach(name.sink_tokens, name.window_tokens))


def _rotations(config: ReplicaConfig, fingerprint: str) -> list[LayerRotations]:
    """By layer, of the calibration that was given. Raises ModelLoadError."""
    if not config.calibration:
        raise ModelLoadError(
            "The KV codec oscar needs a calibration of this model: make one with banyan calibrate."
        )
    try:
        known = Statistics.load(Path(config.calibration), fingerprint)
    except LaunchError as error:
        raise ModelLoadError(error.message) from None
    pairs = zip(known.key_rotation, known.value_rotation, strict=True)
    return [LayerRotations(keys, values) for keys, values in pairs]
