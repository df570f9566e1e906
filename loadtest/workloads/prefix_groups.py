"""Groups that share a long prefix: one system prompt per group, one question per session."""

from __future__ import annotations

from functools import cache

from loadtest.text import Writer, rng_of
from loadtest.workloads.base import Message, Session, Shape, Turn


class Prefixes:
    """The system prompts of the groups, each written once. For one workload."""

    def __init__(self, shape: Shape, writer: Writer, seed: str) -> None:
        self._tokens, self._writer, self._seed = shape.prefix_tokens, writer, seed
        self._written = cache(self._write)

    def of(self, group: int) -> tuple[Message, ...]:
        """The group's system message; none if it is to have no tokens."""
        return (Message("system", self._written(group)),) if self._tokens else ()

    def _write(self, group: int) -> str:
        return self._writer.write(rng_of(self._seed, "group", group), self._tokens)


class PrefixGroups:
    """One question of its own behind the prefix of a group."""

    sessions_max: int | None = None

    def __init__(self, shape: Shape, writer: Writer, seed: str) -> None:
        self._shape, self._writer, self._seed = shape, writer, seed
        self._prefixes = Prefixes(shape, writer, seed)

    def session(self, number: int) -> Session:
        """See Workload."""
        shape, rng = self._shape, rng_of(self._seed, "prefix", number)
        group = shape.chosen(rng, shape.groups)
        output_tokens, input_tokens = shape.output_of(rng), shape.input_of(rng)
        said = Message("user", self._writer.write(rng, input_tokens))
        turn = Turn((*self._prefixes.of(group), said), output_tokens)
        return Session(f"prefix-{number}", (turn,), f"group-{group}")
