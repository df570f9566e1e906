"""One HTTP/1.1 connection: requests in, answers and event streams out. Knows no OpenAI.

Everything a client may cost is bounded: the bytes of head and body, the time it may take to send
them, what is kept for it while it does not read, and for how long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from pydantic_core import to_json

from router.gateway.problems import INVALID, Problem

HEAD_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 8 * 1024 * 1024
BODIES_BYTES_MAX = 256 * 1024 * 1024  # of all connections together
READ_BYTES = 64 * 1024
UNREAD_BYTES_MAX = 256 * 1024  # beyond it the stream waits; relays then hold back at the replica
IDLE_S_MAX = 75.0
HEAD_S_MAX = 10.0
BODY_S_MAX = 60.0
STALL_S_MAX = 300.0  # a client that reads nothing for so long is gone
LINGER_S_MAX = 2.0
LINGER_BYTES_MAX = 2 * BODY_BYTES_MAX

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Head:
    """A request without its body. Header names are in lower case; of repeated ones the last.
    `query` is what follows the path's question mark."""

    method: str
    path: str
    headers: dict[str, str]
    query: str = ""


class Bodies:
    """What bodies of all connections take together while they are read and served."""

    def __init__(self) -> None:
        self._bytes = 0

    def take(self, size: int) -> None:
        """Raises Problem when there is no room."""
        if self._bytes + size > BODIES_BYTES_MAX:
            message = "The router holds as many request bodies as it may."
            raise Problem(429, message, "rate_limit_error", "rate_limit_exceeded", None, 1.0)
        self._bytes += size

    def give(self, size: int) -> None:
        """Room again."""
        self._bytes -= size
        assert self._bytes >= 0


class Exchange:
    """The server's side of one connection. One task uses it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bodies: Bodies
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._bodies = bodies
        self._held = 0
        self._wire = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._head_only = False
        self.begun = False  # the present answer's head is out
        self.idle = True  # between two requests
        writer.transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX)

    # ---- requests --------------------------------------------------------------------------------

    async def head(self) -> Head | None:
        """The next request, None if there will be none. Raises Problem for what is no HTTP."""
        self.begun, self.idle = False, True
        request = self._next()
        try:
            if request is h11.NEED_DATA:
                async with asyncio.timeout(IDLE_S_MAX):
                    await self._receive()
                request = self._next()
        except TimeoutError:
            return None
        self.idle = False
        try:
            async with asyncio.timeout(HEAD_S_MAX):
                while request is h11.NEED_DATA:
                    await self._receive()
                    request = self._next()
        except TimeoutError:
            raise Problem(408, "The request did not arrive in time.", INVALID) from None
        if not isinstance(request, h11.Request):
            return None
        self._head_only = request.method == b"HEAD"
        return _head(request)

    def _next(self) -> Any:
        """What h11 has read. Raises Problem."""
        try:
            return self._wire.next_event()
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            raise Problem(status, "The request is not well-formed HTTP/1.1.", INVALID) from None

    async def _receive(self) -> None:
        self._wire.receive_data(await self._reader.read(READ_BYTES))

    async def body(self) -> bytes:
        """The request's body. Raises Problem if it is too large, too slow or malformed."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S_MAX):
                while not isinstance(event := self._next(), h11.EndOfMessage):
                    if isinstance(event, h11.Data):
                        size += len(event.data)
                        self._hold(len(event.data), size)
                        parts.append(bytes(event.data))
                    elif event is h11.NEED_DATA:
                        await self._more()
                    else:
                        raise asyncio.CancelledError  # it hung up
        except TimeoutError:
            raise Problem(408, "The request did not arrive in time.", INVALID) from None
        return b"".join(parts)

    def _hold(self, more: int, size: int) -> None:
        if size > BODY_BYTES_MAX:
            message = f"The body is larger than {BODY_BYTES_MAX} bytes."
            raise Problem(413, message, INVALID, "request_too_large")
        self._bodies.take(more)
        self._held += more

    async def _more(self) -> None:
        if self._wire.they_are_waiting_for_100_continue:
            self._write(h11.InformationalResponse(status_code=100, headers=[]))
        await self._receive()

    def release(self) -> None:
        """The body is no longer needed."""
        self._bodies.give(self._held)
        self._held = 0

    # ---- answers ---------------------------------------------------------------------------------

    async def answer(self, status: int, value: Any, headers: Headers = ()) -> None:
        """A whole answer, as JSON."""
        body = to_json(value, inf_nan_mode="null")
        length = [("content-length", str(len(body)))]
        self._begin(status, "application/json", [*headers, *length])
        if not self._head_only:
            self._write(h11.Data(data=body))
        self._write(h11.EndOfMessage())
        await self._flush()

    def stream(self, headers: Headers = ()) -> None:
        """Begin a stream of events."""
        self._begin(200, "text/event-stream; charset=utf-8", headers)

    async def send(self, events: bytes) -> None:
        """More of a stream; returns when there is room for the next. Raises TimeoutError if the
        client reads nothing for long."""
        self._write(h11.Data(data=events))
        await self._flush()

    async def end(self) -> None:
        """The end of a stream."""
        self._write(h11.EndOfMessage())
        await self._flush()

    def _begin(self, status: int, kind: str, headers: Headers) -> None:
        assert not self.begun
        self.begun = True
        lines = [("content-type", kind), ("cache-control", "no-store"), *headers]
        if self._wire.their_state is not h11.DONE:
            lines.append(("connection", "close"))  # the rest of the request is never read
        reason = HTTPStatus(status).phrase.encode()
        self._write(h11.Response(status_code=status, headers=lines, reason=reason))

    def _write(self, event: h11.Event) -> None:
        self._writer.write(self._wire.send(event) or b"")

    async def _flush(self) -> None:
        if self._writer.transport.get_write_buffer_size() <= UNREAD_BYTES_MAX:
            return
        async with asyncio.timeout(STALL_S_MAX):
            await self._writer.drain()

    # ---- the end ---------------------------------------------------------------------------------

    async def again(self) -> bool:
        """Make ready for the next request on this connection; False if there can be none."""
        if self._wire.our_state is h11.DONE and self._wire.their_state is h11.DONE:
            self._wire.start_next_cycle()
            return True
        await self._linger()
        return False

    async def _linger(self) -> None:
        """Let the client close first: bytes of it that nobody read would make the kernel take back
        what it has not yet delivered."""
        self._writer.transport.set_write_buffer_limits(high=0)
        async with asyncio.timeout(STALL_S_MAX):
            await self._writer.drain()
        self._writer.write_eof()
        left = LINGER_BYTES_MAX
        async with asyncio.timeout(LINGER_S_MAX):
            while left > 0 and (chunk := await self._reader.read(READ_BYTES)):
                left -= len(chunk)


def _head(request: h11.Request) -> Head:
    """Raises Problem for one of another HTTP, or too large though it came in one packet."""
    if request.http_version not in (b"1.0", b"1.1"):
        raise Problem(505, "The gateway speaks HTTP/1.1.")
    size = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
    if size > HEAD_BYTES_MAX:
        raise Problem(431, f"The request's head is larger than {HEAD_BYTES_MAX} bytes.")
    target = request.target.decode("ascii", "replace")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
    path, _, query = target.partition("?")
    return Head(request.method.decode("ascii"), path, headers, query)
