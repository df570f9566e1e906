"""Closed loop: each user asks, reads the whole answer, asks again. Measures what a client sees."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

from banyan.client import AsyncClient
from banyan.events import Delta, Finished, Started
from loadtest.workload import Conversation
from seams.bench import Row
from seams.errors import BanyanError, InternalError


@dataclass(frozen=True)
class Measured:
    """One request as its client saw it. Seconds; `gaps_s` between tokens after the first."""

    user: str
    turn: int
    replica: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    gaps_s: tuple[float, ...]
    error: str = ""


@dataclass(frozen=True)
class Run:
    """All requests of one run and how long it took."""

    requests: tuple[Measured, ...]
    wall_s: float


async def _ask(
    client: AsyncClient, user: str, turn: int, messages: list[dict[str, str]], max_tokens: int,
    no_cache: bool,
) -> tuple[Measured, str]:  # fmt: skip
    begin = time.perf_counter()
    times: list[float] = []
    text, replica, finished = "", "", None
    async for event in client.generate(
        messages, max_tokens=max_tokens, session=user, no_cache=no_cache
    ):
        if isinstance(event, Delta):
            times.extend([time.perf_counter()] * len(event.token_ids))
            text += event.text
        elif isinstance(event, Started):
            replica = event.replica
        elif isinstance(event, Finished):
            finished = event
    if finished is None or not times:
        raise InternalError("A stream ended without tokens or without its usage.")
    usage = finished.usage
    gaps = tuple(b - a for a, b in pairwise(times))
    measured = Measured(
        user, turn, replica, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens,
        times[0] - begin, time.perf_counter() - begin, gaps,
    )  # fmt: skip
    return measured, text


async def _converse(
    client: AsyncClient, conversation: Conversation, max_tokens: int, no_cache: bool
) -> list[Measured]:
    messages = [{"role": "system", "content": conversation.system}]
    done: list[Measured] = []
    for turn, question in enumerate(conversation.questions):
        messages.append({"role": "user", "content": question})
        try:
            measured, text = await _ask(
                client, conversation.user, turn, messages, max_tokens, no_cache
            )
        except BanyanError as error:
            failed = Measured(conversation.user, turn, "", 0, 0, 0, 0, 0, (), error.message)
            return [*done, failed]
        messages.append({"role": "assistant", "content": text})
        done.append(measured)
    return done


async def run(
    client: AsyncClient,
    conversations: list[Conversation],
    *,
    concurrency: int,
    max_tokens: int,
    no_cache: bool = False,
) -> Run:
    """Let at most `concurrency` users talk at once. Failed requests are in the result."""
    slots = asyncio.Semaphore(concurrency)

    async def one(conversation: Conversation) -> list[Measured]:
        async with slots:
            return await _converse(client, conversation, max_tokens, no_cache)

    begin = time.perf_counter()
    results = await asyncio.gather(*(one(c) for c in conversations))
    wall_s = time.perf_counter() - begin
    return Run(tuple(m for turns in results for m in turns), wall_s)


async def alternate(
    client: AsyncClient, conversations: list[Conversation], *, concurrency: int, max_tokens: int
) -> tuple[Run, Run]:
    """The conversations with the cache and without it, `concurrency` of them at a time.

    Each such part runs both ways, and every other part the other way round first, so that both see
    the same machine. Without the cache nothing is stored, so nothing changes for those with it.
    """
    parts: dict[bool, list[Run]] = {False: [], True: []}
    for number, first in enumerate(range(0, len(conversations), concurrency)):
        part = conversations[first : first + concurrency]
        for no_cache in (True, False) if number % 2 == 0 else (False, True):
            done = await run(
                client, part, concurrency=concurrency, max_tokens=max_tokens, no_cache=no_cache
            )
            parts[no_cache].append(done)
    return _joined(parts[False]), _joined(parts[True])


def _joined(parts: list[Run]) -> Run:
    return Run(tuple(m for p in parts for m in p.requests), sum(p.wall_s for p in parts))


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rows(cached: Run, uncached: Run | None) -> list[Row]:
    """Bench rows of a run, each against the same load without the cache if that was run too."""

    def figures(result: Run) -> dict[str, tuple[float, str]]:
        good = [m for m in result.requests if not m.error]
        gaps = [g for m in good for g in m.gaps_s] or [0.0]
        ttfts = [m.ttft_s for m in good] or [0.0]
        tokens = sum(m.completion_tokens for m in good)
        prompt = max(1, sum(m.prompt_tokens for m in good))
        return {
            "ttft_p50": (_percentile(ttfts, 0.5) * 1e3, "ms"),
            "ttft_p99": (_percentile(ttfts, 0.99) * 1e3, "ms"),
            "itl_p50": (_percentile(gaps, 0.5) * 1e3, "ms"),
            "itl_p99": (_percentile(gaps, 0.99) * 1e3, "ms"),
            "output_rate": (tokens / result.wall_s, "tokens/s"),
            "cached_share": (sum(m.cached_tokens for m in good) / prompt, "of prompt tokens"),
            "failed": (float(len(result.requests) - len(good)), "requests"),
        }

    ours, other = figures(cached), figures(uncached) if uncached else {}
    count = len(cached.requests)
    return [
        Row(name, value, unit, count, "no cache" if other else "", other.get(name, (None,))[0])
        for name, (value, unit) in ours.items()
    ]
