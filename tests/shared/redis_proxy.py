"""A TCP proxy before a Redis server that misbehaves on command."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from enum import Enum
from pathlib import Path

CHUNK = 64 << 10


class Mode(Enum):
    """What happens to connections, open and new ones."""

    PASS = "pass"
    DOWN = "down"  # refused, and open ones closed
    FROZEN = "frozen"  # accepted, but nothing goes through
    LATE = "late"  # replies come 5 s later
    RESET = "reset"  # after `reset_bytes` of replies on a connection, by RST
    DRIP = "drip"  # 20 bytes of reply at a time, 100 times a second


class Proxy:
    """Listens on loopback and forwards to the unix socket `upstream`, which may be exchanged."""

    def __init__(self, upstream: Path, tls: ssl.SSLContext | None = None) -> None:
        self.upstream = upstream
        self._tls = tls
        self._mode = Mode.PASS
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.accepted = 0
        self.reset_bytes = 100_000
        self._listen()

    def url(self, password: str, *, scheme: str = "redis", user: str = "", query: str = "") -> str:
        return f"{scheme}://{user}:{password}@127.0.0.1:{self.port}{query}"

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        was, self._mode = self._mode, mode
        if mode is Mode.DOWN:
            self._stop_listening()
            self.cut()
        elif was is Mode.DOWN:
            self._listen()

    def cut(self) -> None:
        """Close every connection there is."""
        with self._lock:
            sockets, self._open = self._open, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.mode = Mode.DOWN

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server.connect(str(self.upstream))
        except OSError:
            client.close()
            server.close()
            return
        with self._lock:
            self._open += [client, server]
        threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
        self._forward(server, client, True)

    def _forward(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed by the other thread
            while chunk := self._receive(source):
                self._hold(replies)
                passed += len(chunk)
                if replies and self._mode is Mode.RESET and passed > self.reset_bytes:
                    target.sendall(chunk[: len(chunk) // 2])
                    target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    target.close()  # with linger 0: RST
                    break
                self._pass(chunk, target, replies)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _receive(self, source: socket.socket) -> bytes:
        """Never inside recv for long: a socket somebody reads from sends no RST when closed."""
        while not select.select([source], [], [], 0.02)[0]:
            pass
        return source.recv(CHUNK)

    def _hold(self, replies: bool) -> None:
        began = time.monotonic()
        while self._mode is Mode.FROZEN or (
            replies and self._mode is Mode.LATE and time.monotonic() - began < 5
        ):
            time.sleep(0.01)

    def _pass(self, chunk: bytes, target: socket.socket, replies: bool) -> None:
        sent = 0
        while replies and self._mode is Mode.DRIP and sent < len(chunk):
            target.sendall(chunk[sent : sent + 20])
            sent += 20
            time.sleep(0.01)
        target.sendall(chunk[sent:])
