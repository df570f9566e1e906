"""What a pod of the chart runs: a Ray node of its own with one replica, drained on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banyan import Client
from seams.errors import BanyanError

pytestmark = pytest.mark.timeout(280)
Launch = Callable[..., subprocess.Popen[bytes]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Where Ray keeps unix sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="banyan-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def launch(short_folder: Path, tmp_path: Path) -> Iterator[Launch]:
    """Start processes as a pod's containers would; all of their sessions are gone afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64}
    env |= {"PYTHONPATH": str(Path.cwd()), "BANYAN_HOME": str(tmp_path)}

    def start(*command: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{len(started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command], env=env, start_new_session=True,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in reversed(started):
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for log in sorted(tmp_path.glob("*.log")):
        print(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}")


def wait_ready(client: Client, wanted: int, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            states = client.cluster_state().replicas
            ready = [r.replica for r in states if r.state == "ready"]
            if len(ready) == wanted:
                return ready
        except BanyanError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"never {wanted} ready replicas")


def test_a_pod_joins_serves_and_drains(launch: Launch, tmp_path: Path, short_folder: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    gcs, listen, internal = free_port(), free_port(), free_port()
    launch(
        "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
        f"--port={gcs}", f"--temp-dir={short_folder}", "--num-cpus=0", "--include-dashboard=false",
        "--object-store-memory=83886080", "--disable-usage-stats",
    )  # fmt: skip
    ready = tmp_path / "ready.json"
    config = tmp_path / "router.json"
    config.write_text(json.dumps({"ready_file": str(ready)}))
    launch(
        "router", f"--config={config}", "--router=router-a", f"--secret-file={secret}",
        f"--listen=127.0.0.1:{listen}", f"--internal=127.0.0.1:{internal}",
    )  # fmt: skip
    pod = launch(
        "banyan.cluster.pod", f"--ray-address=127.0.0.1:{gcs}", "--node-ip=127.0.0.2",
        "--replica=pod-0", "--model=fake:full", "--served-name=fake",
        f"--routers=localhost:{internal}", f"--secret-file={secret}", "--listen=127.0.0.2:0",
        "--grace-s=10",
    )  # fmt: skip
    with Client(f"127.0.0.1:{listen}", timeout_s=30) as client:
        assert wait_ready(client, 1, 120) == ["pod-0"]
        done = client.complete(list(range(1, 40)), max_tokens=5, ignore_eos=True)
        assert (len(done.token_ids), done.replica) == (5, "pod-0")
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(timeout=60) == 0
        wait_ready(client, 0, 20)
