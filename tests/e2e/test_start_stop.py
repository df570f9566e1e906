"""Starts that fail, are interrupted or join another Ray cluster; nothing is left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_cluster import CLUSTER, Banyan, strays

from banyan import Client
from banyan.cluster import processes, ray_head
from seams.errors import Unauthenticated

pytestmark = pytest.mark.timeout(200)
UP = ("up", "--model", "fake:full", "--device", "cpu", "--listen", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--pool-gib", "0.0000001"], "block"), (["--model", "fake:nonsense"], "fake")],
)
def test_replica_that_cannot_start(banyan: Banyan, options: list[str], expected: str) -> None:
    done = banyan(*UP, *options)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ") and expected in line


def test_replica_that_routers_refuse(banyan: Banyan, tmp_path: Path, demo_model: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(demo_model, damaged)
    tokenizer = (damaged / "tokenizer.json").read_bytes()
    (damaged / "tokenizer.json").write_bytes(tokenizer[: len(tokenizer) // 2])
    done = banyan(*UP, "--model", str(damaged), "--routers", "2", "--pool-gib", "0.2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    expected = "error: replica-0 is refused: The model's tokenizer.json cannot be read."
    assert done.stderr.strip().splitlines()[-1] == expected


def begin(home: Path, until: str) -> subprocess.Popen[bytes]:
    """`banyan up`, waited for until a process with `until` in its command line runs."""
    env = os.environ | {"BANYAN_HOME": str(home), "BANYAN_CLUSTER": CLUSTER}
    up = subprocess.Popen(
        [sys.executable, "-m", "banyan", *UP],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Where the tests run in the background of a shell, children inherit that it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 90
    while not any(until in line for line in strays(home)):
        assert time.monotonic() < deadline and up.poll() is None
        time.sleep(0.05)
    return up


@pytest.mark.parametrize(
    ("until", "number"),
    [("-m router", signal.SIGINT), ("ray::ReplicaActor", signal.SIGTERM)],
    ids=["first-process", "loading"],
)
def test_interrupted_start_leaves_nothing(home: Path, until: str, number: signal.Signals) -> None:
    up = begin(home, until)
    up.send_signal(number)
    output, _ = up.communicate(timeout=60)
    assert up.returncode == 130 and b"Traceback" not in output
    assert output.rstrip().endswith(b"interrupted")
    assert not list(home.rglob("cluster.json"))


def test_killed_start_is_cleared_by_down(home: Path, banyan: Banyan) -> None:
    up = begin(home, "raylet")
    up.kill()
    up.communicate()
    assert strays(home)
    assert json.loads(banyan("down", "--json").stdout)["stopped"] is True
    assert not list(home.rglob("cluster.json"))


def test_down_waits_for_the_start_and_says_so(home: Path, banyan: Banyan) -> None:
    up = begin(home, "-m router")
    down = banyan("down", "--json")
    output, _ = up.communicate(timeout=60)
    assert up.returncode == 0, output
    assert json.loads(down.stdout)["stopped"] is True
    assert down.stderr.strip().endswith("is being started or stopped: waiting for that to end.")


def test_status_names_what_has_ended(home: Path, banyan: Banyan) -> None:
    done = banyan(*UP, "--routers", "2", "--json")
    assert done.returncode == 0, done.stderr
    try:
        assert json.loads(banyan("status", "--json").stdout)["problems"] == []
        record = json.loads(done.stdout)
        os.kill(record["routers"][1]["process"]["pid"], signal.SIGKILL)
        assert end_of_ray(record["ray"]["head"], "gcs_server")
        said = json.loads(banyan("status", "--json").stdout)["problems"]
        assert [line.partition(":")[0] for line in said] == [
            "The process of router-1 has ended.",
            "Ray's gcs_server has ended",
        ]
        assert end_of_ray(record["ray"]["head"], "raylet")
        shown = banyan("status").stdout
        assert "running with problems" in shown
        assert shown.count("problem: ") == 3 and "Ray's raylet has ended" in shown
    finally:
        assert json.loads(banyan("down", "--json").stdout)["stopped"] is True


def end_of_ray(head: dict[str, Any], name: str) -> bool:
    """Kill the process `name` of a Ray head; True once it is gone."""
    members = processes.members(processes.Process(**head))
    [victim] = [member for member in members if member.name() == name]
    victim.kill()
    return not psutil.wait_procs([victim], timeout=10)[1]


def test_head_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # the rest is the check that follows every test here
        ray_head.start_head(tmp_path / "no-logs-here", "unused")


def test_joined_ray_cluster_is_left_as_it_was(
    home: Path, banyan: Banyan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANYAN_HOME", "elsewhere")  # Ray's own processes are not the cluster's
    ray = ray_head.start_head(home, "unused")
    assert ray.head is not None
    try:
        address = ray_head.wait_head(ray)
        monkeypatch.setenv("RAY_AUTH_TOKEN", ray.token)
        (home / "keys.json").write_text('{"key-of-a": "a"}')
        keys = ["--api-keys", str(home / "keys.json")]
        done = banyan(*UP, *keys, "--ray-address", address, "--json")
        assert done.returncode == 0, done.stderr
        assert "key-of-a" not in done.stdout and ray.token not in done.stdout
        where = json.loads(done.stdout)["routers"][0]["listen"]
        with Client(where, timeout_s=10) as client, pytest.raises(Unauthenticated):
            client.complete([1, 2, 3], max_tokens=4)
        with Client(where, "key-of-a", timeout_s=10) as client:
            assert len(client.complete([1, 2, 3], max_tokens=4).token_ids) == 4
        answer = banyan("status", "--json")
        [seen] = json.loads(answer.stdout)["seen"].values()
        assert [r["state"] for r in seen["replicas"]] == ["ready"]
        assert json.loads(banyan("down", "--json").stdout)["stopped"] is True
        names = [p.name() for p in processes.members(ray.head)]
        assert {"gcs_server", "raylet"} <= set(names)
        assert not any("Replica" in name for name in names)
    finally:
        assert ray_head.stop_head(ray)
