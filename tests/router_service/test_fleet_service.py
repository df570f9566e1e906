"""Attach and Events: who is let in, what is refused, and what a lost link means."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from loopback_cluster import Answer, Cluster, cluster, prompt, run
from scripted_replica import SECRET, Script, ScriptedReplica, expected

from banyan.v1 import api_pb2, internal_pb2, internal_pb2_grpc
from seams.proof import replica_proof, session_token

UP = internal_pb2.AttachUp
NONCE = bytes(32)


async def _attach(c: Cluster, *messages: UP, prove: bool = False) -> internal_pb2.AttachDown | None:
    """Say these things; returns the last answer, None if the stream just ended."""
    async with grpc.aio.insecure_channel(c.server.internal) as channel:
        call = internal_pb2_grpc.FleetStub(channel).Attach()
        last = None
        if prove:
            await call.write(UP(greeting=internal_pb2.Greeting(nonce=NONCE)))
            challenge = (await call.read()).challenge
            proof = replica_proof(SECRET, NONCE, challenge.nonce)
            await call.write(UP(proof=internal_pb2.Proof(proof=proof)))
        for message in messages:
            await call.write(message)
        await call.done_writing()
        while (down := await call.read()) is not grpc.aio.EOF:
            last = down
        return last


def _channel(c: Cluster) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(c.server.internal)


GREETING = UP(greeting=internal_pb2.Greeting(nonce=NONCE))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [GREETING],
        [UP()],
        [UP(greeting=internal_pb2.Greeting(nonce=b"short"))],
        [UP(heartbeat=internal_pb2.Heartbeat())],
        [GREETING, GREETING],
        [GREETING, UP(proof=internal_pb2.Proof(proof=bytes(32)))],
        [GREETING, UP(proof=internal_pb2.Proof())],
        [GREETING, UP(proof=internal_pb2.Proof(proof=bytes(65)))],
        [GREETING, UP(hello=internal_pb2.Hello(protocol=1, replica="w"))],
    ],
)
def test_without_a_proof_nobody_gets_in(messages: list[internal_pb2.AttachUp]) -> None:
    async def scenario() -> None:
        async with cluster() as c:
            down = await _attach(c, *messages)
            assert down is not None and down.HasField("refusal")
            assert not c.core.state()

    run(scenario())


def test_a_good_hello_does_not_make_up_for_a_wrong_proof() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            hello = ScriptedReplica("w1").hello()
            hello.address = c.replicas[0].address
            for wrong in (bytes(32), replica_proof(bytes(32), NONCE, NONCE)):
                proof = UP(proof=internal_pb2.Proof(proof=wrong))
                down = await _attach(c, GREETING, proof, UP(hello=hello))
                assert down is not None and "secret" in down.refusal.message
            assert [state.replica for state in c.core.state()] == ["w0"]

    run(scenario())


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"protocol": 2},
        {"protocol": 1, "replica": "w", "block_tokens": 16},
        {"protocol": 1, "replica": "x" * 300, "address": "a:1", "block_tokens": 16},
        {"protocol": 1, "replica": "w", "address": "a:1", "block_tokens": 5000},
        {"protocol": 1, "replica": "w", "address": "a:1", "block_tokens": 16},
    ],
)
def test_a_hello_that_does_not_fit_is_refused(hello: dict[str, object]) -> None:
    async def scenario() -> None:
        async with cluster() as c:
            down = await _attach(c, UP(hello=internal_pb2.Hello(**hello)), prove=True)
            assert down is not None and down.refusal.message.endswith(".")
            assert not c.core.state()

    run(scenario())


def test_a_newer_protocol_is_named_whatever_else_its_hello_has() -> None:
    async def scenario() -> None:
        async with cluster() as c:
            hello = UP(hello=internal_pb2.Hello(protocol=2, replica="x" * 300))
            down = await _attach(c, hello, prove=True)
            assert down is not None
            assert down.refusal.message == "The replica speaks protocol 2, this router protocol 1."

    run(scenario())


def test_a_replica_that_chains_keys_differently_is_refused() -> None:
    async def scenario() -> None:
        async with cluster() as c:
            replica = ScriptedReplica("w0")

            def spoil(hello: internal_pb2.Hello) -> None:
                hello.probe.keys = bytes(len(hello.probe.keys))

            replica.change_hello = spoil
            await replica.start(c.server.internal)
            await replica.attached.wait()
            c.replicas.append(replica)
            assert "chains block keys differently" in replica.refusal

    run(scenario())


def test_text_files_that_cannot_be_had_keep_a_replica_out_but_may_be_tried_again() -> None:
    async def scenario() -> None:
        async with cluster() as c:
            replica = ScriptedReplica("w0", Script(fetchable=False))
            c.replicas.append(replica)
            await replica.start(c.server.internal)
            with pytest.raises(grpc.aio.AioRpcError):
                await replica._links[0]
            assert not c.core.state()
            await c.add("w0")
            assert (await c.generate(prompt())).code is grpc.StatusCode.OK

    run(scenario())


def test_text_files_with_another_fingerprint_are_refused() -> None:
    async def scenario() -> None:
        async with cluster() as c:
            replica = ScriptedReplica("w0")

            def spoil(hello: internal_pb2.Hello) -> None:
                hello.models[0].template_fingerprint = "0" * 64

            replica.change_hello = spoil
            await replica.start(c.server.internal)
            await replica.attached.wait()
            c.replicas.append(replica)
            assert "fingerprints" in replica.refusal and not c.core.state()
            assert replica.refused_as == "Incompatible"

    run(scenario())


def test_a_model_without_a_tokenizer_takes_token_ids_only() -> None:
    async def scenario() -> None:
        async with cluster() as c:
            replica = ScriptedReplica("w0")

            def bare(hello: internal_pb2.Hello) -> None:
                hello.models[0].tokenizer_fingerprint = ""
                hello.models[0].template_fingerprint = ""

            replica.change_hello = bare
            await replica.start(c.server.internal)
            await replica.attached.wait()
            c.replicas.append(replica)
            for request in (prompt("text"), _ids([1, 2], stop=["x"])):
                assert (await c.generate(request)).code is grpc.StatusCode.INVALID_ARGUMENT
            answer = await c.generate(_ids([1, 2]))
            assert len(answer.ids()) == 4 and answer.text() == ""

    run(scenario())


def _ids(ids: list[int], **fields: object) -> api_pb2.GenerateRequest:
    request = api_pb2.GenerateRequest(tokens=api_pb2.TokenIds(ids=ids), **fields)
    request.sampling.max_tokens = 4
    return request


def test_events_need_a_session_and_its_own_replica() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c, _channel(c) as channel:
            stub = internal_pb2_grpc.FleetStub(channel)
            for token in ("", "nonsense", session_token(SECRET, "events", NONCE, NONCE)):
                call = stub.Events(metadata=(("banyan-session", token),))
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            session = c.server._fleet._sessions["w0"]
            metadata = (("banyan-session", session.tokens["events"]),)
            for wrong in (
                internal_pb2.EventBatch(replica="w1", epoch=c.replicas[0].epoch),
                internal_pb2.EventBatch(replica="w0", epoch=c.replicas[0].epoch + 1),
            ):
                call = stub.Events(metadata=metadata)
                await call.write(wrong)
                assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            execute = (("banyan-session", session.tokens["execute"]),)
            assert await stub.Events(metadata=execute).code() is (grpc.StatusCode.UNAUTHENTICATED)

    run(scenario())


def test_a_gap_in_the_events_asks_for_a_snapshot_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c, _channel(c) as channel:
            stub = internal_pb2_grpc.FleetStub(channel)
            session = c.server._fleet._sessions["w0"]
            call = stub.Events(metadata=(("banyan-session", session.tokens["events"]),))
            await call.write(
                internal_pb2.EventBatch(replica="w0", epoch=c.replicas[0].epoch, seq=99)
            )
            control = await asyncio.wait_for(call.read(), 3)
            assert control.want_snapshot
            call.cancel()
            await c.until(lambda: "cache events repaired" in caplog.messages)
            await asyncio.sleep(1.2)
            lines = [r for r in caplog.records if r.msg == "cache events repaired"]
            assert len(lines) == 1, "only when they change"
            assert lines[0].fields["gaps"] == 1  # type: ignore[attr-defined]

    caplog.set_level("INFO", "banyan.router")

    run(scenario())


def test_a_lost_link_makes_suspect_at_once_and_its_streams_go_on() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.02), Script(token_s=0.02), lease_ms=3000) as c:
            call = asyncio.create_task(c.generate(prompt("abc", max_tokens=40, seed=1)))
            await c.until(lambda: any(r.submits for r in c.replicas))
            busy = next(r for r in c.replicas if r.submits)
            busy._links[0].cancel()
            await c.until(lambda: _state(c, busy.name) == "suspect", 1.0)
            for i in range(3):
                answer = await c.generate(prompt(f"new {i}", max_tokens=1))
                assert answer.started[0].replica != busy.name
            answer = await call
            assert answer.ids() == expected(list(b"abc"), 1, 40) and answer.usage.moves == 0

    run(scenario())


def _state(c: Cluster, name: str) -> str:
    return next((s.state for s in c.core.state() if s.replica == name), "")


def test_a_suspect_replica_serves_where_nobody_else_can() -> None:
    async def scenario() -> None:
        async with cluster(Script(), lease_ms=3000) as c:
            c.replicas[0]._links[0].cancel()
            await c.until(lambda: _state(c, "w0") == "suspect")
            assert (await c.generate(prompt())).code is grpc.StatusCode.OK

    run(scenario())


def test_a_silent_replica_is_gone_after_its_lease_and_comes_back() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.01), queue_wait_s_max=0.2) as c:
            replica = c.replicas[0]
            replica.beating = False
            await c.until(lambda: not c.core.state(), 2.0)
            assert (await c.generate(prompt())).code is grpc.StatusCode.UNAVAILABLE
            await c.until(lambda: "w0" not in c.server._fleet._sessions, 3.0)
            replica.beating = True
            replica._links.append(asyncio.create_task(replica._attach(c.server.internal)))
            await c.until(lambda: _state(c, "w0") == "ready")
            assert (await c.generate(prompt())).code is grpc.StatusCode.OK

    run(scenario())


def test_a_gone_replica_that_still_sends_keeps_its_streams() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.02)) as c:
            call = asyncio.create_task(c.generate(prompt("abc", max_tokens=80, seed=1)))
            await c.until(lambda: bool(c.replicas[0].submits))
            c.replicas[0].beating = False
            await c.until(lambda: not c.core.state(), 2.0)
            answer = await call
            assert answer.ids() == expected(list(b"abc"), 1, 80) and answer.usage.moves == 0

    run(scenario())


def test_a_silent_execute_stream_of_a_gone_replica_is_given_up() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=60.0), Script(), queue_wait_s_max=5.0) as c:
            fast = c.replicas[1]
            fast._links[0].cancel()  # suspect: the slow one is taken
            await c.until(lambda: _state(c, "w1") == "suspect")
            call = asyncio.create_task(c.generate(prompt("abc", max_tokens=4, seed=1)))
            await c.until(lambda: bool(c.replicas[0].submits))
            fast._links.append(asyncio.create_task(fast._attach(c.server.internal)))
            c.replicas[0].beating = False
            answer = await call
            assert answer.ids() == expected(list(b"abc"), 1, 4) and answer.usage.moves == 1

    run(scenario())


def test_the_same_epoch_attaching_again_keeps_its_streams() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.02)) as c:
            replica = c.replicas[0]
            call = asyncio.create_task(c.generate(prompt("abc", max_tokens=40, seed=1)))
            await c.until(lambda: bool(replica.submits))
            executor = c.server._fleet._sessions["w0"].executor
            replica._links[0].cancel()
            await asyncio.sleep(0.05)
            replica._links.append(asyncio.create_task(replica._attach(c.server.internal)))
            await c.until(lambda: _state(c, "w0") == "ready")
            assert c.server._fleet._sessions["w0"].executor is executor
            answer = await call
            assert answer.ids() == expected(list(b"abc"), 1, 40) and answer.usage.moves == 0

    run(scenario())


def test_a_newer_epoch_ends_the_old_ones_streams_at_once() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.05)) as c:
            old = c.replicas[0]
            call = asyncio.create_task(c.generate(prompt("abc", max_tokens=10, seed=1)))
            await c.until(lambda: old.emitted > 1)
            await c.add("w0")
            answer = await call
            assert answer.ids() == expected(list(b"abc"), 1, 10) and answer.usage.moves == 1
            late = ScriptedReplica("w0", epoch=old.epoch)
            await late.start(c.server.internal)
            await late.attached.wait()
            c.replicas.append(late)
            assert "newer start" in late.refusal

    run(scenario())


async def _on_the_wedged(c: Cluster) -> asyncio.Task[Answer]:
    """Starts a stream on w0, which emits nothing, and says so."""
    c.replicas[1].draining = True  # for a moment: the wedged one is taken
    await c.until(lambda: _state(c, "w1") == "draining")
    call = asyncio.create_task(c.generate(prompt("abc", max_tokens=4, seed=1)))
    await c.until(lambda: bool(c.replicas[0].submits))
    c.replicas[0].stalled = True
    return call


def test_streams_of_a_stalled_replica_move_once_it_is_silent() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=60.0), Script(), queue_wait_s_max=5.0) as c:
            call = await _on_the_wedged(c)
            await c.add("w2", Script())
            answer = await call
            assert answer.ids() == expected(list(b"abc"), 1, 4) and answer.usage.moves == 1
            assert c.core.state(), "it was never gone"
            await c.until(lambda: c.replicas[0].runs != {})
            for i in range(4):
                assert (await c.generate(prompt(f"{i}"))).started[0].replica == "w2"
            c.replicas[0].stalled = False  # it has nothing to do any more: that proves nothing
            await asyncio.sleep(0.2)
            for i in range(4):
                assert (await c.generate(prompt(f"{i}"))).started[0].replica == "w2"
            await c.quiet()

    run(scenario())


def test_a_stalled_replica_that_still_sends_keeps_its_streams() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.02)) as c:
            c.replicas[0].script.before_token = lambda r, *_: setattr(r, "stalled", True)
            answer = await c.generate(prompt("abc", max_tokens=80, seed=1))
            assert answer.ids() == expected(list(b"abc"), 1, 80) and answer.usage.moves == 0

    run(scenario())


def test_silence_counts_from_when_there_was_something_to_say() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=60.0)) as c:
            executor = c.server._fleet._sessions["w0"].executor
            assert executor is not None
            await c.until(lambda: executor.silent_s > 0.7)
            call = asyncio.create_task(c.generate(prompt()))
            await c.until(lambda: bool(c.replicas[0].submits))
            assert executor.silent_s < 0.5
            call.cancel()

    run(scenario())


def test_nothing_new_goes_to_a_replica_while_it_is_stalled() -> None:
    async def scenario() -> None:
        async with cluster(Script(), queue_wait_s_max=0.3) as c:
            replica = c.replicas[0]
            replica.stalled = True
            await c.until(lambda: _state(c, "w0") == "suspect")
            answer = await c.generate(prompt())
            assert answer.code is grpc.StatusCode.UNAVAILABLE and not replica.submits
            replica.stalled = False
            await asyncio.sleep(0.2)
            assert (await c.generate(prompt())).code is grpc.StatusCode.OK, "the only one"
            await c.until(lambda: _state(c, "w0") == "ready")

    run(scenario())


def test_a_draining_replica_gets_no_new_requests() -> None:
    async def scenario() -> None:
        async with cluster(Script(), Script()) as c:
            c.replicas[0].draining = True
            await c.until(lambda: _state(c, "w0") == "draining")
            for i in range(4):
                assert (await c.generate(prompt(f"{i}"))).started[0].replica == "w1"

    run(scenario())
