"""The synchronous client. Safe under threads: streams share connections and nothing else.

client = Client("127.0.0.1:7600")
for event in client.generate("Once upon a time", max_tokens=32): ...
print(client.complete([{"role": "user", "content": "Hi"}]).text)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from banyan import wire
from banyan.aclient import AsyncClient as AsyncClient
from banyan.channel import OPTIONS, banyan_stub, metadata, replica_stub, to_error
from banyan.events import ChoiceFinished, Collector, Completion, Decision, Delta, Event
from banyan.progress import Progress, Retries
from banyan.routers import Deadline, RouterList
from banyan.v1 import api_pb2
from banyan.wire import Options, Prompt
from seams.errors import BanyanError, Cancelled, InternalError

if TYPE_CHECKING:
    from router.text.model import TextModel

__all__ = ["AsyncClient", "Client", "Stream"]


class Client:
    """Speaks to one cluster through any of its routers.

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
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._text_models: dict[str, TextModel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; open streams end as Cancelled. Safe to repeat."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        direct: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Begin generating. Iterate the stream for its events; close it to cancel.

        `direct` streams token ids from the replica itself and makes the text here; stop strings
        are then refused. Raises InvalidRequest; all else comes from the stream.
        """
        request = wire.generate_request(prompt, **options)
        limit = self.timeout_s if timeout_s is None else timeout_s
        return Stream(self, request, direct, Deadline(limit))

    def complete(
        self,
        prompt: Prompt,
        *,
        direct: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Generate and return the whole answer."""
        with self.generate(prompt, direct=direct, timeout_s=timeout_s, **options) as stream:
            return stream.completion()

    def list_models(self) -> list[api_pb2.ModelInfo]:
        """The served models."""
        return list(self._unary("ListModels", api_pb2.ListModelsRequest()).models)

    def cluster_state(self) -> api_pb2.ClusterStateResponse:
        """Replicas as one router sees them."""
        state: api_pb2.ClusterStateResponse
        state = self._unary("ClusterState", api_pb2.ClusterStateRequest())
        return state

    def reset_cache(self, *, tiers: bool = False) -> api_pb2.ResetCacheResponse:
        """Let every replica forget its prefix cache, and with `tiers` what lies below it; `api_key`
        must be the cluster's admin key. Raises Forbidden, or NoReplica if one did not answer."""
        reset: api_pb2.ResetCacheResponse
        reset = self._unary("ResetCache", api_pb2.ResetCacheRequest(tiers=tiers))
        return reset

    def explain(
        self, request_id: str = "", prompt: Prompt | None = None, **options: Unpack[Options]
    ) -> Decision:
        """The decision taken for a request id, or the one that `prompt` would get now."""
        asked = api_pb2.ExplainRequest(request_id=request_id)
        if prompt is not None:
            asked = api_pb2.ExplainRequest(request=wire.generate_request(prompt, **options))
        return wire.decision(self._unary("Explain", asked).decision)

    def channel(self, address: str) -> grpc.Channel:
        """The connection to one server, made on first use."""
        with self._lock:
            if address not in self._channels:
                self._channels[address] = grpc.insecure_channel(address, options=OPTIONS)
            return self._channels[address]

    def text_model(self, name: str, stub: Any, deadline: Deadline) -> TextModel | None:
        """The tokenizer of a served model, fetched once; None for one that has no text."""
        from banyan import direct

        models = stub.ListModels(
            api_pb2.ListModelsRequest(), metadata=self.metadata, timeout=deadline.left()
        ).models
        fingerprint = next((m.tokenizer_fingerprint for m in models if m.name == name), "")
        if fingerprint and fingerprint not in self._text_models:
            asked = api_pb2.TextFilesRequest(fingerprint=fingerprint)
            chunks = stub.TextFiles(asked, metadata=self.metadata, timeout=deadline.left())
            self._text_models[fingerprint] = direct.text_model(chunks)
        return self._text_models.get(fingerprint)

    def _unary(self, method: str, request: Any) -> Any:
        """One call, at another router if the preferred one cannot be reached."""
        deadline, retries = Deadline(self.timeout_s), Retries()
        while True:
            address = self.routers.current
            call = getattr(banyan_stub(self.channel(address)), method)
            try:
                return call(request, metadata=self.metadata, timeout=deadline.left())
            except grpc.RpcError as error:
                wait_s = retries.failed(to_error(error))
                self.routers.turn_from(address)
                threading.Event().wait(deadline.bound(wait_s))


class Stream:
    """One generation. An iterator of events that ends after Finished or raises a BanyanError.

    For one consumer; `close` may come from any thread and cancels at the replica.
    """

    def __init__(
        self, client: Client, request: api_pb2.GenerateRequest, direct: bool, deadline: Deadline
    ) -> None:
        self._client = client
        self._direct = direct
        self._deadline = deadline
        self._closed = threading.Event()
        self._call: Any = None
        self.progress = Progress(request)
        self._events = self._run()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel if it still runs. Safe to repeat."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    def text(self) -> Iterator[str]:
        """The first choice's text as it comes."""
        for event in self:
            if isinstance(event, Delta | ChoiceFinished) and event.choice == 0 and event.text:
                yield event.text

    def completion(self) -> Completion:
        """Read to the end; returns the sum of all events read by this call."""
        collector = Collector(self.progress.choices)
        for event in self:
            collector.add(event)
        return collector.completion()

    def _run(self) -> Iterator[Event]:
        while not self.progress.finished:
            address = self._client.routers.current
            try:
                attempt = self._attempt_direct if self._direct else self._attempt_routed
                for event in attempt(banyan_stub(self._client.channel(address))):
                    yield from self.progress.accept(event)
                if not self.progress.finished:
                    raise InternalError("The stream ended without its terminal event.")
            except (grpc.RpcError, BanyanError, ValueError) as error:
                wait_s = self.progress.failed(self._typed(error))
                self._client.routers.turn_from(address)
                if self._closed.wait(self._deadline.bound(wait_s)):
                    raise Cancelled("The stream was closed.") from None
            finally:
                if self._call is not None:
                    self._call.cancel()

    def _typed(self, error: Exception) -> BanyanError:
        if self._closed.is_set() or isinstance(error, ValueError):  # grpc: "channel is closed"
            return Cancelled("The stream was closed.")
        if isinstance(error, grpc.RpcError):
            return to_error(error)
        assert isinstance(error, BanyanError)
        return error

    def _attempt_routed(self, stub: Any) -> Iterator[Event]:
        request = self.progress.next_request()
        for message in self._open(stub.Generate, request, self._client.metadata):
            yield wire.event(message)

    def _attempt_direct(self, stub: Any) -> Iterator[Event]:
        from banyan import direct

        request, deadline = self.progress.next_request(), self._deadline
        asked = direct.pick_request(request)
        pick = stub.Pick(asked, metadata=self._client.metadata, timeout=deadline.left())
        model = self._client.text_model(pick.model, stub, deadline)
        stream = direct.DirectStream(request, pick, model)
        yield stream.started(request.label)
        replica = replica_stub(self._client.channel(pick.address))
        try:
            for frame in self._open(replica.Stream, stream.request, ()):
                yield from stream.feed(frame)
        except grpc.RpcError as error:
            raise direct.replica_error(to_error(error)) from error

    def _open(self, method: Any, request: Any, metadata: Any) -> Any:
        """Start the call of this attempt so that `close` can cancel it."""
        self._call = method(request, metadata=metadata, timeout=self._deadline.left())
        if self._closed.is_set():
            self._call.cancel()
        return self._call
