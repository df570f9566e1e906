"""A cluster over gRPC as a load test's target: a real router, and replicas that follow a script."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from http_calls import post
from loopback_cluster import cluster, run
from scripted_replica import Script, ScriptedReplica

from banyan.v1 import internal_pb2
from loadtest.targets.base import Ask, Ended, Form, Heard, Piece, as_ids, as_text
from loadtest.targets.grpc import GrpcTarget
from loadtest.targets.openai import OpenAiTarget
from loadtest.workloads.base import Message
from seams.errors import ModelNotFound

ASK = Ask((Message("system", "be brief"), Message("user", "tell me")), 6, "session-1")


async def heard(target: GrpcTarget) -> list[Heard]:
    async with aclosing(target.ask(ASK)) as stream:
        return [event async for event in stream]


@pytest.mark.parametrize("form", [Form.CHAT, Form.TEXT])
def test_an_answer_is_heard_piece_by_piece(form: Form) -> None:
    async def scenario() -> None:
        async with cluster(Script(cached_tokens=4)) as c:
            target = GrpcTarget(c.server.listen, form=form, no_cache=True)
            await target.open()
            *pieces, ended = await heard(target)
            (submit,) = c.replicas[0].submits
            wanted = as_text(ASK.messages)
            if form is Form.CHAT:
                wanted = "system: be brief\nuser: tell me\n"
            assert bytes(submit.token_ids).decode() == wanted
            assert submit.no_cache and submit.sampling.ignore_eos
            assert submit.sampling.max_tokens == 6 and submit.sampling.temperature == 0
            assert all(isinstance(piece, Piece) for piece in pieces)
            assert len("".join(piece.text for piece in pieces)) == 6
            assert isinstance(ended, Ended)
            assert (ended.prompt_tokens, ended.output_tokens) == (len(wanted), 6)
            assert ended.cached_tokens == 4 and ended.replica == "w0" and ended.request_id
            counter = target.counter()
            assert counter.count(" five") == 5  # bytes
            assert target.facts["form"] == form.value and target.facts["cache"] == "off"
            await target.aclose()

    run(scenario())


def test_a_model_without_text_is_asked_by_ids() -> None:
    def without_text(hello: internal_pb2.Hello) -> None:
        for model in hello.models:
            model.tokenizer_fingerprint = model.template_fingerprint = ""

    async def scenario() -> None:
        async with cluster() as c:
            replica = ScriptedReplica("w0")
            replica.change_hello = without_text
            await replica.start(c.server.internal)
            await asyncio.wait_for(replica.attached.wait(), 5)
            c.replicas.append(replica)
            target = GrpcTarget(c.server.listen)
            await target.open()
            assert target.facts["form"] == "ids" and target.counter().count("two words") == 2
            *pieces, ended = await heard(target)
            (submit,) = replica.submits
            assert list(submit.token_ids) == as_ids(ASK.messages)
            assert isinstance(ended, Ended) and ended.prompt_tokens == 4
            said = Message("assistant", "".join(piece.text for piece in pieces))
            assert len(as_ids([said])) == 6
            await target.aclose()

    run(scenario())


def test_a_move_is_counted() -> None:
    class KillOnce:
        death: asyncio.Task[None] | None = None

        def __call__(
            self, replica: ScriptedReplica, submit: internal_pb2.Submit, position: int
        ) -> None:
            if self.death is None and position == 3:
                replica.dead = True
                self.death = asyncio.create_task(replica.die())

    async def scenario() -> None:
        kill = KillOnce()
        script = Script(before_token=kill, token_s=0.002)
        async with cluster(script, script) as c:
            target = GrpcTarget(c.server.listen)
            await target.open()
            ended = (await heard(target))[-1]
            assert isinstance(ended, Ended) and ended.moves == 1 and ended.output_tokens == 6
            assert kill.death is not None
            await kill.death
            await target.aclose()

    run(scenario())


def test_another_model_is_not_found() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            target = GrpcTarget(c.server.listen, model="nobody")
            with pytest.raises(ModelNotFound, match="Name one of the served models with --model: "):
                await target.open()
            await target.aclose()

    run(scenario())


@pytest.mark.parametrize("form", [Form.CHAT, Form.TEXT])
def test_our_gateway_says_which_replica_answered(form: Form) -> None:
    async def scenario() -> None:
        async with cluster(Script(), http="127.0.0.1:0") as c:
            target = OpenAiTarget(f"http://{c.server.http}/v1", form=form)
            await target.open()
            async with aclosing(target.ask(ASK)) as stream:
                ended = [event async for event in stream][-1]
            assert isinstance(ended, Ended) and ended.replica == "w0" and ended.output_tokens == 6
            await target.aclose()
            whole = await post(c.server.http, "/v1/completions", {"prompt": "x", "max_tokens": 2})
            assert whole.headers["x-banyan-replica"] == "w0"

    run(scenario())
