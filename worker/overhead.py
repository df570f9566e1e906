"""What the engine itself costs a step: CPU time around FakeModel, whose own work is left out.

Rows overhead_b{1,32,256}: one decode step from schedule to serialised frame, and its parts.
overhead_admit: one request from submit to its first token behind a cached prefix, with 255 others
running. It wraps what it measures and changes nothing in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import Any

from seams.bench import Row, median
from seams.clock import SystemClock
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.forgetting import forget_cache
from worker.engine.messages import CacheOp, EngineLoad, EngineRequest, Forgotten, StepOutput
from worker.engine.sampler import sample
from worker.engine.sampling import SamplingParams
from worker.models.fake import fake_model
from worker.service.dispatch import Dispatcher, FrameStream

PARTS = ("schedule", "plan", "sample", "commit", "frame")
PROMPT_TOKENS = 16
PREFIX_TOKENS = 512
BATCHES = (1, 32, 256)


class _Parts:
    """Seconds of this thread's CPU time a part took since the last `take`."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time added to `part`."""

        def timed(*args: Any) -> Any:
            begin = time.thread_time()
            result = call(*args)
            self._spent[part] = self._spent.get(part, 0.0) + time.thread_time() - begin
            return result

        return timed

    def take(self) -> dict[str, float]:
        """Exclusive seconds of each of PARTS, and of the model; forgets them."""
        spent, self._spent = self._spent, {}
        spent = {part: spent.get(part, 0.0) for part in (*PARTS, "step", "model")}
        spent["commit"] = spent["step"] - spent["schedule"] - spent["model"] - spent["sample"]
        spent["schedule"] -= spent["plan"]
        return spent


class _Direct:
    """An EngineClient without a thread: calls go straight to the core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        """Nothing to start."""

    def submit(self, request: EngineRequest) -> None:
        """See EngineClient."""
        self._core.submit(request)

    def cancel(self, request_id: str) -> None:
        """See EngineClient."""
        self._core.cancel(request_id)

    def grant(self, request_id: str, tokens: int) -> None:
        """See EngineClient."""
        self._core.grant(request_id, tokens)

    def load(self) -> EngineLoad:
        """See EngineClient."""
        return self._core.load()

    def snapshot(self, done: Callable[[tuple[CacheOp, ...]], None]) -> None:
        """See EngineClient."""
        done(self._core.snapshot())

    def forget_cache(self, done: Callable[[Forgotten], None]) -> None:
        """See EngineClient."""
        done(forget_cache(self._core.scheduler))

    def stop(self) -> None:
        """Nothing to stop."""


class _Bench:
    """An engine at work, from submit to serialised frames, with every part timed."""

    def __init__(self, batch: int, vocab_tokens: int) -> None:
        model = fake_model("full", context_tokens=4096, vocab_tokens=vocab_tokens)
        config = EngineConfig(blocks=(batch * 64 + 256,), running_max=batch)
        self.parts = _Parts()
        sampler = self.parts.timed("sample", sample)
        self.core = EngineCore(model, config, SystemClock(), sampler)
        for part, owner, name in (
            ("model", model, "execute"),
            ("schedule", self.core.scheduler, "plan"),
            ("plan", self.core.scheduler.builder, "build"),
        ):
            setattr(owner, name, self.parts.timed(part, getattr(owner, name)))
        self._step = self.parts.timed("step", self.core.step)
        self._frame = self.parts.timed("frame", self._deliver)
        self._dispatcher = Dispatcher(_Direct(self.core))
        self._stream = self._dispatcher.open()
        self._names = count()

    def submit(self, prompt: tuple[int, ...], output: int) -> None:
        """A greedy request through a router's stream."""
        wire_id = f"bench-{next(self._names)}"
        params = SamplingParams(seed=0, max_tokens=output, ignore_eos=True)
        engine_id = self._stream.engine_id(wire_id)
        self._stream.submit(wire_id, EngineRequest(engine_id, prompt, len(prompt), params))

    def step(self) -> dict[str, float]:
        """One step; seconds by part."""
        output = self._step()
        self._frame(output)
        return self.parts.take()

    def _deliver(self, output: StepOutput) -> None:
        self._dispatcher.deliver(output)
        for frame in _frames(self._stream):
            frame.SerializeToString()


def _frames(stream: FrameStream) -> Iterator[Any]:
    """What waits to be written, without a loop: `next` of a stream with frames does not wait."""
    while stream.waiting:
        yield _result(stream.next())


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")


def _prompt(number: int, tokens: int) -> tuple[int, ...]:
    """Distinct from the first token on for different numbers below 250."""
    return tuple((number + i * (7 + number)) % 250 for i in range(tokens))


def step_rows(batch: int, steps: int, vocab_tokens: int = 256) -> Iterator[Row]:
    """Medians over `steps` steps in which `batch` sequences decode one token each."""
    bench = _Bench(batch, vocab_tokens)
    for number in range(batch):
        bench.submit(_prompt(number, PROMPT_TOKENS), steps + 64)
    while len(bench.core.scheduler.running) < batch:
        bench.step()
    bench.step()
    taken = [bench.step() for _ in range(steps)]
    whole = [sum(parts[part] for part in PARTS) for parts in taken]
    yield Row(f"overhead_b{batch}", median(whole) * 1e6, "us a step", steps)
    for part in PARTS:
        value = median([parts[part] for parts in taken]) * 1e6
        yield Row(f"overhead_b{batch}_{part}", value, "us a step", steps)


def admit_row(batch: int, rounds: int) -> Row:
    """Median over requests that arrive one by one while batch - 1 others decode."""
    bench = _Bench(batch, 256)
    prefix = _prompt(1, PREFIX_TOKENS)
    bench.submit(prefix, 1)
    bench.step()
    for number in range(batch - 1):
        bench.submit(_prompt(number, PROMPT_TOKENS), 900)
    while len(bench.core.scheduler.running) < batch - 1:
        bench.step()
    taken = []
    for number in range(rounds):
        without = sum(bench.step()[part] for part in PARTS)
        begin = time.thread_time()
        bench.submit((*prefix, *_prompt(number, PROMPT_TOKENS)), 1)
        submitted = time.thread_time() - begin
        parts = bench.step()
        taken.append(submitted + sum(parts[part] for part in PARTS) - without)
    return Row(f"overhead_admit_b{batch}", median(taken) * 1e6, "us a request", rounds)


def overhead_rows(steps: int) -> Iterator[Row]:
    """All rows of this module."""
    for batch in BATCHES:
        yield from step_rows(batch, steps)
    yield admit_row(BATCHES[-1], steps)
