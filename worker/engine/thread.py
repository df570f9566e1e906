"""ThreadEngine: the EngineClient that runs an EngineCore in a thread of this process.

Calls from any thread become commands in a queue; the engine's thread applies them between steps and
sleeps on a condition while there is nothing to do. It knows no gRPC and no asyncio.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from seams.errors import BanyanError, Cancelled, InvalidRequest, NoReplica
from worker.engine.client import OnStep
from worker.engine.core import EngineCore
from worker.engine.forgetting import forget_cache
from worker.engine.messages import (
    CacheOp,
    Emission,
    EngineLoad,
    EngineRequest,
    Finish,
    Forgotten,
    StepOutput,
)

FLUSH_S = 5.0  # for what only host memory has, when the engine stops

_log = logging.getLogger(__name__)

_Command = Callable[[EngineCore], None]


class ThreadEngine:
    """Runs `core`, which nobody else may touch from `start` on. Methods: see EngineClient.

    If the loop itself fails, or too many steps in a row, every live request ends with NoReplica (it
    may go on elsewhere), later ones are refused with it, and `load().stalled` says so, in a last
    StepOutput too, until the process is replaced.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._live: dict[str, EngineRequest] = {}  # submitted, no last emission delivered yet
        self._stopping = False
        self._load = core.load()
        self._thread: threading.Thread | None = None
        self._on_step: OnStep = lambda output: None

    def start(self, on_step: OnStep) -> None:
        """Begin stepping; blocks (no polling) while there is nothing to do. Once."""
        assert self._thread is None, "the engine was started before"
        self._on_step = on_step
        self._core.on_wake(self._notify)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest, harming nobody, if a live request has its id;
        Cancelled if the engine was stopped. Every other refusal arrives as an emission."""
        with self._changed:
            if self._stopping:
                raise Cancelled("The engine has stopped.")
            if request.request_id in self._live:
                raise InvalidRequest("A request with this id is already being served.")
            self._live[request.request_id] = request
            self._enqueue(lambda core: core.submit(request))

    def cancel(self, request_id: str) -> None:
        """End a request in any state. Ignores unknown ids."""
        self._post(lambda core: core.cancel(request_id))

    def grant(self, request_id: str, tokens: int) -> None:
        """Allow every choice of a request `tokens` more tokens. Ignores unknown ids."""
        self._post(lambda core: core.grant(request_id, tokens))

    def load(self) -> EngineLoad:
        """The latest snapshot; never waits for a step."""
        return self._load

    def snapshot(self, done: Callable[[tuple[CacheOp, ...]], None]) -> None:
        """Between two steps, call `done` on the engine's thread with all cached full blocks."""
        self._post(lambda core: done(core.snapshot()))

    def forget_cache(self, done: Callable[[Forgotten], None]) -> None:
        """Between two steps, empty the prefix cache, say so, then call `done` on the engine's
        thread."""
        self._post(lambda core: self._forget(core, done))

    def stop(self) -> None:
        """End what is live as Cancelled, stop and join the thread. Safe to repeat."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _post(self, command: _Command) -> None:
        with self._changed:
            if not self._stopping:
                self._enqueue(command)

    def _enqueue(self, command: _Command) -> None:
        self._commands.append(command)
        self._changed.notify_all()

    # --- on the engine's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve_once():
                pass
        except Exception:
            _log.exception("the engine's loop failed; everything it was serving ends")
            self._fail()

    def _serve_once(self) -> bool:
        """Apply what was asked, make one step; False once stopping."""
        with self._changed:
            while not (self._stopping or self._commands or self._core.has_work()):
                self._changed.wait(self._until_deadline_s())
            commands, self._commands = self._commands, deque()
            stopping = self._stopping
        for command in commands:
            command(self._core)
        if stopping:
            self._cancel_all()
            self._core.close(FLUSH_S)
            return False
        output = self._core.step()
        self._load = self._core.load() if output is None else output.load
        if output is not None:
            self._deliver(output)
        return True

    def _forget(self, core: EngineCore, done: Callable[[Forgotten], None]) -> None:
        forgotten, cache = forget_cache(core.scheduler), core.memory.cache
        self._load, tiers = core.load(), core.scheduler.tiers
        ops = tuple(cache.take_ops()) if cache is not None else ()
        if tiers is not None:  # else a reset of theirs would be told a step later
            ops += tuple(tiers.take_ops())
        self._deliver(StepOutput(self._load.steps, (), ops, self._load))
        done(forgotten)

    def _until_deadline_s(self) -> float | None:
        deadline_s = self._core.next_deadline_s()
        if deadline_s is None:
            return None
        return min(max(0.0, deadline_s - self._core.clock.now()), threading.TIMEOUT_MAX)

    def _deliver(self, output: StepOutput) -> None:
        """Hand over what a step made visible. An id is free again once its last emission is."""
        if not (output.emissions or output.cache_ops):
            return
        ended = [e.request_id for e in output.emissions if e.last]
        with self._changed:
            for request_id in ended:
                self._live.pop(request_id, None)
        self._on_step(output)

    def _cancel_all(self) -> None:
        with self._changed:
            live = list(self._live)
        for request_id in live:
            self._core.cancel(request_id)
        while (output := self._core.step()) is not None:
            self._load = output.load
            self._deliver(output)

    # --- after the loop has failed -----------------------------------------------------------

    def _fail(self) -> None:
        """End everything, then refuse what still comes until `stop`: the core is not touched."""
        self._load = replace(self._load, stalled=True, running=0, waiting=0)
        while True:
            with self._changed:
                stopping, self._commands = self._stopping, deque()
                live, self._live = list(self._live.values()), {}
            self._end_unseen(live, NoReplica("The replica's engine has failed."))
            if stopping:
                return
            with self._changed:
                while not (self._stopping or self._commands):
                    self._changed.wait()

    def _end_unseen(self, live: list[EngineRequest], error: BanyanError) -> None:
        emissions = tuple(
            Emission(request.request_id, 0, 0, finish=Finish.ERROR, error=error, last=True)
            for request in live
        )
        try:
            self._on_step(StepOutput(self._load.steps, emissions, (), self._load))
        except Exception:
            _log.exception("the end of %d requests could not be delivered", len(emissions))
