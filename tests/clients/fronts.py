"""Routers of others before two of our gateways, over HTTP: smg and vllm-router. What has to come
through them: streams, the wanted length, and cached tokens in the usage. Knows no client.
"""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from place import NotRun

READY_S_MAX, END_S_MAX = 120.0, 20.0
LOAD = (
    "prefix-groups", "--concurrency", "2", "--sessions", "12", "--groups", "2",
    "--prefix-tokens", "256", "--input-tokens", "64", "--output-tokens", "16", "--warmup", "0",
)  # fmt: skip


@dataclass(frozen=True)
class Front:
    """One router. `module` is started with `python -m`; `level` is its word for few log lines."""

    name: str
    venv: str
    installs: tuple[tuple[str, ...], ...]
    module: str
    level: str


FRONTS = (
    Front("smg", "smg", (("smg==1.13.0",),), "smg.launch_router", "warn"),
    Front("vllm-router", "vllm-router", (("vllm-router==0.1.17",),), "vllm_router.launch_router",
          "warning"),
)  # fmt: skip


@contextmanager
def running(front: Front, programs: Path, urls: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of a started router that has found the gateways. Raises NotRun."""
    port, metrics = _free_port(), _free_port()
    command = [
        str(programs / "python"), "-m", front.module, "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
        "--log-level", front.level, "--policy", "round_robin", "--worker-urls", *urls,
    ]  # fmt: skip
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"http://127.0.0.1:{port}/v1/models")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end_s = time.monotonic() + READY_S_MAX
    last = "nobody listens"
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise NotRun(f"It ended with {process.returncode}; said.txt says why.")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError as error:
            last = str(error)
        time.sleep(0.5)
    raise NotRun(f"It was not ready within {READY_S_MAX:.0f} s: {last}.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
