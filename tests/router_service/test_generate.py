"""Generate over loopback: what a client gets when nothing goes wrong."""

from __future__ import annotations

import grpc
import pytest
from loopback_cluster import Cluster, cluster, prompt, run
from scripted_replica import Script, expected

from banyan.v1 import api_pb2, common_pb2, internal_pb2
from router.service import relay
from seams.errors import StatusCode


def test_text_prompt_streams_tokens_text_and_usage() -> None:
    async def scenario() -> None:
        async with cluster(Script(cached_tokens=3)) as c:
            request = prompt("hello", max_tokens=8, seed=7)
            request.label = "mine"
            answer = await c.generate(request, metadata=[("traceparent", "00-ab-cd-01")])
            ids = expected(list(b"hello"), 7, 8)
            assert answer.code.value[0] == StatusCode.OK
            assert answer.ids() == ids and answer.text() == bytes(ids).decode()
            started = answer.started[0]
            assert (started.seed, started.label, started.model) == (7, "mine", "scripted")
            assert started.replica == "w0" and started.prompt_tokens == 5
            usage = answer.usage
            assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (5, 3, 2)
            assert usage.completion_tokens == 8 and usage.moves == 0
            assert answer.finished[0].decision.delivered_tokens == 3
            assert answer.choices[0].reason == common_pb2.FINISH_REASON_LENGTH
            assert answer.initial["traceparent"] == "00-ab-cd-01"
            await c.quiet()
            assert c.core.explain(started.request_id).delivered_tokens == 3

    run(scenario())


def test_chat_is_rendered_and_ids_pass_as_they_are() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            chat = api_pb2.GenerateRequest(sampling=common_pb2.Sampling(max_tokens=1))
            chat.chat.messages.add(role="user", content="hé")
            await c.generate(chat)
            assert bytes(c.replicas[0].submits[-1].token_ids).decode() == "user: hé\n"
            ids = api_pb2.GenerateRequest(
                tokens=api_pb2.TokenIds(ids=[1, 2, 299]), sampling=common_pb2.Sampling(max_tokens=1)
            )
            await c.generate(ids)
            assert list(c.replicas[0].submits[-1].token_ids) == [1, 2, 299]

    run(scenario())


def test_seeds_are_minted_and_request_ids_are_ours() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            a, b = await c.generate(prompt()), await c.generate(prompt())
            assert a.started[0].seed != b.started[0].seed
            assert a.started[0].request_id != b.started[0].request_id
            assert [s.sampling.seed for s in c.replicas[0].submits] == [
                a.started[0].seed,
                b.started[0].seed,
            ]

    run(scenario())


def test_max_tokens_zero_means_up_to_the_context() -> None:
    async def scenario() -> None:
        async with cluster(Script(tokens_per_frame=64)) as c:
            answer = await c.generate(prompt("x" * 2000, max_tokens=0))
            assert answer.usage.completion_tokens == 48
            assert len(answer.ids()) == 48

    run(scenario())


def test_several_choices_each_end_once() -> None:
    async def scenario() -> None:
        async with cluster(Script(tokens_per_frame=3)) as c:
            answer = await c.generate(prompt("abc", n=4, max_tokens=10, seed=1, logprobs=2))
            for choice in range(4):
                assert answer.ids(choice) == expected(list(b"abc"), 1, 10, choice)
            assert len(answer.choices) == 4 and answer.usage.completion_tokens == 40
            for delta in answer.deltas:
                assert [p.chosen.token_id for p in delta.logprobs] == list(delta.token_ids)
                assert all(len(p.top) == 2 for p in delta.logprobs)

    run(scenario())


def test_end_token_gives_stop_and_no_text() -> None:
    async def scenario() -> None:
        async with cluster(Script(end_after=3)) as c:
            answer = await c.generate(prompt("abc", max_tokens=10, seed=1))
            assert answer.ids()[:3] == expected(list(b"abc"), 1, 3)
            assert len(answer.ids()) == 4 and len(answer.text()) == 3
            assert answer.choices[0].reason == common_pb2.FINISH_REASON_STOP

    run(scenario())


def test_a_character_over_several_tokens_is_never_split() -> None:
    async def scenario() -> None:
        text = "日本語 🙂 ok"
        size = len(text.encode())
        async with cluster(Script(text=text.encode(), token_s=0.001)) as c:
            answer = await c.generate(prompt(max_tokens=size))
            assert answer.text() == text
            assert not any("\ufffd" in delta.text for delta in answer.deltas)
            cut = await c.generate(prompt(max_tokens=2))
            assert cut.text() == "\ufffd" and cut.deltas[-1].text == ""

    run(scenario())


def test_a_stop_string_ends_the_stream_and_the_request_at_the_replica() -> None:
    async def scenario() -> None:
        script = Script(text=b"one two STOP three" * 9, token_s=0.001, cached_tokens=2)
        async with cluster(script) as c:
            request = prompt(max_tokens=150)
            request.stop.extend(["STOP", "never"])
            answer = await c.generate(request)
            assert answer.text() == "one two "
            ended = answer.choices[0]
            assert (ended.reason, ended.stop) == (common_pb2.FINISH_REASON_STOP_STRING, "STOP")
            assert bytes(answer.ids()) == b"one two STOP"
            assert answer.usage.completion_tokens == 12 and answer.usage.cached_tokens == 2
            assert c.replicas[0].cancels == [answer.started[0].request_id]
            await c.quiet()

    run(scenario())


def test_a_stop_string_in_one_of_several_choices_leaves_the_others_alone() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.001)) as c:
            texts = [bytes(expected(list(b"abc"), 5, 40, n)).decode() for n in range(2)]
            stop = texts[0][10:13]
            request = prompt("abc", n=2, max_tokens=40, seed=5)
            request.stop.append(stop)
            answer = await c.generate(request)
            assert answer.text(0) == texts[0].split(stop)[0]
            assert answer.text(1) == texts[1].split(stop)[0]
            await c.quiet()

    run(scenario())


def test_resume_continues_exactly_and_repeats_nothing() -> None:
    async def scenario() -> None:
        text = "naïve 日本 STO STOP tail"
        raw = text.encode()
        async with cluster(Script(text=raw)) as c:
            request = prompt("hi", max_tokens=len(raw), seed=9)
            request.stop.append("STOP")
            whole = await c.generate(request)
            assert whole.text() == "naïve 日本 STO "
            for cut in range(len(whole.ids()) + 1):
                await _resumed(c, request, whole.ids(), cut, whole.text())
            await c.quiet()

    run(scenario())


async def _resumed(
    c: Cluster, request: api_pb2.GenerateRequest, ids: list[int], cut: int, text: str
) -> None:
    """Break off after `cut` ids: what came before and what comes after make the whole."""
    again = api_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.resume.seed = 9
    again.resume.token_ids.extend(ids[:cut])
    rest = await c.generate(again)
    assert ids[:cut] + rest.ids() == ids
    assert all(delta.position >= cut for delta in rest.deltas)
    shorter = api_pb2.GenerateRequest()
    shorter.CopyFrom(request)
    shorter.sampling.max_tokens = max(1, cut)
    before = "".join(d.text for d in (await c.generate(shorter)).deltas) if cut else ""
    assert before + rest.text() == text, cut
    assert rest.choices[0].reason == common_pb2.FINISH_REASON_STOP_STRING
    assert rest.usage.completion_tokens == len(ids)


def test_a_resumed_stream_that_had_all_its_tokens_only_ends() -> None:
    async def scenario() -> None:
        async with cluster(Script(end_after=5)) as c:
            whole = await c.generate(prompt(max_tokens=20, seed=3))
            submits = len(c.replicas[0].submits)
            again = prompt(max_tokens=20)
            again.resume.seed = 3
            again.resume.token_ids.extend(whole.ids())
            rest = await c.generate(again)
            assert not rest.ids() and rest.choices[0].reason == common_pb2.FINISH_REASON_STOP
            assert rest.usage.completion_tokens == 6
            assert len(c.replicas[0].submits) == submits, "no replica was asked"

    run(scenario())


def test_equal_prefixes_go_to_one_replica_and_tokens_reach_the_core() -> None:
    async def scenario() -> None:
        async with cluster(Script(), Script()) as c:
            homes = {(await c.generate(prompt("p" * 400))).started[0].replica for _ in range(4)}
            assert len(homes) == 1

    run(scenario())


def test_what_was_delivered_stays_open_where_the_replica_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stop string ends the client's stream; the replica never answers the cancel."""
    monkeypatch.setattr(relay, "SETTLE_S_MAX", 0.1)

    def reply(submit: internal_pb2.Submit) -> list[internal_pb2.Emission]:
        return [internal_pb2.Emission(position=0, token_ids=b"stop")]

    async def scenario() -> None:
        async with cluster(Script(reply=reply)) as c:
            request = prompt()
            request.stop.append("stop")
            answer = await c.generate(request)
            assert answer.code is grpc.StatusCode.OK
            assert not answer.finished[0].decision.HasField("delivered_tokens")
            asked = api_pb2.ExplainRequest(request_id=answer.started[0].request_id)
            assert not (await c.stub.Explain(asked)).decision.HasField("delivered_tokens")
            await c.quiet()

    run(scenario())
