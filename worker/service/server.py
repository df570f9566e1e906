"""The replica's gRPC service, token ids only: Execute, Stream, TextFiles, ResetCache."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from banyan.v1 import api_pb2, internal_pb2, internal_pb2_grpc
from seams.clock import Clock
from seams.errors import BanyanError, InternalError, ModelNotFound, Overloaded, Unauthenticated
from seams.limits import check_message
from seams.textfiles import tokenizer_fingerprint
from seams.trailers import trailing
from worker.engine.messages import EngineRequest
from worker.service.convert import Roots, submitted, ticketed
from worker.service.dispatch import Dispatcher, FrameStream
from worker.service.resets import CacheResets
from worker.service.sessions import Sessions
from worker.service.tickets import open_ticket

log = logging.getLogger(__name__)

SESSION_KEY = "banyan-session"
DIRECT_CREDIT_TOKENS = 256  # a direct client may lag this far behind before its request pauses
CHUNK_BYTES = 256 * 1024
_CODES = {code.value[0]: code for code in grpc.StatusCode}

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Identity:
    """Who this replica is and what it shares with the cluster."""

    replica: str
    epoch: int
    secret: bytes


def grpc_code(error: BanyanError) -> grpc.StatusCode:
    """gRPC's enum member for an error of the tree."""
    return _CODES[int(error.status)]


async def _abort(context: Context, error: BanyanError) -> NoReturn:
    await context.abort(grpc_code(error), error.message, trailing(error))


def _session_of(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_KEY and isinstance(value, str):
            return value
    return ""


def _deadline_s(context: Context, clock: Clock) -> float | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else clock.now() + max(0.0, remaining_s)


def _unexpected(error: Exception) -> InternalError:
    """One request's surprise ends that request only; its text may hold anything, so it is kept."""
    log.error("a request failed unexpectedly: %s", type(error).__name__)
    return InternalError("The replica failed to process this request.")


class ReplicaService(internal_pb2_grpc.ReplicaServicer):
    """Serves routers and ticketed clients from one Dispatcher. Runs on the server's loop."""

    def __init__(
        self,
        identity: Identity,
        dispatcher: Dispatcher,
        sessions: Sessions,
        roots: Roots,
        text_files: Mapping[str, bytes],
        clock: Clock,
        resets: CacheResets,
    ) -> None:
        self._identity = identity
        self._resets = resets
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._roots = roots
        self._text_files = text_files
        self._fingerprint = tokenizer_fingerprint(text_files)
        self._clock = clock

    async def Execute(
        self, requests: AsyncIterator[internal_pb2.ExecuteUp], context: Context
    ) -> None:
        """A router's stream. Ends when the router ends it; its requests end with it."""
        if not self._sessions.valid(_session_of(context)):
            await _abort(context, Unauthenticated("This stream belongs to no attached session."))
        stream = self._dispatcher.open()
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            while (frame := await stream.next()) is not None:
                await context.write(frame)
        finally:
            reader.cancel()
            stream.end()
        if stream.overflowed:
            await _abort(context, Overloaded("The stream was not read fast enough."))

    async def _read(
        self, requests: AsyncIterator[internal_pb2.ExecuteUp], stream: FrameStream
    ) -> None:
        try:
            async for up in requests:
                self._take(up, stream)
        except (grpc.RpcError, grpc.aio.UsageError) as error:
            log.debug("an Execute stream broke: %s", type(error).__name__)
        finally:
            stream.end()

    def _take(self, up: internal_pb2.ExecuteUp, stream: FrameStream) -> None:
        kind = up.WhichOneof("message")
        if kind is None:
            return  # a message of a later version: nothing to answer to
        wire_id: str = getattr(up, kind).request_id
        try:
            if kind == "submit":
                stream.submit(wire_id, self._checked(up.submit, stream))
                return
            check_message(up)
            if kind == "cancel":
                stream.cancel(wire_id)
            else:
                stream.grant(wire_id, up.credit.tokens)
        except BanyanError as error:
            stream.fail(wire_id, error)
        except Exception as error:
            stream.fail(wire_id, _unexpected(error))

    def _checked(self, submit: internal_pb2.Submit, stream: FrameStream) -> EngineRequest:
        engine_id = stream.engine_id(submit.request_id)
        return submitted(submit, engine_id, self._roots, self._clock.now())

    async def Stream(self, request: internal_pb2.DirectRequest, context: Context) -> None:
        """A ticketed client's stream: frames until its request's last emission."""
        stream = self._dispatcher.open()
        try:
            wire_id = await self._begin_direct(request, context, stream)
            await self._write_direct(context, stream, wire_id)
        finally:
            stream.end()

    async def _begin_direct(
        self, request: internal_pb2.DirectRequest, context: Context, stream: FrameStream
    ) -> str:
        try:
            if self._dispatcher.refuses is not None:
                raise self._dispatcher.refuses
            check_message(request)
            who, now_ms = self._identity, time.time_ns() // 1_000_000
            ticket = open_ticket(who.secret, request.ticket, who.replica, who.epoch, now_ms)
            checked = ticketed(
                request,
                ticket,
                stream.engine_id(ticket.request_id),
                self._roots,
                who.secret,
                _deadline_s(context, self._clock),
                DIRECT_CREDIT_TOKENS,
            )
        except BanyanError as error:
            await _abort(context, error)
        except Exception as error:
            await _abort(context, _unexpected(error))
        stream.submit(ticket.request_id, checked)
        return ticket.request_id

    async def _write_direct(self, context: Context, stream: FrameStream, wire_id: str) -> None:
        """Write frames; a written token is consumed, so the furthest choice stays one window ahead.

        The furthest, not the slowest: a choice that waits for blocks must not hold back another
        that would free some.
        """
        consumed: dict[int, int] = {}
        granted = 0
        while (frame := await stream.next()) is not None:
            await context.write(frame)
            for emission in frame.emissions:
                if emission.last:
                    return
                tokens = consumed.get(emission.choice, 0) + len(emission.token_ids)
                consumed[emission.choice] = tokens
            furthest = max(consumed.values(), default=0)
            if furthest > granted:
                stream.grant(wire_id, furthest - granted)
                granted = furthest

    async def TextFiles(
        self, request: api_pb2.TextFilesRequest, context: Context
    ) -> AsyncIterator[api_pb2.FileChunk]:
        """The tokenizer and template files of a served model, whole, in chunks, for routers."""
        if not self._sessions.valid(_session_of(context)):
            await _abort(context, Unauthenticated("This call belongs to no attached session."))
        if not request.fingerprint or request.fingerprint != self._fingerprint:
            await _abort(context, ModelNotFound("This replica has no such tokenizer."))
        for name, content in self._text_files.items():
            for start in range(0, max(1, len(content)), CHUNK_BYTES):
                part = content[start : start + CHUNK_BYTES]
                last = start + CHUNK_BYTES >= len(content)
                yield api_pb2.FileChunk(name=name, data=part, last=last)

    async def ResetCache(
        self, request: api_pb2.ResetCacheRequest, context: Context
    ) -> api_pb2.ReplicaReset:
        """Drop what the caches hold, for a router, which has seen the admin key."""
        if not self._sessions.valid(_session_of(context)):
            await _abort(context, Unauthenticated("This call belongs to no attached session."))
        try:
            check_message(request)
            return await self._resets.run(tiers=request.tiers)
        except BanyanError as error:
            failure = error
        except Exception as error:
            failure = _unexpected(error)
        await _abort(context, failure)
