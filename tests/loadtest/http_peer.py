"""An OpenAI endpoint of the tests' own: some other server, well-behaved or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h11

MODEL = "peer-model"


@dataclass
class Peer:
    """What it does wrong is set by a test; `asked` has every body that it got."""

    address: str = ""
    status: int = 200
    fault: str = ""  # "cut", "event", "no usage", "no end", "not json", "odd usage"
    cached: int | None = 3
    pause_s: float = 0.0
    tokenizes: bool = True
    keeps: bool = True  # else it hangs up after every answer, without a word before
    models: tuple[str, ...] = (MODEL,)
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.address}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        wire = h11.Connection(h11.SERVER)
        try:
            while await self._one(reader, writer, wire) and self.keeps:
                wire.start_next_cycle()
        except ConnectionError:
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: h11.Connection
    ) -> bool:
        """One request and its answer; True if another may follow."""

        async def event() -> Any:
            while (found := wire.next_event()) is h11.NEED_DATA:
                wire.receive_data(await reader.read(65536))
            return found

        head, body = await event(), b""
        if not isinstance(head, h11.Request):
            return False
        while isinstance(part := await event(), h11.Data):
            body += part.data
        for sent in self.answers(head, json.loads(body or b"{}")):
            if sent is None:
                writer.transport.abort()
                return False
            if isinstance(sent, float):
                await asyncio.sleep(sent)
            else:
                writer.write(wire.send(sent) or b"")
                await writer.drain()
        return wire.our_state is h11.DONE

    def answers(self, head: h11.Request, body: dict[str, Any]) -> list[Any]:
        """What is sent, in order; None cuts the connection, a number is a pause."""
        path = head.target.decode()
        self.asked.append((path, body, {k.decode(): v.decode() for k, v in head.headers}))
        if path == "/v1/models":
            return self.whole(200, {"data": [{"id": name} for name in self.models]})
        if path == "/tokenize" and self.tokenizes:
            return self.whole(200, {"count": 1 + len(body["prompt"].split())})
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return self.whole(404, {"detail": "Not Found"})
        if self.status != 200:
            said = {"error": {"message": f"refused\nwith {self.status}", "type": "x"}}
            return self.whole(self.status, said)
        return self.streamed(path, body)

    def whole(self, status: int, value: Any) -> list[Any]:
        body = json.dumps(value).encode()
        return [
            h11.Response(status_code=status, headers=[("content-length", str(len(body)))]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]

    def streamed(self, path: str, body: dict[str, Any]) -> list[Any]:
        headers = [("transfer-encoding", "chunked"), ("x-request-id", "req-7")]
        sent: list[Any] = [h11.Response(status_code=200, headers=headers)]
        chat = path.endswith("chat/completions")
        if chat:
            sent.append(_event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}))
        for number in range(body["max_tokens"]):
            if self.pause_s:
                sent.append(self.pause_s)
            piece = {"delta": {"content": f"w{number} "}} if chat else {"text": f"w{number} "}
            if body.get("return_token_ids"):
                piece |= {"token_ids": [number + 1], "text": ""}
            sent.append(_event({"choices": [{"index": 0} | piece]}))
            if number == 1 and self.fault == "cut":
                return [*sent, None]
            if number == 1 and self.fault == "event":
                sent.append(_event({"error": {"message": "it broke", "type": "server_error"}}))
            if number == 1 and self.fault == "not json":
                sent.append(h11.Data(data=b"data: {\n\n"))
        if self.fault != "no usage":
            sent.append(_event({"choices": [], "usage": self.usage(body)}))
        if self.fault != "no end":
            sent.append(h11.Data(data=b"data: [DONE]\n\n"))
        return [*sent, h11.EndOfMessage()]

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        said = body.get("prompt") or " ".join(m["content"] for m in body["messages"])
        words = said.split() if isinstance(said, str) else said
        usage: dict[str, Any] = {"prompt_tokens": len(words)}
        usage["completion_tokens"] = body["max_tokens"]
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return {"prompt_tokens": "many"} if self.fault == "odd usage" else usage


def _event(value: dict[str, Any]) -> h11.Data:
    return h11.Data(data=f"data: {json.dumps(value)}\n\n".encode())


@asynccontextmanager
async def peer(**faults: Any) -> AsyncIterator[Peer]:
    """It, listening."""
    found = Peer(**faults)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(found.serve(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    found.address = f"{host}:{port}"
    try:
        yield found
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
