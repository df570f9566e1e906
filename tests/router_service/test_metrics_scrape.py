"""One router, scripted replicas, real sockets: what a scrape says of what has just happened."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
from pathlib import Path

import grpc
import pytest
from loopback_cluster import CONFIG, Cluster, cluster, prompt, run
from prometheus_client.parser import text_string_to_metric_families
from scripted_replica import SECRET, Script, ScriptedReplica
from test_router_process import start, wait_ready, write_config

from banyan.v1 import api_pb2, internal_pb2
from router.service import metrics_server
from router.service.server import RouterServer
from seams.clock import SystemClock
from seams.errors import LaunchError
from seams.rng import SystemRng

LOOPBACK = "127.0.0.1:0"
SECRETS = ("key-of-acme", "acme", "words of a prompt", "label-of-mine", "session-of-mine")


@pytest.fixture(autouse=True)
def never_an_old_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "FRESH_S", 0.0)


async def text_of(address: str) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    return answer.partition(b"\r\n\r\n")[2].decode()


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float | None:
        found = [
            sample.value
            for sample in self.samples
            if sample.name == f"banyan_{name}" and labels.items() <= sample.labels.items()
        ]
        assert len(found) <= 1
        return found[0] if found else None


async def scrape(running: Cluster) -> Scrape:
    return Scrape(await text_of(running.server.metrics))


def test_a_scrape_tells_what_was_served() -> None:
    async def scenario() -> None:
        keys = {"key-of-acme": "acme"}
        async with cluster(Script(), Script(), metrics=LOOPBACK, api_keys=keys) as running:
            await running.until(lambda: all(r.load for r in running.core.loads()))
            request = prompt("words of a prompt", max_tokens=6)
            request.label, request.session = "label-of-mine", "session-of-mine"
            paid = [("authorization", "Bearer key-of-acme")]
            for _ in range(3):
                answer = await running.generate(request, metadata=paid)
                assert answer.code is grpc.StatusCode.OK
            assert (await running.generate(request)).code is grpc.StatusCode.UNAUTHENTICATED
            now = await scrape(running)
            assert now("router_requests_total", status="OK") == 3
            assert now("router_requests_total", status="UNAUTHENTICATED") == 1
            assert now("router_requests_total", status="INTERNAL") == 0
            assert now("router_streamed_tokens_total", router="r0") == 18
            for name in ("time_to_first_token", "request_duration"):
                assert now(f"router_{name}_seconds_count") == 3
                assert 0 < (now(f"router_{name}_seconds_sum") or 0) < 60
            assert now("router_open_streams") == 0 and now("router_moves_total") == 0
            for name in ("w0", "w1"):
                assert now("replica_state", replica=name, state="ready") == 1
                assert now("replica_pool_blocks", replica=name) == 4096
            assert not [word for word in SECRETS if word in now.text]
            assert not [s for s in now.samples if s.labels.keys() - LABELS]

    run(scenario())


LABELS = {"router", "replica", "tier", "state", "cause", "status", "le"}


def test_moves_and_open_streams_are_seen_while_they_happen() -> None:
    held = asyncio.Event()

    def stop_short(replica: ScriptedReplica, _: internal_pb2.Submit, position: int) -> None:
        if position == 3 and not held.is_set():
            held.set()
            replica.cut()

    script = Script(before_token=stop_short, token_s=0.02)

    async def scenario() -> None:
        async with cluster(script, script, metrics=LOOPBACK) as running:
            request = prompt(max_tokens=40, seed=7)
            call = asyncio.create_task(running.generate(request))
            await asyncio.wait_for(held.wait(), 5)
            moved = 0.0
            while not moved:
                now = await scrape(running)
                moved = now("router_moves_total") or 0.0
            assert now("router_open_streams") == 1
            assert now("router_requests_total", status="OK") == 0
            answer = await call
            assert answer.code is grpc.StatusCode.OK and answer.usage.moves == moved
            now = await scrape(running)
            assert now("router_open_streams") == 0 and now("router_moves_total") == moved
            assert now("router_streamed_tokens_total") == 40

    run(scenario())


def test_a_client_that_leaves_is_counted_as_cancelled() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.05), metrics=LOOPBACK) as running:
            call = running.stub.Generate(prompt(max_tokens=100), timeout=20)
            async for response in call:
                if response.HasField("delta"):
                    break
            call.cancel()
            await running.quiet()
            now = await scrape(running)
            assert now("router_requests_total", status="CANCELLED") == 1
            assert now("router_request_duration_seconds_count") == 0
            assert now("router_time_to_first_token_seconds_count") == 1

    run(scenario())


def test_the_heartbeat_of_a_replaced_session_changes_nothing() -> None:
    """A link that hangs may deliver late: what counts up must not go down and up again."""

    async def scenario() -> None:
        async with cluster(Script(), metrics=LOOPBACK) as running:
            fleet, session = running.server._fleet, running.server._fleet._sessions["w0"]
            await running.until(lambda: all(r.load for r in running.core.loads()))
            running.replicas[0].beating = False
            await asyncio.sleep(0.1)
            fleet._install(session.hello, session.tokens)
            running.replicas[0].emitted = 100
            before = await scrape(running)
            running.replicas[0].beating = True
            await asyncio.sleep(0.3)
            now = await scrape(running)
            series = "replica_steps_total"
            assert now(series, replica="w0") == before(series, replica="w0") == 1

    run(scenario())


def test_without_the_option_nothing_listens_and_a_stop_closes_it() -> None:
    async def scenario() -> None:
        async with cluster() as running:
            assert running.server.metrics == "" and running.server._scraped._server is None
        async with cluster(metrics=LOOPBACK) as running:
            address = running.server.metrics
            assert address.startswith("127.0.0.1:") and not address.endswith(":0")
            await text_of(address)
        with pytest.raises(OSError, match=r"."):
            await text_of(address)

    run(scenario())


def test_a_port_that_is_taken_refuses_the_start() -> None:
    async def scenario() -> None:
        async with cluster(metrics=LOOPBACK) as running:
            config = dataclasses.replace(CONFIG, metrics=running.server.metrics)
            clock, rng = SystemClock(), SystemRng()
            other = RouterServer(config, SECRET, running.core, clock, rng)
            with pytest.raises(LaunchError, match=r"busy"):
                await other.start()

    run(scenario())


def test_the_router_process_answers_and_says_where(tmp_path: Path) -> None:
    process = start(write_config(tmp_path), "--metrics", LOOPBACK)
    try:
        where = wait_ready(tmp_path, process)
        text = asyncio.run(text_of(where["metrics"]))
        assert 'banyan_router_open_streams{router="r0"} 0\n' in text
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["metrics"] for line in lines if line["event"] == "listening"] == [where["metrics"]]


def test_a_request_that_is_refused_is_counted_by_its_status() -> None:
    async def scenario() -> None:
        async with cluster(metrics=LOOPBACK) as running:
            refused = await running.generate(api_pb2.GenerateRequest())
            assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
            now = await scrape(running)
            assert now("router_requests_total", status="INVALID_ARGUMENT") == 1

    run(scenario())
