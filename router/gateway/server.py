"""GatewayServer: listens for HTTP, one task per connection. Knows no route and no body."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import h11

from router.gateway.exchange import Bodies, Exchange, Head
from router.gateway.problems import SERVER, Problem, problem_of
from router.service import sockets
from router.service.logs import note, where
from seams.errors import BanyanError

CONNECTIONS_MAX = 8192  # further ones are cut off at once
BACKLOG = 1024

Serve = Callable[[Exchange, Head], Awaitable[None]]
"""Answers one request; raises Problem or BanyanError before its answer has begun."""


class _Watched(asyncio.StreamReaderProtocol):
    """Tells when the client has closed, even while nobody reads."""

    def __init__(self, server: GatewayServer) -> None:
        super().__init__(asyncio.StreamReader(), self._connected)
        self._server = server
        self._serving: asyncio.Task[None] | None = None

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving = self._server.accept(reader, writer)

    def eof_received(self) -> bool | None:
        self._gone()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()
        super().connection_lost(exc)

    def _gone(self) -> None:
        if self._serving is not None:
            self._serving.cancel()


class GatewayServer:
    """Runs on the loop of the relays: they hand it responses without crossing a thread."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._bodies = Bodies()
        self._connections: dict[asyncio.Task[None], Exchange] = {}
        self._stopping = False

    def bind(self, address: str) -> str:
        """Take host:port and return it with the real port; nobody is answered before `start`.
        Raises LaunchError."""
        self._socket, at = sockets.take(address, "http", BACKLOG)
        return at

    async def start(self) -> None:
        """Answer from now on."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Watched(self), sock=self._socket, backlog=BACKLOG
        )

    def stop_accepting(self) -> None:
        """No new connection; those that wait for a request end, others after their answer."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
        for task, exchange in self._connections.items():
            if exchange.idle:
                task.cancel()

    async def close(self, grace_s: float) -> None:
        """Cut off who is still there after `grace_s`. Also after a start that failed."""
        self.stop_accepting()
        if self._server is None and self._socket is not None:
            self._socket.close()
        tasks = list(self._connections)
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> asyncio.Task[None] | None:
        """Serve a new connection; the task ends with it."""
        if len(self._connections) >= CONNECTIONS_MAX or self._stopping:
            writer.transport.abort()
            return None
        exchange = Exchange(reader, writer, self._bodies)
        task = asyncio.create_task(self._keep_serving(exchange, writer))
        self._connections[task] = exchange

        def ended(_: asyncio.Task[None]) -> None:
            del self._connections[task]
            exchange.release()
            writer.transport.abort()  # whatever is left to say, nobody waits for it

        task.add_done_callback(ended)
        return task

    async def _keep_serving(self, exchange: Exchange, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, h11.ProtocolError, asyncio.CancelledError):
            while await self._one(exchange) and not self._stopping:
                pass
            await _delivered(writer)

    async def _one(self, exchange: Exchange) -> bool:
        """One request and its answer; True if the connection can carry another."""
        try:
            head = await exchange.head()
            if head is None:
                return False
            await self._serve(exchange, head)
        except Problem as problem:
            await _refuse(exchange, problem)
        except BanyanError as error:
            await _refuse(exchange, problem_of(error))
        except (OSError, TimeoutError, h11.LocalProtocolError):
            raise
        except Exception as error:
            note(logging.ERROR, "an HTTP request failed unexpectedly", **where(error))
            message = "The router failed to process this request."
            await _refuse(exchange, Problem(500, message, SERVER))
        finally:
            exchange.release()
        return await exchange.again()


async def _refuse(exchange: Exchange, problem: Problem) -> None:
    if not exchange.begun:
        await exchange.answer(problem.status, problem.body, problem.headers)


async def _delivered(writer: asyncio.StreamWriter) -> None:
    writer.transport.set_write_buffer_limits(high=0)
    await writer.drain()
