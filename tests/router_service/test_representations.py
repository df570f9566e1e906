"""Replicas that keep the same cache differently, behind one router: they share keys and streams.

Real workers with FakeModel, plain and inverted: one root, two representations. Every replica is
killed in turn under a stream, which ends exactly as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from loopback_cluster import Cluster, cluster, prompt, run
from scripted_replica import Script, ScriptedReplica, expected
from test_router_process import QUIET, start, wait_ready, write_config
from test_with_workers import Processes, generate, ready

from banyan.v1 import api_pb2, api_pb2_grpc, common_pb2, internal_pb2

SHAPES = {"plain": "fake:full", "inverted": "fake:full/inverted"}
TOKENS = 400


@pytest.fixture
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("mixed")
    router = start(
        write_config(folder, lease_ms=3000, heartbeat_ms=100, queue_wait_s_max=60.0), *QUIET
    )
    running = Processes(folder, wait_ready(folder, router), {})
    try:
        for name, model in SHAPES.items():
            running.start_worker(name, model)
        yield running
    finally:
        for worker in running.workers.values():
            worker.send_signal(signal.SIGTERM)
        router.send_signal(signal.SIGTERM)
        router.communicate(timeout=30)
        for worker in running.workers.values():
            worker.wait(30)


def _request(seed: int, tokens: int = TOKENS) -> api_pb2.GenerateRequest:
    sampling = common_pb2.Sampling(max_tokens=tokens, seed=seed, temperature=1.0, ignore_eos=True)
    ids = [(at * 7 + 3) % 250 for at in range(160)]
    return api_pb2.GenerateRequest(tokens=api_pb2.TokenIds(ids=ids), sampling=sampling)


async def _killed_under(
    stub: api_pb2_grpc.BanyanStub, running: Processes, seed: int, victim: str
) -> tuple[list[int], common_pb2.Usage]:
    """One stream; its replica is killed once some tokens are there. It must be `victim`."""
    ids: list[int] = []
    moved_to, usage = "", common_pb2.Usage()
    async for response in stub.Generate(_request(seed), timeout=60):
        if response.HasField("started"):
            assert response.started.replica == victim
        ids += response.delta.token_ids
        if len(ids) > 20 and running.workers[victim].poll() is None:
            running.kill(victim)
        if response.HasField("finished"):
            moved_to, usage = response.finished.decision.replica, response.finished.usage
    assert moved_to not in ("", victim)
    return ids, usage


async def _drawn_to(stub: api_pb2_grpc.BanyanStub, name: str) -> None:
    """Serve the prompt until `name` is what the router would choose for it."""
    end_s = time.monotonic() + 30
    dry = api_pb2.ExplainRequest(request=_request(0))
    while (await stub.Explain(dry)).decision.replica != name:
        assert time.monotonic() < end_s, "the router never chooses it"
        await asyncio.sleep(0.1)


def test_a_stream_moves_between_representations_exactly(processes: Processes) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(processes.router["listen"]) as channel:
            stub = api_pb2_grpc.BanyanStub(channel)
            await ready(stub, 2)
            state = (await stub.ClusterState(api_pb2.ClusterStateRequest())).replicas
            assert len({replica.representation for replica in state}) == 2
            truth = {seed: (await generate(stub, _request(seed), [])).ids() for seed in (0, 1, 2)}
            assert [len(ids) for ids in truth.values()] == [TOKENS] * 3
            holder = (
                await stub.Explain(api_pb2.ExplainRequest(request=_request(0)))
            ).decision.replica
            for seed in (1, 2):  # away from the first, then back to it
                ids, usage = await _killed_under(stub, processes, seed, holder)
                assert ids == truth[seed] and usage.moves == 1
                await _same_keys(stub)
                other = next(name for name in SHAPES if name != holder)
                processes.start_worker(holder, SHAPES[holder])
                await ready(stub, 2)
                await _drawn_to(stub, other)
                holder = other

    asyncio.run(scenario())


async def _same_keys(stub: api_pb2_grpc.BanyanStub) -> None:
    """The router finds the prompt's blocks at the one replica that is left, and it reuses them."""
    seen = await generate(stub, _request(0, 1), [])
    decision = seen.finished[0].decision
    assert 0 < decision.chosen_tokens <= decision.delivered_tokens
    assert decision.chosen_tokens == decision.available_tokens
    assert seen.usage.cached_tokens >= 144, "all whole blocks but the last token's"


def test_a_moved_stream_stays_in_its_numeric_class_while_it_can() -> None:
    """The other class is far cheaper, and gets the stream only when nobody else is left."""

    async def scenario() -> None:
        async with cluster() as c:
            first, second = [await _attach(c, name, "a", 1e-2) for name in ("a1", "a2")]
            call = asyncio.create_task(c.generate(prompt("abc", max_tokens=150, seed=7)))
            await c.until(lambda: bool(first.emitted or second.emitted))
            here, twin = (first, second) if first.emitted else (second, first)
            cheap = await _attach(c, "b1", "b", 1e-5)
            dry = api_pb2.ExplainRequest(request=prompt("abc", max_tokens=150))
            assert (await c.stub.Explain(dry)).decision.replica == "b1"
            await here.die()
            await c.until(lambda: bool(twin.emitted))
            assert not cheap.submits
            await twin.die()
            answer = await call
            assert answer.ids() == expected(list(b"abc"), 7, 150) and answer.usage.moves == 2
            decision = answer.finished[0].decision
            assert decision.replica == "b1" and "numeric class" in decision.reason

    run(scenario())


async def _attach(c: Cluster, name: str, numeric_class: str, step_s: float) -> ScriptedReplica:
    replica = ScriptedReplica(name, Script(token_s=0.01))

    def classed(hello: internal_pb2.Hello) -> None:
        hello.numeric_class = numeric_class
        hello.priors.step_s = step_s

    replica.change_hello = classed
    await replica.start(c.server.internal)
    await asyncio.wait_for(replica.attached.wait(), 5)
    c.replicas.append(replica)
    return replica
