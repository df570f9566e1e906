"""Ours and the raw operation in turns, each call timed by itself. It knows no tier."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from kvstore.tiers.base import BlockName, Status, Tier
from seams.bench import Row, median

CALL_BLOCKS = 8  # of one call to a tier, as TierQueue makes them
SIZES = {"256k": 256 << 10, "1m": 1 << 20, "2m": 2 << 20}
SOON_S = 60.0
REPRESENTATION = "bf16-bench"


class Cost(NamedTuple):
    """One call: seconds that passed, and seconds of CPU of the calling thread."""

    wall_s: float
    cpu_s: float


def cost(work: Callable[[], object]) -> Cost:
    """Of one call of `work`."""
    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    work()
    cpu_ns, wall_ns = time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
    return Cost(wall_ns * 1e-9, cpu_ns * 1e-9)


class Pair(NamedTuple):
    """A call of ours, and the raw one that moves as many bytes in as many pieces."""

    ours: Callable[[], object]
    raw: Callable[[], object]


def by_two(threads: Executor, passes: Callable[[int], Iterable[Pair]], turn: int) -> Iterator[Pair]:
    """The calls of a pass two at a time, side by side on `threads`."""
    calls = list(passes(turn))
    for one, other in zip(calls[::2], calls[1::2], strict=True):
        yield Pair(
            partial(_side_by_side, threads, one.ours, other.ours),
            partial(_side_by_side, threads, one.raw, other.raw),
        )


def _side_by_side(threads: Executor, *works: Callable[[], object]) -> None:
    for future in [threads.submit(work) for work in works]:
        future.result()


class Race:
    """Calls of ours and of `against` with `blocks` of so many bytes each, in turns; who is first
    changes, so that what one leaves in caches is no help to always the same."""

    def __init__(
        self, name: str, against: str, block_bytes: int, blocks: int = CALL_BLOCKS
    ) -> None:
        self.name, self.against = name, against
        self._block_bytes, self._blocks = block_bytes, blocks
        self._ours: list[Cost] = []
        self._raw: list[Cost] = []

    def run(self, passes: Callable[[int], Iterable[Pair]], rounds: int) -> None:
        """`rounds` passes after one, number 0, that does not count."""
        for turn in range(rounds + 1):
            if turn == 1:
                self._ours.clear()
                self._raw.clear()
            for pair in passes(turn):
                self._turn(pair)

    def _turn(self, pair: Pair) -> None:
        if len(self._ours) % 2:
            self._raw.append(cost(pair.raw))
            self._ours.append(cost(pair.ours))
        else:
            self._ours.append(cost(pair.ours))
            self._raw.append(cost(pair.raw))

    def _rate(self, costs: Sequence[Cost], *, of_cpu: bool) -> float:
        taken_s = median([taken.cpu_s if of_cpu else taken.wall_s for taken in costs])
        return self._blocks * self._block_bytes / taken_s / 1e9

    def _cpu_us(self, costs: Sequence[Cost]) -> float:
        return median([taken.cpu_s for taken in costs]) / self._blocks * 1e6

    def row(self, *, of_cpu: bool = False) -> Row:
        """GB/s of ours against the raw one's. `of_cpu`: per second of the calling thread's CPU, for
        work that is nothing else: what others do on the machine matters less."""
        count = len(self._ours)
        ours, raw = (self._rate(costs, of_cpu=of_cpu) for costs in (self._ours, self._raw))
        return Row(self.name, ours, "GB/s", count, self.against, raw)

    @property
    def overhead_us(self) -> float:
        """CPU of ours per block beyond the raw operation's."""
        return self._cpu_us(self._ours) - self._cpu_us(self._raw)


def overhead_row(name: str, races: Sequence[Race]) -> Row:
    """CPU per block that is ours alone, of storing or loading, whichever is more."""
    worst = max(races, key=lambda race: race.overhead_us)
    others = {f"{race.name.split('_')[1]} us": race.overhead_us for race in races}
    return Row(name, worst.overhead_us, "us", len(worst._ours), others=others)


def memory(size: int, seed: int = 0) -> memoryview:
    """Page-aligned bytes in huge pages where there are any, touched; random with a `seed`."""
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapped, np.uint8)
    array[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8) if seed else 1
    return memoryview(mapped)


def cut(whole: memoryview, size: int) -> list[memoryview]:
    """Views of `size` bytes each, one after the other."""
    return [whole[at : at + size] for at in range(0, len(whole) - size + 1, size)]


def chain_names(seed: object, count: int) -> list[BlockName]:
    """A chain, parent before child, of 16-token blocks; others for another `seed`."""
    keys = [sha256(f"{seed} {at}".encode()).digest()[:16] for at in range(count + 1)]
    return [BlockName(keys[at + 1], keys[at], bytes(64)) for at in range(count)]


def store(tier: Tier, names: Sequence[BlockName], views: Sequence[memoryview]) -> None:
    """One call; all must be kept."""
    _all_ok(tier.store(names, views, SOON_S))


def load(tier: Tier, names: Sequence[BlockName], views: Sequence[memoryview]) -> None:
    """One call; all must come."""
    _all_ok(tier.load(names, views, SOON_S))


def _all_ok(statuses: Sequence[Status]) -> None:
    assert all(status is Status.OK for status in statuses), f"this measured failures: {statuses}"
