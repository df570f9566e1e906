"""Load tests in virtual time: a loop whose clock jumps, and servers whose speed is known."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from loadtest.arrivals import CLOSED, Arrivals
from loadtest.measure import Measurement, header
from loadtest.plan import Plan
from loadtest.records import Log, Record, Run
from loadtest.targets.base import Ask, Ended, Heard, Piece
from loadtest.text import Writer
from loadtest.tokens import WordTokens
from loadtest.workloads.catalog import maker
from seams.errors import Overloaded

T = TypeVar("T")
MACHINE = {"cpu": "none", "cores": 0}


class VirtualLoop(asyncio.SelectorEventLoop):
    """When nothing is left to do, time goes on to the next timer at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """At once: a thread's time is not the loop's."""
        done = self.create_future()
        done.set_result(func(*args))
        return done

    def _run_once(self) -> None:
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(scheduled)._scheduled = False
        if scheduled and not self._ready:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


class LoopClock:
    """The running loop's time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Silent:
    """A Watch that counts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.sent_count = self.ended_count = 0

    def began(self, load: str, requests: int) -> None:
        self.asked.append((load, requests))

    def sent(self) -> None:
        self.sent_count += 1

    def ended(self, record: Record) -> None:
        self.ended_count += 1


@dataclass
class QueueTarget:
    """A server that answers `servers` requests at a time, each token after `token_s`; replicas take
    turns. Words of a prompt that it has seen before at the same place are cached."""

    token_s: float = 0.01
    servers: int = 1
    replicas: int = 2
    fail_when: str = ""  # a prompt with this word is refused
    asked: list[Ask] = field(default_factory=list)
    _seen: set[tuple[str, ...]] = field(default_factory=set)
    _slots: asyncio.Semaphore | None = None

    async def open(self) -> None:
        self._slots = asyncio.Semaphore(self.servers)

    @property
    def facts(self) -> dict[str, str]:
        return {"protocol": "none", "model": "queue"}

    def counter(self) -> WordTokens:
        return WordTokens()

    async def ask(self, ask: Ask) -> AsyncGenerator[Heard, None]:
        assert self._slots is not None
        number = len(self.asked)
        self.asked.append(ask)
        words = [w for message in ask.messages for w in message.content.split()]
        if self.fail_when and self.fail_when in words:
            raise Overloaded("The queue is full.")
        async with self._slots:
            cached = self._cached(words)
            for token in range(ask.output_tokens):
                await asyncio.sleep(self.token_s)
                yield Piece(f"answer{number}.{token} ")
        yield Ended(len(words), cached, ask.output_tokens, f"replica-{number % self.replicas}")

    def _cached(self, words: list[str]) -> int:
        starts = [tuple(words[:length]) for length in range(1, len(words) + 1)]
        cached = sum(start in self._seen for start in starts)
        self._seen.update(starts)
        return cached

    async def aclose(self) -> None:
        self._slots = None


def plan_of(workload: str = "random", **changes: Any) -> Plan:
    """A small plan: 8 sessions, four at once."""
    arrivals = changes.pop("arrivals", Arrivals(CLOSED, concurrency=4))
    defaults: dict[str, Any] = {"sessions": 8, "warmup": 0}
    return Plan(workload, arrivals, **(defaults | changes))


async def measured(plan: Plan, target: Any, log: Log | None = None) -> Run:
    """The whole measurement of a plan."""
    await target.open()
    make = maker(plan.workload, plan.shape, plan.trace, plan.scale, sessions_max=plan.sessions_max)
    if log is None:
        log = Log(header_of(plan, target))
    writer = Writer(WordTokens())
    await Measurement(plan, target, make, writer, log, Silent(), LoopClock()).run()
    await target.aclose()
    return log.run


def header_of(plan: Plan, target: Any) -> dict[str, Any]:
    return header(plan, target, MACHINE, "banyan bench run", "2026-01-01T00:00:00+00:00")
