"""Agent loops: a plan, calls side by side that continue it, a step that reads what they said."""

from __future__ import annotations

import random

from loadtest.text import Writer, rng_of
from loadtest.workloads.base import Message, Session, Shape, Turn
from loadtest.workloads.prefix_groups import Prefixes


class Agents:
    """A DAG per session: plan -> `branches` calls at once -> join, `turns` times; a join is the
    plan of the next round. A group's agents share the prefix that describes their tools."""

    sessions_max: int | None = None

    def __init__(self, shape: Shape, writer: Writer, seed: str) -> None:
        self._shape, self._writer, self._seed = shape, writer, seed
        self._prefixes = Prefixes(shape, writer, seed)

    def session(self, number: int) -> Session:
        """See Workload."""
        shape, rng = self._shape, rng_of(self._seed, "agent", number)
        group = shape.chosen(rng, shape.groups)
        turns = [Turn((*self._prefixes.of(group), self._said(rng)), shape.output_of(rng))]
        for _ in range(shape.turns):
            plan = len(turns) - 1
            turns += [self._call(rng, plan) for _ in range(shape.branches)]
            calls = tuple(range(plan + 1, len(turns)))
            turns.append(Turn((self._said(rng),), shape.output_of(rng), plan, calls))
        return Session(f"agent-{number}", tuple(turns), f"group-{group}")

    def _call(self, rng: random.Random, plan: int) -> Turn:
        """What a tool gave, after the time that it took."""
        shape = self._shape
        return Turn((self._said(rng),), shape.output_of(rng), plan, wait_s=shape.think_s)

    def _said(self, rng: random.Random) -> Message:
        return Message("user", self._writer.write(rng, self._shape.input_of(rng)))
