"""The files that turn text into token ids, their fingerprints. They travel replica -> router."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATE_FILE = "chat_template.jinja"


def read_text_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer and template files that `folder` has. Raises OSError."""
    names = (*TEXT_FILES, TEMPLATE_FILE)
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _fingerprint(files: Mapping[str, bytes], names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        data = files.get(name)
        if data is not None:
            for part in (name.encode(), data):
                digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def tokenizer_fingerprint(files: Mapping[str, bytes]) -> str:
    """Hex SHA-256 of the tokenizer files; "" if there is no tokenizer.json (token ids only)."""
    return _fingerprint(files, TEXT_FILES) if "tokenizer.json" in files else ""


def template_fingerprint(files: Mapping[str, bytes]) -> str:
    """Hex SHA-256 of what the chat template is read from; "" if there is no tokenizer.json."""
    if "tokenizer.json" not in files:
        return ""
    return _fingerprint(files, (TEMPLATE_FILE, "tokenizer_config.json"))
