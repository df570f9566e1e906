"""Attention over layers that are stored twice, against every row computed by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hybrid_cases import BLOCK, HybridCase, errors, hybrid_case

from kernels.attention import Attended
from kernels.backends import backend_for
from kernels.hybrid import HybridAttention, Reach
from kernels.paged import PagedAttention

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# name -> lengths and rows of the sequences of a step
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([5, 40, 41, 57, 200], [1] * 5),
    "one decode": ([150], [1]),
    "fresh prefill": ([200], [200]),
    "chunk behind the window": ([230], [40]),
    "chunk across the edge": ([90], [80]),
    "mixed": ([130, 25, 60, 170, 41], [60, 25, 1, 1, 41]),
    "nothing behind": ([30, 12], [30, 1]),
}
REACHES = [Reach(32, 40), Reach(0, 40), Reach(16, 1), Reach(0, 1), Reach(96, 20)]


def attend(case: HybridCase) -> Attended:
    attention = HybridAttention(PagedAttention())
    return attention.attend(case.q, case.pages, case.step, case.spec, want_lse=True)


def close(found: dict[str, float], most: float = 1e-4) -> None:
    assert max(found.values()) <= most, found


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_every_row_equals_itself_alone(step: str, reach: Reach) -> None:
    lengths, rows = STEPS[step]
    case = hybrid_case(1, lengths, rows, reach)
    close(errors(case, attend(case)))


@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize(
    "other",
    [{"codec": "turbo"}, {"group": 5}, {"soft_cap": 3.0}, {"sinks": True}],
    ids=lambda other: next(iter(other)),
)
def test_other_codecs_and_logits(step: str, other: dict[str, object]) -> None:
    lengths, rows = STEPS[step]
    case = hybrid_case(2, lengths, rows, Reach(16, 24), **other)  # type: ignore[arg-type]
    close(errors(case, attend(case)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype: str) -> None:
    lengths, rows = STEPS["mixed"]
    case = hybrid_case(3, lengths, rows, Reach(16, 24), dtype=dtype)
    close(errors(case, attend(case)), 0.02)


def test_within_the_window_nothing_is_lost() -> None:
    """Bit for bit what pages in the model's dtype give."""
    lengths, rows = STEPS["nothing behind"]
    case = hybrid_case(4, lengths, rows, Reach(32, 40))
    exact = PagedAttention().attend(case.q, case.pages.exact, case.step.exact, case.spec)
    assert torch.equal(attend(case).out, exact.out)


def test_a_sequence_without_rows_is_passed_over() -> None:
    case = hybrid_case(5, [120, 90, 60], [30, 0, 5], Reach(16, 24))
    close(errors(case, attend(case)))


def test_sinks_are_whole_blocks() -> None:
    with pytest.raises(AssertionError, match="whole blocks"):
        hybrid_case(6, [40], [1], Reach(BLOCK + 1, 8))


def test_rows_are_not_written_through_mixed_pages() -> None:
    case = hybrid_case(7, [40], [1], Reach(16, 8))
    with pytest.raises(NotImplementedError, match="through HybridPages"):
        case.pages.mixed.write(torch.zeros(1), torch.zeros(1), torch.zeros(1))


def _interpret(dtype: str, first: int, count: int, most: float) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    }
    command = [sys.executable, str(HERE / "hybrid_interpreted.py"), dtype, str(first), str(count)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for seed, found in enumerate(json.loads(ran.stdout.splitlines()[-1]), first):
        print(f"seed {seed} {found}")
        close(found, most)


def test_interpreted_decode_equals_every_row() -> None:
    """The split kernels of either kind of page, merged."""
    _interpret("fp32", 0, 2, 1e-4)


@pytest.mark.soak
@pytest.mark.parametrize(("dtype", "most"), [("fp32", 1e-4), ("fp16", 0.02)])
def test_interpreted_decode_full(dtype: str, most: float) -> None:
    _interpret(dtype, 100, 60, most)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_gpu_equals_every_row(step: str) -> None:
    lengths, rows = STEPS[step]
    case = hybrid_case(8, lengths, rows, Reach(32, 40), device="cuda")
    attention = HybridAttention(backend_for("cuda"))
    close(
        errors(case, attention.attend(case.q, case.pages, case.step, case.spec, want_lse=True)),
        1e-3,
    )
