"""Cancellation, deadlines, waiting, slow readers, overload: nothing is left behind."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from loopback_cluster import Answer, Cluster, cluster, prompt, run
from scripted_replica import Script, expected

from banyan.v1 import api_pb2
from router.outbox import OUTBOX_BYTES_MAX


def test_a_cancelled_call_is_cancelled_at_the_replica() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.01)) as c:
            call = c.stub.Generate(prompt(max_tokens=500))
            started = (await call.read()).started
            await call.read()
            call.cancel()
            await c.until(lambda: c.replicas[0].cancels == [started.request_id])
            await c.quiet()

    run(scenario())


def test_cancels_at_random_moments_leak_nothing() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.003), Script(token_s=0.003)) as c:
            calls = [c.stub.Generate(prompt(f"p{i}", max_tokens=100)) for i in range(60)]
            for i, call in enumerate(calls):
                await asyncio.sleep(0.002 * (i % 5))
                call.cancel()
            await c.quiet()
            await c.until(
                lambda: all(
                    run.task.done() for r in c.replicas for run in r.runs.values() if run.task
                )
            )
            assert (await c.generate(prompt())).code is grpc.StatusCode.OK

    run(scenario())


def test_the_deadline_is_passed_on_and_ends_the_stream() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.05)) as c:
            began_s = time.monotonic()
            answer = await c.generate(prompt(max_tokens=500), timeout_s=0.5)
            assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - began_s < 1.5
            submit = c.replicas[0].submits[0]
            assert 0 < submit.deadline_ms <= 500
            await c.until(lambda: c.replicas[0].cancels == [submit.request_id])
            await c.quiet()
            await c.generate(prompt(max_tokens=1), timeout_s=None)
            assert c.replicas[0].submits[1].deadline_ms == 0

    run(scenario())


def test_a_request_waits_for_the_first_replica() -> None:
    async def scenario() -> None:
        async with cluster() as c:
            call = asyncio.create_task(c.generate(prompt("abc", max_tokens=2)))
            await asyncio.sleep(0.3)
            await c.add("w0")
            assert (await call).code is grpc.StatusCode.OK

    run(scenario())


def test_without_any_replica_the_wait_is_bounded() -> None:
    async def scenario() -> None:
        async with cluster(queue_wait_s_max=0.3) as c:
            began_s = time.monotonic()
            answer = await c.generate(prompt())
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert answer.trailing["banyan-error"] == "NoReplica"
            assert int(answer.trailing["retry-after-ms"]) > 0
            assert 0.25 < time.monotonic() - began_s < 1.5
            short = await c.generate(prompt(), timeout_s=0.1)
            assert short.code in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
            )

    run(scenario())


def test_more_streams_than_allowed_are_refused_with_push_back() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.02), streams_max=2) as c:
            calls = [asyncio.create_task(c.generate(prompt(max_tokens=20))) for _ in range(2)]
            await asyncio.sleep(0.15)
            refused = await c.generate(prompt())
            assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refused.trailing["banyan-error"] == "Overloaded"
            assert refused.trailing["grpc-retry-pushback-ms"] == refused.trailing["retry-after-ms"]
            assert all(a.code is grpc.StatusCode.OK for a in await asyncio.gather(*calls))
            assert (await c.generate(prompt())).code is grpc.StatusCode.OK

    run(scenario())


def _waiting_bytes(c: Cluster) -> list[int]:
    return [relay._stream.outbox._bytes for relay in c.server._api._relays]


def test_slow_readers_hold_up_nobody_and_stay_small() -> None:
    async def scenario() -> None:
        async with cluster(Script(tokens_per_frame=16)) as c:
            idle = []
            for i in range(3):
                request = prompt(f"s{i}", max_tokens=2000, n=16, logprobs=20, seed=i)
                idle.append(c.stub.Generate(request))
                await idle[-1].read()  # Started, then nothing more
            began_s = time.monotonic()
            quick = [await c.generate(prompt(f"q{i}", max_tokens=50)) for i in range(5)]
            assert all(a.code is grpc.StatusCode.OK for a in quick)
            assert time.monotonic() - began_s < 10.0
            made = -1
            while made != c.replicas[0].emitted:
                assert max(_waiting_bytes(c)) <= OUTBOX_BYTES_MAX
                made = c.replicas[0].emitted
                await asyncio.sleep(0.4)
            assert made < 3 * 16 * 2000, "credit stops the replica"
            assert len(c.server._api._relays) == 3
            await _drained(c, idle)

    run(scenario())


async def _drained(c: Cluster, calls: list[grpc.aio.UnaryStreamCall]) -> None:
    """A slow reader that reads on gets everything."""
    for call in calls[1:]:
        call.cancel()
    answer = Answer()
    while (response := await calls[0].read()) is not grpc.aio.EOF:
        c.note(answer, response)
    for choice in range(16):
        assert answer.ids(choice) == expected(list(b"s0"), 0, 2000, choice)
    await c.quiet()


def test_a_replica_that_ignores_credit_costs_only_the_slow_stream() -> None:
    async def scenario() -> None:
        flood = Script(tokens_per_frame=64, before_token=_ignore_credit)
        async with cluster(flood) as c:
            call = c.stub.Generate(prompt("f", max_tokens=2000, n=64, logprobs=20))
            await call.read()
            await asyncio.sleep(1.0)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await _read_all(call)
            assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await c.quiet()

    run(scenario())


async def _read_all(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def _ignore_credit(replica, submit, position) -> None:
    replica.runs[submit.request_id].limit = 1 << 30


def test_a_stopping_router_lets_streams_end_and_sends_the_rest_elsewhere() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.01)) as c:
            short = asyncio.create_task(c.generate(prompt("a", max_tokens=30)))
            long = asyncio.create_task(c.generate(prompt("b", max_tokens=2000)))
            await asyncio.sleep(0.15)
            stopping = asyncio.create_task(c.server._api.drain(1.0))
            await asyncio.sleep(0.05)
            refused = await c.generate(prompt("c"))
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert (await short).code is grpc.StatusCode.OK
            ended = await long
            assert ended.code is grpc.StatusCode.UNAVAILABLE and ended.ids()
            await stopping
            await c.quiet()

    run(scenario())


def test_a_waiting_stream_ends_too_when_the_router_stops() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.01), queue_wait_s_max=30.0) as c:
            call = asyncio.create_task(c.generate(prompt("a", max_tokens=300)))
            await asyncio.sleep(0.1)
            await c.replicas[0].die()
            await asyncio.sleep(0.1)
            await c.server._api.drain(0.1)
            answer = await call
            assert answer.code is grpc.StatusCode.UNAVAILABLE and "stopping" in answer.details

    run(scenario())


def test_a_request_that_waits_for_a_model_ends_when_the_router_stops() -> None:
    async def scenario() -> None:
        async with cluster(queue_wait_s_max=30.0) as c:
            call = asyncio.create_task(c.generate(prompt()))
            await asyncio.sleep(0.1)
            await c.server._api.drain(0.1)
            answer = await call
            assert answer.code is grpc.StatusCode.UNAVAILABLE and "stopping" in answer.details

    run(scenario())


def test_empty_request_types_answer() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            models = (await c.stub.ListModels(api_pb2.ListModelsRequest())).models
            assert [(m.name, m.replicas, m.context_tokens) for m in models] == [
                ("scripted", 1, 2048)
            ]
            state = await c.stub.ClusterState(api_pb2.ClusterStateRequest())
            assert state.router == "r0" and state.replicas[0].replica == "w0"
            assert state.replicas[0].state == "ready" and state.streams_open == 0

    run(scenario())
