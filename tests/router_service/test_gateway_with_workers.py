"""The OpenAI gateway before a real worker with FakeModel: a process each, token ids only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from http_calls import connected, post, stream
from test_router_process import QUIET, start, wait_ready, write_config
from test_with_workers import Processes, generate, ready

from banyan.v1 import api_pb2, api_pb2_grpc, common_pb2

COMPLETIONS = "/v1/completions"
STREAMS = 200
TOKENS = 24


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("gateway")
    config = write_config(
        folder, lease_ms=3000, heartbeat_ms=200, queue_wait_s_max=60.0, http="127.0.0.1:0"
    )
    router = start(config, *QUIET)
    running = Processes(folder, wait_ready(folder, router), {})
    running.start_worker("w0")
    yield running
    for process in running.workers.values():
        process.terminate()
    router.terminate()
    router.communicate(timeout=30)
    for process in running.workers.values():
        process.wait(30)


@asynccontextmanager
async def stub_of(processes: Processes) -> AsyncIterator[api_pb2_grpc.BanyanStub]:
    async with grpc.aio.insecure_channel(processes.router["listen"]) as channel:
        stub = api_pb2_grpc.BanyanStub(channel)
        await ready(stub, 1)
        yield stub


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


def prompt(i: int) -> list[int]:
    return [(i * 31 + at * 7) % 250 for at in range(40 + i % 9)]


def body(i: int, **more: Any) -> dict[str, Any]:
    plain = {"prompt": prompt(i), "max_tokens": TOKENS, "seed": i, "temperature": i % 2}
    return plain | {"ignore_eos": True, "return_token_ids": True} | more


async def whole_again(stub: api_pb2_grpc.BanyanStub) -> None:
    """Until no stream is open and no block is held: free + cached = all."""
    for _ in range(100):
        state = await stub.ClusterState(api_pb2.ClusterStateRequest())
        [replica] = state.replicas
        held = replica.blocks_total - replica.blocks_free - replica.blocks_cached
        if not (state.streams_open or replica.running or replica.waiting or held):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"something is left: {state}")


def test_the_second_call_says_what_was_cached(processes: Processes) -> None:
    async def scenario() -> None:
        async with stub_of(processes) as stub:
            address, asked = processes.router["http"], body(1000) | {"prompt": list(range(200))}
            first = (await post(address, COMPLETIONS, asked)).json
            await asyncio.sleep(0.2)
            second = (await post(address, COMPLETIONS, asked)).json
            assert first["choices"] == second["choices"]
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 199
            salted = (await post(address, COMPLETIONS, asked | {"cache_salt": "mine"})).json
            assert salted["choices"] == first["choices"]
            assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            again = (await post(address, COMPLETIONS, asked | {"cache_salt": "mine"})).json
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 199
            await whole_again(stub)

    run(scenario())


def test_the_sdk_sees_what_was_cached(processes: Processes) -> None:
    openai = pytest.importorskip("openai")

    async def scenario() -> None:
        async with stub_of(processes) as stub:
            url = f"http://{processes.router['http']}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                prompt = [(249 - 7 * at) % 250 for at in range(160)]  # begins as no other here
                found = [
                    await client.completions.create(model="fake", prompt=prompt, max_tokens=4)
                    for _ in range(2)
                ]
                cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in found]
                assert cached == [0, 159]
            await whole_again(stub)

    run(scenario())


def test_two_hundred_streams_are_what_grpc_gives(processes: Processes) -> None:
    async def scenario() -> None:
        async with stub_of(processes) as stub:
            address = processes.router["http"]
            asked = [body(i) for i in range(STREAMS)]
            found = await asyncio.gather(*(stream(address, COMPLETIONS, one) for one in asked))
            assert all(events.done and events.reasons() == {0: "length"} for events in found)
            for i in range(0, STREAMS, 20):
                sampling = common_pb2.Sampling(
                    max_tokens=TOKENS, seed=i, temperature=i % 2, ignore_eos=True
                )
                wanted = api_pb2.GenerateRequest(
                    tokens=api_pb2.TokenIds(ids=prompt(i)), sampling=sampling
                )
                assert (await generate(stub, wanted, [])).ids() == found[i].ids()
            assert all(len(events.ids()) == TOKENS for events in found)
            await whole_again(stub)

    run(scenario())


def test_clients_that_leave_give_all_blocks_back(processes: Processes) -> None:
    async def scenario() -> None:
        async with stub_of(processes) as stub:
            address = processes.router["http"]

            async def leaving(i: int) -> None:
                async with connected(address) as connection:
                    asked = body(i, max_tokens=2000, stream=i % 2 == 0, n=1 + i % 3)
                    await connection.ask("POST", COMPLETIONS, asked)
                    if i % 4 == 0:
                        await connection.begun()
                        await connection.events(at_most=2)
                    else:
                        await asyncio.sleep(0.01 * (i % 7))

            await asyncio.gather(*map(leaving, range(60)))
            await whole_again(stub)

    run(scenario())
