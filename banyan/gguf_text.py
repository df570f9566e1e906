"""Gives a GGUF file a folder with the tokenizer that it embeds; knows nothing of its tensors.

Routers need a tokenizer.json. Where none lies beside the file, the embedded one is written out
once, into the cache, next to a link to the file: such a folder is a model like any other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from banyan.home import home, locked
from seams.errors import ModelLoadError

GGUF = ".gguf"
TOKENIZER = "tokenizer.json"


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that a path stands for: itself, or the only one of a folder without
    safetensors. Raises ModelLoadError if there are several.
    """
    if path.suffix == GGUF and path.is_file():
        return path.resolve()
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    found = sorted(path.glob(f"*{GGUF}"))
    if len(found) > 1:
        raise ModelLoadError(f"{path} holds several GGUF files; name one of them.")
    return found[0].resolve() if found else None


def with_tokenizer(gguf: Path) -> Path:
    """The file itself if a tokenizer.json lies beside it, else a folder in the cache that has both.

    Raises ModelLoadError if the embedded tokenizer cannot be written out.
    """
    if (gguf.parent / TOKENIZER).is_file():
        return gguf
    stat = gguf.stat()
    named = f"{gguf}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}"
    target = home() / "gguf" / hashlib.sha256(named.encode()).hexdigest()[:24]
    if not target.is_dir():
        with locked(target.parent / f".{target.name}.lock"):
            if not target.is_dir():
                _make(gguf, target)
    return target


def _make(gguf: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".text-") as scratch:
        made = Path(scratch) / "model"
        command = [sys.executable, "-m", "banyan.convert", "--tokenizer", str(gguf), str(made)]
        quiet = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(command, capture_output=True, text=True, env=quiet)
        if done.returncode != 0 or not (made / TOKENIZER).is_file():
            raise ModelLoadError(
                f"The tokenizer embedded in {gguf.name} cannot be read; "
                "put the model's tokenizer.json beside the file."
            )
        (made / gguf.name).symlink_to(gguf)
        shutil.rmtree(target, ignore_errors=True)
        made.replace(target)
