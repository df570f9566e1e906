"""Detached processes that outlive the command: start, recognise and stop exactly those.

A process is known by pid and start time, so a reused pid is never touched. It leads its own
session; whatever it starts (Ray's workers) is found by that session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Process:
    """One started process. `created_s` is its start time as the system tells it. A `daemon` has
    ended and left others running in its session."""

    role: str
    pid: int
    created_s: float
    log: str
    daemon: bool = False

    def alive(self) -> bool:
        """True while this very process runs, a daemon's session has members. Zombies do not run."""
        if self.daemon:
            return bool(members(self))
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created_s) < 0.02
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def start(
    role: str, command: Sequence[str], log: Path, env: Mapping[str, str], *, daemon: bool = False
) -> Process:
    """Run `command` in a session of its own, output to `log`. Raises OSError."""
    with log.open("wb") as output:  # the last start's log stays until the next
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env=dict(env),
        )
    child.returncode = 0  # detached: nobody waits for it, and subprocess need not warn of that
    return Process(role, child.pid, psutil.Process(child.pid).create_time(), str(log), daemon)


def members(process: Process) -> list[psutil.Process]:
    """The live processes of the session that `process` leads, itself included."""
    found = []
    for candidate in psutil.process_iter():
        try:
            if os.getsid(candidate.pid) != process.pid:
                continue
            younger = candidate.create_time() >= process.created_s - 0.02
            if younger and candidate.status() != psutil.STATUS_ZOMBIE:
                found.append(candidate)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _reap(pid: int) -> None:
    """Collect our own dead child; nothing happens for another's."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def stop(process: Process, grace_s: float) -> bool:
    """Ask the leader (of a daemon: all) to end, then kill the session; True if nothing is left."""
    if process.daemon:
        _signal(members(process), signal.SIGTERM)
    elif process.alive():
        _signal([psutil.Process(process.pid)], signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while members(process) and time.monotonic() < deadline:
        _reap(process.pid)
        time.sleep(0.05)
    deadline = time.monotonic() + 5.0
    while left := members(process):
        if time.monotonic() > deadline:
            return False
        _signal(left, signal.SIGKILL)
        _reap(process.pid)
        time.sleep(0.05)
    _reap(process.pid)
    return True


def last_line(log: str) -> str:
    """The last non-empty line of a process's log, "" if there is none."""
    try:
        lines = Path(log).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
