"""A small HTTP/1.1 client for the gateway's tests: it can do what polite clients do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; asserts that it is one and nothing else."""
        assert set(self.json) == {"error"}
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert isinstance(found["message"], str) and found["message"].endswith(".")
        assert isinstance(found["type"], str)
        return found


@dataclass
class Events:
    """The events of a stream, taken apart."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def text(self, index: int = 0) -> str:
        parts = []
        for chunk in self.chunks:
            for choice in chunk.get("choices", ()):
                if choice["index"] == index:
                    delta = choice.get("delta")
                    parts.append(choice["text"] if delta is None else delta.get("content", ""))
        return "".join(parts)

    def ids(self, index: int = 0) -> list[int]:
        choices = [c for chunk in self.chunks for c in chunk.get("choices", ())]
        mine = [c for c in choices if c["index"] == index]
        return [i for c in mine for i in c.get("token_ids", ())]

    def reasons(self) -> dict[int, str]:
        choices = [c for chunk in self.chunks for c in chunk.get("choices", ())]
        ended = [c for c in choices if c["finish_reason"] is not None]
        assert len({c["index"] for c in ended}) == len(ended), "a choice ended twice"
        return {c["index"]: c["finish_reason"] for c in ended}


class Connection:
    """One connection; requests one after the other, or a raw stream of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.wire = h11.Connection(h11.CLIENT)

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        """Send a request."""
        data = b""
        lines = {"Host": "gateway"}
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        lines |= headers or {}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data)
        # what was said, so that the answer's framing is known
        self.wire = h11.Connection(h11.CLIENT)
        self.wire.send(h11.Request(method=method, target=path, headers=[("Host", "gateway")]))
        self.wire.send(h11.EndOfMessage())

    async def event(self) -> Any:
        while (found := self.wire.next_event()) is h11.NEED_DATA:
            self.wire.receive_data(await self.reader.read(65536))
        return found

    async def begun(self) -> Reply:
        """The head of the answer."""
        head = await self.event()
        while isinstance(head, h11.InformationalResponse):
            head = await self.event()
        assert isinstance(head, h11.Response), head
        headers = {k.decode(): v.decode() for k, v in head.headers}
        return Reply(head.status_code, headers)

    async def reply(self) -> Reply:
        """The whole answer."""
        reply = await self.begun()
        reply.body = b"".join([part async for part in self.parts()])
        return reply

    async def parts(self) -> AsyncIterator[bytes]:
        while isinstance(found := await self.event(), h11.Data):
            yield bytes(found.data)
        assert isinstance(found, h11.EndOfMessage), found

    async def events(self, at_most: int | None = None) -> Events:
        """The events of a stream whose head was read, all of them or the first few."""
        events, rest = Events(), b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n\n")
            for line in whole:
                assert not events.done and line.startswith(b"data: ")
                if line == b"data: [DONE]":
                    events.done = True
                else:
                    events.chunks.append(json.loads(line.removeprefix(b"data: ")))
            if at_most is not None and len(events.chunks) >= at_most:
                return events
        assert not rest
        return events

    def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = Connection(reader, writer)
    try:
        yield connection
    finally:
        connection.close()


async def call(
    address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Reply:
    """One request on a connection of its own."""
    async with connected(address) as connection:
        await connection.ask(method, path, body, headers)
        return await connection.reply()


async def post(address: str, path: str, body: Any, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await call(address, "POST", path, body, named)


async def stream(address: str, path: str, body: dict[str, Any]) -> Events:
    """All events of a streamed answer."""
    async with connected(address) as connection:
        await connection.ask("POST", path, body | {"stream": True})
        reply = await connection.begun()
        assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
        return await connection.events()
