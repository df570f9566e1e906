"""Bad input on the command line: one clear sentence, a non-zero exit, nothing left running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Banyan = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def banyan(tmp_path: Path) -> Banyan:
    """The command line with a home of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"BANYAN_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", "banyan", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)

    return run


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a failed command's standard error."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout
    [line] = [line for line in done.stderr.splitlines() if line.strip()]
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "/no/such/folder"], "error: There is no model folder /no/such/folder."),
        (["--model", "./nothing"], "error: There is no model folder ./nothing."),
        (["--model", "nothing"], "error: There is no model folder nothing."),
        (["--replicas", "0"], "error: --replicas must be from 1 to 256."),
        (["--routers", "99"], "error: --routers must be from 1 to 16."),
        (["--listen", "nonsense"], "error: nonsense is no HOST:PORT."),
        (["--listen", "192.0.2.77:0"], "is not an address of this machine."),
        (["--device", "tpu"], "error: --device must be auto, cpu or cuda."),
        (["--dtype", "int3"], "error: --dtype must be auto, bf16, fp16 or fp32."),
        (["--pool-gib", "-1"], "error: --pool-gib must be more than 0."),
        (["--pool-gib", "nan"], "error: --pool-gib must be more than 0."),
        (["--pool-gib", "inf"], "error: --pool-gib must be more than 0."),
        (["--context-tokens", "-5"], "error: --context-tokens must not be negative."),
        (["--speculate", "-1"], "error: --speculate must not be negative."),
        (["--timeout-s", "-1"], "error: --timeout-s must be more than 0."),
        (["--timeout-s", "nan"], "error: --timeout-s must be more than 0."),
        (["--name", "../x"], "error: A cluster name has letters, digits, - and _ only"),
        (["--api-keys", "/no/such"], "error: The file of API keys /no/such cannot be read as"),
        (["--api-keys", "/proc/self/oom_score"], "is no object of keys and tenant names."),
        (["--host-gib", "-1"], "error: --host-gib must be at least 0."),
        (["--host-gib", "nan"], "error: --host-gib must be at least 0."),
        (["--host-gib", "1e9"], "GiB of memory that this machine has left."),
        (["--nvme", "/tmp"], "error: --nvme needs --nvme-gib: how much of the disk each"),
        (["--nvme-gib", "1"], "error: --nvme-gib needs --nvme: the directory to use."),
        (["--nvme", "/dev/null", "--nvme-gib", "1"], "error: --nvme /dev/null is no directory."),
        (["--redis", "memcached"], "error: --redis must be none, embedded, a redis://, rediss://"),
        (["--redis", "redis://:pw@h:1/0"], "error: A password in --redis can be read by every"),
        (["--redis", "redis://h:1/0?password=pw"], "error: A password in --redis can be read by"),
        (["--redis", "redis://h:99999"], "error: --redis: the URL's port must be a number from 1"),
        (["--redis", "@/no/such"], "error: The file that holds the shared cache's URL cannot be"),
        (["--redis", "embedded", "--ray-address", "h:1"], "error: --redis embedded serves this"),
        (["--cold-codec", "zip"], "error: --cold-codec: The cold codec must be none, fp8 or"),
        (["--cold-codec", "fp8", "--batch-invariant"], "not with batch-invariant serving."),
        (
            ["--kv-codec", "turboquant:k5v4"],
            "error: --kv-codec: The KV codec must be model, fp8,",
        ),
        (["--kv-codec", "oscar", "--batch-invariant"], "not with batch-invariant serving."),
        (["--kv-codec", "oscar"], "error: --kv-codec: The KV codec oscar needs a calibration of"),
        (["--kv-codec", "fp8", "--cold-codec", "fp8"], "the cold codec must be none."),
        (["--model", "owner/missing"], "error: owner/missing is neither a folder here nor"),
    ],
)
def test_up_refuses(banyan: Banyan, tmp_path: Path, arguments: list[str], expected: str) -> None:
    defaults = ["--model", "fake:full", "--listen", "127.0.0.1:0"]
    assert expected in sentence(banyan("up", *defaults, *arguments))
    assert not list(tmp_path.rglob("cluster.json"))


def test_up_refuses_a_folder_without_a_model(banyan: Banyan, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    line = sentence(banyan("up", "--listen", "127.0.0.1:0", "--model", str(folder)))
    assert line.endswith("holds no model: it has no config.json.")


def test_up_refuses_a_busy_port(banyan: Banyan) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        line = sentence(banyan("up", "--model", "fake:full", "--listen", address))
    assert line == f"error: Cannot listen on {address}: it is in use already."


@pytest.mark.parametrize("command", [["status"], ["generate", "hi"], ["explain", "x"], ["bench"]])
def test_no_cluster(banyan: Banyan, command: list[str]) -> None:
    expected = "error: No cluster default is running: start one with `banyan up`."
    assert sentence(banyan(*command)) == expected


def test_errors_as_json(banyan: Banyan) -> None:
    done = banyan("status", "--json")
    expected = "No cluster default is running: start one with `banyan up`."
    assert json.loads(done.stdout) == {"error": expected, "status": "FAILED_PRECONDITION"}


def test_down_is_safe_to_repeat(banyan: Banyan) -> None:
    for _ in range(2):
        done = banyan("down", "--json")
        assert json.loads(done.stdout) == {"name": "default", "stopped": False}


def test_unreachable_router(banyan: Banyan) -> None:
    line = sentence(banyan("generate", "hi", "--address", "127.0.0.1:1"))
    assert line == "error: The router cannot be reached."


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_damaged_state_is_said(banyan: Banyan, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "clusters" / "default"
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text("{")
    line = sentence(banyan(command))
    assert line.startswith("error: The state file of cluster default is damaged")
    assert line.endswith(f"then remove {folder / 'cluster.json'}.")


def test_help_is_quick_and_loads_nothing_heavy(banyan: Banyan) -> None:
    began = time.monotonic()
    done = banyan("--help")
    assert done.returncode == 0 and "chat" in done.stdout
    assert time.monotonic() - began < 10  # a loaded machine; alone it takes 0.4 s
    code = (
        "import sys, banyan.cli.app\n"
        "heavy = {'torch', 'transformers', 'ray', 'grpc', 'tokenizers', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_client_and_launcher_load_nothing_heavy() -> None:
    code = (
        "import sys, banyan.client, banyan.cluster.launch\n"
        "heavy = {'torch', 'transformers', 'ray', 'tokenizers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "arguments", [["up", "--model", "demo", "--replicas", "0"], ["generate", "demo"]]
)
def test_json_errors_are_json_whatever_the_words(banyan: Banyan, arguments: list[str]) -> None:
    done = banyan(*arguments, "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["error"] in done.stderr
    assert said["status"] == "FAILED_PRECONDITION"
