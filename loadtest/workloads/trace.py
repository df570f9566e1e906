"""Recorded traffic, replayed.

Where a trace (seams/traces.py) says which blocks a prompt shares with others, texts are made that
share just these; where it has lengths only, they share nothing.
"""

from __future__ import annotations

from functools import cache

from loadtest.text import Writer, rng_of
from loadtest.workloads.base import Message, Session, Turn
from seams.traces import HASHED_TOKENS, Recorded


class Trace:
    """One turn a session. Lengths, and the blocks that are shared, are divided by `scale`."""

    def __init__(self, recorded: list[Recorded], scale: float, writer: Writer, seed: str) -> None:
        self._recorded, self._scale = recorded, scale
        self._writer, self._seed = writer, seed
        self._block_tokens = max(1, round(HASHED_TOKENS / scale))
        self._block = cache(self._write)
        self.sessions_max: int | None = len(recorded)

    def session(self, number: int) -> Session:
        """See Workload."""
        recorded = self._recorded[number]
        tokens = max(1, round(recorded.input_tokens / self._scale))
        if recorded.hash_ids:
            text = self._shared(recorded, tokens)
        else:
            text = self._writer.write(rng_of(self._seed, "trace", number), tokens)
        output_tokens = max(1, round(recorded.output_tokens / self._scale))
        turn = Turn((Message("user", text),), output_tokens)
        return Session(f"trace-{number}", (turn,), at_s=recorded.at_s)

    def _shared(self, recorded: Recorded, tokens: int) -> str:
        """Its blocks' texts, the last one as full as it was."""
        *whole, last = recorded.hash_ids
        rest = min(max(1, tokens - len(whole) * self._block_tokens), self._block_tokens)
        texts = [self._block(hash_id, self._block_tokens) for hash_id in whole]
        return " ".join([*texts, self._block(last, rest)])

    def _write(self, hash_id: int, tokens: int) -> str:
        return self._writer.write(rng_of(self._seed, "block", hash_id), tokens)
