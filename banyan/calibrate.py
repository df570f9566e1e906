"""`banyan calibrate`: statistics of a model over a text, once, into a file. It knows no cluster."""

from __future__ import annotations

from pathlib import Path

from seams.errors import LaunchError, ModelLoadError
from seams.textfiles import read_text_files
from worker.config import ReplicaConfig


def calibrate(model: str, text: Path, out: Path, tokens_max: int, device: str = "auto") -> str:
    """Run the local `model` over the first `tokens_max` tokens of `text` and write `out`; returns
    one sentence with the statistics' hash. Raises LaunchError, ModelLoadError or OutOfBlocks."""
    from worker.calibration.capture import TOKENS_MAX, TOKENS_MIN, capture
    from worker.models.llama import LlamaModel
    from worker.models.load import load_model
    from worker.models.opening import open_model

    if tokens_max < TOKENS_MIN:
        raise LaunchError(f"A calibration needs {TOKENS_MIN} tokens of text or more.")
    ids = _token_ids(model, text)
    # torch, since it can be watched; float32 on a CPU, the stored dtype on a GPU
    config = ReplicaConfig(
        replica="calibrate", model=model, served_name="calibrate", routers=(), secret_file="",
        device=device, compute="torch",
    )  # fmt: skip
    loaded = load_model(config)
    if not isinstance(loaded, LlamaModel):
        raise ModelLoadError("Only models that our own decoder computes can be calibrated.")
    parsed, source = open_model(Path(model))
    with source:
        pass  # only what the model is was asked for
    if any(parsed.windows):
        raise ModelLoadError("Models with sliding windows are not pruned: nothing to calibrate.")
    ids = ids[: min(tokens_max, TOKENS_MAX, loaded.spec.context_tokens)]
    if len(ids) < TOKENS_MIN:
        raise LaunchError(f"A calibration needs {TOKENS_MIN} tokens of text; here are {len(ids)}.")
    statistics = capture(loaded, parsed, ids)
    statistics.save(out)
    return f"Calibration {statistics.hash} of {len(ids)} tokens is in {out}."


def _token_ids(model: str, text: Path) -> list[int]:
    from router.text.model import TextModel

    folder = Path(model).parent if Path(model).is_file() else Path(model)
    try:
        return TextModel(read_text_files(folder)).encode_text(text.read_text(errors="replace"))
    except OSError:
        raise LaunchError(f"The text {text}, or the model's tokenizer, cannot be read.") from None
