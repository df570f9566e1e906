"""Texts that are on every machine, and texts of files: names, sizes and hashes. Knows no token.

What is measured and what a calibration is learnt from are never the same text.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from seams.errors import InvalidRequest

LICENCE_OF = "numpy"  # a long one: it carries those of the libraries inside
DOCUMENTED = (
    "_pydecimal", "difflib", "doctest", "pdb", "unittest.mock", "typing", "statistics", "random",
    "datetime", "logging", "threading", "subprocess", "optparse", "textwrap", "turtle",
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A document, and what names it in a report."""

    name: str
    text: str

    @cached_property
    def sha256(self) -> str:
        """Of its UTF-8 bytes, in hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def as_json(self, tokens: int) -> dict[str, str | int]:
        """What it is, and how many of its tokens were read at most."""
        size = len(self.text.encode())
        return {"name": self.name, "bytes": size, "sha256": self.sha256, "tokens": tokens}


def texts_on_this_machine() -> list[Text]:
    """Prose, code and law: Python's reference as pydoc has it, the source of a module, and the
    licences of a package. Each has some 10,000 tokens or more. Raises InvalidRequest if an
    installation lacks all."""
    found = [*_reference(), _module("argparse", argparse.__file__), *_licences(LICENCE_OF)]
    if not found:
        raise InvalidRequest("This machine has none of the usual texts: name one with --text.")
    return found


def _reference() -> Iterator[Text]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems pack it apart
        return
    yield Text("Python's language reference", "\n\n".join(topics[name] for name in sorted(topics)))


def _module(name: str, path: str) -> Text:
    return Text(f"source of {name}", Path(path).read_text(encoding="utf-8"))


def _licences(package: str) -> Iterator[Text]:
    files = importlib.metadata.files(package) or []
    parts = [f.read_text(encoding="utf-8") for f in files if f.name.startswith("LICENSE")]
    longest = max(parts, key=len, default="")
    if longest:
        yield Text(f"licences of {package}", longest)


def docstrings() -> Text:
    """The standard library's documentation strings: what is learnt from, never measured on."""
    found = [text for name in DOCUMENTED for text in _docstrings_of(name)]
    return Text("docstrings of the standard library", "\n\n".join(found))


def _docstrings_of(module: str) -> Iterator[str]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            yield text


def text_of_file(path: Path) -> Text:
    """A file as a document, called by its own name. Raises InvalidRequest."""
    try:
        return Text(path.name, path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise InvalidRequest(f"The text {path} cannot be read: {error.strerror}.") from None
