"""Runs the command line with a home of its own, and finds what it left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from banyan.cluster import leftovers, processes, ray_head
from banyan.cluster.state import ClusterRecord

Banyan = Callable[..., subprocess.CompletedProcess[str]]
CLUSTER = "e2e"


def run_banyan(home: Path, *arguments: str, timeout_s: float = 240) -> Any:
    """One command with a home of its own."""
    env = os.environ | {"BANYAN_HOME": str(home), "BANYAN_CLUSTER": CLUSTER, "COLUMNS": "200"}
    command = [sys.executable, "-m", "banyan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout_s)


def strays(home: Path) -> list[str]:
    """Command lines of processes that belong to clusters of this home."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("BANYAN_HOME") == str(home)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def ray_folders() -> set[Path]:
    """Folders of Ray heads, whoever started them."""
    found = ray_head.TEMP_PARENT.glob("banyan-*")
    return {path for path in found if leftovers.NAME.fullmatch(path.name)}


def abandoned(folders: set[Path], limit_s: float = 10.0) -> set[Path]:
    """Those of `folders` that still exist though no process names them. A start names its folder
    and a stop removes it a moment later: only what stays so for `limit_s` counts."""
    deadline = time.monotonic() + limit_s
    left = folders
    while left := {path for path in left if path.exists()}:
        lines = " ".join(_command_lines())
        left = {path for path in left if str(path) not in lines}
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return left


def _command_lines() -> Iterator[str]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield " ".join(process.cmdline())


@dataclass(frozen=True)
class LiveCluster:
    """The running cluster, found again through its state file."""

    home: Path
    record: ClusterRecord

    def banyan(self, *arguments: str) -> Any:
        """A command about this cluster."""
        return run_banyan(self.home, *arguments)

    def replica_process(self, address: str) -> psutil.Process:
        """The process that listens on a replica's address."""
        port = int(address.rpartition(":")[2])
        assert self.record.ray is not None and self.record.ray.head is not None
        for process in processes.members(self.record.ray.head):
            listening = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
            if port in listening:
                return process
        raise AssertionError("no process listens there")


def logs(home: Path) -> str:
    """The end of every log, for a failed start."""
    return "".join(f"\n== {p.name}\n{p.read_text()[-3000:]}" for p in home.rglob("*.log"))
