"""An OpenAI endpoint as a target: what is sent, what is heard, and each way to fail."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest
from http_peer import MODEL, Peer, peer

from loadtest.targets.base import Ask, Ended, Form, Heard, Piece, as_ids, of_ids
from loadtest.targets.http1 import HttpClient
from loadtest.targets.openai import OpenAiTarget
from loadtest.workloads.base import Message
from seams.errors import (
    BanyanError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NoReplica,
    Overloaded,
    ReplicaLost,
    Unauthenticated,
)

ASK = Ask((Message("system", "be brief"), Message("user", "tell me more")), 4, "session-1")


async def heard(target: OpenAiTarget, ask: Ask = ASK) -> list[Heard]:
    async with aclosing(target.ask(ask)) as stream:
        return [event async for event in stream]


def asked(options: dict[str, Any] | None = None, **faults: Any) -> tuple[list[Heard], Peer]:
    """All events of one request to a peer."""

    async def ask() -> tuple[list[Heard], Peer]:
        async with peer(**faults) as there:
            target = OpenAiTarget(there.url, **(options or {}))
            try:
                await target.open()
                return await heard(target), there
            finally:
                await target.aclose()

    return asyncio.run(asyncio.wait_for(ask(), 20))


def test_a_chat_is_streamed() -> None:
    events, there = asked({"api_key": "secret"})
    assert events[:-1] == [Piece(f"w{number} ") for number in range(4)]
    assert events[-1] == Ended(5, 3, 4, request_id="req-7")
    path, body, headers = there.asked[-1]
    assert path == "/v1/chat/completions" and headers["authorization"] == "Bearer secret"
    assert headers["x-session-id"] == "session-1"
    assert body == {
        "model": MODEL, "max_tokens": 4, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
        "messages": [{"role": "system", "content": "be brief"},
                     {"role": "user", "content": "tell me more"}],
    }  # fmt: skip


def test_other_forms_of_a_prompt() -> None:
    events, there = asked({"form": Form.TEXT, "ignore_eos": False})
    _, body, _ = there.asked[-1]
    assert body["prompt"] == "be brief\n\ntell me more" and "ignore_eos" not in body
    assert events[0] == Piece("w0 ")
    events, there = asked({"form": Form.IDS})
    path, body, _ = there.asked[-1]
    assert path == "/v1/completions" and len(body["prompt"]) == 5 and body["return_token_ids"]
    assert events[:-1] == [Piece(f"#{number + 1} ") for number in range(4)]


def test_ids_of_an_answer_come_back_as_they_were() -> None:
    said = Message("assistant", of_ids([7, 0, 65000]))
    asked_for = Message("user", "a b a")
    first, second, third, *rest = as_ids([asked_for, said])
    assert rest == [7, 0, 65000]
    assert first == third != second and 0 < first <= 200


def test_a_server_that_does_not_tell_what_was_cached() -> None:
    events, _ = asked(cached=None)
    assert events[-1] == Ended(5, None, 4, request_id="req-7")


@pytest.mark.parametrize(
    ("faults", "kind", "sentence"),
    [
        ({"status": 400}, InvalidRequest, "HTTP 400: refused with 400"),
        ({"status": 401}, Unauthenticated, "HTTP 401: refused with 401"),
        ({"status": 429}, Overloaded, "HTTP 429: refused with 429"),
        ({"status": 503}, NoReplica, "HTTP 503: refused with 503"),
        ({"status": 500}, InternalError, "HTTP 500: refused with 500"),
        ({"fault": "cut"}, ReplicaLost, "before the answer's end."),
        ({"fault": "event"}, InternalError, "HTTP 500: it broke"),
        ({"fault": "not json"}, InternalError, "an event that is no JSON object."),
        ({"fault": "no usage"}, InternalError, "without its end mark or its usage."),
        ({"fault": "no end"}, InternalError, "without its end mark or its usage."),
        ({"fault": "odd usage"}, InternalError, "usage is none of OpenAI's."),
        (
            {"models": ("a", "b")},
            ModelNotFound,
            "Name one of the served models with --model: a, b.",
        ),
    ],
)
def test_failures_are_typed(faults: dict[str, Any], kind: type[BanyanError], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        asked(**faults)
    assert type(caught.value) is kind and caught.value.message.endswith(sentence)


def test_a_model_that_is_not_served() -> None:
    with pytest.raises(ModelNotFound, match=f"with --model: {MODEL}"):
        asked({"model": "another"})


def test_connections_are_kept_and_stale_ones_replaced() -> None:
    async def scenario() -> None:
        async with peer() as there:
            target = OpenAiTarget(there.url)
            await target.open()
            for _ in range(5):
                await heard(target)
            assert there.connections == 1
            await asyncio.gather(*(heard(target) for _ in range(3)))
            assert there.connections == 3
            there.keeps = False
            for _ in range(8):  # three are kept: each is found closed, once
                assert isinstance((await heard(target))[-1], Ended)
                await asyncio.sleep(0.01)
            assert there.connections > 6
            await target.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_request_that_is_cut_off_leaves_no_connection_in_use() -> None:
    async def scenario() -> None:
        async with peer(pause_s=0.2) as there:
            target = OpenAiTarget(there.url)
            await target.open()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await heard(target)
            there.pause_s = 0.0
            assert isinstance((await heard(target))[-1], Ended)
            assert there.connections == 2  # the one that was cut off is not used again
            await target.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(NoReplica, match="The endpoint cannot be reached"):
            asyncio.run(OpenAiTarget(url).open())


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://h/v1", "http://", "http://h:99999", "http://u@h/"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="The target must be a URL such as"):
        HttpClient(url, {})


def test_the_endpoints_own_tokenizer_counts() -> None:
    async def scenario() -> None:
        async with peer() as there:
            target = OpenAiTarget(there.url)
            await target.open()
            counter = await asyncio.to_thread(target.counter)
            found = [await asyncio.to_thread(counter.count, t) for t in ("", "a", " a b c")]
            assert found == [0, 1, 3]  # the server itself says one more: its first token
            counter.close()
            there.tokenizes = False
            with pytest.raises(InvalidRequest, match="has no /tokenize; name the model's folder"):
                await asyncio.to_thread(target.counter)
            await target.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 20))
