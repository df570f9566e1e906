"""The asyncio client: the same calls as the synchronous one, awaited.

async with AsyncClient("127.0.0.1:7600") as client:
    async for event in client.generate("Once upon a time", max_tokens=32): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from banyan import wire
from banyan.channel import OPTIONS, banyan_stub, metadata, replica_stub, to_error
from banyan.events import ChoiceFinished, Collector, Completion, Decision, Delta, Event
from banyan.progress import Progress, Retries
from banyan.routers import Deadline, RouterList
from banyan.v1 import api_pb2
from banyan.wire import Options, Prompt
from seams.errors import BanyanError, Cancelled, InternalError

if TYPE_CHECKING:
    from router.text.model import TextModel


class AsyncClient:
    """Speaks to one cluster through any of its routers; for one event loop.

    `timeout_s` bounds every call in total, retries included; None leaves it open. Errors are the
    leaves of seams.errors.BanyanError.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        api_key: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.routers = RouterList(addresses)
        self.metadata = metadata(api_key)
        self.timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._text_models: dict[str, TextModel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; open streams end as Cancelled. Safe to repeat."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)

    def generate(
        self,
        prompt: Prompt,
        *,
        direct: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Begin generating. Iterate the stream for its events; close it to cancel.

        `direct` streams token ids from the replica itself and makes the text here; stop strings
        are then refused. Raises InvalidRequest; all else comes from the stream.
        """
        request = wire.generate_request(prompt, **options)
        limit = self.timeout_s if timeout_s is None else timeout_s
        return AsyncStream(self, request, direct, Deadline(limit))

    async def complete(
        self,
        prompt: Prompt,
        *,
        direct: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Generate and return the whole answer."""
        async with self.generate(prompt, direct=direct, timeout_s=timeout_s, **options) as stream:
            return await stream.completion()

    async def list_models(self) -> list[api_pb2.ModelInfo]:
        """The served models."""
        return list((await self._unary("ListModels", api_pb2.ListModelsRequest())).models)

    async def cluster_state(self) -> api_pb2.ClusterStateResponse:
        """Replicas as one router sees them."""
        state: api_pb2.ClusterStateResponse
        state = await self._unary("ClusterState", api_pb2.ClusterStateRequest())
        return state

    async def reset_cache(self, *, tiers: bool = False) -> api_pb2.ResetCacheResponse:
        """Let every replica forget its prefix cache, and with `tiers` what lies below it; `api_key`
        must be the cluster's admin key. Raises Forbidden, or NoReplica if one did not answer."""
        reset: api_pb2.ResetCacheResponse
        reset = await self._unary("ResetCache", api_pb2.ResetCacheRequest(tiers=tiers))
        return reset

    async def explain(
        self, request_id: str = "", prompt: Prompt | None = None, **options: Unpack[Options]
    ) -> Decision:
        """The decision taken for a request id, or the one that `prompt` would get now."""
        asked = api_pb2.ExplainRequest(request_id=request_id)
        if prompt is not None:
            asked = api_pb2.ExplainRequest(request=wire.generate_request(prompt, **options))
        return wire.decision((await self._unary("Explain", asked)).decision)

    def channel(self, address: str) -> grpc.aio.Channel:
        """The connection to one server, made on first use."""
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=OPTIONS)
        return self._channels[address]

    async def text_model(self, name: str, stub: Any, deadline: Deadline) -> TextModel | None:
        """The tokenizer of a served model, fetched once; None for one that has no text."""
        from banyan import direct

        answer = await stub.ListModels(
            api_pb2.ListModelsRequest(), metadata=self.metadata, timeout=deadline.left()
        )
        prints = {model.name: model.tokenizer_fingerprint for model in answer.models}
        fingerprint = prints.get(name, "")
        if fingerprint and fingerprint not in self._text_models:
            asked = api_pb2.TextFilesRequest(fingerprint=fingerprint)
            call = stub.TextFiles(asked, metadata=self.metadata, timeout=deadline.left())
            self._text_models[fingerprint] = direct.text_model([chunk async for chunk in call])
        return self._text_models.get(fingerprint)

    async def _unary(self, method: str, request: Any) -> Any:
        """One call, at another router if the preferred one cannot be reached."""
        deadline, retries = Deadline(self.timeout_s), Retries()
        while True:
            address = self.routers.current
            call = getattr(banyan_stub(self.channel(address)), method)
            try:
                return await call(request, metadata=self.metadata, timeout=deadline.left())
            except grpc.RpcError as error:
                wait_s = retries.failed(to_error(error))
                self.routers.turn_from(address)
                await asyncio.sleep(deadline.bound(wait_s))


class AsyncStream:
    """One generation. An async iterator of events that ends after Finished or raises BanyanError.

    For one consumer. Cancelling the consuming task, or `aclose`, cancels at the replica.
    """

    def __init__(
        self,
        client: AsyncClient,
        request: api_pb2.GenerateRequest,
        direct: bool,
        deadline: Deadline,
    ) -> None:
        self._client = client
        self._direct = direct
        self._deadline = deadline
        self._closed = False
        self._call: Any = None
        self.progress = Progress(request)
        self._events = self._run()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel if it still runs. Safe to repeat."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()
        with suppress(RuntimeError):  # the consumer is inside it and sees the cancellation
            await self._events.aclose()

    async def text(self) -> AsyncIterator[str]:
        """The first choice's text as it comes."""
        async for event in self:
            if isinstance(event, Delta | ChoiceFinished) and event.choice == 0 and event.text:
                yield event.text

    async def completion(self) -> Completion:
        """Read to the end; returns the sum of all events read by this call."""
        collector = Collector(self.progress.choices)
        async for event in self:
            collector.add(event)
        return collector.completion()

    async def _run(self) -> AsyncGenerator[Event, None]:
        while not self.progress.finished:
            address = self._client.routers.current
            try:
                stub = banyan_stub(self._client.channel(address))
                attempt = self._attempt_direct if self._direct else self._attempt_routed
                async for event in attempt(stub):
                    for seen in self.progress.accept(event):
                        yield seen
                if not self.progress.finished:
                    raise InternalError("The stream ended without its terminal event.")
            except (grpc.RpcError, BanyanError, asyncio.CancelledError) as error:
                wait_s = self.progress.failed(self._typed(error))
                self._client.routers.turn_from(address)
                await asyncio.sleep(self._deadline.bound(wait_s))
            finally:
                if self._call is not None:
                    self._call.cancel()

    def _typed(self, error: BaseException) -> BanyanError:
        """Our own close shows as CancelledError too; the consuming task's cancellation goes on."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise error
        if self._closed or isinstance(error, asyncio.CancelledError):
            return Cancelled("The stream was closed.")
        if isinstance(error, grpc.RpcError):
            return to_error(error)
        assert isinstance(error, BanyanError)
        return error

    async def _attempt_routed(self, stub: Any) -> AsyncIterator[Event]:
        request = self.progress.next_request()
        async for message in self._open(stub.Generate, request, self._client.metadata):
            yield wire.event(message)

    async def _attempt_direct(self, stub: Any) -> AsyncIterator[Event]:
        from banyan import direct

        request, deadline = self.progress.next_request(), self._deadline
        asked = direct.pick_request(request)
        pick = await stub.Pick(asked, metadata=self._client.metadata, timeout=deadline.left())
        model = await self._client.text_model(pick.model, stub, deadline)
        stream = direct.DirectStream(request, pick, model)
        yield stream.started(request.label)
        replica = replica_stub(self._client.channel(pick.address))
        try:
            async for frame in self._open(replica.Stream, stream.request, ()):
                for event in stream.feed(frame):
                    yield event
        except grpc.RpcError as error:
            raise direct.replica_error(to_error(error)) from error

    def _open(self, method: Any, request: Any, metadata: Any) -> Any:
        """Start the call of this attempt so that `aclose` can cancel it."""
        self._call = method(request, metadata=metadata, timeout=self._deadline.left())
        if self._closed:
            self._call.cancel()
        return self._call
