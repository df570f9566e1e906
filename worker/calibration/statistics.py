"""Statistics of a model's queries, keys and values over ordinary text: one file per model, whose
hash names them. It knows no text and computes nothing of a model.

The file is safetensors: tensors and strings, nothing that runs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from seams.errors import LaunchError

FORMAT = "banyan/calibration/1"


@dataclass(frozen=True)
class Statistics:
    """L layers, Hq query heads, Hkv KV heads, F = dim / 2 bands of RoPE: number f of a head turns
    with number f + F, as one complex number.

    Queries are taken after their norm, before RoPE for the means and after it for the rotations.
    """

    fingerprint: str  # of the model
    tokens: int  # of the text
    query_mean: torch.Tensor  # float32 [L, Hq, 2, F] real and imaginary part of the mean
    query_size: torch.Tensor  # float32 [L, Hq, F] mean absolute value
    frequencies: torch.Tensor  # float64 [F] radians per position
    key_rotation: torch.Tensor  # float32 [L, Hkv, dim, dim] OSCAR's bases (kernels/codecs/oscar.py)
    value_rotation: torch.Tensor

    @property
    def hash(self) -> str:
        """Names the contents: equal for equal numbers of one model."""
        digest = hashlib.sha256(f"{FORMAT} {self.fingerprint}".encode())
        for name, tensor in sorted(self._tensors().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: t.contiguous() for name, t in found.items() if isinstance(t, torch.Tensor)}

    def save(self, path: Path) -> None:
        """Write the file, replacing what is there. Raises LaunchError."""
        notes = {"format": FORMAT, "fingerprint": self.fingerprint, "tokens": str(self.tokens)}
        try:
            save_file(self._tensors(), path, metadata=notes)
        except (OSError, SafetensorError):
            raise LaunchError(f"The calibration cannot be written to {path}.") from None

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> Statistics:
        """Read a file that `save` wrote for this model. Raises LaunchError."""
        names = [field.name for field in fields(cls)][2:]
        try:
            with safe_open(path, framework="pt") as file:
                notes = file.metadata() or {}
                if notes.get("format") != FORMAT:
                    raise LaunchError(f"{path} is no calibration file (banyan calibrate).")
                tensors = {name: file.get_tensor(name) for name in names}
                tokens = int(notes["tokens"])
        except (OSError, SafetensorError, KeyError, ValueError):
            raise LaunchError(f"The calibration file {path} cannot be read.") from None
        if notes.get("fingerprint") != fingerprint:
            raise LaunchError(f"The calibration file {path} is of another model.")
        return cls(fingerprint=fingerprint, tokens=tokens, **tensors)
