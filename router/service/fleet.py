"""The Fleet service: replicas attach here, and report here what their caches hold.

It proves peers, keeps one session per replica and its Execute stream, and passes facts on to the
core. Which replica serves what is the core's decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from banyan.v1 import internal_pb2, internal_pb2_grpc
from router.config import RouterConfig
from router.fleet import check_protocol
from router.placement import Core, ModelEntry
from router.service.executors import SESSION_KEY, Executor
from router.service.logs import note
from router.service.requests import Served
from router.service.resets import Door
from router.service.status import EOF, Context, abort, as_status, metadata_of
from router.service.textcache import TextCache
from seams.clock import Clock
from seams.errors import BanyanError, Incompatible, NoReplica, ReplicaLost, Unauthenticated
from seams.limits import check_message
from seams.proof import NONCE_BYTES, matches, replica_proof, router_proof, session_token
from seams.rng import Rng

HANDSHAKE_S_MAX = 10.0
DIAL_AGAIN_S = 1.0  # a replica that was not reached; a connection that broke is dialled at once
EVENTS_NOTED_S = 1.0
REPAIRS = ("gaps", "digest_mismatches", "malformed_ops")  # EventCounts that should stay 0
LOOK_AGAIN_S = 1.0  # who waits for a replica looks again so often, told or not
MODELS_KNOWN_MAX = 1024
KNOWN_S = 600.0  # a model without a replica is awaited for so long, then it is unknown


@dataclass(eq=False)
class Session:
    """One proven Attach stream. The newest of a replica is the one in force."""

    tokens: dict[str, str]  # by purpose: execute (and unary calls), events
    hello: internal_pb2.Hello
    executor: Executor | None = None
    open: bool = True
    stalled: bool = False  # by its last heartbeat
    gone: bool = False  # its lease is over; running streams are judged by their own Execute stream


class Fleet(internal_pb2_grpc.FleetServicer):
    """All replicas of this router. Lives on one event loop."""

    def __init__(
        self, config: RouterConfig, secret: bytes, core: Core, clock: Clock, rng: Rng
    ) -> None:
        self.texts = TextCache(clock)
        self._config = config
        self._secret = secret
        self._core = core
        self._clock = clock
        self._rng = rng
        self._sessions: dict[str, Session] = {}  # by replica
        self._known: dict[str, tuple[ModelEntry, float]] = {}  # as served last, and when
        self._changed = asyncio.Event()
        self._closing = False
        self._events_seen_s = clock.now()
        self._repairs = dict.fromkeys(REPAIRS, 0)

    # ---- what the client side asks ---------------------------------------------------------------

    def epoch(self, replica: str) -> int | None:
        """The epoch in force of a replica, None if it is unknown."""
        session = self._sessions.get(replica)
        return None if session is None else session.hello.epoch

    def numeric_class(self, replica: str) -> str:
        """Of an attached replica; "" if it is unknown."""
        session = self._sessions.get(replica)
        return "" if session is None else session.hello.numeric_class

    def executor(self, replica: str, epoch: int) -> Executor | None:
        """The way to a replica's epoch, dialled anew if it broke; None if it is not there."""
        session = self._sessions.get(replica)
        if session is None or session.hello.epoch != epoch or self._closing:
            return None
        if session.executor is None or session.executor.broken:
            session.executor = Executor(
                replica,
                epoch,
                session.hello.address,
                session.tokens["execute"],
                self._clock,
                self.wake,
            )
        return session.executor

    def reached_anew(self, replica: str, epoch: int, broken: Executor) -> bool:
        """Whether another connection than the one that broke leads to the replica's epoch now."""
        session = self._sessions.get(replica)
        if session is None or session.hello.epoch != epoch or session.executor is None:
            return False
        executor = session.executor
        return executor is not broken and executor.connected and not executor.broken

    def served(self, name: str) -> Served | None:
        """A model by name, as served now or until lately; None if nobody knows it."""
        known = self._known.get(name)
        return None if known is None else Served(known[0], self.texts.get(known[0].served))

    def model_names(self) -> list[str]:
        """The base models served now; if there are none, those served until lately."""
        entries = self._core.models() or {name: entry for name, (entry, _) in self._known.items()}
        return [name for name, entry in entries.items() if not entry.served.adapter]

    @property
    def replicas(self) -> int:
        """How many replicas have a session."""
        return len(self._sessions)

    def doors(self) -> list[Door]:
        """Of every replica whose lease is not over, by name."""
        return [
            Door(replica, session.hello.address, session.tokens["execute"])
            for replica, session in sorted(self._sessions.items())
            if not session.gone
        ]

    async def change(self, wait_s: float) -> bool:
        """Wait until something may have changed, and now and then anyway; False if no time is
        left to wait."""
        if wait_s <= 0:
            return False
        try:
            async with asyncio.timeout(min(wait_s, LOOK_AGAIN_S)):
                await self._changed.wait()
        except TimeoutError:
            pass
        return True

    def tick(self) -> None:
        """Let leases run out and dial what broke. The streams of a gone or stalled replica end,
        to be moved, if it is silent on them as well."""
        lease_s = self._config.lease_ms / 1000
        for replica, epoch in self._core.tick():
            note(logging.WARNING, "replica gone", replica=replica, epoch=epoch)
            session = self._sessions.get(replica)
            if session is not None and session.hello.epoch == epoch:
                session.gone, session.open = True, False
        for replica, session in list(self._sessions.items()):
            executor = session.executor
            silent = executor is None or executor.broken or executor.silent_s > lease_s
            if session.gone and silent:
                self._drop(session, ReplicaLost("The replica was lost."))
                del self._sessions[replica]
            elif session.stalled and executor is not None and executor.streams and silent:
                note(logging.WARNING, "replica stalled", replica=replica, streams=executor.streams)
                executor.close(ReplicaLost("The replica does not get on."))
            elif session.open:
                self._dial_again(session)
        self._note_events()
        self._remember_models()

    def _note_events(self) -> None:
        """Say so when replicas' event streams needed repair: the index was wrong for a while."""
        now_s = self._clock.now()
        if now_s - self._events_seen_s < EVENTS_NOTED_S:
            return
        self._events_seen_s = now_s
        counts = self._core.event_counts()
        repairs = {name: counts.get(name, 0) for name in REPAIRS}
        if repairs != self._repairs:
            self._repairs = repairs
            note(logging.INFO, "cache events repaired", **counts)

    def _dial_again(self, session: Session) -> None:
        executor = session.executor
        if executor is None or not executor.broken:
            return
        if executor.connected or self._clock.now() - executor.made_s > DIAL_AGAIN_S:
            self.executor(session.hello.replica, session.hello.epoch)

    def _remember_models(self) -> None:
        now_s = self._clock.now()
        for name, entry in self._core.models().items():
            self._known.pop(name, None)
            self._known[name] = (entry, now_s)
        for name, (_, seen_s) in list(self._known.items()):
            if now_s - seen_s > KNOWN_S or len(self._known) > MODELS_KNOWN_MAX:
                del self._known[name]
        self.texts.retain(entry.served for entry, _ in self._known.values())

    def wake(self) -> None:
        """Let everyone who waits in `change` look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    @staticmethod
    def _drop(session: Session, error: BanyanError) -> None:
        session.open = False
        if session.executor is not None:
            session.executor.close(error)

    async def close(self) -> None:
        """Break every Execute stream; nothing can be placed afterwards."""
        self._closing = True
        sessions = list(self._sessions.values())
        for session in sessions:
            self._drop(session, ReplicaLost("The router is stopping."))
        for session in sessions:
            if session.executor is not None:
                await session.executor.closed()

    # ---- Attach ----------------------------------------------------------------------------------

    async def Attach(self, _: AsyncIterator[internal_pb2.AttachUp], context: Context) -> None:
        """One replica's link, from its greeting until it breaks."""
        try:
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                tokens = await self._prove(context)
                hello = await self._read_hello(context)
                session = await self._greet(hello, tokens, context)
        except BanyanError as error:
            note(logging.WARNING, "replica refused", reason=error.message)
            await _write(context, refusal=as_status(error))
            return
        except (TimeoutError, grpc.RpcError):
            await abort(context, NoReplica("The replica did not complete its hello."))
        try:
            await self._stay(session, context)
        except BanyanError as error:
            note(logging.WARNING, "replica refused", reason=error.message)
            await _write(context, refusal=as_status(error))
        finally:
            self._link_lost(session)

    async def _prove(self, context: Context) -> dict[str, str]:
        """Both sides prove the cluster secret; returns the session's tokens."""
        up = await _read(context, "greeting")
        theirs = up.greeting.nonce
        if len(theirs) != NONCE_BYTES:
            raise Unauthenticated("The greeting's nonce has a wrong length.")
        ours = self._rng.bits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")
        proof = router_proof(self._secret, theirs, ours)
        await _write(context, challenge=internal_pb2.Challenge(nonce=ours, proof=proof))
        up = await _read(context, "proof")
        if not matches(replica_proof(self._secret, theirs, ours), up.proof.proof):
            raise Unauthenticated("The replica does not know the cluster secret.")
        purposes = ("execute", "events")
        return {p: session_token(self._secret, p, theirs, ours) for p in purposes}

    async def _read_hello(self, context: Context) -> internal_pb2.Hello:
        hello: internal_pb2.Hello = (await _read(context, "hello")).hello
        if not hello.replica or not hello.address:
            raise Incompatible("The hello names no replica or no address.")
        return hello

    async def _greet(
        self, hello: internal_pb2.Hello, tokens: dict[str, str], context: Context
    ) -> Session:
        await self._take_hello(hello, tokens)
        session = self._install(hello, tokens)
        config = self._config
        welcome = internal_pb2.Welcome(
            router=config.router, heartbeat_ms=config.heartbeat_ms, lease_ms=config.lease_ms
        )
        try:
            await _write(context, welcome=welcome)
        except BaseException:
            self._link_lost(session)
            raise
        return session

    async def _take_hello(self, hello: internal_pb2.Hello, tokens: dict[str, str]) -> None:
        """Fetch the text sides, then let the core judge: from then on requests may come."""
        for served in hello.models:
            await self.texts.ensure(served, hello.address, tokens["execute"])
        for replica in self._core.attach(hello):
            note(logging.INFO, "older epoch void", replica=replica)
        self._remember_models()

    def _install(self, hello: internal_pb2.Hello, tokens: dict[str, str]) -> Session:
        """Make the session the one in force. Streams of the same epoch go on where they are."""
        session = Session(tokens, hello)
        before = self._sessions.get(hello.replica)
        if before is not None:
            before.open = False
            if before.hello.epoch == hello.epoch:
                session.executor = before.executor
            else:
                self._drop(before, ReplicaLost("The replica was restarted."))
        self._sessions[hello.replica] = session
        note(logging.INFO, "replica attached", replica=hello.replica, epoch=hello.epoch)
        self.executor(hello.replica, hello.epoch)  # dialled before the first request needs it
        self.wake()
        return session

    async def _stay(self, session: Session, context: Context) -> None:
        hello = session.hello
        silence_s = max(1.0, 2 * self._config.lease_ms / 1000)
        try:
            while session.open:
                async with asyncio.timeout(silence_s):
                    up = await context.read()
                if up is EOF or not session.open:  # a newer session's figures are newer as well
                    return
                check_message(up)
                if up.HasField("heartbeat"):
                    session.stalled = up.heartbeat.load.stalled
                    self._core.heartbeat(hello.replica, hello.epoch, up.heartbeat)
                elif up.HasField("hello"):
                    await self._hello_again(session, up.hello)
        except TimeoutError:
            note(logging.WARNING, "replica silent", replica=hello.replica, epoch=hello.epoch)

    async def _hello_again(self, session: Session, hello: internal_pb2.Hello) -> None:
        """The served models changed; who it is must not."""
        known = session.hello
        if (hello.replica, hello.epoch, hello.address) != (
            known.replica,
            known.epoch,
            known.address,
        ):
            raise Incompatible("A later hello names another replica, epoch or address.")
        await self._take_hello(hello, session.tokens)
        session.hello = hello
        self.wake()

    def _link_lost(self, session: Session) -> None:
        hello, session.open = session.hello, False
        if self._sessions.get(hello.replica) is session:
            note(logging.INFO, "replica link lost", replica=hello.replica, epoch=hello.epoch)
            self._core.link_lost(hello.replica, hello.epoch)
            self.wake()

    # ---- Events ----------------------------------------------------------------------------------

    async def Events(self, _: AsyncIterator[internal_pb2.EventBatch], context: Context) -> None:
        """What an attached replica's cache gained and lost, in order."""
        session = self._session_of(metadata_of(context, SESSION_KEY))
        if session is None:
            await abort(context, Unauthenticated("This stream belongs to no attached session."))
        hello = session.hello
        while session.open:
            batch = await context.read()
            if batch is EOF:
                return
            try:
                check_message(batch)
                if (batch.replica, batch.epoch) != (hello.replica, hello.epoch):
                    raise Incompatible("The events name another replica than the session.")
            except BanyanError as error:
                await abort(context, error)
            if self._core.events(batch):
                await context.write(internal_pb2.EventControl(want_snapshot=True))

    def _session_of(self, token: str) -> Session | None:
        found = None
        for session in self._sessions.values():
            if matches(session.tokens["events"], token) and session.open:
                found = session
        return found


async def _read(context: Context, wanted: str) -> internal_pb2.AttachUp:
    up = await context.read()
    if up is EOF:
        raise Incompatible("The replica ended its hello early.")
    assert isinstance(up, internal_pb2.AttachUp)
    if up.HasField("hello"):
        check_protocol(up.hello)  # first: another protocol may have other limits
    check_message(up)
    if up.WhichOneof("message") != wanted:
        raise Incompatible(f"The replica's hello is out of order: {wanted} was due.")
    return up


async def _write(context: Context, **message: Any) -> None:
    await context.write(internal_pb2.AttachDown(**message))
