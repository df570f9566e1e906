"""Triton's decode attention over codes: in the interpreter against the reference over what the
codes stand for, and on a GPU where there is one. That it compiles: test_triton_decode.

The interpreter cannot do bf16 arithmetic; fp16 and fp32 run the same kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import compare, make_case
from coded_pages import PAIRS, coded_case, decodable

from kernels.backends import backend_for
from kernels.codecs.pages import CodecAttention, CodecPages

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


# Queries are rounded to their dtype once more, after they were turned: seen in fp16.
ERROR_MAX = {"fp32": {"out": 1e-4, "lse": 1e-4}, "fp16": {"out": 0.02, "lse": 0.02}}


def close(errors: dict[str, float], dtype: str, seed: int) -> None:
    """Raise AssertionError, naming the seed."""
    for name, most in ERROR_MAX[dtype].items():
        assert errors[name] <= most, f"seed {seed} {dtype}: {errors}"


def _interpret(dtype: str, first: int, count: int) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    }
    command = [sys.executable, str(HERE / "codecs_interpreted.py"), dtype, str(first), str(count)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert count < 9 or set(report) == set(PAIRS), "some codec met no case"
    for cases in report.values():
        for errors in cases:
            close(errors, dtype, int(errors.pop("seed")))


@pytest.mark.parametrize(("dtype", "seeds"), [("fp32", 9), ("fp16", 2)])
def test_interpreter_equals_reference(dtype: str, seeds: int) -> None:
    _interpret(dtype, 0, seeds)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_interpreter_equals_reference_full_size(dtype: str) -> None:
    for first in range(0, 200, 50):
        _interpret(dtype, first, 50)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_gpu_equals_reference(dtype: str) -> None:
    backend = CodecAttention(backend_for("cuda"))
    for seed in range(20):
        case = make_case(seed, dtype, pure_decode=True, device="cuda")
        for codec in decodable(case).values():
            pages, expected = coded_case(case, codec)
            assert isinstance(pages, CodecPages)
            got = backend.attend(case.q, pages, case.batch, case.spec, want_lse=True)
            close(compare(expected, got), dtype, seed)
