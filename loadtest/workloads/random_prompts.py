"""Prompts that share nothing: what a cluster does when no cache can help."""

from __future__ import annotations

from loadtest.text import Writer, rng_of
from loadtest.workloads.base import Message, Session, Shape, Turn


class RandomPrompts:
    """One turn a session, words of its own."""

    sessions_max: int | None = None

    def __init__(self, shape: Shape, writer: Writer, seed: str) -> None:
        self._shape, self._writer, self._seed = shape, writer, seed

    def session(self, number: int) -> Session:
        """See Workload."""
        rng = rng_of(self._seed, "random", number)
        output_tokens, input_tokens = self._shape.output_of(rng), self._shape.input_of(rng)
        said = Message("user", self._writer.write(rng, input_tokens))
        return Session(f"random-{number}", (Turn((said,), output_tokens),))
