"""The clients against a scripted router: retry, resume, cancel, deadline, direct streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from banyan import AsyncClient, Client
from banyan.events import (
    ChoiceFinished,
    Completion,
    Delta,
    Finished,
    FinishReason,
    Resumed,
    Started,
)
from banyan.progress import ATTEMPTS_MAX
from banyan.v1 import api_pb2, api_pb2_grpc, internal_pb2, internal_pb2_grpc
from seams.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NoReplica,
    Overloaded,
    PromptTooLong,
    ReplicaLost,
)

TOKENS = 20


def token(seed: int, position: int) -> int:
    """What the scripted model says; depends on the seed so that a lost seed shows."""
    return (seed * 7919 + position * 31) % 1000


class ScriptedRouter(api_pb2_grpc.BanyanServicer, internal_pb2_grpc.ReplicaServicer):
    """Answers every request with TOKENS tokens, "<id>" each, two a delta; breaks as told.

    `breaks` holds, per call, after how many tokens to abort with UNAVAILABLE (None = never).
    """

    def __init__(self, name: str, breaks: list[int | None] | None = None) -> None:
        self.name = name
        self.breaks = breaks or []
        self.requests: list[api_pb2.GenerateRequest] = []
        self.direct_requests: list[internal_pb2.DirectRequest] = []
        self.cancelled = threading.Event()
        self.hang = threading.Event()
        self.hang.set()
        self.address = ""
        self.retry_after_ms = 0
        self.tickets_refused = 0

    def _break_after(self) -> int:
        breaking = self.breaks.pop(0) if self.breaks else None
        return 1 << 30 if breaking is None else breaking

    def _abort(self, context: Any) -> None:
        if self.retry_after_ms:
            context.set_trailing_metadata((("retry-after-ms", str(self.retry_after_ms)),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "The replica died.")

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        if request.text == "too long":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The prompt does not fit.")
        if request.text == "busy":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "The queue is full.")
        context.add_callback(self.cancelled.set)
        limit, emitted = self._break_after(), list(request.resume.token_ids)
        if limit < 0:
            self._abort(context)
        seed = request.resume.seed or 41 + len(self.requests)
        yield response(started=api_pb2.Started(
            request_id=f"{self.name}-{len(self.requests)}", seed=seed, model="m",
            replica=self.name, prompt_tokens=5))  # fmt: skip
        for position in range(len(emitted), TOKENS, 2):
            while not self.hang.wait(0.01):
                if not context.is_active():
                    return
            if position >= limit:
                self._abort(context)
            ids = [token(seed, p) for p in range(position, min(position + 2, TOKENS))]
            for choice in range(max(1, request.sampling.n)):
                yield response(delta=api_pb2.Delta(
                    choice=choice, position=position, token_ids=ids, text=text(ids)))  # fmt: skip
        for choice in range(max(1, request.sampling.n)):
            yield response(choice_finished=api_pb2.ChoiceFinished(choice=choice, reason=3))
        if limit == TOKENS:
            self._abort(context)
        yield response(finished=api_pb2.Finished())

    def ClusterState(self, request: Any, context: Any) -> Any:
        if self._break_after() < 0:
            self._abort(context)
        return api_pb2.ClusterStateResponse(router=self.name)

    def ListModels(self, request: Any, context: Any) -> Any:
        return api_pb2.ListModelsResponse(models=[api_pb2.ModelInfo(name="m")])

    def Pick(self, request: Any, context: Any) -> Any:
        self.requests.append(request.request)
        resume = request.request.resume
        return api_pb2.PickResponse(
            replica=self.name, address=self.address, ticket=b"t", model="m",
            request_id=f"{self.name}-{len(self.requests)}", seed=resume.seed or 77,
            token_ids=[1, 2, 3, *resume.token_ids])  # fmt: skip

    def Stream(self, request: Any, context: Any) -> Iterator[Any]:
        self.direct_requests.append(request)
        if self.tickets_refused:
            self.tickets_refused -= 1
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "The ticket is another's.")
        limit, seed = self._break_after(), request.sampling.seed
        for position in range(len(request.token_ids) - 3, TOKENS):
            if position >= limit:
                self._abort(context)
            done = position == TOKENS - 1
            yield internal_pb2.Frame(emissions=[internal_pb2.Emission(
                position=position, token_ids=[token(seed, position)],
                finish=3 if done else 0, last=done)])  # fmt: skip


def response(**event: Any) -> api_pb2.GenerateResponse:
    return api_pb2.GenerateResponse(**event)


def text(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


Start = Callable[[ScriptedRouter], ScriptedRouter]


@pytest.fixture
def start() -> Iterator[Start]:
    servers = []

    def begin(router: ScriptedRouter) -> ScriptedRouter:
        server = grpc.server(ThreadPoolExecutor(32))
        api_pb2_grpc.add_BanyanServicer_to_server(router, server)  # type: ignore[no-untyped-call]
        internal_pb2_grpc.add_ReplicaServicer_to_server(router, server)  # type: ignore[no-untyped-call]
        router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
        return router

    yield begin
    for server in servers:
        server.stop(0).wait(5)


def run_sync(addresses: list[str], prompt: Any, **options: Any) -> list[Any]:
    with Client(addresses) as client:
        return list(client.generate(prompt, **options))


def run_async(addresses: list[str], prompt: Any, **options: Any) -> list[Any]:
    async def collect() -> list[Any]:
        async with AsyncClient(addresses) as client:
            return [event async for event in client.generate(prompt, **options)]

    return asyncio.run(collect())


both = pytest.mark.parametrize("run", [run_sync, run_async])


def ids_of(events: list[Any]) -> list[int]:
    return [i for e in events if isinstance(e, Delta) for i in e.token_ids]


def check_whole(events: list[Any], seed: int) -> None:
    """Started, every token once and in order, text to match, one finish, Finished."""
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    expected = [token(seed, p) for p in range(TOKENS)]
    assert ids_of(events) == expected
    assert "".join(e.text for e in events if isinstance(e, Delta)) == text(expected)
    assert [e.reason for e in events if isinstance(e, ChoiceFinished)] == [FinishReason.LENGTH]


@both
def test_streams_whole(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("a"))
    events = run([router.address], "hi", max_tokens=TOKENS, stop="x", session="s", label="l")
    check_whole(events, seed=42)
    sent = router.requests[0]
    assert (sent.text, sent.sampling.max_tokens, list(sent.stop)) == ("hi", TOKENS, ["x"])
    assert (sent.session, sent.label) == ("s", "l")


@both
def test_first_token_never_came_so_it_is_sent_again(start: Start, run: Any) -> None:
    router, other = start(ScriptedRouter("a", [-1, 0])), start(ScriptedRouter("b", [-1]))
    events = run([router.address, other.address], "hi")
    assert len(router.requests) == 2 and len(other.requests) == 2
    assert not any(request.HasField("resume") for request in other.requests)
    check_whole(events, seed=43)


@both
def test_router_that_is_not_there_is_skipped(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("b"))
    check_whole(run(["127.0.0.1:1", router.address], "hi"), seed=42)


@both
@pytest.mark.parametrize("at", range(2, TOKENS + 1, 2))
def test_broken_stream_resumes_exactly(start: Start, run: Any, at: int) -> None:
    first, second = start(ScriptedRouter("a", [at])), start(ScriptedRouter("b"))
    events = run([first.address, second.address], "hi")
    check_whole(events, seed=42)
    [resumed] = [e for e in events if isinstance(e, Resumed)]
    assert (resumed.replica, resumed.position) == ("b", at)
    resume = second.requests[0].resume
    assert list(resume.token_ids) == [token(42, p) for p in range(at)] and resume.seed == 42


@both
def test_gives_up_after_bounded_attempts(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("a", [-1] * 50))
    with pytest.raises(NoReplica):
        run([router.address], "hi")
    assert len(router.requests) == ATTEMPTS_MAX


@both
def test_progress_renews_the_attempts(start: Start, run: Any) -> None:
    breaks: list[int | None] = [*range(2, TOKENS, 2)]
    router = start(ScriptedRouter("a", breaks))
    check_whole(run([router.address], "hi"), seed=42)
    assert len(router.requests) == TOKENS // 2


@both
def test_waits_as_long_as_it_was_told(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("a", [-1]))
    router.retry_after_ms = 400
    began = time.monotonic()
    check_whole(run([router.address], "hi"), seed=43)
    assert time.monotonic() - began >= 0.4


@both
def test_several_choices_are_not_resumed(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("a", [4]))
    with pytest.raises(ReplicaLost):
        run([router.address], "hi", n=2)
    assert len(router.requests) == 1


@both
@pytest.mark.parametrize(("prompt", "error"), [("too long", InvalidRequest), ("busy", Overloaded)])
def test_other_statuses_are_raised_at_once(start: Start, run: Any, prompt: str, error: Any) -> None:
    router = start(ScriptedRouter("a"))
    with pytest.raises(error):
        run([router.address], prompt)
    assert len(router.requests) == 1


@both
def test_deadline_bounds_retries_too(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("a", [-1] * 50))
    router.retry_after_ms = 5000
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        run([router.address], "hi", timeout_s=0.3)
    assert time.monotonic() - began < 3


@both
def test_deadline_ends_a_silent_stream(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("a"))
    router.hang.clear()
    with pytest.raises(DeadlineExceeded):
        run([router.address], "hi", timeout_s=0.3)
    assert router.cancelled.wait(5)


@both
@pytest.mark.parametrize("prompt", [[], [{"role": "user", "text": "x"}], [-1], [1.5]])
def test_malformed_prompts(run: Any, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        run(["127.0.0.1:1"], prompt)


@both
def test_unknown_option(run: Any) -> None:
    with pytest.raises(InvalidRequest):
        run(["127.0.0.1:1"], "hi", temprature=1.0)


@both
@pytest.mark.parametrize("at", [0, 1, 7, TOKENS - 1])
def test_direct_stream_resumes_through_pick(start: Start, run: Any, at: int) -> None:
    router = start(ScriptedRouter("a", [at]))
    events = run([router.address], [1, 2, 3], direct=True)
    assert ids_of(events) == [token(77, p) for p in range(TOKENS)]
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(e, ChoiceFinished) for e in events) == 1
    assert list(router.direct_requests[1].token_ids[3:]) == [token(77, p) for p in range(at)]


@both
def test_direct_picks_again_where_a_ticket_is_refused(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("a"))
    router.tickets_refused = 2
    events = run([router.address], [1, 2, 3], direct=True)
    assert ids_of(events) == [token(77, p) for p in range(TOKENS)]
    assert len(router.requests) == 3


@both
def test_direct_refuses_stop_strings(start: Start, run: Any) -> None:
    router = start(ScriptedRouter("a"))
    with pytest.raises(InvalidRequest):
        run([router.address], [1], direct=True, stop=["x"])


def test_close_from_another_thread_cancels(start: Start) -> None:
    router = start(ScriptedRouter("a"))
    router.hang.clear()
    with Client(router.address) as client:
        stream = client.generate("hi")
        assert isinstance(next(stream), Started)
        threading.Timer(0.1, stream.close).start()
        with pytest.raises(Cancelled):
            list(stream)
        assert router.cancelled.wait(5)


def test_leaving_the_block_cancels(start: Start) -> None:
    router = start(ScriptedRouter("a"))
    router.hang.clear()
    with Client(router.address) as client:
        with client.generate("hi") as stream:
            next(stream)
        assert router.cancelled.wait(5)


def test_cancelled_task_cancels_the_stream(start: Start) -> None:
    router = start(ScriptedRouter("a"))
    router.hang.clear()

    async def scenario() -> None:
        async with AsyncClient(router.address) as client:
            begun = asyncio.Event()

            async def consume() -> None:
                async for _ in client.generate("hi"):
                    begun.set()

            task = asyncio.create_task(consume())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.1)

    asyncio.run(scenario())
    assert router.cancelled.wait(5)


def test_aclose_from_another_task(start: Start) -> None:
    router = start(ScriptedRouter("a"))

    async def scenario() -> None:
        async with AsyncClient(router.address) as client:
            router.hang.clear()  # before the stream begins: it could be over by the time of Started
            stream = client.generate("hi")
            assert isinstance(await anext(stream), Started)
            waiting = asyncio.ensure_future(stream.completion())
            await asyncio.sleep(0.1)
            await stream.aclose()
            with pytest.raises(Cancelled):
                await waiting

    asyncio.run(scenario())
    assert router.cancelled.wait(5)


def test_one_client_many_threads(start: Start) -> None:
    router = start(ScriptedRouter("a", [4] * 8 + [None] * 100))

    def ask(client: Client) -> Completion:
        return client.complete("hi", seed=3)

    with Client(router.address) as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, [client] * 16))
    for answer in answers:
        assert list(answer.token_ids) == [token(answer.started.seed, p) for p in range(TOKENS)]
        assert answer.text == text(list(answer.token_ids))
    assert sum(answer.resumes for answer in answers) == 8


def test_unary_calls_turn_to_another_router(start: Start) -> None:
    first, second = start(ScriptedRouter("a", [-1])), start(ScriptedRouter("b"))
    with Client(f"{first.address},{second.address}") as client:
        assert client.cluster_state().router == "b"
        assert [model.name for model in client.list_models()] == ["m"]


def test_errors_carry_no_address() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(NoReplica) as raised:
        client.cluster_state()
    assert "127.0.0.1" not in raised.value.message


def test_prompt_too_long_is_an_invalid_request() -> None:
    assert issubclass(PromptTooLong, InvalidRequest)
