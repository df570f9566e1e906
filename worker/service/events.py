"""EventHub: gets block events from the engine to the routers' Events streams, on the server's loop.

What is sent and in which order is EventLog's; here are only the waking, the engine's snapshots and
the regular digest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from banyan.v1 import internal_pb2
from worker.engine.client import EngineClient
from worker.engine.messages import CacheOp
from worker.service.event_log import Cursor, EventLog

log = logging.getLogger(__name__)

DIGEST_EVERY_S = 2.0
SNAPSHOT_EVERY_S_MIN = 0.25  # of one router; asking more often waits


class Feed:
    """One router's events: `next` waits for the next batch, snapshots included."""

    def __init__(self, hub: EventHub, cursor: Cursor) -> None:
        self._hub = hub
        self._cursor = cursor
        self._wake = asyncio.Event()
        self._requested = False
        self._not_before_s = 0.0

    def wake(self) -> None:
        """There may be something to send."""
        self._wake.set()

    def want_snapshot(self) -> None:
        """The router has lost the thread."""
        self._cursor.want_snapshot()
        self.wake()

    def begin(self, ops: Sequence[CacheOp]) -> None:
        """The engine's snapshot, valid now."""
        self._requested = False
        self._cursor.begin(ops)
        self.wake()

    async def next(self) -> internal_pb2.EventBatch:
        """The next batch; not to be changed."""
        while True:
            batch = self._cursor.take()
            if batch is not None:
                return batch
            if self._cursor.wants_snapshot and not self._requested:
                await self._request()
            await self._wake.wait()
            self._wake.clear()

    async def _request(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._not_before_s - loop.time()))
        self._not_before_s = loop.time() + SNAPSHOT_EVERY_S_MIN
        self._requested = True
        self._hub.request_snapshot(self)


class EventHub:
    """The log of this epoch and everyone who follows it."""

    def __init__(self, log: EventLog, engine: EngineClient) -> None:
        self._log = log
        self._engine = engine
        self._feeds: set[Feed] = set()
        self._repairs = 0
        self._loop = asyncio.get_running_loop()

    def open(self) -> Feed:
        """A new follower; it gets a snapshot first."""
        feed = Feed(self, Cursor(self._log))
        self._feeds.add(feed)
        return feed

    def close(self, feed: Feed) -> None:
        """Stop following."""
        self._feeds.discard(feed)

    def publish(self, ops: Sequence[CacheOp]) -> None:
        """Append one step's cache changes, in order."""
        if ops:
            self._log.append(ops)
            self._wake_all()

    async def marks(self) -> None:
        """Publish the digest every DIGEST_EVERY_S, for ever."""
        while True:
            await asyncio.sleep(DIGEST_EVERY_S)
            self._log.mark()
            self._wake_all()

    def _wake_all(self) -> None:
        for feed in self._feeds:
            feed.wake()

    def request_snapshot(self, feed: Feed) -> None:
        """Ask the engine; the answer keeps its place between the steps' outputs, since both reach
        the loop from the engine's thread in order."""

        def done(ops: tuple[CacheOp, ...]) -> None:
            self._loop.call_soon_threadsafe(self._answer, feed, ops)

        self._engine.snapshot(done)

    def _answer(self, feed: Feed, ops: tuple[CacheOp, ...]) -> None:
        if feed not in self._feeds:
            return
        feed.begin(ops)
        if self._log.digest_repairs > self._repairs:
            self._repairs = self._log.digest_repairs
            log.warning("the cache's content contradicted its events; the digest was set right")
