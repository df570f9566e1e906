"""The Triton decode kernels: in the interpreter against the reference, on a GPU where there is one,
and compiled ahead of time for every target. Fault scenario 4.

The interpreter cannot do bf16 arithmetic; fp16 and fp32 run the same kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import check, compare, make_case

from kernels import aot
from kernels.backends import backend_for, is_pure_decode
from kernels.batch import build_batch

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def _interpret(dtype: str, first: int, count: int) -> dict[str, Any]:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    }
    command = [sys.executable, str(HERE / "triton_interpreted.py"), dtype, str(first), str(count)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert len(report["cases"]) == count
    for errors in report["cases"]:
        check(errors, dtype, int(errors.pop("seed")))
    return report


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_interpreter_equals_reference(dtype: str) -> None:
    report = _interpret(dtype, 0, 50)
    assert report["invariant"], "a sequence's result depends on its batch mates"


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_interpreter_equals_reference_full_size(dtype: str) -> None:
    for first in range(0, 500, 100):
        _interpret(dtype, first, 100)


COMMON = [v.name for v in aot.variants() if v.name.endswith("d128-bf16")]
REST = [v.name for v in aot.variants() if v.name not in COMMON]


def _build(name: str, target: str) -> None:
    (variant,) = (v for v in aot.variants() if v.name == name)
    built = aot.build(variant, target)
    assert built.binary_bytes > 1000
    assert built.shared_bytes <= aot.SHARED_BYTES_MAX[target]


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("name", COMMON)
def test_compiles_ahead_of_time(name: str, target: str) -> None:
    _build(name, target)


@pytest.mark.parametrize("name", REST)
def test_every_variant_compiles_for_one_target(name: str) -> None:
    _build(name, "sm_90")


@pytest.mark.soak
@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("name", REST)
def test_every_variant_compiles_for_all(name: str, target: str) -> None:
    _build(name, target)


def test_pure_decode_is_one_row_of_every_sequence() -> None:
    tables = [[0], [1]]
    assert is_pure_decode(build_batch([0, 1, 2], [3, 4], [2, 3], tables, [2, 19], 16, "cpu"))
    assert not is_pure_decode(build_batch([0, 1, 1], [3, 4], [2], tables, [2], 16, "cpu"))
    mixed = build_batch([0, 1, 3], [3, 4], [2, 2, 3], tables, [2, 18, 19], 16, "cpu")
    assert not is_pure_decode(mixed)


def test_cpu_needs_no_triton() -> None:
    """Triton exists for Linux only; the CPU path must not want it."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import kernels.backends as b, kernels.batch, kernels.reference, kernels.merge\n"
        "print(b.backend_for('cpu').name)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "torch", ran.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_gpu_equals_reference(dtype: str) -> None:
    backend = backend_for("cuda")
    for seed in range(50):
        case = make_case(seed, dtype, pure_decode=seed % 2 == 0, device="cuda")
        got = backend.attend(case.q, case.pages, case.batch, case.spec, want_lse=True)
        check(compare(case, got), dtype, seed)
