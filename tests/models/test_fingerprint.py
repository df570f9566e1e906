"""The remembered digest: files that only look the same, and other kinds of files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from quantised_writer import write_quantised
from safetensors.torch import save_file
from test_checkpoint import DOCUMENT, tensors

from worker.models import fingerprint as fingerprint_module
from worker.models.fingerprint import model_fingerprint
from worker.models.opening import open_model
from worker.models.source import TensorSource
from worker.models.weights import SINGLE


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))


def fingerprint(folder: Path) -> str:
    config, source = open_model(folder)
    with source:
        return model_fingerprint(source, config)


def wide() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """A checkpoint whose layers are a whole number of groups of 32 wide."""
    document = {**DOCUMENT, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    grown = {
        name: torch.randn([n * 4 if n < 12 else {12: 64, 24: 24}[n] for n in t.shape]).bfloat16()
        for name, t in tensors().items()
    }
    return document, grown


def test_a_file_put_in_anothers_place_is_read_again(tmp_path: Path) -> None:
    """Same path, size and modification time; what tells is the inode."""
    (tmp_path / "config.json").write_text(json.dumps(DOCUMENT))
    held = tensors()
    save_file(held, tmp_path / SINGLE)
    os.utime(tmp_path / SINGLE, ns=(5, 5))
    first = fingerprint(tmp_path)
    held["lm_head.weight"].view(torch.int16)[0, 0] ^= 1
    save_file(held, tmp_path / "new")
    os.utime(tmp_path / "new", ns=(5, 5))
    (tmp_path / "new").replace(tmp_path / SINGLE)
    assert fingerprint(tmp_path) != first


def test_quantised_folders_are_hashed_once_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, held = wide()
    write_quantised(tmp_path / "model", "awq", document, held)
    hashed: list[list[object]] = []
    real = fingerprint_module.tensors_digest

    def counted(source: TensorSource, progress: object = None) -> str:
        hashed.append([described for described, _ in source.stored()])
        return real(source)

    monkeypatch.setattr(fingerprint_module, "tensors_digest", counted)
    assert fingerprint(tmp_path / "model") == fingerprint(tmp_path / "model")
    (described,) = hashed
    assert ["model.layers.0.mlp.up_proj.qweight", "torch.int32", [32, 8]] in described
