"""Dispatcher: which request belongs to which peer's stream. It knows no gRPC and no model.

Lives on the server's event loop; only `EngineClient` calls leave it. Whatever happens to a request,
exactly one emission with `last` reaches the stream that submitted it, unless that stream is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from banyan.v1 import internal_pb2
from seams.errors import BanyanError, InvalidRequest
from worker.engine.client import EngineClient
from worker.engine.messages import Emission, EngineRequest, StepOutput
from worker.service.convert import add_emission, refused

FRAMES_WAITING_MAX = 1 << 16  # of one stream; a peer that grants credit but does not read ends here


@dataclass(slots=True)
class _Request:
    """One request in the engine. `left[c]` is the credit choice c has left, 0 once it ended."""

    engine_id: str
    wire_id: str
    stream: FrameStream
    left: list[int]
    ended: set[int]

    def spend(self, emission: Emission) -> None:
        choice = emission.choice
        if choice < len(self.left):
            self.left[choice] -= len(emission.token_ids)
            if emission.finish is not None:
                self.ended.add(choice)

    def grant(self, tokens: int) -> None:
        self.left = [left + tokens for left in self.left]

    @property
    def may_emit(self) -> bool:
        return any(left > 0 and c not in self.ended for c, left in enumerate(self.left))


class Dispatcher:
    """All requests of one replica in flight, and the frames of each step on their way out."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._requests: dict[str, _Request] = {}  # by engine id
        self._streams: set[FrameStream] = set()
        self._opened = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.step = 0  # of the newest output seen
        self.refuses: BanyanError | None = None  # set: new requests end with it

    @property
    def running(self) -> int:
        """Requests whose `last` has not been seen."""
        return len(self._requests)

    @property
    def pending(self) -> bool:
        """True if some request could emit: a healthy engine is stepping now."""
        return any(request.may_emit for request in self._requests.values())

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def open(self) -> FrameStream:
        """A new stream for one peer."""
        self._opened += 1
        stream = FrameStream(self, self._engine, f"{self._opened}/")
        self._streams.add(stream)
        return stream

    def closed(self, stream: FrameStream) -> None:
        """A stream's peer is served no more."""
        self._streams.discard(stream)

    def end(self) -> None:
        """End all streams; what waits in them is still written."""
        for stream in list(self._streams):
            stream.end()

    def deliver(self, output: StepOutput) -> None:
        """Queue one frame per stream that has emissions in this step."""
        self.step = output.step
        frames: dict[FrameStream, internal_pb2.Frame] = {}
        requests = self._requests
        for emission in output.emissions:
            request = requests.get(emission.request_id)
            if request is None:
                continue  # its stream has closed or it was ended over its head
            frame = frames.get(request.stream)
            if frame is None:
                frame = frames[request.stream] = internal_pb2.Frame(step=output.step)
            add_emission(frame, emission, request.wire_id)
            request.spend(emission)
            if emission.last:
                self.forget(request)
        for stream, frame in frames.items():
            stream.put(frame)

    def admit(self, request: _Request) -> None:
        """Note a request that goes to the engine now."""
        assert request.engine_id not in self._requests
        self._requests[request.engine_id] = request
        self._idle.clear()

    def forget(self, request: _Request) -> None:
        """Drop a request; what the engine still says about it is ignored."""
        del self._requests[request.engine_id]
        request.stream.dropped(request.wire_id)
        if not self._requests:
            self._idle.set()


class FrameStream:
    """One peer's requests and the frames that wait to be written to it, oldest first."""

    def __init__(self, dispatcher: Dispatcher, engine: EngineClient, prefix: str) -> None:
        self._dispatcher = dispatcher
        self._engine = engine
        self._prefix = prefix  # makes request ids of different streams differ in the engine
        self._open: dict[str, _Request] = {}  # by wire id
        self._frames: deque[internal_pb2.Frame] = deque()
        self._wake = asyncio.Event()
        self._ended = False
        self.overflowed = False

    @property
    def waiting(self) -> int:
        """Frames that `next` gives without waiting."""
        return len(self._frames)

    def engine_id(self, wire_id: str) -> str:
        """The id under which the engine knows this stream's request."""
        return self._prefix + wire_id

    def submit(self, wire_id: str, request: EngineRequest) -> None:
        """Hand a checked request to the engine.

        An id that is already in flight here ends that request: which of the two the peer means can
        no longer be told apart.
        """
        assert request.request_id == self.engine_id(wire_id)
        if self._dispatcher.refuses is not None:
            self.fail(wire_id, self._dispatcher.refuses)
        elif wire_id in self._open:
            self.fail(wire_id, InvalidRequest("The request id is already in use."))
        else:
            credit = [request.credit_tokens] * request.sampling.n
            entry = _Request(request.request_id, wire_id, self, credit, set())
            self._open[wire_id] = entry
            self._dispatcher.admit(entry)
            try:
                self._engine.submit(request)
            except BanyanError as error:  # it has stopped meanwhile
                self.fail(wire_id, error)

    def cancel(self, wire_id: str) -> None:
        """Ask the engine to end a request; its last emission follows. Ignores unknown ids."""
        entry = self._open.get(wire_id)
        if entry is not None:
            self._engine.cancel(entry.engine_id)

    def grant(self, wire_id: str, tokens: int) -> None:
        """Allow every choice of a request more tokens. Ignores unknown ids."""
        entry = self._open.get(wire_id)
        if entry is not None:
            entry.grant(tokens)
            self._engine.grant(entry.engine_id, tokens)

    def fail(self, wire_id: str, error: BanyanError) -> None:
        """End a request, known or not, with `error` as its last emission."""
        entry = self._open.get(wire_id)
        if entry is not None:
            self._dispatcher.forget(entry)
            self._engine.cancel(entry.engine_id)
        self.put(refused(wire_id, error, self._dispatcher.step))

    def dropped(self, wire_id: str) -> None:
        """The dispatcher has forgotten this request."""
        del self._open[wire_id]

    def put(self, frame: internal_pb2.Frame) -> None:
        """Queue a frame; past the bound the whole stream ends."""
        if self._ended:
            return
        if len(self._frames) >= FRAMES_WAITING_MAX:
            self.overflowed = True
            self.end()
            return
        self._frames.append(frame)
        self._wake.set()

    async def next(self) -> internal_pb2.Frame | None:
        """The next frame to write; None once the stream has ended and all are written."""
        while not self._frames and not self._ended:
            self._wake.clear()
            await self._wake.wait()
        return self._frames.popleft() if self._frames else None

    def end(self) -> None:
        """Let `next` come to its end and cancel what still runs. Safe to repeat."""
        self._ended = True
        self._wake.set()
        self._dispatcher.closed(self)
        if self.overflowed:
            self._frames.clear()
        for entry in list(self._open.values()):
            self._dispatcher.forget(entry)
            self._engine.cancel(entry.engine_id)
