"""GET /metrics over HTTP, and nothing else. It knows no metric, only how to have the text written.

Everything a client may cost is bounded: connections, the bytes of a request, the time of an
exchange, and how often the text is written anew.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

from router.metrics import CONTENT_TYPE
from router.service import sockets
from router.service.logs import note, where

PATH = b"/metrics"
CONNECTIONS_MAX = 64  # further ones are cut off at once
HEADER_BYTES_MAX = 8 * 1024
HEADER_S_MAX = 5.0
ANSWER_S_MAX = 10.0  # Prometheus itself gives up after so long
LINGER_S_MAX = 1.0
LINGER_BYTES_MAX = 64 * 1024
FRESH_S = 0.25  # scrapes within it get one text
SLICE_S = 0.001  # writing the text gives way to streams so often

REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


class MetricsServer:
    """`write` yields the text in parts; it is called anew for each text."""

    def __init__(self, write: Callable[[], Iterator[str]]) -> None:
        self._write = write
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._exchanges: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._text = b""
        self._stale_s = 0.0  # by the loop's clock

    def bind(self, address: str) -> str:
        """Take host:port and return it with the real port; nobody is answered before `start`.
        Raises LaunchError."""
        self._socket, at = sockets.take(address, "metrics", CONNECTIONS_MAX)
        return at

    async def start(self) -> None:
        """Answer from now on."""
        assert self._socket is not None
        self._server = await asyncio.start_server(
            self._accept, sock=self._socket, limit=HEADER_BYTES_MAX, backlog=CONNECTIONS_MAX
        )

    async def close(self) -> None:
        """Listen no longer and cut off who is still there. Also after a start that failed."""
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()
        exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._exchanges) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        exchange = asyncio.create_task(self._serve(reader, writer))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        exchange.add_done_callback(lambda _: writer.transport.abort())  # even if it never began

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):  # gone, or too slow
            await self._exchange(reader, writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one answer. The answer is out once this returns; else it raises."""
        status = await self._judge(reader)
        body = b""
        if status == 200:
            try:
                body = await self._current()
            except Exception as error:
                note(logging.ERROR, "writing the metrics failed", **where(error))
                status = 500
        writer.transport.set_write_buffer_limits(high=0)  # so that drain waits for the last byte
        writer.write(_head(status, body) + body)
        async with asyncio.timeout(ANSWER_S_MAX):
            await writer.drain()
        await _linger(reader, writer)

    async def _judge(self, reader: asyncio.StreamReader) -> int:
        """Read a request's head and return the status that it deserves."""
        try:
            async with asyncio.timeout(HEADER_S_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return 408
        except asyncio.LimitOverrunError:
            return 431
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400
        method, target, _ = words
        if target.partition(b"?")[0] != PATH:
            return 404
        return 200 if method == b"GET" else 405

    async def _current(self) -> bytes:
        """The text, at most FRESH_S old. However many ask, one writes at a time."""
        loop = asyncio.get_running_loop()
        async with self._writing:
            if loop.time() >= self._stale_s:
                self._text = await self._written(loop)
                self._stale_s = loop.time() + FRESH_S
            return self._text

    async def _written(self, loop: asyncio.AbstractEventLoop) -> bytes:
        parts, began_s = [], loop.time()
        for part in self._write():
            parts.append(part.encode())
            if loop.time() - began_s > SLICE_S:
                await asyncio.sleep(0)
                began_s = loop.time()
        return b"".join(parts)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the client close first: bytes of it that nobody read would make the kernel take back
    what it has not yet delivered."""
    writer.write_eof()
    left = LINGER_BYTES_MAX
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S_MAX):
            while left > 0 and (chunk := await reader.read(4096)):
                left -= len(chunk)


def _head(status: int, body: bytes) -> bytes:
    kind = CONTENT_TYPE if status == 200 else "text/plain"
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"Content-Type: {kind}"]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "Cache-Control: no-store"]
    if status == 405:
        lines.append("Allow: GET")
    return "\r\n".join([*lines, "", ""]).encode()
