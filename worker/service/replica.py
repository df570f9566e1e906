"""One replica: engine, gRPC server and links, and the order they start and end in. No Ray here."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import uvloop

from banyan.v1 import internal_pb2
from kvstore.tiered import TieredStore
from seams.clock import Clock
from seams.errors import InternalError, NoReplica
from seams.rng import SystemRng
from worker.config import ReplicaConfig
from worker.engine.client import EngineClient
from worker.engine.messages import StepOutput
from worker.models.base import ModelSpec
from worker.service import convert
from worker.service.convert import ServedRoot
from worker.service.dispatch import Dispatcher
from worker.service.event_log import EventLog
from worker.service.events import EventHub
from worker.service.hello import build_hello, served_roots
from worker.service.links import Links
from worker.service.listener import Listener
from worker.service.progress import ProgressWatch
from worker.service.resets import CacheResets
from worker.service.router_link import LinkContext
from worker.service.server import Identity, ReplicaService
from worker.service.sessions import Sessions
from worker.service.settings import advertised
from worker.service.tiers import capacities, tier_loads
from worker.service.warmup import measure_priors

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
STALL_S_MIN = 8.0
STALL_STEPS = 10  # or as long as so many full steps at the measured prefill speed
DRAIN_SETTLE_S = 0.5  # requests on their way while routers learn of the drain are still taken


@dataclass(frozen=True)
class ReplicaParts:
    """What a replica serves with: an engine not yet started, over a model that is loaded."""

    engine: EngineClient
    spec: ModelSpec
    blocks: tuple[int, ...]
    text_files: Mapping[str, bytes]
    clock: Clock
    tiers: TieredStore | None = None  # the engine's, which closes it; here read and cleared


def new_epoch() -> int:
    """Larger after every start. From the wall clock, since nothing durable counts the starts and a
    monotonic clock begins anew with the machine; a clock set back by less than a restart takes is
    harmless, and one set back by more only looks stale to routers until they lose the old epoch."""
    return time.time_ns()


class Replica:
    """`start` once, then `drain` and `stop` from any thread. The server has its own thread."""

    def __init__(
        self,
        config: ReplicaConfig,
        parts: ReplicaParts,
        secret: bytes,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.epoch = new_epoch()
        self.address = ""  # where routers reach it; known once started
        self._parts = parts
        self._secret = secret
        self._served: tuple[ServedRoot, ...] = served_roots(parts.spec, config.context_tokens)
        self._thread = threading.Thread(target=self._run, name="replica-server", daemon=True)
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._on_failure = on_failure
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._stalled = False

    # ---- from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Warm up, listen, begin to attach. Returns once it listens.

        Raises LaunchError if the address is not to be had or the warm-up fails.
        """
        self._thread.start()
        self._started.result()

    def drain(self, grace_s: float = 60.0) -> bool:
        """Stop taking requests and wait for those that run; True if all ended within `grace_s`."""
        return bool(self._call(self._drain(grace_s)).result())

    def stop(self) -> None:
        """Cancel what runs, close everything, join the thread. Safe to repeat."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def describe(self) -> dict[str, Any]:
        """Plain values for a launcher."""
        return {
            "replica": self.config.replica,
            "pid": os.getpid(),
            "epoch": self.epoch,
            "address": self.address,
            "served_name": self.config.served_name,
            "numeric_class": self._parts.spec.numeric_class,
            "blocks": list(self._parts.blocks),
            "context_tokens": self._served[0].context_tokens,
            "attached": self._links.attached,
            "refusal": self._links.refusal,
        }

    def _call(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- the server's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            log.exception("the replica's server ended unexpectedly")
            if self._on_failure is not None:
                self._on_failure()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._engine_failed = asyncio.Event()
        engine = self._parts.engine
        self._dispatcher = Dispatcher(engine)
        self._events = EventHub(EventLog(self.config.replica, self.epoch), engine)
        engine.start(self._on_step)
        self._listener = Listener(self.config.listen)
        try:
            await self._open()
            self._started.set_result(None)
            await self._until_stopped()
        finally:
            await self._close()

    async def _until_stopped(self) -> None:
        """Returns when asked to stop; raises if the engine fails, or what ended a task that was to
        run for ever."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        done, _ = await asyncio.wait([stopping, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _open(self) -> None:
        config, parts, sessions = self.config, self._parts, Sessions()
        priors = await measure_priors(
            self._dispatcher, parts.spec, parts.blocks, config.step_tokens_max
        )
        self._base = parts.engine.load()
        identity = Identity(config.replica, self.epoch, self._secret)
        roots = {served.root_id: served for served in self._served}
        resets = CacheResets(config.replica, parts.engine, parts.tiers)
        service = ReplicaService(
            identity, self._dispatcher, sessions, roots, parts.text_files, parts.clock, resets
        )
        self.address = advertised(config, await self._listener.open(service))
        self._links = Links(config.routers, self._link_context(sessions, priors))
        stall_s = max(
            STALL_S_MIN, STALL_STEPS * priors.prefill_s_per_token * config.step_tokens_max
        )
        watch = ProgressWatch(parts.clock, stall_s)
        self._tasks = [
            asyncio.create_task(part)
            for part in (
                self._links.run(),
                self._events.marks(),
                self._watch(watch),
                self._until_engine_failed(),
            )
        ]

    def _hello(self, priors: internal_pb2.Priors) -> internal_pb2.Hello:
        parts = self._parts
        return build_hello(
            self.config,
            parts.spec,
            self._served,
            parts.blocks,
            parts.text_files,
            epoch=self.epoch,
            address=self.address,
            priors=priors,
            rng=SystemRng(),
            tiers=capacities(parts.tiers, self.config, parts.spec),
        )

    def _link_context(self, sessions: Sessions, priors: internal_pb2.Priors) -> LinkContext:
        return LinkContext(
            secret=self._secret,
            hello=lambda: self._hello(priors),  # anew for each: tiers are measured as they work
            heartbeat=self._heartbeat,
            sessions=sessions,
            events=self._events,
            rng=SystemRng(),
        )

    def _heartbeat(self) -> internal_pb2.Heartbeat:
        load = self._parts.engine.load()
        tiers = tier_loads(self._parts.tiers, self._parts.spec)
        return convert.heartbeat(load, self._base, self._draining, self._stalled, tiers)

    def _on_step(self, output: StepOutput) -> None:
        """On the engine's thread: hand the step over, once."""
        self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: StepOutput) -> None:
        self._dispatcher.deliver(output)
        self._events.publish(output.cache_ops)
        if output.load.stalled:
            self._engine_failed.set()

    async def _until_engine_failed(self) -> None:
        """Raises then: the process must end, or it would look idle and draw every request."""
        await self._engine_failed.wait()
        raise InternalError("The replica's engine has failed.")

    async def _watch(self, watch: ProgressWatch) -> None:
        """Readiness follows progress (and draining); liveness is this loop answering at all."""
        while True:
            load = self._parts.engine.load()
            stalled = load.stalled or watch.stalled(load.steps, self._dispatcher.pending)
            if stalled != self._stalled:
                self._stalled = stalled
                log.warning("the engine %s", "is stalled" if stalled else "is stepping again")
                self._links.beat()
            await self._listener.set_ready(not stalled and not self._draining)
            await asyncio.sleep(WATCH_EVERY_S)

    async def _drain(self, grace_s: float) -> bool:
        self._draining = True
        await self._listener.set_ready(False)
        self._links.beat()
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.sleep(DRAIN_SETTLE_S)
                self._dispatcher.refuses = NoReplica("The replica is draining.")
                await self._dispatcher.idle()
        except TimeoutError:
            return False
        finally:
            self._dispatcher.refuses = NoReplica("The replica is draining.")
        return True

    async def _close(self) -> None:
        """Last emissions first, then the streams, then the links: routers hear of it in order."""
        self._dispatcher.refuses = NoReplica("The replica is stopping.")
        await self._loop.run_in_executor(None, self._parts.engine.stop)
        self._dispatcher.end()
        await self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
