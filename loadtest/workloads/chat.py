"""Chats of several turns: each prompt holds all that was said, answers included."""

from __future__ import annotations

from loadtest.text import Writer, rng_of
from loadtest.workloads.base import Message, Session, Shape, Turn
from loadtest.workloads.prefix_groups import Prefixes


class Chats:
    """A user under a group's system prompt who asks, reads, thinks and asks again."""

    sessions_max: int | None = None

    def __init__(self, shape: Shape, writer: Writer, seed: str) -> None:
        self._shape, self._writer, self._seed = shape, writer, seed
        self._prefixes = Prefixes(shape, writer, seed)

    def session(self, number: int) -> Session:
        """See Workload."""
        shape, rng = self._shape, rng_of(self._seed, "chat", number)
        group = shape.chosen(rng, shape.groups)
        turns: list[Turn] = []
        for index in range(shape.turns):
            output_tokens, input_tokens = shape.output_of(rng), shape.input_of(rng)
            said = Message("user", self._writer.write(rng, input_tokens))
            if index == 0:
                turns.append(Turn((*self._prefixes.of(group), said), output_tokens))
            else:
                turns.append(Turn((said,), output_tokens, index - 1, wait_s=shape.think_s))
        return Session(f"chat-{number}", tuple(turns), f"group-{group}")
