"""A pass-through before an API that notes when each byte went by, and afterwards makes the load
generator's records of it: a client's requests measured by our own definitions, on the same wire
and at the same time. It changes no byte and knows no client.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h11

from loadtest.records import OK, Record

READ_BYTES = 64 * 1024
DONE = b"[DONE]"
GENERATE = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class Passed:
    """Bytes that went by at `at_s` (monotonic). No bytes: that side has closed."""

    at_s: float
    asked: bool
    data: bytes


@dataclass
class Exchange:
    """One request and its answer. `events` are (time, payload of one server-sent event)."""

    path: str
    sent_s: float
    status: int = 0
    end_s: float = 0.0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    rest: bytes = b""

    def take(self, at_s: float, data: bytes) -> None:
        """A part of the answer's body."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.events.append((at_s, line.removeprefix(b"data:").strip()))


class Witness:
    """Listens on a loopback port of its own and passes everything on to `host`:`port`."""

    def __init__(self, host: str, port: int) -> None:
        self._there = (host, port)
        self._wires: list[tuple[float, list[Passed]]] = []  # when it was opened, what passed
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Witness:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        """Where clients find it."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def records(self) -> list[Record]:
        """Streamed generations that have ended, in the order in which they were sent."""
        found = [one for at_s, wire in self._wires for one in exchanges(wire, at_s)]
        streamed = [one for one in found if one.path in GENERATE and one.events and one.end_s]
        return [record_of(one) for one in sorted(streamed, key=lambda one: one.sent_s)]

    def refused(self) -> list[int]:
        """Statuses of generations that were not answered with 200."""
        found = [one for at_s, wire in self._wires for one in exchanges(wire, at_s)]
        return [one.status for one in found if one.path in GENERATE and one.status not in (0, 200)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire: list[Passed] = []
        self._wires.append((time.monotonic(), wire))
        there_reader, there_writer = await asyncio.open_connection(*self._there)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass(reader, there_writer, wire, asked=True))
                both.create_task(_pass(there_reader, writer, wire, asked=False))
        finally:
            there_writer.close()
            writer.close()


async def _pass(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: list[Passed], *, asked: bool
) -> None:
    with suppress(OSError):
        while data := await reader.read(READ_BYTES):
            wire.append(Passed(time.monotonic(), asked, data))
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    wire.append(Passed(time.monotonic(), asked, b""))


def exchanges(wire: list[Passed], opened_s: float) -> Iterator[Exchange]:
    """The requests of one connection, one after the other. Those without an end have `end_s` 0.
    The first was sent when the connection was opened, since clients open one for a request and
    have started their clock by then, as our load generator has."""
    asks, answers = h11.Connection(h11.SERVER), h11.Connection(h11.CLIENT)
    now: Exchange | None = None
    first = True
    for passed in wire:
        here, there = (asks, answers) if passed.asked else (answers, asks)
        here.receive_data(passed.data)
        while (event := here.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.ConnectionClosed):
                break
            there.send(event)  # keeps the other side's machine in step
            if isinstance(event, h11.Request):
                path = event.target.decode().partition("?")[0]
                now, first = Exchange(path, opened_s if first else passed.at_s), False
            elif now is not None and isinstance(event, h11.Response):
                now.status = event.status_code
            elif now is not None and isinstance(event, h11.Data) and not passed.asked:
                now.take(passed.at_s, bytes(event.data))
            elif now is not None and isinstance(event, h11.EndOfMessage) and not passed.asked:
                now.end_s = passed.at_s
                yield now
                now = None
                if asks.our_state is not h11.DONE or asks.their_state is not h11.DONE:
                    return
                asks.start_next_cycle()
                answers.start_next_cycle()
    if now is not None:
        yield now


def record_of(exchange: Exchange) -> Record:
    """As the load generator would have written it. A client that asks for no usage gets none: its
    output tokens are then the messages that brought text. Raises ValueError for what is no stream
    of OpenAI's."""
    usage: dict[str, Any] = {}
    chunks_s: list[float] = []
    brought, whole = 0, False
    for at_s, payload in exchange.events:
        if payload == DONE:
            whole = True
            continue
        chunk = json.loads(payload)
        usage = chunk.get("usage") or usage
        brought += _brought(chunk)
        if _brought(chunk) and (not chunks_s or chunks_s[-1] != at_s - exchange.sent_s):
            chunks_s.append(at_s - exchange.sent_s)
    details = usage.get("prompt_tokens_details") or {}
    return Record(
        stage=0, session="", turn=0, group="", warmup=False,
        intended_s=exchange.sent_s, sent_s=exchange.sent_s, end_s=exchange.end_s,
        chunks_s=tuple(chunks_s), prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens"),
        output_tokens=usage.get("completion_tokens", brought),
        status=OK if exchange.status == 200 and whole else f"HTTP {exchange.status}",
    )  # fmt: skip


def _brought(chunk: dict[str, Any]) -> bool:
    """Whether it brought text."""
    (choice, *_) = chunk.get("choices") or ({},)
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))
