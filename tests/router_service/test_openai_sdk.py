"""OpenAI's own Python SDK against the gateway, unmodified. Skipped where it is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from loopback_cluster import Cluster, cluster, run
from scripted_replica import Script, expected

openai = pytest.importorskip("openai")
KEYS = {"key-a": "tenant-a"}
USER = [{"role": "user", "content": "hello"}]
RENDERED = list(b"user: hello\n")


@asynccontextmanager
async def served(*scripts: Script, **config: Any) -> AsyncIterator[tuple[Cluster, Any]]:
    async with (
        cluster(*scripts, http="127.0.0.1:0", api_keys=KEYS, **config) as running,
        openai.AsyncOpenAI(
            base_url=f"http://{running.server.http}/v1", api_key="key-a", max_retries=0
        ) as client,
    ):
        yield running, client


def test_chats_whole_and_streamed() -> None:
    async def scenario() -> None:
        async with served(Script(cached_tokens=4)) as (running, client):
            options = {
                "model": "scripted",
                "messages": USER,
                "max_completion_tokens": 12,
                "seed": 3,
            }
            whole = await client.chat.completions.create(**options, n=2)
            wanted = [bytes(expected(RENDERED, 3, 12, choice)).decode() for choice in range(2)]
            assert [choice.message.content for choice in whole.choices] == wanted
            assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
            assert whole.usage.prompt_tokens_details.cached_tokens == 4
            assert whole.usage.completion_tokens == 24
            assert whole._request_id == running.replicas[0].submits[0].request_id
            stream = await client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
            assert "".join(texts) == wanted[0]
            assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4
            await running.quiet()

    run(scenario())


def test_completions_stops_and_logprobs() -> None:
    async def scenario() -> None:
        async with served(Script(text=b"one two three ")) as (_, client):
            found = await client.completions.create(
                model="scripted", prompt=["a", "b"], stop=["two"], max_tokens=30, logprobs=2
            )
            assert [(c.text, c.finish_reason) for c in found.choices] == [("one ", "stop")] * 2
            assert found.choices[0].logprobs.tokens[:4] == list("one ")
            chat = await client.chat.completions.create(
                model="scripted", messages=USER, max_tokens=3, logprobs=True, top_logprobs=2
            )
            content = chat.choices[0].logprobs.content
            assert [entry.token for entry in content] == list("one")
            assert len(content[0].top_logprobs) == 2
            ids = await client.completions.create(model="scripted", prompt=[1, 2, 3], max_tokens=3)
            assert ids.usage.prompt_tokens == 3
            models = await client.models.list()
            assert [model.id for model in models.data] == ["scripted"]
            assert (await client.models.retrieve("scripted")).id == "scripted"

    run(scenario())


def test_errors_arrive_as_the_sdk_s_own() -> None:
    async def scenario() -> None:
        async with served(Script(), lease_ms=200) as (_, client):
            await asyncio.sleep(0.3)
            create = client.chat.completions.create
            with pytest.raises(openai.NotFoundError) as missing:
                await create(model="other", messages=USER)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as wrong:
                await create(model="scripted", messages=USER, temperature=-1)
            assert wrong.value.param == "temperature"
            with pytest.raises(openai.BadRequestError) as long:
                await create(model="scripted", messages=USER, max_tokens=4000)
            assert long.value.code == "context_length_exceeded"
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="other").models.list()
        async with served(Script(), streams_max=0) as (_, client):
            with pytest.raises(openai.RateLimitError) as full:
                await client.completions.create(model="scripted", prompt="x")
            assert int(full.value.response.headers["retry-after"]) >= 1
        async with served(queue_wait_s_max=0.1) as (_, client):
            with pytest.raises(openai.InternalServerError) as nobody:
                await client.completions.create(model="scripted", prompt="x")
            assert nobody.value.status_code == 503

    run(scenario())


def test_leaving_a_stream_cancels_it() -> None:
    async def scenario() -> None:
        async with served(Script(token_s=0.01)) as (running, client):
            stream = await client.completions.create(
                model="scripted", prompt="x", max_tokens=1000, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
            await running.until(lambda: len(running.replicas[0].cancels) == 1)
            await running.quiet()

    run(scenario())
