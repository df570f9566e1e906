"""GET /metrics and nothing else: what odd, greedy, slow and many clients get."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from router.service import metrics_server
from router.service.metrics_server import CONNECTIONS_MAX, HEADER_BYTES_MAX, MetricsServer
from seams.errors import LaunchError

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
SMALL = "# TYPE a gauge\na 1\n"


class Text:
    """What the server writes; counts how often."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts or (SMALL,)
        self.written = 0

    def __call__(self) -> Iterator[str]:
        self.written += 1
        yield from self.parts


@asynccontextmanager
async def serving(
    text: Callable[[], Iterator[str]], kernel_bytes: int | None = None
) -> AsyncIterator[str]:
    """`kernel_bytes`: about what the kernel takes of an answer before its client reads."""
    server = MetricsServer(text)
    address = server.bind("127.0.0.1:0")
    if kernel_bytes is not None:
        assert server._socket is not None
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel_bytes)
    await server.start()
    try:
        yield address
    finally:
        await asyncio.wait_for(server.close(), 5)
        await asyncio.sleep(0)
        assert not server._exchanges
        with pytest.raises(OSError, match=r"."):
            await connect(address)


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ask(address: str, request: bytes = GET) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; ends only once the server has closed."""
    reader, writer = await connect(address)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, body


async def answered(address: str) -> bool:
    """False if the connection is cut off at once."""
    reader, writer = await connect(address)
    try:
        writer.write(GET)
        return bool(await asyncio.wait_for(reader.read(), 5))
    except ConnectionError:
        return False
    finally:
        writer.close()


def rest(connection: socket.socket) -> int:
    """Bytes that still come before the end, or before the connection breaks."""
    count = 0
    with connection, suppress(ConnectionError):
        while chunk := connection.recv(1 << 20):
            count += len(chunk)
    return count


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_scrape(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        large = Text(SMALL, "b 2\n" * 1_000_000)
        async with serving(large) as address:
            status, headers, body = await ask(address)
            assert status == 200 and body == "".join(large.parts).encode()
            assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            status, _, body = await ask(address, GET.replace(b"/metrics", b"/metrics?a=b"))
            assert status == 200 and body

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\nsomething", 405),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 405),
        (b"get /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET http://x/metrics HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics SPDY/3\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xff\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"a" * 100 * HEADER_BYTES_MAX + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 3 * HEADER_BYTES_MAX, 431),
    ],
)
def test_anything_else_is_refused(request_: bytes, status: int) -> None:
    async def scenario() -> None:
        text = Text()
        async with serving(text) as address:
            found, headers, body = await ask(address, request_)
            assert (found, body) == (status, b"") and not text.written
            assert headers.get("allow") == ("get" if status == 405 else None)
            assert (await ask(address))[0] == 200

    asyncio.run(scenario())


def test_fifty_scrapes_at_once_are_one_text() -> None:
    async def scenario() -> None:
        text = Text(*[SMALL] * 10)
        async with serving(text) as address:
            answers = await asyncio.gather(*(ask(address) for _ in range(50)))
            assert {status for status, _, _ in answers} == {200}
            assert len({body for _, _, body in answers}) == 1 and text.written <= 2
            await asyncio.sleep(metrics_server.FRESH_S + 0.05)
            before = text.written
            await ask(address)
            assert text.written == before + 1

    asyncio.run(scenario())


def test_writing_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams get their turn between two metrics, however many there are."""
    monkeypatch.setattr(metrics_server, "SLICE_S", 0.0)

    async def scenario() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        def text() -> Iterator[str]:
            for _ in range(100):
                seen.append(turns)
                yield SMALL

        seen: list[int] = []
        streams = asyncio.create_task(other())
        async with serving(text) as address:
            assert (await ask(address))[0] == 200
        streams.cancel()
        assert len(set(seen)) == 100

    asyncio.run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_slow_clients_are_cut_off_and_disturb_nobody(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "HEADER_S_MAX", 0.2)
    monkeypatch.setattr(metrics_server, "ANSWER_S_MAX", 0.2)
    monkeypatch.setattr(metrics_server, "LINGER_S_MAX", 0.2)

    async def scenario() -> None:
        async with serving(Text("b 2\n" * 4_000_000)) as address:
            silent, silence = await connect(address)
            halfway, half = await connect(address)
            half.write(GET[:-2])
            unread = socket.create_connection(address.rsplit(":", 1))
            unread.sendall(GET)  # and never reads 16 MB
            stays, kept = await connect(address)
            kept.write(GET.replace(b"/metrics", b"/else"))  # and never closes
            for reader in (silent, halfway):
                assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 408")
            assert (await asyncio.wait_for(stays.read(), 5)).startswith(b"HTTP/1.1 404")
            await asyncio.sleep(1.0)
            unread.settimeout(5)
            assert rest(unread) < 16_000_000
            for writer in (silence, half, kept):
                writer.close()

    run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_reads_slowly_gets_it_to_the_last_byte(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer counts as given once nothing of it waits in this process any longer."""
    monkeypatch.setattr(metrics_server, "LINGER_S_MAX", 0.0)

    async def scenario() -> None:
        async with serving(Text("b 2\n" * 250_000), 4096) as address:
            reader, writer = await connect(address)
            writer.write(GET)
            got = 0
            while chunk := await asyncio.wait_for(reader.read(1 << 14), 5):
                got += len(chunk)
                await asyncio.sleep(0.002)
            assert got > 1_000_000
            writer.close()

    run(scenario())


def test_connections_are_bounded() -> None:
    async def scenario() -> None:
        async with serving(Text()) as address:
            held = [await connect(address) for _ in range(CONNECTIONS_MAX)]
            await asyncio.sleep(0.1)
            assert await answered(address) is False
            for _, other in held:
                other.close()
            end_s = time.monotonic() + 5
            while not await answered(address):
                assert time.monotonic() < end_s, "connections are not given back"
                await asyncio.sleep(0.02)

    asyncio.run(scenario())


def test_a_failure_is_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    def text() -> Iterator[str]:
        yield SMALL
        raise KeyError("words of a prompt")

    async def scenario() -> None:
        async with serving(text) as address:
            for _ in range(2):
                assert (await ask(address))[::2] == (500, b"")

    asyncio.run(scenario())
    assert len(caplog.records) == 2 and "words" not in str([r.__dict__ for r in caplog.records])


def test_closing_does_not_wait_for_clients() -> None:
    async def scenario() -> None:
        async with serving(Text()) as address:
            _, writer = await connect(address)
            writer.write(GET[:10])
            await asyncio.sleep(0.05)
        writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["9464", ":9464", "127.0.0.1", "127.0.0.1:", "x:70000", ""])
def test_an_address_names_host_and_port(address: str) -> None:
    with pytest.raises(LaunchError, match=r"HOST:PORT"):
        MetricsServer(Text()).bind(address)


def test_a_busy_port_or_a_foreign_address_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "192.0.2.1:1"):
            with pytest.raises(LaunchError, match=r"busy or not ours"):
                MetricsServer(Text()).bind(address)
