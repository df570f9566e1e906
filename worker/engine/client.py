"""EngineClient: the seam between a replica's server and its engine (a thread now)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worker.engine.messages import CacheOp, EngineLoad, EngineRequest, Forgotten, StepOutput

OnStep = Callable[[StepOutput], None]
"""Called on the engine's thread after each step that made something visible; must not block."""


class EngineClient(Protocol):
    """Every call returns at once and may come from any thread; answers arrive through OnStep.

    Each submitted request gets exactly one emission with `last`, whatever happens to it: refusals
    (too long, never fits) arrive there too, as its `error`. Only `submit` may raise.
    """

    def start(self, on_step: OnStep) -> None:
        """Begin stepping; blocks (no polling) while there is nothing to do."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest, without harm to it, if a live one has its id;
        Cancelled after `stop`."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request in any state; its blocks are free within two steps. Ignores unknown ids."""
        ...

    def grant(self, request_id: str, tokens: int) -> None:
        """Allow every choice of a request `tokens` more tokens. Unknown ids are ignored."""
        ...

    def load(self) -> EngineLoad:
        """The latest snapshot; never waits for a step."""
        ...

    def snapshot(self, done: Callable[[tuple[CacheOp, ...]], None]) -> None:
        """Between two steps, call `done` (on the engine's thread) with STORED ops for all cached
        full blocks, parents first; ops of later StepOutputs apply on top of it."""
        ...

    def forget_cache(self, done: Callable[[Forgotten], None]) -> None:
        """Between two steps, empty the prefix cache (worker/engine/forgetting.py): a StepOutput
        says what was removed, then `done` is called on the engine's thread. Never called if the
        engine stops or fails first."""
        ...

    def stop(self) -> None:
        """Fail what is running as Cancelled, stop the engine, join its thread. Safe to repeat."""
        ...
