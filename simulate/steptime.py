"""How long a step takes, as a sum of what it reads and computes; numbers only.

A step reads the weights once, the context of every sequence that decodes, and computes its prompt
tokens, each of which attends to all before it. The constants come from a run (simulate/fit.py); the
defaults are those of an 8B model on one GPU with 3.3 TB/s and some 400 TFLOP/s that are reached:
16 GB of weights, 128 KiB of keys and values a token, 16 GFLOP a prompt token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. All terms add up; none may be negative."""

    step_s: float = 5e-3  # of any step
    sequence_s: float = 2.5e-5  # for each sequence that decodes
    context_s: float = 4e-8  # for each token of their contexts
    prompt_s: float = 4e-5  # for each prompt token computed
    pair_s: float = 1.3e-9  # for each pair of a prompt token and one before it

    def decode_s(self, sequences: int, context_tokens: float) -> float:
        """A step that only decodes."""
        return self.step_s + sequences * self.sequence_s + context_tokens * self.context_s

    def prompt_extra_s(self, tokens: int, before: int) -> float:
        """What a chunk of `tokens` behind `before` others adds to its step."""
        return tokens * (self.prompt_s + self.pair_s * (before + tokens / 2))

    def scaled(self, prompt: float, decode: float) -> StepTime:
        """A device that is so many times slower at prompts and at decoding."""
        return StepTime(
            self.step_s * decode, self.sequence_s * decode, self.context_s * decode,
            self.prompt_s * prompt, self.pair_s * prompt,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """`steps` equal steps in a row, each `growth_s` longer than the one before it: sequences that
    decode and nothing else happens."""

    first_s: float
    growth_s: float = 0.0
    steps: int = 1

    def until_s(self, steps: int) -> float:
        """When the first `steps` of them are done, from the start."""
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    @property
    def total_s(self) -> float:
        """Of all."""
        return self.until_s(self.steps)

    def steps_by(self, elapsed_s: float) -> int:
        """The fewest steps that are not done before `elapsed_s`: the one under way then is the
        last. At least one, at most all."""
        a, b = self.growth_s / 2, self.first_s - self.growth_s / 2
        if a > 1e-18:
            steps = (math.sqrt(b * b + 4 * a * max(0.0, elapsed_s)) - b) / (2 * a)
        else:
            steps = elapsed_s / self.first_s
        count = max(1, min(self.steps, math.ceil(steps - 1e-9)))
        while count < self.steps and self.until_s(count) < elapsed_s - 1e-12:
            count += 1
        return count

    def steps_done(self, elapsed_s: float) -> int:
        """How many of them are whole by then; none, perhaps."""
        steps = self.steps_by(elapsed_s)
        return steps if self.until_s(steps) <= elapsed_s else steps - 1
