"""Run in a process of its own with TRITON_INTERPRET=1: decode attention of layers that are stored
twice, by Triton's kernels for pages of either kind; prints one JSON list of errors.

usage: hybrid_interpreted.py DTYPE FIRST_SEED SEEDS
"""

from __future__ import annotations

import json
import random
import sys

from hybrid_cases import errors, hybrid_case

from kernels.backends import GpuAttention
from kernels.hybrid import HybridAttention, Reach


def run(dtype: str, seed: int) -> dict[str, float]:
    """One row of each of a few sequences, before and behind the edges of sinks and window."""
    rng = random.Random(seed)
    reach = Reach(rng.choice([0, 16, 32]), rng.choice([1, 20, 48]))
    edge = reach.sink_tokens + reach.window_tokens
    lengths = [rng.choice([edge, edge + 1, 5]), edge + rng.randint(2, 90), edge + 300 * (seed % 2)]
    codec = rng.choice(["oscar", "turbo"])
    case = hybrid_case(seed, lengths, [1] * 3, reach, codec=codec, dtype=dtype)
    attention = HybridAttention(GpuAttention())
    return errors(case, attention.attend(case.q, case.pages, case.step, case.spec, want_lse=True))


if __name__ == "__main__":
    dtype, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps([run(dtype, seed) for seed in range(first, first + count)]))
