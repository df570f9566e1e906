"""GGUF files by name: the embedded tokenizer is the model's own, written out once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import pytest

from banyan import models
from banyan.gguf_text import with_tokenizer
from seams.errors import ModelLoadError

TEXT = "A banyan's aerial roots, 3 of them:\n\t\u00fcber <|im_end|> trunks\u2026"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))


def write_vocabulary(path: Path, tokenizer: Path) -> None:
    """A GGUF file with the tokenizer of a folder, as llama.cpp's converter embeds it."""
    document = json.loads(tokenizer.read_text())
    special = {t["content"]: t["id"] for t in document["added_tokens"]}
    ids = document["model"]["vocab"] | special
    tokens = sorted(ids, key=lambda token: ids[token])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = document["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_embedded_tokenizer_is_written_once(demo_model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = tmp_path / "files" / "small.gguf"
    path.parent.mkdir()
    write_vocabulary(path, demo_model / "tokenizer.json")
    folder = Path(models.resolve_model(str(path)))
    assert (folder / "small.gguf").resolve() == path
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert ours.encode(TEXT).ids == theirs.encode(TEXT).ids
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    assert models.resolve_model(str(path.parent)) == str(folder)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    os.utime(path, ns=(1, 1))  # another file, as far as anyone can tell
    assert models.resolve_model(str(path)) != str(folder)


def test_a_tokenizer_beside_the_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "files" / "small.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    (path.parent / "tokenizer.json").write_text("{}")
    assert models.resolve_model(str(path)) == models.resolve_model(str(path.parent)) == str(path)
    assert models.served_name(str(path)) == "small"
    (path.parent / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="several GGUF files"):
        models.resolve_model(str(path.parent))
    assert models.resolve_model(str(path)) == str(path)


def test_no_tokenizer_at_all_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "files" / "small.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"put the model's tokenizer\.json beside the file\."):
        with_tokenizer(path)
    assert [p for p in (tmp_path / "home" / "gguf").iterdir() if not p.name.endswith("lock")] == []
    with pytest.raises(ModelLoadError, match="no model"):
        models.resolve_model(str(tmp_path / "none.gguf"))
    with pytest.raises(ModelLoadError, match="no model"):
        models.resolve_model("owner/none.gguf")
