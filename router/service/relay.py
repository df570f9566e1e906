"""Relay: serves one client stream. It moves bytes and waits; what happens is ClientStream's to say.

Between client and replica: places, submits, writes what the stream has for the client, grants
credit as it is taken, and leaves nothing booked or running behind, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from banyan.v1 import api_pb2, internal_pb2
from router.placement import Core, Placement, PlaceRequest
from router.service.executors import Executor
from router.service.fleet import Fleet
from router.service.logs import LOG, note
from router.stream import ClientStream, Phase
from seams.clock import Clock
from seams.errors import BanyanError, DeadlineExceeded, NoReplica, StatusCode

SETTLE_S_MAX = 5.0  # how long Finished waits for the replica's usage after a stop string

Write = Callable[[api_pb2.GenerateResponse], Awaitable[None]]


class Deadline:
    """The time a caller has left; None = as long as it takes."""

    def __init__(self, clock: Clock, remaining_s: float | None) -> None:
        self._clock = clock
        self._due_s = None if remaining_s is None else clock.now() + remaining_s

    @property
    def left_s(self) -> float | None:
        """Seconds left, 0 when it is over."""
        return None if self._due_s is None else max(0.0, self._due_s - self._clock.now())


async def find_place(
    core: Core, fleet: Fleet, request: Callable[[], PlaceRequest], wait_s: float
) -> Placement:
    """Place a request, waiting for a replica that can take it. Raises NoReplica."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + wait_s
    while True:
        wanted = request()  # may raise: the stream was stopped
        try:
            return core.place(wanted)
        except NoReplica:
            if not await fleet.change(due_s - loop.time()):
                raise


def log_decision(placement: Placement) -> None:
    """One line per decision with every candidate's cost by terms; no line from `warning` on."""
    if not LOG.isEnabledFor(logging.INFO):
        return
    decision = placement.decision
    note(
        logging.INFO,
        "decision",
        request_id=placement.request_id,
        replica=placement.replica,
        prompt_tokens=decision.prompt_tokens,
        available_tokens=decision.available_tokens,
        chosen_tokens=decision.chosen_tokens,
        reason=decision.reason,
        left_numeric_class=placement.left_numeric_class,
        candidates=[
            {
                "replica": c.replica,
                "matched_tokens": c.matched_tokens,
                "total_s": round(c.total_s, 6),
                **{term.name: round(term.seconds, 6) for term in c.terms},
            }
            for c in decision.candidates
        ],
    )


class Relay:
    """One Generate call. `run` is called once; the rest comes from the executor."""

    def __init__(
        self,
        stream: ClientStream,
        core: Core,
        fleet: Fleet,
        deadline: Deadline,
        queue_wait_s: float,
        placed: Callable[[Placement], None],
    ) -> None:
        self._stream = stream
        self._core = core
        self._fleet = fleet
        self._deadline = deadline
        self._queue_wait_s = queue_wait_s
        self._placed = placed
        self._id = stream.spec.request_id
        self._executor: Executor | None = None  # while a request of ours runs there
        self._booked = False
        # (replica, epoch) that failed this stream; the connection, if that is what broke
        self._failed: dict[tuple[str, int], Executor | None] = {}
        self._numeric_class = ""  # of the replica the stream ran on last
        self._wake = asyncio.Event()

    async def run(self, write: Write) -> None:
        """Serve the stream to its end. Raises the error it ended with, if any."""
        timeout = asyncio.timeout(self._deadline.left_s)
        try:
            async with timeout:
                await self._serve(write)
        except TimeoutError:
            if not timeout.expired():
                raise
            self._stream.fail(DeadlineExceeded("The time given for this request is over."))
        finally:
            self._leave()
        if self._stream.error is not None:
            raise self._stream.error

    def stop(self, error: BanyanError) -> None:
        """End the stream with an error, wherever it is."""
        self._stream.fail(error)
        self._leave()
        self._wake.set()

    async def _serve(self, write: Write) -> None:
        stream = self._stream
        while True:
            batch = stream.outbox.take()
            if batch:
                await self._deliver(batch, write)
            elif stream.phase is Phase.OVER:
                return
            elif stream.phase is Phase.PLACING:
                await self._place()
            else:
                await self._wait()

    async def _deliver(self, batch: list[api_pb2.GenerateResponse], write: Write) -> None:
        for response in batch:
            await write(response)
        self._stream.consumed(batch)
        self._grant()

    def _grant(self) -> None:
        if self._executor is not None and (grant := self._stream.credit_due()):
            self._executor.grant(self._id, grant)

    async def _wait(self) -> None:
        limit_s = SETTLE_S_MAX if self._stream.phase is Phase.SETTLING else None
        try:
            async with asyncio.timeout(limit_s) as timeout:
                await self._wake.wait()
        except TimeoutError:
            if not timeout.expired():
                raise
            self._stream.settle()
        self._wake.clear()

    # ---- placing ---------------------------------------------------------------------------------

    async def _place(self) -> None:
        try:
            placement = await find_place(
                self._core, self._fleet, self._request, self._wait_for_place_s()
            )
        except NoReplica as error:
            self._stream.fail(self._stream.last_loss or error)
            return
        self._booked = True
        self._placed(placement)
        self._submit(placement)

    def _submit(self, placement: Placement) -> None:
        executor = self._fleet.executor(placement.replica, placement.epoch)
        submit = self._stream.placed(placement, self._deadline.left_s)
        if executor is None:
            self.lost(NoReplica("The chosen replica has just gone."))
            return
        self._executor = executor
        executor.submit(self, submit)

    def _request(self) -> PlaceRequest:
        if self._stream.error is not None:  # stopped while it waited
            raise self._stream.error
        return self._stream.place_request(self._excluded(), self._numeric_class)

    def _excluded(self) -> frozenset[str]:
        """Replicas that failed this stream and are still the same. One whose connection broke is
        as good as any other once it was reached again: the stream's attempts are bounded."""
        fleet = self._fleet
        for (name, epoch), broken in list(self._failed.items()):
            anew = broken is not None and fleet.reached_anew(name, epoch, broken)
            if anew or fleet.epoch(name) != epoch:
                del self._failed[name, epoch]
        return frozenset(name for name, _ in self._failed)

    def _wait_for_place_s(self) -> float:
        loss = self._stream.last_loss
        if loss is not None and loss.status is StatusCode.RESOURCE_EXHAUSTED:
            return 0.0  # the others are full as well: the client is to come back later
        return self._queue_wait_s

    # ---- what the executor calls -----------------------------------------------------------------

    def receive(self, emission: internal_pb2.Emission) -> None:
        """The replica sent this."""
        stream = self._stream
        began = stream.first_token_seen
        cancel = stream.receive(emission)
        if stream.first_token_seen and not began:
            self._core.first_token(self._id)
        if cancel and self._executor is not None:
            self._executor.cancel(self._id)
        self._grant()
        self._follow()

    def lost(self, error: BanyanError) -> None:
        """The replica will send nothing more."""
        self._stream.lost(error)
        self._follow()

    def _follow(self) -> None:
        """Give up the placement once the stream has no more use for it."""
        if self._stream.phase is Phase.PLACING:
            placement = self._stream.placement
            assert placement is not None
            executor = self._executor
            broken = executor if executor is not None and executor.broken else None
            self._failed[placement.replica, placement.epoch] = broken
            self._numeric_class = self._fleet.numeric_class(placement.replica)
            note(logging.INFO, "stream moves", request_id=self._id, replica=placement.replica)
            self._release()
        elif self._stream.phase is Phase.OVER:
            self._release()
        self._wake.set()

    def _release(self) -> None:
        """Neither routed to from the executor nor booked at the core any longer."""
        if self._executor is not None:
            self._executor.forget(self._id)
            self._executor = None
        if not self._booked:
            return
        self._booked = False
        stream = self._stream
        if stream.phase is Phase.OVER and stream.error is None:
            self._core.finished(self._id, stream.delivered_tokens, stream.observed())
        else:
            self._core.failed(self._id)

    def _leave(self) -> None:
        """The call ends: cancel what still runs for it."""
        if self._executor is not None:
            self._executor.cancel(self._id)
        self._release()
