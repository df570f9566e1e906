"""One real cluster for all end-to-end tests: the command line starts it and has to end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from banyan.cluster import processes, state
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


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home for commands that start clusters of their own; nothing may be left of them."""
    yield tmp_path
    assert strays(tmp_path) == []


@pytest.fixture
def banyan(home: Path) -> Banyan:
    """The command line in that home."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = run_banyan(home, *arguments)
        return done

    return run


@pytest.fixture(scope="session")
def cluster(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Two replicas in fp32, two routers, the real model."""
    home = tmp_path_factory.mktemp("home")
    options = ["--model", str(demo_model), "--replicas", "2", "--routers", "2", "--dtype", "fp32"]
    done = run_banyan(home, "up", *options, "--listen", "127.0.0.1:0", "--device", "cpu", "--json")
    try:
        assert done.returncode == 0, done.stdout + done.stderr + _logs(home)
        print(f"up in {json.loads(done.stdout)['took_s']:.1f} s")
        os.environ["BANYAN_HOME"], before = str(home), os.environ.get("BANYAN_HOME")
        record = state.load(CLUSTER)
        os.environ.pop("BANYAN_HOME") if before is None else os.environ.update(BANYAN_HOME=before)
        assert record is not None
        yield LiveCluster(home, record)
    finally:
        down = run_banyan(home, "down", "--json")
    assert json.loads(down.stdout) == {"name": CLUSTER, "stopped": True}, down.stderr
    assert strays(home) == []
    assert not list(home.rglob("cluster.json"))
    assert not Path(record.ray.temp_dir).exists() if record.ray else True
    assert json.loads(run_banyan(home, "down", "--json").stdout)["stopped"] is False


def _logs(home: Path) -> str:
    return "".join(f"\n== {p.name}\n{p.read_text()[-3000:]}" for p in home.rglob("*.log"))
