"""The fingerprint of a model: a hash of all that decides its keys and values; knows no device.

SHA-256 over the parsed configuration and every tensor (name, dtype, shape, bytes), framed by
length, in the order of names, so that sharding and file names do not matter. The tensors' part is
remembered in the user's cache folder per (path, size, modification time, inode) of every file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from worker.models.config import ModelConfig
from worker.models.source import TensorSource
from worker.models.weights import Progress

FORMAT = "banyan-model-1"


def model_fingerprint(
    source: TensorSource, config: ModelConfig, progress: Progress | None = None
) -> str:
    """64 hexadecimal digits. Reads all tensors unless the same files were hashed before."""
    # The end tokens decide when to stop, never what a key or value is.
    fields = {k: v for k, v in asdict(config).items() if k != "eos_token_ids"}
    return document_fingerprint(source, fields, progress)


def document_fingerprint(
    source: TensorSource, fields: Mapping[str, Any], progress: Progress | None = None
) -> str:
    """As model_fingerprint; `fields` are the JSON values that decide keys and values."""
    remembered = _Remembered(source)
    tensors = remembered.load()
    if tensors is None:
        tensors = tensors_digest(source, progress)
        remembered.store(tensors)
    if source.settings:
        fields = {**fields, "stored": source.settings}
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return _framed_digest(FORMAT, canonical, tensors)


def tensors_digest(source: TensorSource, progress: Progress | None = None) -> str:
    """SHA-256 over all tensors as they are stored, in hexadecimal digits."""
    return described_digest(source.stored(), source.bytes_total, progress)


def described_digest(
    stored: Iterable[tuple[list[object], torch.Tensor]],
    total: int = 0,
    progress: Progress | None = None,
) -> str:
    """SHA-256 over tensors and what they are (JSON values), in hexadecimal digits."""
    digest, done = hashlib.sha256(), 0
    for described, given in stored:
        tensor = given.contiguous()
        head = json.dumps(described).encode()
        size = tensor.numel() * tensor.element_size()
        digest.update(len(head).to_bytes(8, "little") + head + size.to_bytes(8, "little"))
        if size:
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        done += size
        if progress is not None:
            progress(done, total)
    return digest.hexdigest()


def _framed_digest(*fields: str) -> str:
    digest = hashlib.sha256()
    for field in fields:
        digest.update(len(field.encode()).to_bytes(8, "little") + field.encode())
    return digest.hexdigest()


class _Remembered:
    """One small file per model folder. Anything wrong with it means that it is computed anew."""

    def __init__(self, source: TensorSource) -> None:
        home = Path(os.environ.get("BANYAN_HOME") or "~/.cache/banyan").expanduser()
        files = [path.resolve() for path in source.files]
        stats = [path.stat() for path in files]
        self._key = [
            [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
            for path, stat in zip(files, stats, strict=True)
        ]
        name = _framed_digest(FORMAT, *(str(path) for path in files))[:32]
        self._path = home / "fingerprints" / f"{name}.json"

    def load(self) -> str | None:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("files") != self._key:
            return None
        tensors = document.get("tensors")
        return tensors if isinstance(tensors, str) and len(tensors) == 64 else None

    def store(self, tensors: str) -> None:
        """Atomically, so that a reader sees a whole file or none; a read-only place is no error."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self._path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"files": self._key, "tensors": tensors}, file)
                Path(name).replace(self._path)
            except OSError:
                Path(name).unlink(missing_ok=True)
