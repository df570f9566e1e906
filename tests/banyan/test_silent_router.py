"""A router that hangs (SIGSTOP): its connections stand, and the client goes on at another one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan import Client


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[list[tuple[subprocess.Popen[bytes], str]]]:
    """Two real routers without replicas: (process, address)."""
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    started = []
    for name in ("a", "b"):
        config, ready = tmp_path / f"{name}.json", tmp_path / f"{name}.ready"
        fields = {"router": name, "secret_file": str(secret), "ready_file": str(ready)}
        config.write_text(json.dumps(fields))
        command = [sys.executable, "-m", "router", "--config", str(config)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        started.append((process, json.loads(ready.read_text())["listen"]))
    yield started
    for process, _ in started:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait()


def test_a_hanging_router_is_left_without_a_deadline(
    routers: list[tuple[subprocess.Popen[bytes], str]],
) -> None:
    (first, one), (_, other) = routers
    with Client([one, other]) as client:
        assert client.cluster_state().router == "a"
        os.kill(first.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert client.cluster_state().router == "b"
        assert time.monotonic() - began < 60
