"""Detached processes: recognised from another command, stopped with all they began."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from banyan.cluster import processes, state
from banyan.cluster.state import ClusterRecord, RayRecord, RouterRecord
from seams.errors import LaunchError

SPAWNING = """
import signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(100)"])
print("begun", flush=True)
time.sleep(100)
"""


def spawn(tmp_path: Path, *arguments: str) -> processes.Process:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SPAWNING, *arguments]
    process = processes.start("x", command, log, os.environ)
    deadline = time.monotonic() + 20
    while len(processes.members(process)) < 2 or "begun" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("arguments", [[], ["deaf"]])
def test_stop_ends_the_whole_session(tmp_path: Path, arguments: list[str]) -> None:
    process = spawn(tmp_path, *arguments)
    pids = [member.pid for member in processes.members(process)]
    assert process.alive() and len(pids) == 2
    assert processes.stop(process, grace_s=0.3)
    assert not process.alive()
    assert not [p for p in pids if psutil.pid_exists(p) and _running(p)]
    assert processes.stop(process, grace_s=0.3)  # safe to repeat


def _running(pid: int) -> bool:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_reused_pid_is_not_touched(tmp_path: Path) -> None:
    process = spawn(tmp_path)
    other = replace(process, created_s=process.created_s + 100)  # what was there before it
    assert not other.alive()
    assert processes.stop(other, grace_s=0.1)
    assert process.alive()
    assert processes.stop(process, grace_s=0.1)


def test_daemon_lives_as_long_as_its_session(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])"
    )
    command = [sys.executable, "-c", code]
    process = processes.start("x", command, tmp_path / "log", os.environ, daemon=True)
    os.waitpid(process.pid, 0)
    assert process.alive() and not replace(process, daemon=False).alive()
    [left] = processes.members(process)
    assert processes.stop(process, grace_s=0.3)
    assert not process.alive()
    assert not psutil.pid_exists(left.pid) or not _running(left.pid)


def test_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert processes.last_line(str(log)) == ""
    log.write_text("first\nthe reason\n\n")
    assert processes.last_line(str(log)) == "the reason"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterRecord:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path))
    process = processes.Process("router-0", 1, 2.5, "log")
    router = RouterRecord("router-0", "127.0.0.1:1", "127.0.0.1:2", process)
    ray = RayRecord("127.0.0.1:3", "banyan-a", "token", "/tmp/x", replace(process, role="ray"))
    return ClusterRecord("a", "/m", "m", replicas=("a-0", "a-1"), routers=(router,), ray=ray)


def test_state_survives_the_disk(record: ClusterRecord) -> None:
    path = state.prepare("a")
    assert state.load("a") is None
    for written in (record, replace(record, ray=None), replace(record, phase="running")):
        assert state.load(state.save(written).name) == written
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "cluster.json").stat().st_mode & 0o777 == 0o600
    assert (path / "secret").stat().st_mode & 0o777 == 0o600


def test_secret_is_made_once_and_kept(record: ClusterRecord) -> None:
    secret = (state.prepare("a") / "secret").read_text()
    assert len(bytes.fromhex(secret.strip())) == 32
    state.save(record)
    state.remove("a", everything=False)
    assert state.load("a") is None
    assert (state.prepare("a") / "secret").read_text() == secret
    state.remove("a", everything=True)
    assert (state.prepare("a") / "secret").read_text() != secret


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a" * 64, "a b"])
def test_names_that_are_no_file_names(name: str) -> None:
    with pytest.raises(LaunchError):
        state.folder(name)
