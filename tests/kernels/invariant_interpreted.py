"""Run in a process of its own with TRITON_INTERPRET=1, which must be set before Triton is imported:
the batch-invariant kernels against references, and every row in different company. Prints one JSON
object: errors, and the names of what was not the same to the last bit.

usage: invariant_interpreted.py DTYPE FIRST_SEED SEEDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
from attention_cases import compare, make_case
from row_sums import sum_rows_alike

from kernels import row_plan, triton_invariant
from kernels.attention import AttentionBatch, AttentionSpec
from kernels.batch import build_batch
from kernels.layout import DTYPES, PageLayout
from kernels.triton_rows import RowAttention

ROWS = 150
MATRICES = ((96, 64, False), (70, 130, True), (33, 17, True))
WIDTHS = (8, 100, 1000, 2100)
# Keys of each sequence, and how many of its last positions are rows: over a split of the keys.
SEQUENCES = ((525, 30), (40, 40), (17, 1), (130, 20))
TOKENS = 16
SPECS = {
    "plain": AttentionSpec(6, 2, 32, 32, 0.2),
    "window": AttentionSpec(6, 2, 32, 32, 0.2, window=37),
    "capped": AttentionSpec(3, 1, 24, 16, 0.3, soft_cap=5.0),
    "group of 20 with sinks": AttentionSpec(20, 1, 16, 16, 0.3, sinks=torch.linspace(-1, 1, 20)),
}
Parts = list[tuple[int, int, int]]  # of a step: sequence, first position, end


def attention_errors(dtype: str, first: int, count: int) -> list[dict[str, float]]:
    """Of each seed's case, prefill and decode mixed, against the reference."""
    found = []
    for seed in range(first, first + count):
        case = make_case(seed, dtype, pure_decode=seed % 4 == 0)
        got = RowAttention().attend(case.q, case.pages, case.batch, case.spec, want_lse=True)
        found.append({"seed": seed, **compare(case, got)})
    return found


def companies(rows: int) -> Iterator[slice]:
    """Numbers of rows on both sides of a tile's, wherever they begin."""
    for count in (1, 16, 17, 64, 65, 129):
        for first in (5, rows - count):
            yield slice(first, first + count)


def linear(dtype: str, wrong: list[str]) -> float:
    """The largest error, beyond the rounding of the result."""
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for outputs, inputs, has_bias in MATRICES:
        x, weight, bias = (
            (torch.randn(*shape, generator=generator) * inputs**-0.25).to(DTYPES[dtype])
            for shape in ((ROWS, inputs), (outputs, inputs), (outputs,))
        )
        given = bias if has_bias else None
        whole = triton_invariant.linear(x, weight, given)
        right = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
        error = (whole.double() - right).abs() - right.abs() * torch.finfo(whole.dtype).eps / 2
        largest = max(largest, float(error.max().nan_to_num(nan=torch.inf)))
        for rows in companies(ROWS):
            if not torch.equal(triton_invariant.linear(x[rows], weight, given), whole[rows]):
                wrong.append(f"linear {outputs} x {inputs}: {rows}")
    return largest


def norm(wrong: list[str]) -> float:
    """The largest error relative to the result's own size."""
    generator = torch.Generator().manual_seed(2)
    largest = 0.0
    for width in WIDTHS:
        x = torch.randn(20, width, generator=generator) * torch.logspace(-2, 2, 20).unsqueeze(1)
        weight = torch.randn(width, generator=generator)
        whole = triton_invariant.rms_norm(x, weight, 1e-5)
        right = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-5)
        largest = max(largest, float(((whole - right).abs() / (right.abs() + 1)).max()))
        for rows in (slice(0, 1), slice(3, 4), slice(7, 20), slice(19, 20)):
            if not torch.equal(triton_invariant.rms_norm(x[rows], weight, 1e-5), whole[rows]):
                wrong.append(f"norm {width}: {rows}")
    return largest


def table_of(sequence: int) -> list[int]:
    """Blocks in an order of their own, none shared."""
    before = sum(-(-length // TOKENS) for length, _ in SEQUENCES[:sequence])
    count = -(-SEQUENCES[sequence][0] // TOKENS)
    return [before + (i * 7 + 3) % count if count % 7 else before + i for i in range(count)]


def step(parts: Parts) -> AttentionBatch:
    starts = [0]
    for _, first, end in parts:
        starts.append(starts[-1] + end - first)
    return build_batch(
        starts,
        [end for _, _, end in parts],
        [position for _, first, end in parts for position in range(first, end)],
        [table_of(sequence) for sequence, _, _ in parts],
        [0] * starts[-1],
        TOKENS,
        "cpu",
    )


def schedules() -> dict[str, list[Parts]]:
    """Ways to compute every sequence's last rows, as steps."""
    whole = [(s, length - rows, length) for s, (length, rows) in enumerate(SEQUENCES)]

    def chunks(size: int) -> list[Parts]:
        return [
            [(s, at, min(at + size, end))]
            for s, first, end in whole
            for at in range(first, end, size)
        ]

    return {
        "one by one": chunks(1)[::9],
        "chunks of 7": chunks(7),
        "all at once": [whole],
        "all at once, backwards": [whole[::-1]],
        "decode beside prefill": [
            [whole[1], (0, 495, 496), (3, 110, 129)],
            [(0, 496, 515), (2, 16, 17), (3, 129, 130)],
            [(0, 515, 525)],
        ],
    }


def attention(dtype: str, wrong: list[str]) -> None:
    """Each row's bits in every schedule are those of its sequence computed alone at once."""
    generator = torch.Generator().manual_seed(3)
    blocks = sum(-(-length // TOKENS) for length, _ in SEQUENCES)
    for name, spec in SPECS.items():
        layout = PageLayout(1, spec.kv_heads, TOKENS, spec.qk_dim, spec.v_dim, dtype)
        numbers = torch.randn(blocks, layout.layer_elements, generator=generator)
        pages = layout.pages(numbers.to(DTYPES[dtype]).view(torch.uint8))[0]
        q = torch.randn(4, 600, spec.query_heads, spec.qk_dim, generator=generator)
        q = q.to(DTYPES[dtype])

        def attend(parts: Parts, q: torch.Tensor = q, pages=pages, spec=spec) -> torch.Tensor:  # type: ignore[no-untyped-def]
            rows = torch.cat([q[s, first:end] for s, first, end in parts])
            return RowAttention().attend(rows, pages, step(parts), spec).out

        lone = {s: attend([(s, end - n, end)]) for s, (end, n) in enumerate(SEQUENCES)}
        assert not any(out.isnan().any() for out in lone.values())
        memory = row_plan.WORKSPACE_BYTES_MAX
        for schedule, steps in schedules().items():
            # Backwards in many launches of few rows too.
            row_plan.WORKSPACE_BYTES_MAX = 1 if "backwards" in schedule else memory
            for parts in steps:
                out, at = attend(parts), 0
                for s, first, end in parts:
                    right = lone[s][first - (SEQUENCES[s][0] - SEQUENCES[s][1]) :][: end - first]
                    if not torch.equal(out[at : at + end - first], right):
                        wrong.append(f"{name}, {schedule}: sequence {s}, {first} to {end}")
                    at += end - first
        row_plan.WORKSPACE_BYTES_MAX = memory


def main() -> None:
    sum_rows_alike()
    dtype, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    wrong: list[str] = []
    report = {
        "cases": attention_errors(dtype, first, count),
        "linear": linear(dtype, wrong),
        "norm": norm(wrong),
    }
    attention(dtype, wrong)
    print(json.dumps({**report, "wrong": wrong}))


if __name__ == "__main__":
    main()
