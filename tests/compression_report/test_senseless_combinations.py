"""Combinations that make no sense: a sentence for each, and none for those that do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from banyan.cli.compression import Asked, run, settings_of
from seams.errors import BanyanError, InvalidRequest, ModelLoadError
from worker.compression.base import QUICK, Settings
from worker.engine.retention.options import Options
from worker.service.advice import pruning_warning
from worker.service.settings import check_retention

ASKED = Asked("demo", (), "", "", "", only="", quick=False, out="", json_file="")


@pytest.mark.parametrize(
    "text",
    [
        "streaming:window=64+triattention:budget=64",
        "streaming;snapkv",
        "snapkv:budget=64,streaming",
        "none,streaming",
        "triattention:budget=9,snapkv:budget=9",
    ],
)
def test_two_policies_on_one_request_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="one retention policy; this one names"):
        Options(text)
    with pytest.raises(InvalidRequest, match="one retention policy"):
        check_retention(text)


@pytest.mark.parametrize(
    "codec", ["turboquant:k2v2", "turboquant:k1v4", "turboquant:k2v4,boundary=2"]
)
def test_pruning_on_coarse_keys_warns(codec: str) -> None:
    for policy in ("triattention", "snapkv:budget=64", "requests"):
        assert codec in pruning_warning(codec, policy)
    for policy in ("", "none", "streaming:window=64"):
        assert pruning_warning(codec, policy) == ""


@pytest.mark.parametrize("codec", ["model", "fp8", "turboquant:k3v2", "turboquant:k8v1"])
def test_pruning_on_finer_keys_does_not(codec: str) -> None:
    assert pruning_warning(codec, "triattention") == ""


def test_settings_are_the_full_ones_or_what_was_asked_for() -> None:
    assert settings_of(ASKED) == Settings()
    assert settings_of(replace(ASKED, quick=True)) == QUICK
    assert settings_of(replace(ASKED, only="pools, sweep")).parts == ("sweep", "pools")
    given = settings_of(replace(ASKED, codecs="fp8 turboquant:k3v3", contexts="512,256"))
    assert given.codecs == ("fp8", "turboquant:k3v3")
    assert given.contexts_tokens == (256, 512)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (replace(ASKED, codecs="zip"), "no KV codec zip"),
        (replace(ASKED, contexts="many"), "--contexts"),
        (replace(ASKED, only="sweep,all"), "--only"),
        (replace(ASKED, contexts="1000"), "--contexts"),
        (replace(ASKED, contexts="16"), "--contexts"),
        (replace(ASKED, model="fake:full"), "fake model"),
        (replace(ASKED, texts=("no/such/file",)), "cannot be read"),
        (replace(ASKED, model="no/such/folder/here"), "no model folder"),
    ],
)
def test_wrong_options_are_sentences(asked: Asked, words: str) -> None:
    with pytest.raises(BanyanError, match=words) as raised:
        run(asked)
    assert raised.type in (InvalidRequest, ModelLoadError)
    assert raised.value.message.endswith(".")


def test_a_replica_logs_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    from worker.config import ReplicaConfig
    from worker.models.fake import fake_model
    from worker.service.assemble import _policies

    config = ReplicaConfig("r", "fake:full", "m", (), "", kv_codec="turboquant:k2v2",
                           retention="requests")  # fmt: skip
    with caplog.at_level(logging.WARNING):
        _policies(config, fake_model("full").spec)
    assert "score keys may drop the wrong tokens" in caplog.text


def test_the_command_line_warns_before_it_starts_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "banyan", "up", "--model", str(tmp_path / "none")]
    command += ["--kv-codec", "turboquant:k2v2", "--retention", "triattention"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "300"}
    )
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("warning: The KV codec turboquant:k2v2")
    assert lines[-1].startswith("error: ")
