"""Leftover Ray folders: removed if nobody can be using them; everything else is kept."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.cluster.leftovers import remove_leftovers


@pytest.fixture
def parent() -> Iterator[Path]:
    """A short path: unix sockets lie below it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def ray_folder(parent: Path, name: str, *, hours: float = 25, extra: str = "") -> Path:
    """A folder as a dead Ray head leaves it."""
    folder = parent / name
    sockets = folder / "session_1" / "sockets"
    sockets.mkdir(parents=True)
    (folder / "ray_current_cluster").write_text("127.0.0.1:1")
    (folder / "session_latest").symlink_to(folder / "session_1")
    if extra:
        (folder / extra).write_text("mine")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(sockets / "raylet"))
    then = time.time() - hours * 3600
    os.utime(folder, (then, then))
    return folder


def test_only_dead_old_folders_of_ray_go(parent: Path) -> None:
    dead = ray_folder(parent, "banyan-abcd_123")
    kept = [
        ray_folder(parent, "banyan-young123", hours=23),
        ray_folder(parent, "banyan-notes123", extra="thesis.txt"),
        ray_folder(parent, "banyan-mine"),
        ray_folder(parent, "elsewhere"),
    ]
    kept.append(parent / "banyan-empty123")
    kept[-1].mkdir()
    os.utime(kept[-1], (0, 0))
    link = parent / "banyan-linked12"
    link.symlink_to(kept[-1])
    assert remove_leftovers(parent) == [dead]
    assert not dead.exists() and link.is_symlink() and all(folder.exists() for folder in kept)
    assert remove_leftovers(parent) == []


def test_folders_in_use_stay(parent: Path) -> None:
    answered, named = ray_folder(parent, "banyan-answers1"), ray_folder(parent, "banyan-named123")
    path = answered / "session_1" / "sockets" / "plasma_store"
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, f"--temp-dir={named}"]
    with (
        socket.socket(socket.AF_UNIX) as raylet,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        raylet.bind(str(path))
        raylet.listen()
        assert remove_leftovers(parent) == []
        process.communicate()
    assert sorted(remove_leftovers(parent)) == [answered, named]
