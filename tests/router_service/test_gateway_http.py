"""The OpenAI gateway over real sockets, before scripted replicas with text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_calls import call, connected, post, stream
from loopback_cluster import Cluster, cluster, run
from scripted_replica import Script, ScriptedReplica, expected

from banyan.v1 import common_pb2, internal_pb2
from seams.errors import StatusCode

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HTTP = {"http": "127.0.0.1:0"}
USER = [{"role": "user", "content": "hello"}]
PROMPT = list(b"hello")


def at(running: Cluster) -> str:
    return running.server.http


def text(ids: list[int]) -> str:
    return bytes(ids).decode()


def test_a_completion_in_one_piece() -> None:
    async def scenario() -> None:
        async with cluster(Script(cached_tokens=3), **HTTP) as running:
            body = {"model": "scripted", "prompt": "hello", "max_tokens": 8, "seed": 5}
            reply = await post(at(running), COMPLETIONS, body)
            assert reply.status == 200
            found = reply.json
            assert found["choices"] == [
                {
                    "index": 0,
                    "text": text(expected(PROMPT, 5, 8)),
                    "logprobs": None,
                    "finish_reason": "length",
                }
            ]
            assert found["usage"] == {
                "prompt_tokens": 5,
                "completion_tokens": 8,
                "total_tokens": 13,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            assert found["object"] == "text_completion" and found["model"] == "scripted"
            assert found["id"] == f"cmpl-{reply.headers['x-request-id']}"
            submit = running.replicas[0].submits[0]
            assert found["id"].endswith(submit.request_id)
            assert submit.sampling.temperature == 1.0  # OpenAI's default
            await running.quiet()

    run(scenario())


def test_a_stream_gives_the_same_text_and_ends_once() -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            body = {"prompt": "hello", "max_tokens": 20, "seed": 5, "return_token_ids": True}
            whole = (await post(at(running), COMPLETIONS, body)).json
            with_usage = body | {"stream_options": {"include_usage": True}}
            events = await stream(at(running), COMPLETIONS, with_usage)
            assert events.done
            assert events.text() == whole["choices"][0]["text"]
            assert events.ids() == whole["choices"][0]["token_ids"] == expected(PROMPT, 5, 20)
            assert events.reasons() == {0: "length"}
            assert events.chunks[-1]["choices"] == []
            assert events.chunks[-1]["usage"] == whole["usage"]
            assert all(chunk["usage"] is None for chunk in events.chunks[:-1])
            assert len({chunk["id"] for chunk in events.chunks}) == 1
            assert "usage" not in (await stream(at(running), COMPLETIONS, body)).chunks[-1]
            await running.quiet()

    run(scenario())


@pytest.mark.parametrize("streamed", [False, True])
def test_several_prompts_and_choices_are_numbered_side_by_side(streamed: bool) -> None:
    async def scenario() -> None:
        async with cluster(Script(), Script(), **HTTP) as running:
            prompts: list[Any] = [["hello", "there"], [PROMPT, list(b"there")]]
            wanted = [
                text(expected(list(prompt), 9, 6, choice))
                for prompt in (b"hello", b"there")
                for choice in range(2)
            ]
            for prompt in prompts:
                body = {"prompt": prompt, "n": 2, "max_tokens": 6, "seed": 9}
                if streamed:
                    events = await stream(at(running), COMPLETIONS, body)
                    assert [events.text(i) for i in range(4)] == wanted and events.done
                    assert events.reasons() == dict.fromkeys(range(4), "length")
                    continue
                found = (await post(at(running), COMPLETIONS, body)).json
                assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
                assert [choice["text"] for choice in found["choices"]] == wanted
                assert found["usage"]["prompt_tokens"] == 10
                assert found["usage"]["completion_tokens"] == 24
            await running.quiet()

    run(scenario())


def test_one_bad_prompt_of_several_is_refused_before_any_is_placed() -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            for streamed in (False, True):
                body = {"prompt": [[1, 2], [3, 299], [4, 300]], "stream": streamed}
                reply = await post(at(running), COMPLETIONS, body)
                assert reply.status == 400 and "vocabulary" in reply.error["message"]
            assert not running.replicas[0].submits
            await running.quiet()

    run(scenario())


def test_a_chat_is_rendered_by_the_template() -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
            body = {"messages": USER, "max_completion_tokens": 6, "max_tokens": 99, "seed": 1}
            found = (await post(at(running), CHAT, body)).json
            rendered = list(b"user: hello\n")
            assert list(running.replicas[0].submits[0].token_ids) == rendered
            message = found["choices"][0]["message"]
            wanted = text(expected(rendered, 1, 6))
            assert message == {"role": "assistant", "content": wanted, "refusal": None}
            assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
            in_parts = body | {"messages": [{"role": "user", "content": parts}]}
            events = await stream(at(running), CHAT, in_parts)
            assert events.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert events.chunks[0]["object"] == "chat.completion.chunk"
            assert events.text() == wanted
            await running.quiet()

    run(scenario())


def test_logprobs_in_both_forms() -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            common = {"max_tokens": 3, "seed": 1}
            body = common | {"messages": USER, "logprobs": True, "top_logprobs": 2}
            whole = (await post(at(running), CHAT, body)).json["choices"][0]
            content = whole["logprobs"]["content"]
            assert "".join(entry["token"] for entry in content) == whole["message"]["content"]
            assert content[0]["bytes"] == list(content[0]["token"].encode())
            assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-1.0, -1.0]
            events = await stream(at(running), CHAT, body)
            pieces = [chunk["choices"][0]["logprobs"] for chunk in events.chunks]
            assert [e for piece in pieces if piece for e in piece["content"]] == content
            body = common | {"prompt": "hello", "logprobs": 2}
            found = (await post(at(running), COMPLETIONS, body)).json["choices"][0]
            assert "".join(found["logprobs"]["tokens"]) == found["text"]
            assert found["logprobs"]["text_offset"] == [0, 1, 2]
            assert len(found["logprobs"]["top_logprobs"]) == 3
            events = await stream(at(running), COMPLETIONS, body)
            pieces = [chunk["choices"][0]["logprobs"] for chunk in events.chunks]
            offsets = [o for piece in pieces if piece for o in piece["text_offset"]]
            assert offsets == [0, 1, 2]
            await running.quiet()

    run(scenario())


def test_a_stop_string_ends_the_text_before_it() -> None:
    async def scenario() -> None:
        async with cluster(Script(text=b"one two three "), **HTTP) as running:
            body = {"prompt": "x", "max_tokens": 40, "stop": ["two", "zzz"]}
            found = (await post(at(running), COMPLETIONS, body)).json["choices"][0]
            assert (found["text"], found["finish_reason"]) == ("one ", "stop")
            events = await stream(at(running), COMPLETIONS, body)
            assert events.text() == "one " and events.reasons() == {0: "stop"}
            await running.quiet()

    run(scenario())


def test_models_tokens_and_health() -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            address = at(running)
            models = (await call(address, "GET", "/v1/models")).json
            assert [(m["id"], m["object"]) for m in models["data"]] == [("scripted", "model")]
            assert (await call(address, "GET", "/v1/models/scripted")).json == models["data"][0]
            missing = await call(address, "GET", "/v1/models/other%2Fone")
            assert missing.status == 404 and missing.error["code"] == "model_not_found"
            tokens = (await post(address, "/tokenize", {"prompt": "hello"})).json
            assert tokens == {"count": 5, "max_model_len": 2048, "tokens": PROMPT}
            chat = (await post(address, "/tokenize", {"messages": USER})).json
            assert chat["tokens"] == list(b"user: hello\n")
            back = await post(address, "/detokenize", {"tokens": PROMPT})
            assert back.json == {"prompt": "hello"}
            outside = await post(address, "/detokenize", {"tokens": [300]})
            assert outside.status == 400 and outside.error["param"] == "tokens"
            await running.until(lambda: running.server._ready)
            assert (await call(address, "GET", "/health")).status == 200
            described = (await call(address, "GET", "/openapi.json")).json
            assert described["openapi"].startswith("3.1") and CHAT in described["paths"]
            assert (await call(address, "GET", "/nothing")).error["code"] == "unknown_url"
            wrong = await call(address, "GET", CHAT)
            assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
            await running.until(lambda: running.server._ready)
            raw = await sent_raw(address, b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert raw.startswith(b"HTTP/1.1 200") and raw.endswith(b"\r\n\r\n")
        async with cluster(**HTTP) as running:
            assert (await call(at(running), "GET", "/health")).status == 503

    run(scenario())


def test_the_api_key_names_the_tenant() -> None:
    async def scenario() -> None:
        keys = {"key-a": "tenant-a", "key-b": "tenant-b"}
        async with cluster(Script(), api_keys=keys, **HTTP) as running:
            address, body = at(running), {"prompt": "hello", "max_tokens": 2}
            paths = (COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/reset_prefix_cache")
            for path in paths:
                reply = await post(address, path, body)
                assert reply.status == 401 and reply.error["code"] == "invalid_api_key"
                wrong = await post(address, path, body, Authorization="Bearer key-c")
                assert wrong.status == 401
            for path in ("/v1/models", "/v1/models/scripted"):
                assert (await call(address, "GET", path)).status == 401
            assert (await call(address, "GET", "/health")).status in (200, 503)
            for key in ("key-a", "key-b"):
                given = {"Authorization": f"Bearer {key}"}
                assert (await call(address, "POST", COMPLETIONS, body, given)).status == 200
            submits = running.replicas[0].submits
            assert [s.tenant for s in submits] == ["tenant-a", "tenant-b"]
            assert submits[0].salt != submits[1].salt

    run(scenario())


def test_a_cache_salt_narrows_inside_the_tenant_and_chooses_no_key() -> None:
    async def scenario() -> None:
        keys = {"key-a": "tenant-a", "key-b": "tenant-b"}
        async with cluster(Script(), api_keys=keys, **HTTP) as running:
            body = {"prompt": "hello", "max_tokens": 2}
            salts = []
            for key, salt in (("a", None), ("a", "s"), ("a", "s"), ("a", "t"), ("b", "s")):
                given = {"Authorization": f"Bearer key-{key}"}
                with_salt = body if salt is None else body | {"cache_salt": salt}
                reply = await call(at(running), "POST", COMPLETIONS, with_salt, given)
                assert reply.status == 200
                salts.append(running.replicas[0].submits[-1].salt)
            assert salts[1] == salts[2], "the same salt of the same tenant shares"
            assert len(set(salts)) == 4
            assert all(len(salt) == 32 and salt != b"s" for salt in salts)
            given = {"Authorization": "Bearer key-a"}
            empty = await call(at(running), "POST", COMPLETIONS, body | {"cache_salt": ""}, given)
            assert empty.status == 400 and empty.error["param"] == "cache_salt"

    run(scenario())


@pytest.mark.parametrize(
    ("given", "headers", "session"),
    [
        ({"prompt_cache_key": "k"}, {"X-Session-Affinity": "a"}, "k"),
        ({}, {"X-Session-Affinity": "a", "X-Correlation-ID": "c"}, "a"),
        ({}, {"X-Correlation-ID": "c", "X-Request-ID": "r"}, "c"),
        ({}, {"X-Request-ID": "r"}, ""),
    ],
)
def test_sessions_stay_where_they_were(
    given: dict[str, str], headers: dict[str, str], session: str
) -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            body = {"prompt": "hello", "max_tokens": 2, "user": "u", "metadata": 7} | given
            assert (await call(at(running), "POST", COMPLETIONS, body, headers)).status == 200
            sessions = running.core._sessions
            assert list(sessions) == ([("default", session)] if session else [])

    run(scenario())


# ---- errors --------------------------------------------------------------------------------------


def failing(code: StatusCode, after: int, name: str = "") -> Script:
    """A replica that fails every request after some tokens."""

    def reply(submit: internal_pb2.Submit) -> list[internal_pb2.Emission]:
        status = common_pb2.Status(code=int(code), message="It cannot be.", error=name)
        first = internal_pb2.Emission(token_ids=[0x61] * after)
        last = internal_pb2.Emission(error=status, last=True)
        return [first, last] if after else [last]

    return Script(reply=reply)


@pytest.mark.parametrize(
    ("code", "name", "status", "retried"),
    [
        (StatusCode.RESOURCE_EXHAUSTED, "Overloaded", 429, True),
        (StatusCode.RESOURCE_EXHAUSTED, "OutOfBlocks", 400, False),
        (StatusCode.UNAVAILABLE, "NoReplica", 503, True),
        (StatusCode.DEADLINE_EXCEEDED, "", 504, False),
        (StatusCode.INTERNAL, "", 500, False),
        (StatusCode.INVALID_ARGUMENT, "", 400, False),
    ],
)
def test_a_replica_s_refusal_is_an_http_status(
    code: StatusCode, name: str, status: int, retried: bool
) -> None:
    async def scenario() -> None:
        async with cluster(failing(code, 0, name), queue_wait_s_max=0.2, **HTTP) as running:
            for streamed in (False, True):
                body = {"prompt": "hello", "stream": streamed}
                reply = await post(at(running), COMPLETIONS, body)
                if streamed and reply.status == 200:  # Started was on its way already
                    assert b'"error"' in reply.body and reply.body.endswith(b"data: [DONE]\n\n")
                    continue
                assert reply.status == status and reply.error["message"] == "It cannot be."
                assert ("retry-after" in reply.headers) == retried
            await running.quiet()

    run(scenario())


def test_an_error_in_the_middle_of_a_stream_is_an_event() -> None:
    async def scenario() -> None:
        async with cluster(failing(StatusCode.INTERNAL, 3), **HTTP) as running:
            events = await stream(at(running), COMPLETIONS, {"prompt": "hello"})
            assert events.done and "error" in events.chunks[-1]
            assert events.chunks[-1]["error"]["message"] == "It cannot be."
            await running.quiet()

    run(scenario())


def test_nobody_there_and_too_many_streams() -> None:
    async def scenario() -> None:
        async with cluster(queue_wait_s_max=0.1, **HTTP) as running:
            reply = await post(at(running), COMPLETIONS, {"prompt": "hello"})
            assert reply.status == 503 and reply.error["code"] == "no_replica"
            assert int(reply.headers["retry-after"]) >= 1
        async with cluster(Script(), streams_max=0, **HTTP) as running:
            reply = await post(at(running), COMPLETIONS, {"prompt": "hello"})
            assert reply.status == 429 and reply.error["code"] == "rate_limit_exceeded"
            assert int(reply.headers["retry-after"]) >= 1
        async with cluster(Script(), lease_ms=200, **HTTP) as running:
            await asyncio.sleep(0.3)
            reply = await post(at(running), COMPLETIONS, {"prompt": "x", "model": "other"})
            assert reply.status == 404 and reply.error["code"] == "model_not_found"

    run(scenario())


def test_a_prompt_longer_than_the_context() -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            reply = await post(at(running), COMPLETIONS, {"prompt": "x" * 2048})
            assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
            reply = await post(at(running), CHAT, {"messages": USER, "max_tokens": 2048})
            assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
            assert not running.replicas[0].submits

    run(scenario())


# ---- clients that go away, or do not read --------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_goes_away_cancels_within_two_steps(streamed: bool, prompts: int) -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.02), **HTTP) as running:
            replica = running.replicas[0]
            body = {"prompt": ["hello"] * prompts, "max_tokens": 500, "stream": streamed}
            async with connected(at(running)) as connection:
                await connection.ask("POST", COMPLETIONS, body)
                await running.until(lambda: replica.emitted >= 3 * prompts)
                before = replica.emitted
            await running.until(lambda: len(replica.cancels) == prompts)
            assert replica.emitted - before <= 3 * prompts  # two steps, and the one under way
            await running.quiet()
            assert running.server._api._calls == 0

    run(scenario())


def test_a_client_that_does_not_read_holds_up_its_own_stream_alone() -> None:
    async def scenario() -> None:
        script = Script(tokens_per_frame=16)
        async with cluster(script, **HTTP) as running:
            replica: ScriptedReplica = running.replicas[0]
            replica.change_hello = lambda hello: None
            body = {"prompt": "hello", "max_tokens": 2000, "n": 32, "stream": True}
            body |= {"logprobs": 20}
            async with connected(at(running)) as lazy:
                await lazy.ask("POST", COMPLETIONS, body)
                await running.until(lambda: replica.emitted > 0)
                before = -1
                while before != replica.emitted:  # until nothing more comes for it
                    before = replica.emitted
                    await asyncio.sleep(0.2)
                assert before < 32 * 2000, "all of it was produced for nobody"
                other = await post(at(running), COMPLETIONS, {"prompt": "x", "max_tokens": 50})
                assert other.status == 200
            await running.quiet()

    run(scenario())


# ---- HTTP ----------------------------------------------------------------------------------------


def test_one_connection_serves_one_request_after_the_other() -> None:
    async def scenario() -> None:
        async with (
            cluster(Script(), **HTTP) as running,
            connected(at(running)) as connection,
        ):
            for body in ({"prompt": "a"}, {"prompt": 7}, {"prompt": "a", "stream": True}):
                await connection.ask("POST", COMPLETIONS, body)
                reply = await connection.reply()
                assert reply.status == (400 if body["prompt"] == 7 else 200)
                await connection.ask("GET", "/v1/models")
                assert (await connection.reply()).status == 200

    run(scenario())


def test_two_requests_in_one_packet() -> None:
    async def scenario() -> None:
        async with (
            cluster(Script(), **HTTP) as running,
            connected(at(running)) as connection,
        ):
            one = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
            connection.writer.write(
                one + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            )
            everything = await connection.reader.read()
            assert everything.count(b"HTTP/1.1 200") == 2

    run(scenario())


async def sent_raw(address: str, data: bytes) -> bytes:
    """The first bytes that come back, "" if the connection is cut."""
    async with connected(address) as connection:
        connection.writer.write(data)
        return await connection.reader.read(65536)


def test_chunked_bodies_and_expectations() -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            body = b'{"prompt": "hello", "max_tokens": 2}'
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
            chunked = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
            assert (await sent_raw(at(running), chunked)).startswith(b"HTTP/1.1 200")
            async with connected(at(running)) as connection:
                expecting = f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.writer.write(expecting.encode())
                assert (await connection.reader.read(64)).startswith(b"HTTP/1.1 100")
                connection.writer.write(body)
                assert (await connection.reader.read(64)).startswith(b"HTTP/1.1 200")

    run(scenario())


def test_what_is_too_large_or_no_http() -> None:
    async def scenario() -> None:
        async with cluster(Script(), **HTTP) as running:
            address = at(running)
            large = await post(address, COMPLETIONS, b" " * (8 * 1024 * 1024 + 1))
            assert large.status == 413 and large.error["code"] == "request_too_large"
            fits = await post(address, COMPLETIONS, b" " * (8 * 1024 * 1024))
            assert fits.status == 400 and fits.error["code"] == "invalid_json"
            headers = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n"
            assert (await sent_raw(address, headers)).startswith(b"HTTP/1.1 431")
            for nonsense in (
                b"\x16\x03\x01\x02\x00\r\n\r\n",
                b"GET\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\n",
            ):
                answer = await sent_raw(address, nonsense)
                assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 505")), answer[:80]
            double = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
            double += b"Content-Length: 3\r\n\r\n{}"
            assert (await sent_raw(address, double)).startswith(b"HTTP/1.1 400")
            form = await call(
                address, "POST", COMPLETIONS, {"prompt": "x"}, {"Content-Type": "text/plain"}
            )
            assert form.status == 415
            assert running.server._gateway._bodies._bytes == 0

    run(scenario())


def test_a_router_that_stops_tells_its_streams() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.02), **HTTP) as running:
            async with connected(at(running)) as idle, connected(at(running)) as connection:
                await idle.ask("GET", "/health")
                await idle.reply()
                body = {"prompt": "hello", "max_tokens": 1000, "stream": True}
                await connection.ask("POST", COMPLETIONS, body)
                await connection.begun()
                stopping = asyncio.create_task(running.server.stop(0.2))
                events = await connection.events()
                assert events.done and events.chunks[-1]["error"]["code"] == "no_replica"
                await stopping
                assert await idle.reader.read() == b""
            running.server.stop = _stopped  # type: ignore[method-assign]

    run(scenario())


async def _stopped(grace_s: float) -> None:
    """It was."""


def test_a_port_that_is_taken_is_one_sentence() -> None:
    async def scenario() -> None:
        from seams.errors import LaunchError

        async with cluster(**HTTP) as running:
            with pytest.raises(LaunchError, match="busy"):
                async with cluster(http=at(running), metrics="127.0.0.1:0"):
                    pass
            with pytest.raises(LaunchError, match="no HOST:PORT"):
                async with cluster(http="8000"):
                    pass

    run(scenario())


def test_two_hundred_streams_at_once_are_each_whole() -> None:
    async def scenario() -> None:
        async with cluster(
            Script(tokens_per_frame=4), Script(tokens_per_frame=4), **HTTP
        ) as running:

            async def one(seed: int) -> None:
                body = {"prompt": "hello", "max_tokens": 32, "seed": seed, "return_token_ids": True}
                events = await stream(at(running), COMPLETIONS, body)
                assert events.ids() == expected(PROMPT, seed, 32) and events.done

            await asyncio.gather(*map(one, range(200)))
            await running.quiet()
            assert running.server._api._calls == 0

    run(scenario())
