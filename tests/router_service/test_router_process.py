"""`python -m router` as a process: ready file, ports, signals, and what it never loads."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import helm_python
import pytest
from loopback_cluster import CONFIG
from scripted_replica import SECRET, Script, ScriptedReplica, expected

from banyan.v1 import api_pb2, api_pb2_grpc, common_pb2
from router.__main__ import read_config, serve
from router.cost import TERMS
from router.service.fleet import Fleet
from seams.errors import InternalError


def write_config(folder: Path, **changes: Any) -> Path:
    secret = folder / "secret"
    secret.write_text(SECRET.hex() + "\n")
    secret.chmod(0o600)
    config = dataclasses.replace(
        CONFIG, secret_file=str(secret), ready_file=str(folder / "ready.json"), **changes
    )
    path = folder / "router.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    return path


QUIET = ("--log-level", "warning")  # where nobody reads the pipe: once full, it would hold all up


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "router", "--config", str(config), *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_ready(folder: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    ready, end_s = folder / "ready.json", time.monotonic() + 30
    while not ready.exists():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < end_s
        time.sleep(0.02)
    found: dict[str, Any] = json.loads(ready.read_text())
    return found


def refused(config: Path) -> str:
    """It must not start; returns what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "router", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and not done.stdout
    return done.stderr


async def serve_one(where: dict[str, Any], tokens: int, token_s: float) -> list[int]:
    replica = ScriptedReplica("w0", Script(token_s=token_s))
    await replica.start(where["internal"])
    await asyncio.wait_for(replica.attached.wait(), 10)
    chat = api_pb2.GenerateRequest(sampling=common_pb2.Sampling(max_tokens=tokens, seed=1))
    chat.chat.messages.add(role="user", content="hi")
    ids: list[int] = []
    try:
        async with grpc.aio.insecure_channel(where["listen"]) as channel:
            async for response in api_pb2_grpc.BanyanStub(channel).Generate(chat, timeout=30):
                ids += response.delta.token_ids
                if tokens > 50 and len(ids) == 5:
                    os.kill(where["pid"], signal.SIGTERM)
    finally:
        await replica.die()
    return ids


@pytest.mark.parametrize(("tokens", "level"), [(5, "info"), (60, "debug"), (5, "warning")])
def test_serves_a_chat_without_torch_and_stops_in_order(
    tmp_path: Path, tokens: int, level: str
) -> None:
    """SIGTERM in the middle of a stream lets it end; the modules are looked at from outside."""
    spy = tmp_path / "sitecustomize.py"
    spy.write_text(
        "import atexit, sys\n"
        "heavy = ('torch', 'transformers', 'ray', 'worker', 'kernels', 'banyan.client')\n"
        "atexit.register(lambda: print('loaded:', "
        "[m for m in heavy if m in sys.modules], file=sys.stderr))\n"
    )
    os.environ["PYTHONPATH"], before = f"{tmp_path}:.", os.environ.get("PYTHONPATH")
    try:
        process = start(write_config(tmp_path), "--log-level", level)
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    where = wait_ready(tmp_path, process)
    assert where["pid"] == process.pid
    ids = asyncio.run(serve_one(where, tokens, 0.01))
    assert ids == expected(list(b"user: hi\n"), 1, tokens)
    if tokens <= 50:
        process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert "loaded: []" in said
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    decisions = [line for line in lines if line["event"] == "decision"]
    assert [line["replica"] for line in decisions] == ([] if level == "warning" else ["w0"])
    for decision in decisions:
        assert {*TERMS, "replica", "total_s", "matched_tokens"} == set(decision["candidates"][0])
    assert "user: hi" not in said


def test_a_busy_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for field in ("listen", "internal"):
            said = refused(write_config(tmp_path, **{field: address}))
            assert said.count("\n") == 1 and address in said and said.endswith(".\n"), said
    assert not (tmp_path / "ready.json").exists()


def test_two_routers_never_share_a_port(tmp_path: Path) -> None:
    process = start(write_config(tmp_path))
    try:
        where = wait_ready(tmp_path, process)
        other = tmp_path / "other"
        other.mkdir()
        assert "busy" in refused(write_config(other, listen=where["listen"]))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nonsense": 1}, "unknown field"),
        ({"secret_file": "/nowhere/secret"}, "secret"),
        (None, "JSON"),
        ([], "JSON object"),
        ({"router": ...}, "lacks"),
        ({"grace_s": -1}, "grace_s"),
        ({"grace_s": "long"}, "grace_s"),
    ],
)
def test_a_bad_configuration_is_one_sentence(tmp_path: Path, change: Any, words: str) -> None:
    path = write_config(tmp_path)
    if isinstance(change, dict):
        given = {**json.loads(path.read_text()), **change}
        path.write_text(json.dumps({k: v for k, v in given.items() if v is not ...}))
    else:
        path.write_text("{" if change is None else json.dumps(change))
    said = refused(path)
    assert words in said and said.count("\n") == 1


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "secret").chmod(0o644)
    assert "chmod 600" in refused(path)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "secret").write_text("abcd")
    assert "at least 16 bytes" in refused(path)


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = write_config(tmp_path, router="from-file")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "router", "--config", str(path), "--listen", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert address in done.stderr


def test_streams_that_outlast_the_grace_period_end_with_it(tmp_path: Path) -> None:
    process = start(write_config(tmp_path), "--grace-s", "0.5")
    where = wait_ready(tmp_path, process)
    began_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        asyncio.run(serve_one(where, 2000, 0.01))
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    process.communicate(timeout=30)
    assert process.returncode == 0 and time.monotonic() - began_s < 10


def test_a_router_whose_clock_fails_stops_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Leases would never run out: it must not look healthy, and whoever started it must know."""
    config = read_config(write_config(tmp_path), {"grace_s": 0.0})

    def fail(fleet: Fleet) -> None:
        raise RuntimeError("words of a prompt")

    monkeypatch.setattr(Fleet, "tick", fail)
    with pytest.raises(InternalError):
        asyncio.run(asyncio.wait_for(serve(config, SECRET), 20))
    (line,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert line.fields["kind"] == "RuntimeError"  # type: ignore[attr-defined]
    assert "fail:" in line.fields["where"][-1]  # type: ignore[attr-defined]
    assert "words" not in str(line.__dict__)


def test_the_chart_grants_streams_less_time_than_the_pod_has() -> None:
    chart = Path(__file__).resolve().parents[2] / "helm" / "banyan"
    for pod_s, grace_s in ((120, 100), (10, 0)):
        values = {"router": {"terminationGracePeriodSeconds": pod_s}}
        with helm_python.Chart.load(chart) as loaded:
            rendered = loaded.render(values, name="banyan", namespace="llm")
        (router,) = [text for name, text in rendered.items() if name.endswith("/router.yaml")]
        assert f"terminationGracePeriodSeconds: {pod_s}\n" in router
        assert f"- --grace-s={grace_s}\n" in router
