"""One socket that speaks Redis' protocol under a deadline. It knows no blocks and no keys.

redis-py opens the socket (redis_link.py); from there on we speak ourselves, for three things its
client does not offer: a deadline over a whole exchange however slowly its bytes drip, a value read
straight to where it is wanted, and a reply of the wrong kind or size that is never buffered whole.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvstore.tiers.redis_layout import FIRST_BYTES_MAX, Buffer
from seams.clock import Clock

STALL_S = 0.5
"""A server that gives or takes less than SLOW_BYTES in this time is failing."""
SLOW_BYTES = 64 << 10
LINE_BYTES_MAX = 1024
SKIP_BYTES_MAX = 1 << 20
"""A value longer than wanted by more than this ends the connection instead of being read."""
REFUSALS = frozenset({"OOM", "READONLY", "NOPERM", "MISCONF", "NOREPLICAS", "NOAUTH", "LOADING"})
"""Errors that say how the server is, not that something is odd."""
CLOCK_S = 0.002  # what a timeout may come early
_READ_BYTES = 4096
_VECTOR_MAX = 512  # below every system's IOV_MAX
_ENDED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

Cause = Literal["late", "busy", "stalled", "closed", "odd", "refused"]
"""late: the deadline came. busy: it came before our turn. The rest is the server's doing."""


class LinkFault(Exception):
    """An exchange ended early; the connection is of no use any more. Never leaves the tier."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause: Cause = cause


class Deadline(NamedTuple):
    """A point in time, on one clock."""

    at: float
    clock: Clock

    @staticmethod
    def within(seconds: float, clock: Clock) -> Deadline:
        """`seconds` from now."""
        return Deadline(clock.now() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds; 0 or less once it is over."""
        return self.at - self.clock.now()


class ServerError(str):
    """The text of an error reply: a well-formed answer, so the connection goes on."""

    @property
    def code(self) -> str:
        """Its first word: OOM, READONLY, WRONGTYPE, ..."""
        return self.partition(" ")[0]


class Wire:
    """Requests out, replies in, in order. One thread at a time; every fault is a LinkFault."""

    def __init__(self, sock: socket.socket, deadline: Deadline, stall_s: float = STALL_S) -> None:
        self._sock = sock
        self._vectored = not isinstance(sock, ssl.SSLSocket)
        self._deadline, self._stall_s = deadline, stall_s
        self._window_at, self._window_bytes = deadline.clock.now(), 0
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._start = self._end = 0  # what of _buffer is read and not yet used
        self.suspect = False
        """Something odd but well framed came: end the connection after this exchange."""
        self.first = memoryview(bytearray(FIRST_BYTES_MAX))
        """Room for one part 0, for whoever uses this wire."""

    def begin(self, deadline: Deadline) -> None:
        """Everything until the next `begin` must be over by `deadline`."""
        self._deadline = deadline
        self._window_at, self._window_bytes = deadline.clock.now(), 0

    @property
    def quiet(self) -> bool:
        """Whether it is open and nothing waits to be read, as between two exchanges it must be.
        Over TLS a session ticket may wait: there only an end is seen."""
        poll = select.poll()
        poll.register(self._sock, _ENDED | (select.POLLIN if self._vectored else 0))
        return self._start == self._end and not poll.poll(0)

    # -- out -------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all, one after the other, copying none."""
        if not self._vectored:
            for buffer in buffers:
                self._send_some([memoryview(buffer)])
            return
        views = [memoryview(buffer) for buffer in buffers]
        for first in range(0, len(views), _VECTOR_MAX):
            self._send_some(views[first : first + _VECTOR_MAX])

    def _send_some(self, views: list[memoryview]) -> None:
        done = 0
        while done < len(views):
            self._arm()
            try:
                if self._vectored:
                    sent = self._sock.sendmsg(views[done:])
                else:
                    sent = self._sock.send(views[done])
            except OSError as error:
                raise self._fault(error) from None
            self._progress(sent)
            while done < len(views) and sent >= views[done].nbytes:
                sent -= views[done].nbytes
                done += 1
            if sent:
                views[done] = views[done][sent:]

    # -- in --------------------------------------------------------------------------------------

    def integer(self) -> int | ServerError:
        """The next reply, which must be an integer."""
        kind, text = self._head()
        if kind == b"-":
            return self._error(text)
        if kind != b":":
            raise LinkFault("odd")
        return _number(text)

    def done(self) -> ServerError | None:
        """The next reply, which must be OK: None."""
        kind, text = self._head()
        if kind == b"-":
            return self._error(text)
        if kind != b"+" or text != b"OK":
            raise LinkFault("odd")
        return None

    def bulk(self, into: memoryview) -> int | ServerError:
        """The next reply, which must be a value or nothing: its length, -1 for nothing.

        Fills the front of `into`; what is longer than it is skipped, and the wire is suspect.
        """
        kind, text = self._head()
        if kind == b"-":
            return self._error(text)
        if kind != b"$":
            raise LinkFault("odd")
        size = _number(text)
        if size < 0:
            return -1
        if size > len(into) + SKIP_BYTES_MAX:
            raise LinkFault("odd")
        self._read(into[:size])
        if size > len(into):
            self.suspect = True
            self._skip(size - len(into))
        if bytes(self._exactly(2)) != b"\r\n":
            raise LinkFault("odd")
        return size

    def _error(self, text: bytes) -> ServerError:
        error = ServerError(text.decode("ascii", "replace"))
        self.suspect = self.suspect or error.code not in REFUSALS
        return error

    def _head(self) -> tuple[bytes, bytes]:
        """(kind, text) of the next reply's first line."""
        while True:
            held = bytes(self._buffer[self._start : self._end])
            length = held.find(b"\r\n")
            if length >= 0:
                break
            if len(held) > LINE_BYTES_MAX:
                raise LinkFault("odd")
            self._more()
        self._start += length + 2
        return held[:1], held[1:length]

    def _more(self) -> None:
        """Read at least one byte more into _buffer."""
        if self._start:
            held = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(held)] = held
            self._start, self._end = 0, len(held)
        self._end += self._receive(self._buffer[self._end :])

    def _exactly(self, count: int) -> memoryview:
        """The next few bytes; valid until the next read."""
        while self._end - self._start < count:
            self._more()
        self._start += count
        return self._buffer[self._start - count : self._start]

    def _read(self, into: memoryview) -> None:
        """Fill `into`: what is in _buffer, then straight from the socket."""
        count = min(len(into), self._end - self._start)
        into[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        while count < len(into):
            count += self._receive(into[count:])

    def _skip(self, count: int) -> None:
        while count:
            count -= len(self._exactly(min(count, _READ_BYTES)))

    # -- time ------------------------------------------------------------------------------------

    def _receive(self, into: memoryview) -> int:
        self._arm()
        try:
            count = self._sock.recv_into(into)
        except OSError as error:
            raise self._fault(error) from None
        if count == 0:
            raise LinkFault("closed")
        self._progress(count)
        return count

    def _arm(self) -> None:
        left_s = self._deadline.left_s
        if left_s <= 0:
            raise LinkFault("late")
        self._sock.settimeout(min(left_s, self._stall_s))

    def _progress(self, count: int) -> None:
        self._window_bytes += count
        now = self._deadline.clock.now()
        if now - self._window_at >= self._stall_s:
            if self._window_bytes < SLOW_BYTES:
                raise LinkFault("stalled")
            self._window_at, self._window_bytes = now, 0

    def _fault(self, error: OSError) -> LinkFault:
        if not isinstance(error, TimeoutError):
            return LinkFault("closed")
        return LinkFault("late" if self._deadline.left_s <= CLOCK_S else "stalled")


def _number(text: bytes) -> int:
    """A decimal integer, and nothing that Python would take for one besides."""
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise LinkFault("odd")
    return int(text)
