"""Run in a process of its own with TRITON_INTERPRET=1, which must be set before Triton is imported:
compares the Triton decode kernels with the reference and prints one JSON object.

usage: triton_interpreted.py DTYPE FIRST_SEED SEEDS
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from attention_cases import compare, make_case

from kernels import triton_decode
from kernels.attention import AttentionBatch, AttentionSpec
from kernels.batch import build_batch
from kernels.layout import PageLayout


def equals_reference(dtype: str, first: int, count: int) -> list[dict[str, float]]:
    """Errors of each seed's case."""
    found = []
    for seed in range(first, first + count):
        case = make_case(seed, dtype, pure_decode=True)
        got = triton_decode.decode(case.q, case.pages, case.batch, case.spec, want_lse=True)
        found.append({"seed": seed, **compare(case, got)})
    return found


def batch_mates_change_no_bit() -> bool:
    """A sequence alone against the same one beside a longer and a shorter."""
    layout = PageLayout(1, 2, 16, 32, 32, "fp32")
    generator = torch.Generator().manual_seed(2)
    lengths, tables = [300, 700, 20], [[*range(19)], [*range(19, 63)], [63, 64]]
    pool = torch.randn(65, layout.block_bytes // 4, generator=generator).view(torch.uint8)
    pages = layout.pages(pool)[0]
    q = torch.randn(3, 6, 32, generator=generator)

    def batch(chosen: list[int]) -> AttentionBatch:
        return build_batch(
            range(len(chosen) + 1),
            [lengths[s] for s in chosen],
            [lengths[s] - 1 for s in chosen],
            [tables[s] for s in chosen],
            [0] * len(chosen),
            16,
            "cpu",
        )

    for window in (0, 150):
        spec = replace(AttentionSpec(6, 2, 32, 32, 0.2), window=window)
        together = triton_decode.decode(q, pages, batch([0, 1, 2]), spec).out
        for s in range(3):
            alone = triton_decode.decode(q[s : s + 1], pages, batch([s]), spec).out
            if not torch.equal(alone[0], together[s]):
                return False
    return True


if __name__ == "__main__":
    dtype, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    report = {
        "cases": equals_reference(dtype, first, count),
        "invariant": batch_mates_change_no_bit(),
    }
    print(json.dumps(report))
