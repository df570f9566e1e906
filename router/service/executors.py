"""Executor: the one Execute stream to an attached replica, shared by all requests placed there.

It hands each emission to the stream it belongs to, and tells every stream once when it breaks. It
decides nothing: what a lost stream does next is the stream's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from banyan.v1 import internal_pb2, internal_pb2_grpc
from router.service.logs import note
from router.service.status import EOF
from seams.channels import CHANNEL_OPTIONS, OWN_CONNECTION
from seams.clock import Clock
from seams.errors import BanyanError, ReplicaLost

SESSION_KEY = "banyan-session"
WAITING_MAX = 1 << 16  # messages to a replica that does not read


class Receiver(Protocol):
    """One request's stream. Neither call may block or raise."""

    def receive(self, emission: internal_pb2.Emission) -> None:
        """The replica sent this."""
        ...

    def lost(self, error: BanyanError) -> None:
        """The replica will send nothing more; called at most once, and nothing follows."""
        ...


def dial(address: str) -> grpc.aio.Channel:
    """A connection of its own to a replica."""
    return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, OWN_CONNECTION])


class Executor:
    """Lives on the event loop that made it. `broken` is final: then a new one must be made.

    `connected` once the replica has been reached; `on_connected` is called then.
    """

    def __init__(
        self,
        replica: str,
        epoch: int,
        address: str,
        token: str,
        clock: Clock,
        on_connected: Callable[[], None],
    ) -> None:
        self.replica = replica
        self.epoch = epoch
        self.broken = False
        self.connected = False
        self.made_s = clock.now()
        self._clock = clock
        self._on_connected = on_connected
        self._heard_s = self.made_s
        self._receivers: dict[str, Receiver] = {}
        self._waiting: deque[internal_pb2.ExecuteUp] = deque()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run(address, token))

    @property
    def silent_s(self) -> float:
        """How long the replica has sent no frame although it had something to do."""
        return self._clock.now() - self._heard_s

    @property
    def streams(self) -> int:
        """Requests in flight here."""
        return len(self._receivers)

    def submit(self, receiver: Receiver, submit: internal_pb2.Submit) -> None:
        """Queue a request; its emissions go to `receiver` until the last one or `forget`."""
        assert not self.broken and submit.request_id not in self._receivers
        if not self._receivers:
            self._heard_s = self._clock.now()
        self._receivers[submit.request_id] = receiver
        self._put(internal_pb2.ExecuteUp(submit=submit))

    def cancel(self, request_id: str) -> None:
        """Ask the replica to end a request; its last emission follows unless it is forgotten."""
        self._put(internal_pb2.ExecuteUp(cancel=internal_pb2.Cancel(request_id=request_id)))

    def grant(self, request_id: str, tokens: int) -> None:
        """Let a request emit more tokens."""
        credit = internal_pb2.Credit(request_id=request_id, tokens=tokens)
        self._put(internal_pb2.ExecuteUp(credit=credit))

    def forget(self, request_id: str) -> None:
        """Hand over nothing more of this request."""
        self._receivers.pop(request_id, None)

    def close(self, error: BanyanError) -> None:
        """Break it deliberately; its streams learn `error`. Safe to repeat."""
        self._task.cancel()
        self._break(error)

    async def closed(self) -> None:
        """Wait until its connection is released."""
        await asyncio.wait([self._task])

    def _put(self, up: internal_pb2.ExecuteUp) -> None:
        if self.broken:
            return
        self._waiting.append(up)
        self._wake.set()
        if len(self._waiting) > WAITING_MAX:
            self.close(ReplicaLost("The replica does not read what it is sent."))

    async def _run(self, address: str, token: str) -> None:
        try:
            async with dial(address) as channel:
                stub = internal_pb2_grpc.ReplicaStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Execute(metadata=((SESSION_KEY, token),))
                sender = asyncio.create_task(self._send(call))
                try:
                    await call.wait_for_connection()
                    self.connected = True
                    self._on_connected()
                    await self._read(call)
                finally:
                    sender.cancel()
                    call.cancel()
                    await asyncio.wait([sender])
        except grpc.RpcError as error:
            code = error.code().name.lower() if isinstance(error, grpc.aio.AioRpcError) else ""
            note(logging.INFO, "execute stream broke", replica=self.replica, status=code)
        finally:
            self._break(ReplicaLost("The replica was lost."))

    async def _send(self, call: Any) -> None:
        try:
            while True:
                while self._waiting:
                    await call.write(self._waiting.popleft())
                self._wake.clear()
                await self._wake.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader sees the end and says why

    async def _read(self, call: Any) -> None:
        while True:
            frame = await call.read()
            if frame is EOF:
                return
            self._heard_s = self._clock.now()
            for emission in frame.emissions:
                self._deliver(emission)

    def _deliver(self, emission: internal_pb2.Emission) -> None:
        receiver = self._receivers.get(emission.request_id)
        if receiver is None:
            return  # cancelled and forgotten, or never ours
        if emission.last:
            self.forget(emission.request_id)
        receiver.receive(emission)

    def _break(self, error: BanyanError) -> None:
        if self.broken:
            return
        self.broken = True
        self._waiting.clear()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.lost(error)
