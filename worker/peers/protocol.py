"""What a measured process speaks: JSON lines, a case in, a list of seconds out; standard library
only, because it runs under the peers' interpreters too.

First line out: {"ready": facts} or {"error": sentence}. Then for every case a {"seconds": [...]}
or, before it ends, an {"error": ...}. Between cases it waits for its standard input; at the end of
that it exits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict, cast


class Settings(TypedDict):
    """What every engine is started with. `model` is the folder; `extra` the peer's own argument."""

    model: str
    dtype: str  # auto | bf16 | fp16 | fp32
    threads: int
    pool_gib: float
    extra: str


class Case(TypedDict):
    """Greedy requests of one length each way. `before` is served first, untimed.

    kind steps: the last `keep` steps in which all of `prompts` decoded one token each
         batch: all prompts at once, until the last is done
         each:  every prompt alone, one after the other
         read:  `keep` readings of the weights, by engines that can
    """

    kind: str
    prompts: list[list[int]]
    output_tokens: int
    before: list[list[int]]
    keep: int


class Engine(Protocol):
    """What an adapter makes of an engine; all requests are greedy and ignore end tokens."""

    def facts(self) -> dict[str, Any]:
        """Plain values about the engine as it is when ready."""
        ...

    def add(self, prompt: Sequence[int], output_tokens: int, together: bool = False) -> None:
        """Queue a request. together: its second token may wait for the others' first ones, so that
        an engine which lets decoding go first has the whole batch decode at all."""
        ...

    def step(self) -> int:
        """Advance; how many tokens were sampled."""
        ...

    def busy(self) -> bool:
        """Whether requests are left."""
        ...


class Readable(Protocol):
    """An engine that can time its memory; only such a one is asked to."""

    def read(self) -> float:
        """Seconds of reading the weights once."""
        ...


def measure(engine: Engine, case: Case) -> list[float]:
    """The case's seconds. Raises ValueError if no step had the whole batch."""
    if case["kind"] == "read":
        readable = cast("Readable", engine)
        return [readable.read() for _ in range(case["keep"])]
    for prompt in case["before"]:
        _drain(engine, [prompt], 1)
    prompts, output = case["prompts"], case["output_tokens"]
    if case["kind"] == "each":
        return [_drain(engine, [prompt], output) for prompt in prompts]
    if case["kind"] == "batch":
        return [_drain(engine, prompts, output)]
    return _full_steps(engine, prompts, output)[-case["keep"] :]


def _drain(engine: Engine, prompts: list[list[int]], output: int) -> float:
    begin = time.perf_counter()
    for prompt in prompts:
        engine.add(prompt, output)
    while engine.busy():
        engine.step()
    return time.perf_counter() - begin


def _full_steps(engine: Engine, prompts: list[list[int]], output: int) -> list[float]:
    for prompt in prompts:
        engine.add(prompt, output, together=True)
    times = []
    while engine.busy():
        begin = time.perf_counter()
        if engine.step() == len(prompts):
            times.append(time.perf_counter() - begin)
    if len(times) < 2:
        raise ValueError("No step decoded the whole batch.")
    return times[1:]  # the first full step may have computed the last prompt too


def serve(make: Callable[[Settings], Engine]) -> None:
    """Be such a process: settings are the last argument, replies go where standard output went.

    What engines print themselves goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**reply: Any) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        engine = make(json.loads(sys.argv[-1]))
        tell(ready=engine.facts())
        for line in sys.stdin:
            tell(seconds=measure(engine, json.loads(line)))
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        tell(error=f"{type(error).__name__}: {text}")
        raise  # the whole of it, to standard error
