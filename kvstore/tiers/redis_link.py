"""Connections to one Redis or Valkey server, and a few of them shared by many threads.

It knows no blocks. redis-py reads the URL and opens the socket, TLS and unix sockets too; we log in
ourselves with AUTH and SELECT alone, so an ACL can forbid all else. Opening happens on a thread of
its own: no slow name service and no silent host holds a caller beyond its deadline.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, NamedTuple

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, parse_url
from redis.exceptions import RedisError
from redis.retry import Retry

from kvstore.tiers.redis_layout import request
from kvstore.tiers.redis_wire import STALL_S, Deadline, LinkFault, Wire
from seams.clock import Clock
from seams.errors import LaunchError

_TAKEN_FROM_URL = frozenset({"host", "port", "path", "db", "username", "password"})


class Link(NamedTuple):
    """An open connection and the wire on its socket."""

    connection: AbstractConnection
    wire: Wire

    def close(self) -> None:
        """Safe to repeat."""
        self.connection.disconnect()  # type: ignore[no-untyped-call]


class Address:
    """Where the server is and how to log in. Its text never shows the password."""

    def __init__(self, url: str, stall_s: float = STALL_S) -> None:
        """Raises LaunchError for what is no redis://, rediss:// or unix:// URL."""
        self.stall_s = stall_s
        try:
            options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
            self._kind = options.pop("connection_class", Connection)
            kept = {k: v for k, v in options.items() if k in _TAKEN_FROM_URL or k[:4] == "ssl_"}
            unknown = sorted(set(options) - set(kept))
            if unknown:
                raise ValueError(f"unknown option {unknown[0]}")
            self._options = {
                **kept,
                "socket_timeout": stall_s,
                "socket_connect_timeout": stall_s,
                "retry": Retry(NoBackoff(), 0),
                "protocol": 2,
            }
            self._kind(**self._options)
        except (ValueError, TypeError, RedisError):  # whose texts may quote the password
            raise LaunchError(
                "a shared cache is named by a redis://, rediss:// or unix:// URL with at most db "
                "and ssl_ options"
            ) from None

    def dial(self, clock: Clock) -> Link:
        """A new connection, logged in. Blocks for a while; raises LinkFault alone."""
        wires: list[Wire] = []

        def log_in(connection: AbstractConnection) -> None:
            sock: socket.socket = vars(connection)["_sock"]
            wire = Wire(sock, Deadline.within(self.stall_s, clock), self.stall_s)
            _log_in(wire, connection)
            wires.append(wire)

        connection = self._kind(**self._options, redis_connect_func=log_in)
        try:
            connection.connect()
            return Link(connection, wires[0])
        except (RedisError, LinkFault, OSError, ValueError):
            connection.disconnect()
            raise LinkFault("refused") from None


def _log_in(wire: Wire, connection: AbstractConnection) -> None:
    words: list[list[str]] = []
    if connection.password or connection.username:
        user = [connection.username] if connection.username else []
        words.append(["AUTH", *user, connection.password or ""])
    if connection.db:
        words.append(["SELECT", str(connection.db)])
    for command in words:
        wire.send([request(*(word.encode() for word in command))])
        if wire.done() is not None:
            raise LinkFault("refused")


class LinkPool:
    """At most `links_max` connections in use. Thread-safe; one holder per connection."""

    def __init__(self, address: Address, clock: Clock, links_max: int) -> None:
        assert links_max > 0
        self._address, self._clock = address, clock
        self._permits = threading.Semaphore(links_max)
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._closed = False

    def take(self, deadline: Deadline) -> Link:
        """A connection to use alone until `give` or `drop`.

        Raises LinkFault: "busy" if all are in use until the deadline, "stalled" if the server does
        not answer for `stall_s`, "late", "refused", "closed".
        """
        if not self._permits.acquire(timeout=max(deadline.left_s, 0)):
            raise LinkFault("busy")
        try:
            return self._idle_one() or self._dialled(deadline)
        except BaseException:
            self._permits.release()
            raise

    def _idle_one(self) -> Link | None:
        """One that the server has not ended meanwhile, by a restart or its own idle limit."""
        while True:
            with self._lock:
                if self._closed:
                    raise LinkFault("closed")
                if not self._idle:
                    return None
                link = self._idle.pop()
            if link.wire.quiet:
                return link
            link.close()

    def _dialled(self, deadline: Deadline) -> Link:
        left_s, stall_s = deadline.left_s, self._address.stall_s
        if left_s <= 0:
            raise LinkFault("late")
        dialling = self.dial_aside(lambda outcome: None)
        try:
            return dialling.result(timeout=min(left_s, stall_s))
        except FutureTimeout:
            dialling.add_done_callback(self._adopt)
            raise LinkFault("late" if left_s < stall_s else "stalled") from None

    def dial_aside(self, then: Callable[[Future[Link]], None]) -> Future[Link]:
        """Open a connection on another thread, which calls `then` at the end."""
        dialling: Future[Link] = Future()
        dialling.add_done_callback(then)

        def run() -> None:
            try:
                link = self._address.dial(self._clock)
            except Exception as error:
                dialling.set_exception(
                    error if isinstance(error, LinkFault) else LinkFault("refused")
                )
            else:
                dialling.set_result(link)

        try:
            threading.Thread(target=run, name="redis-dial", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is going down
            dialling.set_exception(LinkFault("refused"))
        return dialling

    def _adopt(self, dialling: Future[Link]) -> None:
        if dialling.exception() is None:
            self.adopt(dialling.result())

    def adopt(self, link: Link) -> None:
        """Keep a good connection that nobody uses."""
        with self._lock:
            if not self._closed and not self._idle:
                self._idle.append(link)
                return
        link.close()

    def give(self, link: Link) -> None:
        """Back from `take`, its last reply read."""
        with self._lock:
            kept = not self._closed and not link.wire.suspect
            if kept:
                self._idle.append(link)
        self._permits.release()
        if not kept:
            link.close()

    def drop(self, link: Link, fault: LinkFault) -> None:
        """Back from `take`, in no known state. If it was closed, the idle ones are dropped too:
        a server's restart, most likely, and it befell them as well."""
        dropped = [link]
        with self._lock:
            if fault.cause == "closed":
                dropped, self._idle = [link, *self._idle], []
        self._permits.release()
        for each in dropped:
            each.close()

    def close(self) -> None:
        """Idle connections end now, those in use when they come back. Safe to repeat."""
        with self._lock:
            self._closed = True
            dropped, self._idle = self._idle, []
        for link in dropped:
            link.close()
