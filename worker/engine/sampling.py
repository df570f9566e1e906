"""SamplingParams: how one request chooses its tokens. Values only; the drawing is in sampler.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

TEMPERATURE_MIN = 1e-5  # below: greedy


@dataclass(frozen=True)
class SamplingParams:
    """Defaults mean off. temperature 0 is greedy (ties: the lowest id). OpenAI's terms.

    `logprobs` None = none; k >= 0 = the chosen token's and the k most likely. `max_tokens` > 0 is
    resolved against the context before it gets here. `logit_bias` is added to the logits of its
    tokens; where `allowed_token_ids` are given, no others are chosen. Both hold an id once.
    """

    seed: int
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()

    def may_stop(self, position: int) -> bool:
        """Whether the token at `position`, from 0, may be a stop: the first `min_tokens` of the
        output never are, as in transformers' min_new_tokens."""
        return position >= self.min_tokens

    @cached_property
    def allowed_array(self) -> npt.NDArray[np.int64]:
        """`allowed_token_ids`, made once: a list may be long, and every step needs it."""
        return np.array(self.allowed_token_ids, dtype=np.int64)

    @cached_property
    def is_plain(self) -> bool:
        """True if a token is the largest of the raw logits and nothing else is asked."""
        return (
            self.temperature < TEMPERATURE_MIN
            and self.min_tokens == 0
            and self.logprobs is None
            and not self.needs_history
            and not self.logit_bias
            and not self.allowed_token_ids
        )

    @cached_property
    def needs_history(self) -> bool:
        """True if a penalty looks at earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
