"""From a model's path to its configuration and an open source of its tensors; knows no device."""

from __future__ import annotations

from pathlib import Path

from seams.errors import ModelLoadError
from worker.models.config import ModelConfig, read_config, read_json
from worker.models.gguf_model import GgufModel
from worker.models.quantised import QuantisedCheckpoint, weight_format
from worker.models.source import TensorSource
from worker.models.weights import INDEX, Checkpoint

GGUF = ".gguf"


def open_model(path: Path) -> tuple[ModelConfig, TensorSource]:
    """A folder of safetensors, or a GGUF file, or a folder that holds one and no safetensors.

    Close the source. Raises ModelLoadError, one sentence.
    """
    gguf = gguf_file(path)
    if gguf is not None:
        model = GgufModel(gguf)
        return model.config, model
    if not path.is_dir():
        raise ModelLoadError("There is no such model folder.")
    config = read_config(path)
    document = read_json(path / "config.json")
    form = weight_format(document)
    checkpoint = Checkpoint(path)
    if form is None:
        return config, checkpoint
    settings = document.get("quantization_config") or document["compression_config"]
    return config, QuantisedCheckpoint(checkpoint, form, settings)


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path stands for; None if it stands for something else.

    Raises ModelLoadError if a folder holds several and nothing else.
    """
    if path.suffix == GGUF and path.is_file():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or (path / INDEX).is_file():
        return None
    found = sorted(path.glob(f"*{GGUF}"))
    if len(found) > 1:
        raise ModelLoadError("The model folder holds several GGUF files; name one of them.")
    return found[0] if found else None
