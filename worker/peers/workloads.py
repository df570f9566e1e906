"""What every engine is asked: rows' names and sizes, and their prompts; knows no engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

from worker.peers.protocol import Case

FLOOR = "decode_b1"  # the row that memory_floor_b1 is measured around
PREFILL_TOKENS = 2048  # what a step of a peer takes at least: how soon its whole batch decodes


@dataclass(frozen=True)
class Workload:
    """A row of the table: `requests` prompts of random tokens, behind one prefix, if any."""

    name: str
    kind: str  # of worker.peers.protocol.Case
    requests: int
    prompt_tokens: int
    output_tokens: int
    unit: str = "ms"
    prefix_tokens: int = 0
    keep: int = 0
    long: bool = False  # takes so long that half the rounds have to do

    def rounds(self, asked: int) -> int:
        """How many turns, of `asked`."""
        return (asked + 1) // 2 if self.long else asked

    def case(self, turn: int, vocab_tokens: int) -> Case:
        """Other prompts every turn: nothing but the prefix is ever cached."""
        rng = random.Random(f"{self.name} {turn}")
        low, high = min(1000, vocab_tokens // 4), min(40000, vocab_tokens)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(low, high) for _ in range(count)]

        prefix = tokens(self.prefix_tokens)
        return {
            "kind": self.kind,
            "prompts": [prefix + tokens(self.prompt_tokens) for _ in range(self.requests)],
            "output_tokens": self.output_tokens,
            "before": [prefix] if prefix else [],
            "keep": self.keep,
        }


def reads(times: int) -> Case:
    """Readings of the weights."""
    return {"kind": "read", "prompts": [], "output_tokens": 0, "before": [], "keep": times}


def decode(name: str, batch: int, prompt_tokens: int, steps: int, long: bool = False) -> Workload:
    """Enough output for `steps` steps of the whole batch after its last prompt was computed."""
    joining = -(-batch * prompt_tokens // PREFILL_TOKENS)
    output = steps + joining + 2
    return Workload(name, "steps", batch, prompt_tokens, output, keep=steps, long=long)


def workloads(steps: int) -> tuple[Workload, ...]:
    """In the order in which they run."""
    return (
        decode(FLOOR, 1, 24, steps),
        decode("decode_b8", 8, 24, steps),
        decode("decode_b32", 32, 24, steps),
        decode("decode_b8_ctx2000", 8, 2000 - steps, steps, long=True),
        Workload("prefill_512", "each", 3, 512, 1),
        Workload("ttft_cached_1892", "each", 3, 108, 1, prefix_tokens=1892),
        Workload("run_32x512x64", "batch", 32, 512, 64, unit="s", long=True),
    )


WARM_UPS = (
    Workload("one", "batch", 1, 24, 8),
    Workload("many", "batch", 8, 64, 8),
    Workload("long", "batch", 1, 512, 1),
)
