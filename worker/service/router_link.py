"""RouterLink: the Attach and Events streams to one router, kept up for ever. It places nothing.

Attach and Events use separate connections and tasks, so that a snapshot or a router slow to read
its events never delays a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from banyan.v1 import internal_pb2, internal_pb2_grpc
from seams.channels import CHANNEL_OPTIONS, OWN_CONNECTION
from seams.errors import BanyanError, Unauthenticated, from_status
from seams.proof import NONCE_BYTES, matches, replica_proof, router_proof, session_token
from seams.rng import Rng
from worker.service.events import EventHub
from worker.service.sessions import Sessions

log = logging.getLogger(__name__)

HANDSHAKE_S_MAX = 10.0
WRITE_S_MAX = 10.0  # a heartbeat that cannot be written for so long means a dead router
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 0.5  # a router that is back is found again at once; a refused connect is cheap
REFUSED_RETRY_S = 30.0
HEARTBEAT_MS_MIN, HEARTBEAT_MS_MAX = 20, 60_000
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_OPTIONS = [*CHANNEL_OPTIONS, OWN_CONNECTION]


class _Ended(Exception):
    """The router ended a stream."""


class _Refused(Exception):
    """The router, or its proof, was refused: trying again soon is of no use."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class LinkContext:
    """What all links share. `hello` and `heartbeat` are asked anew each time; must not block."""

    secret: bytes
    hello: Callable[[], internal_pb2.Hello]
    heartbeat: Callable[[], internal_pb2.Heartbeat]
    sessions: Sessions
    events: EventHub
    rng: Rng


class Backoff:
    """Waits between attempts: doubling up to a bound, a random half to the whole of it."""

    def __init__(self, rng: Rng, first_s: float = BACKOFF_S_MIN, max_s: float = BACKOFF_S_MAX):
        self._rng = rng
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def reset(self) -> None:
        """The last attempt succeeded."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """How long to wait now. Mutates."""
        wait_s = self._next_s * (0.5 + 0.5 * self._rng.random())
        self._next_s = min(self._max_s, self._next_s * 2)
        return wait_s


@dataclass(frozen=True)
class _Session:
    router: str
    heartbeat_s: float
    events_token: str


class RouterLink:
    """The streams to one router at one address."""

    def __init__(self, target: str, context: LinkContext) -> None:
        self._target = target
        self._context = context
        self._beat_now = asyncio.Event()
        self._reason = ""  # of the last failure, so that each is logged once
        self.attached = False
        self.refusal = ""  # why the router refused this replica, until it takes it

    def beat(self) -> None:
        """Send the present state at once instead of at the next regular time."""
        self._beat_now.set()

    async def run(self) -> None:
        """Attach, again and again, until cancelled."""
        backoff = Backoff(self._context.rng)
        while True:
            wait_s = 0.0
            try:
                await self._attach(backoff)
            except _Refused as refusal:
                self.refusal = refusal.reason
                self._note(logging.WARNING, refusal.reason)
                wait_s = REFUSED_RETRY_S * (0.5 + 0.5 * self._context.rng.random())
            except Exception as error:  # whatever it was, the next attempt may succeed
                self._note(_level(error), _describe(error))
            await asyncio.sleep(wait_s or backoff.next_s())

    def _note(self, level: int, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            log.log(level, "not attached to the router at %s: %s", self._target, reason)

    async def _attach(self, backoff: Backoff) -> None:
        sessions, execute_token = self._context.sessions, ""
        try:
            async with grpc.aio.insecure_channel(self._target, options=_OPTIONS) as channel:
                call = _fleet(channel).Attach()
                async with asyncio.timeout(HANDSHAKE_S_MAX):
                    execute_token, events_token = await self._prove(call)
                    # Before the welcome: the router may dial Execute the moment it has sent it.
                    sessions.open(execute_token)
                    welcome = await self._greet(call)
                backoff.reset()
                await self._stay(call, welcome, events_token)
        finally:
            if execute_token:
                sessions.close(execute_token)

    async def _prove(self, call: Any) -> tuple[str, str]:
        """Both sides prove the secret; returns the tokens of Execute and Events."""
        secret, up = self._context.secret, internal_pb2.AttachUp
        nonce = self._context.rng.bits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")
        await call.write(up(greeting=internal_pb2.Greeting(nonce=nonce)))
        challenge = (await _answer(call, "challenge")).challenge
        if len(challenge.nonce) != NONCE_BYTES or not matches(
            router_proof(secret, nonce, challenge.nonce), challenge.proof
        ):
            raise _Refused(Unauthenticated("The router does not know the cluster secret.").message)
        proof = replica_proof(secret, nonce, challenge.nonce)
        await call.write(up(proof=internal_pb2.Proof(proof=proof)))
        return (
            session_token(secret, "execute", nonce, challenge.nonce),
            session_token(secret, "events", nonce, challenge.nonce),
        )

    async def _greet(self, call: Any) -> internal_pb2.Welcome:
        await call.write(internal_pb2.AttachUp(hello=self._context.hello()))
        welcome: internal_pb2.Welcome = (await _answer(call, "welcome")).welcome
        return welcome

    async def _stay(self, call: Any, welcome: internal_pb2.Welcome, token: str) -> None:
        beat_ms = min(max(welcome.heartbeat_ms, HEARTBEAT_MS_MIN), HEARTBEAT_MS_MAX)
        session = _Session(welcome.router, beat_ms / 1000, token)
        log.info("attached to router %s", session.router)
        self._reason = self.refusal = ""
        self.attached = True
        try:
            await _until_first(self._beats(call, session), self._downs(call), self._events(session))
        finally:
            self.attached = False

    async def _beats(self, call: Any, session: _Session) -> None:
        while True:
            beat = internal_pb2.AttachUp(heartbeat=self._context.heartbeat())
            async with asyncio.timeout(WRITE_S_MAX):
                await call.write(beat)
            try:
                async with asyncio.timeout(session.heartbeat_s):
                    await self._beat_now.wait()
            except TimeoutError:
                pass
            self._beat_now.clear()

    async def _downs(self, call: Any) -> None:
        while True:
            down = await call.read()
            if down is _EOF:
                raise _Ended
            if down.WhichOneof("message") == "refusal":
                raise _Refused(_refusal(down.refusal).message)

    async def _events(self, session: _Session) -> None:
        """Keep an Events stream for as long as the session lasts; its end is no one else's."""
        backoff, reason = Backoff(self._context.rng), ""
        while True:
            try:
                await self._events_once(session, backoff)
            except Exception as error:  # as above
                if _describe(error) != reason:
                    reason = _describe(error)
                    log.log(_level(error), "events to router %s broke: %s", session.router, reason)
            await asyncio.sleep(backoff.next_s())

    async def _events_once(self, session: _Session, backoff: Backoff) -> None:
        feed = self._context.events.open()
        try:
            async with grpc.aio.insecure_channel(self._target, options=_OPTIONS) as channel:
                metadata = (("banyan-session", session.events_token),)
                call = _fleet(channel).Events(metadata=metadata)

                async def controls() -> None:
                    while True:
                        control = await call.read()
                        if control is _EOF:
                            raise _Ended
                        if control.want_snapshot:
                            feed.want_snapshot()

                async def batches() -> None:
                    while True:
                        await call.write(await feed.next())
                        backoff.reset()

                await _until_first(controls(), batches())
        finally:
            self._context.events.close(feed)


def _fleet(channel: grpc.aio.Channel) -> Any:
    return internal_pb2_grpc.FleetStub(channel)  # type: ignore[no-untyped-call]


def _refusal(status: Any) -> BanyanError:
    return from_status(status.code, status.message or "The router refused this replica.")


async def _answer(call: Any, wanted: str) -> Any:
    down = await call.read()
    if down is _EOF:
        raise _Ended
    kind = down.WhichOneof("message")
    if kind == "refusal":
        raise _Refused(_refusal(down.refusal).message)
    if kind != wanted:
        raise _Refused("The router does not keep to the protocol.")
    return down


_EXPECTED = (_Ended, TimeoutError, grpc.RpcError, asyncio.InvalidStateError)


def _level(error: Exception) -> int:
    return logging.INFO if isinstance(error, _EXPECTED) else logging.ERROR


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code().name.lower()
    return "the router ended the stream" if isinstance(error, _Ended) else type(error).__name__


async def _until_first(*parts: Any) -> None:
    """Run coroutines together; the first exception cancels the others and is raised itself."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
