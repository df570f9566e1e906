"""`python -m worker` and ReplicaActor as users start them: signals, sockets, one-line errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from service_peers import WAIT_S, FakeRouter, eventually

from seams.errors import LaunchError
from worker.__main__ import _read as read_config_file
from worker.models.fake import fake_model
from worker.service.actor import ReplicaActor
from worker.service.settings import THREAD_VARIABLES

REPOSITORY = Path(__file__).resolve().parents[2]


class Process:
    """One `python -m worker`."""

    def __init__(self, folder: Path, config: dict[str, Any], *arguments: str) -> None:
        path = folder / "replica.json"
        path.write_text(json.dumps(config))
        self.ready_file = folder / "ready.json"
        command = [sys.executable, "-m", "worker", "--config", str(path)]
        command += ["--ready-file", str(self.ready_file), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
        self.popen = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True
        )

    def ready(self) -> dict[str, Any]:
        def described() -> dict[str, Any] | None:
            assert self.popen.poll() is None, self.popen.stderr and self.popen.stderr.read()
            if not self.ready_file.exists():
                return None
            read: dict[str, Any] = json.loads(self.ready_file.read_text())
            return read

        found: dict[str, Any] = eventually(described, within_s=60)
        return found

    def ended(self) -> tuple[int, str]:
        _, said = self.popen.communicate(timeout=60)
        return self.popen.returncode, said


@pytest.fixture
def config(secret_file: Path, router: FakeRouter) -> dict[str, Any]:
    return {
        "replica": "replica-0",
        "model": "fake:full",
        "served_name": "fake",
        "routers": [router.address],
        "secret_file": str(secret_file),
        "threads": 1,
    }


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Process] = []

    def run(config: dict[str, Any], *arguments: str) -> Process:
        started.append(Process(tmp_path, config, *arguments))
        return started[-1]

    yield run
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


def test_one_process_from_start_to_drain(
    router: FakeRouter, config: dict[str, Any], start: Any
) -> None:
    process = start(config)
    ready = process.ready()
    assert set(ready) == {"address", "pid", "epoch"} and ready["pid"] == process.popen.pid
    listening = [
        f"{c.laddr.ip.removeprefix('::ffff:')}:{c.laddr.port}"
        for c in psutil.Process(ready["pid"]).net_connections(kind="all")
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening == [ready["address"]]  # rule S2: nothing else
    assert router.attached().epoch == ready["epoch"]
    stream = router.execute()
    stream.submit("r", [1] * 20, credit_tokens=1)
    eventually(lambda: stream.emissions("r"))
    process.popen.send_signal(signal.SIGTERM)
    eventually(lambda: router.beats[-1].draining)
    stream.send(credit={"request_id": "r", "tokens": 100})
    assert stream.tokens("r") == fake_model("full").oracle([1] * 20, 8, ignore_eos=True)
    code, said = process.ended()
    assert code == 0, said
    assert stream.ended.wait(WAIT_S) and stream.error is None


def test_a_drain_longer_than_its_grace_is_cut(
    router: FakeRouter, config: dict[str, Any], start: Any
) -> None:
    process = start(config, "--grace-s", "0.2")
    process.ready()
    stream = router.execute()
    stream.submit("r", [1] * 20, credit_tokens=1)
    eventually(lambda: stream.emissions("r"))
    process.popen.send_signal(signal.SIGINT)
    code, said = process.ended()
    assert code == 0, said
    assert stream.finished("r")[-1].error.message == "The request was cancelled."


def sentence(process: Process) -> str:
    """What a failed start says: one line, non-zero exit."""
    code, said = process.ended()
    assert code == 1 and said.count("\n") == 1 and said.endswith(".\n"), said
    return said


def test_a_busy_port_is_one_sentence(config: dict[str, Any], start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "port is busy" in sentence(start(config | {"listen": f"127.0.0.1:{port}"}))


@pytest.mark.parametrize("text", ["", "[]", "{", None])
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "replica.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_config_file(path)
    assert caught.value.message.endswith(".")


ACTOR = """
import json, sys
from worker.service.actor import ReplicaActor
assert "torch" not in sys.modules, "the thread count must be set before torch is loaded"
actor = ReplicaActor(json.loads(sys.argv[1]))
import os, torch
described = actor.describe() | {
    "threads": torch.get_num_threads(), "variable": os.environ["OMP_NUM_THREADS"],
    "called": actor.address(),
}
drained = actor.drain(5.0)
actor.stop()
actor.stop()
print(json.dumps(described | {"drained": drained}))
"""


def test_the_actor_as_a_launcher_uses_it(router: FakeRouter, config: dict[str, Any]) -> None:
    command = [sys.executable, "-c", ACTOR, json.dumps(config)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    described = json.loads(done.stdout)
    assert described["address"] == described["called"] and described["epoch"] > 0
    assert described["served_name"] == "fake" and described["pid"] > 0
    assert (described["threads"], described["variable"]) == (1, "1")
    assert described["drained"] is True


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"colour": "red"}, "unknown field"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"secret_file": "/nowhere/secret"}, "secret file is missing"),
        ({"model": "/nowhere/model"}, "model"),
        ({"model": "fake:triangle"}, "fake"),
        ({"pool_gib": 0.0}, "block"),
        ({"listen": "192.0.2.1:5"}, "not this machine's"),
    ],
)
def test_the_actor_says_what_is_wrong(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "1")
    with pytest.raises(LaunchError) as caught:
        ReplicaActor(config | {"threads": 0} | fields)
    said = caught.value.message
    assert says in said.lower() and "/nowhere" not in said
    assert said.endswith(".") and "\n" not in said


def test_a_dead_server_ends_the_process(config: dict[str, Any]) -> None:
    """So that whoever started it starts it anew."""
    command = [sys.executable, "-c", CRASH, json.dumps(config)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "still here" not in done.stdout
    assert "ended unexpectedly" in done.stderr


CRASH = """
import json, sys, time
from worker.service import events
from worker.service.actor import ReplicaActor

def mark(log):
    raise RuntimeError("on purpose")

events.DIGEST_EVERY_S = 0.1
events.EventLog.mark = mark
actor = ReplicaActor(json.loads(sys.argv[1]))
time.sleep(20)
print("still here")
"""
