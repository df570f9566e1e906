"""Ray folders of clusters that were killed together with their home. It stops no process."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

AGE_S_MIN = 24 * 3600.0
NAME = re.compile(r"banyan-[a-z0-9_]{8}")  # as tempfile makes them
ENTRY = re.compile(r"session_.*|ray_current_cluster|node_ip_address\.json.*|prom_metrics_.*")


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove folders under `parent` that only a Ray head of ours can have made, that are this
    user's, older than a day, named by no process and answered by no raylet; returns them."""
    old = [path for path in parent.glob("banyan-*") if _old_ray_folder(path)]
    if not old:
        return []
    commands = list(_command_lines())
    unused = [path for path in old if not any(str(path) in line for line in commands)]
    dead = [path for path in unused if not any(map(_answers, path.glob("session_*/sockets/*")))]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return dead


def _old_ray_folder(path: Path) -> bool:
    try:
        found = path.lstat()
        entries = [entry.name for entry in path.iterdir()]
        return (
            NAME.fullmatch(path.name) is not None
            and stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and time.time() - found.st_mtime > AGE_S_MIN
            and all(map(ENTRY.fullmatch, entries))
            and "session_latest" in entries
        )
    except OSError:  # gone meanwhile, or not ours to look at
        return False


def _command_lines() -> Iterator[str]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield " ".join(process.cmdline())


def _answers(path: Path) -> bool:
    """True unless nobody listens on the unix socket `path` (of another container, say)."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return True  # cannot be told
    return True
