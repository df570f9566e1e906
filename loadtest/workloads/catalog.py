"""The workloads by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loadtest.text import Writer
from loadtest.workloads.agent import Agents
from loadtest.workloads.base import Shape, Workload
from loadtest.workloads.chat import Chats
from loadtest.workloads.prefix_groups import PrefixGroups
from loadtest.workloads.rag import Questions
from loadtest.workloads.random_prompts import RandomPrompts
from loadtest.workloads.trace import Trace
from seams.errors import InvalidRequest
from seams.traces import read_trace

TRACE = "trace"
MADE: dict[str, Callable[[Shape, Writer, str], Workload]] = {
    "random": RandomPrompts,
    "prefix-groups": PrefixGroups,
    "chat": Chats,
    "agent": Agents,
    "rag": Questions,
}
NAMES = (*MADE, TRACE)

Make = Callable[[Writer, str], Workload]
"""Makes the workload of one stage, from its own seed."""


def maker(
    name: str,
    shape: Shape,
    trace: Path | None = None,
    scale: float = 1.0,
    *,
    sessions_max: int | None = None,
    until_s: float | None = None,
) -> Make:
    """How to make the workload `name`. Raises InvalidRequest; a trace is read here, once: its first
    `sessions_max` requests, and of these the ones until `until_s`."""
    if name not in NAMES:
        raise InvalidRequest(f"There is no workload {name}; there are {', '.join(NAMES)}.")
    if (name == TRACE) != (trace is not None):
        raise InvalidRequest("The workload trace needs --trace FILE, and no other takes one.")
    if trace is None:
        return lambda writer, seed: MADE[name](shape, writer, seed)
    recorded = read_trace(trace, sessions_max)
    if until_s is not None:
        recorded = [one for one in recorded if one.at_s <= until_s]
    return lambda writer, seed: Trace(recorded, scale, writer, seed)
