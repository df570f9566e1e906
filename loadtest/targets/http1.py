"""A small HTTP/1.1 client for event streams: h11 over asyncio. Knows no OpenAI.

Connections are kept and used again, one request at a time each, as many as there are requests.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import h11

from seams.errors import InvalidRequest, NoReplica, ReplicaLost

READ_BYTES = 64 * 1024
ANSWER_BYTES_MAX = 4 * 1024 * 1024  # of one that is no stream
EVENT_BYTES_MAX = 4 * 1024 * 1024
PORTS = {"http": 80, "https": 443}

Headers = dict[str, str]


class _Stale(Exception):
    """A kept connection was closed before its next answer began: the server had given it up."""


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._wire = h11.Connection(h11.CLIENT)
        self._used = False

    async def send(self, method: str, target: str, headers: Headers, body: bytes) -> h11.Response:
        """Send a request, return the answer's head."""
        fields = headers | {"Content-Length": str(len(body))}
        request = h11.Request(method=method, target=target, headers=list(fields.items()))
        try:
            for event in (request, h11.Data(data=body), h11.EndOfMessage()):
                self._writer.write(self._wire.send(event) or b"")
            await self._writer.drain()
            while not isinstance(head := await self._event(), h11.Response):
                if not isinstance(head, h11.InformationalResponse):
                    raise ReplicaLost("The endpoint closed the connection without an answer.")
        except (OSError, h11.RemoteProtocolError, ReplicaLost):
            if self._used:
                raise _Stale from None
            raise
        return head

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The answer's body as it comes."""
        while isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise ReplicaLost("The endpoint closed the connection before the answer's end.")

    def again(self) -> bool:
        """Make ready for another request; False if there can be none."""
        if self._wire.our_state is h11.DONE and self._wire.their_state is h11.DONE:
            self._wire.start_next_cycle()
            self._used = True
            return True
        return False

    async def _event(self) -> Any:
        while (event := self._wire.next_event()) is h11.NEED_DATA:
            self._wire.receive_data(await self._reader.read(READ_BYTES))
        return event

    def close(self) -> None:
        self._writer.transport.abort()


class Answered:
    """An answer whose head has come. Read it to its end, or close it; then it is spent."""

    def __init__(self, client: HttpClient, connection: _Connection, head: h11.Response) -> None:
        self._client = client
        self._connection: _Connection | None = connection
        self.status = head.status_code
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}

    async def json(self) -> Any:
        """The body; None if it is no JSON."""
        body = bytearray()
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                body += part
                if len(body) > ANSWER_BYTES_MAX:
                    return None
        try:
            return json.loads(body)
        except ValueError:
            return None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The `data` of each server-sent event."""
        rest = b""
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > EVENT_BYTES_MAX:
                    raise ReplicaLost("The endpoint sent an event without an end.")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line.removeprefix(b"data:").strip()

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        connection = self._connection
        assert connection is not None, "an answer is read once"
        try:
            async with aclosing(connection.parts()) as parts:
                async for part in parts:
                    yield part
        except (OSError, h11.RemoteProtocolError):
            message = "The endpoint closed the connection before the answer's end."
            raise ReplicaLost(message) from None
        self._connection = None
        self._client.keep(connection)

    def close(self) -> None:
        """Cut it off unless it was read to its end. Safe to repeat."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class HttpClient:
    """Speaks to one server. `base_url` may have a path, which goes before every request's."""

    def __init__(self, base_url: str, headers: Headers) -> None:
        """Raises InvalidRequest for what is no http(s) URL."""
        try:
            found = urlsplit(base_url)
            port = found.port or PORTS.get(found.scheme, 0)
        except ValueError:
            port = 0
        if not port or not found.hostname or found.username is not None:
            raise InvalidRequest("The target must be a URL such as http://HOST:PORT/v1.")
        self._host, self._port = found.hostname, port
        self._secure = ssl.create_default_context() if found.scheme == "https" else None
        self._path = found.path.rstrip("/")
        self._headers = {"Host": found.netloc, "Content-Type": "application/json"} | headers
        self._idle: list[_Connection] = []

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Headers | None = None
    ) -> Answered:
        """Send a request. Raises NoReplica if nobody is there."""
        sent = b"" if body is None else json.dumps(body).encode()
        lines = self._headers | (headers or {})
        while True:
            connection = self._idle.pop() if self._idle else await self._connected()
            try:
                head = await connection.send(method, self._path + path, lines, sent)
            except _Stale:
                connection.close()
                continue
            except (OSError, h11.RemoteProtocolError):
                connection.close()
                raise NoReplica("The endpoint does not speak HTTP/1.1.") from None
            except BaseException:
                connection.close()
                raise
            return Answered(self, connection, head)

    async def _connected(self) -> _Connection:
        try:
            where = (self._host, self._port)
            return _Connection(*await asyncio.open_connection(*where, ssl=self._secure))
        except OSError:
            raise NoReplica("The endpoint cannot be reached.") from None

    def keep(self, connection: _Connection) -> None:
        """For the next request, if it can carry one."""
        if connection.again():
            self._idle.append(connection)
        else:
            connection.close()

    async def aclose(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # the loop lets go of what was closed
