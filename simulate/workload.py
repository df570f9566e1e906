"""Workloads: requests with arrival times, as tokens of a coarser grain; no replica, no router.

What the radix cache takes for a token is a *cell* of `cell_tokens` real ones here: a trace knows no
finer content than its 512-token blocks, and a prompt of 12,000 tokens is 190 cells to compare.
Times, lengths and everything a router sees stay in real tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvstore.keys import BlockKey, ChainSpec, RootId, chain, root
from seams.errors import InvalidRequest
from seams.traces import HASHED_TOKENS

FINGERPRINT = "simulated"
OUTPUT_CELLS_FROM = 1 << 31  # ids of generated cells: nobody's prompt has them


@dataclass(frozen=True)
class Grain:
    """How tokens become cells, and cells blocks. Both in real tokens; a block is whole cells."""

    block_tokens: int = HASHED_TOKENS
    cell_tokens: int = 64

    def __post_init__(self) -> None:
        if self.cell_tokens < 1 or self.block_tokens % self.cell_tokens:
            raise InvalidRequest("A block must be a whole number of cells.")

    @property
    def block_cells(self) -> int:
        """Cells of a block: the block size of the engine."""
        return self.block_tokens // self.cell_tokens

    @property
    def root(self) -> RootId:
        """Where every chain starts."""
        return root(FINGERPRINT, "", self.block_tokens)

    @property
    def chain(self) -> ChainSpec:
        """The chain of a prompt's cells."""
        return ChainSpec(self.root, self.block_cells)

    def cells(self, tokens: int) -> int:
        """Cells that hold so many tokens."""
        return -(-tokens // self.cell_tokens)


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `cells` are the prompt's, `keys` those of its full blocks."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    cells: tuple[int, ...]
    keys: tuple[BlockKey, ...]
    session: str = ""


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, and what they may ask for at most."""

    grain: Grain
    requests: tuple[SimRequest, ...]
    max_tokens: int  # what every client asks for: nobody knows how long an answer gets

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    def unique_blocks(self) -> int:
        """Different blocks of all prompts, those that are not full left out."""
        return len({key for request in self.requests for key in request.keys})

    def faster(self, factor: float) -> Workload:
        """The same requests, arriving `factor` times as fast."""
        assert factor > 0
        return replace(
            self,
            requests=tuple(replace(r, at_s=r.at_s / factor) for r in self.requests),
        )

    def at_rate(self, requests_per_s: float) -> Workload:
        """The same requests at this mean rate."""
        if self.duration_s == 0.0:
            return self
        return self.faster(requests_per_s * self.duration_s / len(self.requests))

    def first(self, count: int) -> Workload:
        """The first requests alone."""
        return replace(self, requests=self.requests[:count])

    def spread(self, seed: int) -> Workload:
        """Arrivals that share a moment spread at random up to the next one: traces are rounded to
        seconds, and users are not."""
        rng = random.Random(seed)
        times = sorted({request.at_s for request in self.requests})
        following = dict(zip(times, [*times[1:], times[-1] + _tick_s(times)], strict=True))
        moved = [
            replace(r, at_s=r.at_s + rng.random() * (following[r.at_s] - r.at_s))
            for r in self.requests
        ]
        ordered = sorted(moved, key=lambda r: (r.at_s, r.number))
        return replace(self, requests=tuple(replace(r, number=i) for i, r in enumerate(ordered)))


def _tick_s(times: Sequence[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def request_of(
    grain: Grain, number: int, at_s: float, cells: Sequence[int], prompt_tokens: int,
    output_tokens: int, session: str = "",
) -> SimRequest:  # fmt: skip
    """A request with its keys. The last cell may be as empty as `prompt_tokens` says."""
    assert grain.cells(prompt_tokens) == len(cells) and output_tokens > 0
    made = chain(grain.chain, cells)
    return SimRequest(
        number, at_s, prompt_tokens, output_tokens, tuple(cells), tuple(made), session
    )


def chats(
    users: int, groups: int, turns: int, seed: int, *, grain: Grain | None = None,
    rate: float = 4.0, system_tokens: int = 4096, turn_tokens: int = 512,
    output_tokens: int = 200, think_s: float = 20.0,
) -> Workload:  # fmt: skip
    """Conversations that share their group's system prompt; users come at random, `rate` a second,
    and ask again about `think_s` after they asked."""
    grain, rng = grain or Grain(), random.Random(seed)
    made = Cells(grain)
    systems = [made.take(system_tokens) for _ in range(groups)]
    drafts: list[tuple[float, list[int], int, str]] = []
    begins_s = 0.0
    for user in range(users):
        begins_s += rng.expovariate(rate)
        prompt, at_s = list(rng.choice(systems)), begins_s
        for _ in range(turns):
            prompt += made.take(rng.randint(turn_tokens // 2, 2 * turn_tokens))
            length = max(1, min(4 * output_tokens, round(rng.expovariate(1 / output_tokens))))
            drafts.append((at_s, list(prompt), length, f"user-{user}"))
            prompt += made.take(length)  # the answer, as the next prompt has it
            at_s += rng.expovariate(1 / think_s)
    return _workload(grain, drafts, 4 * output_tokens)


def _workload(
    grain: Grain, drafts: Iterable[tuple[float, list[int], int, str]], max_tokens: int
) -> Workload:
    ordered = sorted(drafts, key=lambda draft: (draft[0], draft[3]))
    requests = tuple(
        request_of(grain, i, at_s, cells, len(cells) * grain.cell_tokens, output, session)
        for i, (at_s, cells, output, session) in enumerate(ordered)
    )
    return Workload(grain, requests, max_tokens)


class Cells:
    """New cells that nobody else has."""

    def __init__(self, grain: Grain) -> None:
        self._grain, self._next = grain, 0

    def take(self, tokens: int) -> list[int]:
        count = self._grain.cells(tokens)
        self._next += count
        return list(range(self._next - count, self._next))
