"""Starts that fail or are interrupted: one sentence, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import CLUSTER, Banyan, strays

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--model", "fake:full", "--pool-gib", "0.0000001"], "block"),
     (["--model", "fake:nonsense"], "fake")],
)  # fmt: skip
def test_replica_that_cannot_start(banyan: Banyan, options: list[str], expected: str) -> None:
    done = banyan("up", "--listen", "127.0.0.1:0", *options)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ") and expected in line


def test_interrupted_start_leaves_nothing(home: Path) -> None:
    env = os.environ | {"BANYAN_HOME": str(home), "BANYAN_CLUSTER": CLUSTER}
    command = [sys.executable, "-m", "banyan", "up", "--model", "fake:full"]
    command += ["--listen", "127.0.0.1:0"]
    up = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while len(strays(home)) < 4:  # the command, a router, Ray's head and its first child
        assert time.monotonic() < deadline
        time.sleep(0.05)
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=60)
    assert up.returncode == 130 and b"Traceback" not in output
    assert not list(home.rglob("cluster.json"))
