"""Quantised safetensors folders: which format it is, and dense tensors out of it; knows no device.

Weights are dequantised when they are loaded, in float32, and then rounded once to the model's
dtype. So a quantised checkpoint saves disk and download here, not memory; what it computes is
exactly what its stored numbers say, with activations left as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from seams.errors import ModelLoadError
from worker.models.quantised_fp8 import fp8_format
from worker.models.quantised_int import awq_format, compressed_int_format, gptq_format
from worker.models.weights import EMBEDDING, Checkpoint

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq")

# Scales of activations and of a quantised KV cache: neither is quantised here.
IGNORED = frozenset(
    {"input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale"}
    | {"q_scale", "k_scale", "v_scale"}
)


class WeightFormat(Protocol):
    """How the weight of one linear layer is spread over stored tensors."""

    @property
    def marker(self) -> tuple[str, ...]:
        """Endings of names: a layer that has one of these tensors is quantised."""
        ...

    @property
    def parts(self) -> frozenset[str]:
        """Endings of all tensors that make up a weight, the markers among them."""
        ...

    def dense(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 [out, in] from the tensors of one layer, by ending; what it is given may lack
        some. Raises ValueError with the rest of a sentence that starts with the layer's name.
        """
        ...


def weight_format(document: Mapping[str, Any]) -> WeightFormat | None:
    """The format that a config.json names; None if its weights are not quantised.

    Raises ModelLoadError if we cannot read it.
    """
    settings = document.get("quantization_config")
    if settings is None:
        settings = document.get("compression_config")  # compressed-tensors, before 2025
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ModelLoadError("The model's quantization_config is not a JSON object.")
    method = settings.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return fp8_format(settings)
    if method == "gptq":
        return gptq_format(settings)
    if method == "awq":
        return awq_format(settings)
    if method == "compressed-tensors":
        return _compressed(settings)
    known = ", ".join(METHODS)
    raise ModelLoadError(f"Weights quantised as {str(method)[:64]!r} are not supported ({known}).")


def _compressed(settings: Mapping[str, Any]) -> WeightFormat:
    """compressed-tensors: the format stands once for all or per group of layers."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError("The model's quantization_config has no config_groups.")
    schemes = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ModelLoadError("A group of the model's quantization_config has no weights.")
        schemes.append({k: weights.get(k) for k in ("type", "num_bits")})
    if any(scheme != schemes[0] for scheme in schemes):
        raise ModelLoadError("Models that mix several kinds of quantised weights are unsupported.")
    kind, bits = schemes[0]["type"], schemes[0]["num_bits"]
    if kind == "float" and bits == 8:
        return fp8_format(settings)
    if kind == "int" and bits in (4, 8):
        return compressed_int_format(bits)
    named = f"{str(kind)[:16]} weights of {str(bits)[:16]} bits"
    raise ModelLoadError(f"compressed-tensors with {named} is not supported (float 8, int 4, 8).")


class QuantisedCheckpoint:
    """A Checkpoint some of whose linear layers are quantised, as a TensorSource."""

    def __init__(self, stored: Checkpoint, form: WeightFormat, settings: Mapping[str, Any]) -> None:
        """Takes `stored` over: closing this closes it."""
        self._stored = stored
        self._format = form
        self._settings = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        names = stored.names
        self._layers = {
            name.removesuffix(f".{ending}")
            for name in names
            for ending in form.marker
            if name.endswith(f".{ending}")
        }
        self._held = frozenset(names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stored.close()

    @property
    def names(self) -> list[str]:
        """Of the dense tensors, sorted: a quantised layer has one weight."""
        plain = [name for name in self._held if not self._is_part(name)]
        return sorted([*plain, *(f"{layer}.weight" for layer in self._layers)])

    @property
    def files(self) -> list[Path]:
        """Of all shards, sorted."""
        return self._stored.files

    @property
    def bytes_total(self) -> int:
        """Of all shards."""
        return self._stored.bytes_total

    @property
    def bytes_read(self) -> int:
        """Of the stored tensors."""
        return self._stored.bytes_read

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, which nobody quantises here."""
        return self._stored.tensor(EMBEDDING).dtype

    @property
    def settings(self) -> str:
        """The quantization_config: it decides how the stored numbers are read."""
        return self._settings

    def tensor(self, name: str) -> torch.Tensor:
        """See TensorSource.tensor."""
        layer = name.removesuffix(".weight")
        if layer == name or layer not in self._layers:
            return self._stored.tensor(name)
        parts = {
            ending: self._stored.tensor(f"{layer}.{ending}")
            for ending in sorted(self._format.parts)
            if f"{layer}.{ending}" in self._held
        }
        try:
            return self._format.dense(parts)
        except ValueError as error:
            raise ModelLoadError(f"The quantised layer {layer} {error}.") from None

    def stored(self) -> Iterator[tuple[list[object], torch.Tensor]]:
        """See TensorSource.stored: as they lie in the files."""
        return self._stored.stored()

    def _is_part(self, name: str) -> bool:
        layer, _, ending = name.rpartition(".")
        return ending in IGNORED or (layer in self._layers and ending in self._format.parts)
