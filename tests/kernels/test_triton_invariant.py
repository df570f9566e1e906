"""Batch-invariant kernels: in the interpreter against references and against themselves in other
company, to the bit; compiled ahead of time; on a GPU where there is one. Fault scenarios 3 and 4.

The interpreter cannot do bf16 arithmetic; fp16 and fp32 run the same kernels.
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

from kernels import aot, triton_invariant, triton_rows
from kernels.attention import AttentionSpec
from kernels.batch import build_batch
from kernels.layout import DTYPES, PageLayout

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
LINEAR_MAX = {"fp32": 1e-5, "fp16": 2e-3}
NORM_MAX = 1e-6


def _interpret(dtype: str, first: int, count: int) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), str(ROOT / "tests" / "shared")]),
    }
    script = str(HERE / "invariant_interpreted.py")
    command = [sys.executable, script, dtype, str(first), str(count)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert len(report["cases"]) == count
    for errors in report["cases"]:
        check(errors, dtype, int(errors.pop("seed")))
    assert report["linear"] <= LINEAR_MAX[dtype] and report["norm"] <= NORM_MAX, report
    assert report["wrong"] == [], "these depend on the rows beside them"


@pytest.mark.parametrize(
    "dtype", ["fp32", pytest.param("fp16", marks=pytest.mark.soak)]
)  # a minute and more each
def test_interpreted(dtype: str) -> None:
    _interpret(dtype, 4, 4)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_interpreted_full_size(dtype: str) -> None:
    for first in range(12, 512, 100):
        _interpret(dtype, first, 100)


class _Recorder:
    """In a kernel's place: what it was launched with, apart from tensors, and its own settings."""

    def __init__(self, kernel: Any, launches: list[dict[str, Any]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **named: self._launch(given, named)

    def _launch(self, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        numbers = {}
        for value, parameter in zip(given, self._kernel.params, strict=False):
            if isinstance(value, torch.Tensor):
                aligned = value.data_ptr() % triton_invariant.ALIGNED_BYTES == 0
                numbers[parameter.name] = (str(value.dtype), aligned)
            elif not (isinstance(value, int) and parameter.do_not_specialize):
                numbers[parameter.name] = value  # an integer of these is compiled in
        self._launches.append(numbers | named)


def _record(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[dict[str, Any]]:
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(module, name, _Recorder(getattr(module, name), launches))
    return launches


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_what_is_compiled_does_not_follow_from_the_rows(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles, stages, warps, specialised numbers: all as for one row."""
    linears = _record(monkeypatch, triton_invariant, "linear_tile")
    norms = _record(monkeypatch, triton_invariant, "norm_rows")
    weight, gain = torch.zeros(48, 33, dtype=DTYPES[dtype]), torch.zeros(33)
    for rows in (1, 2, 15, 16, 17, 63, 64, 65, 512, 1000, 4096):
        for x in (torch.zeros(rows, 33), torch.zeros(rows + 1, 33)[1:]):  # not aligned
            triton_invariant.linear(x.to(weight.dtype), weight)
            triton_invariant.linear(torch.zeros(rows + 1, 33, dtype=weight.dtype)[1:], weight)
            triton_invariant.rms_norm(x, gain, 1e-6)
    assert len(linears) == 44 and len(norms) == 22
    assert all(launch == linears[0] for launch in linears)
    assert all(launch == norms[0] for launch in norms)


@pytest.mark.parametrize("window", [0, 20])
def test_what_attention_is_compiled_for_does_not_follow_from_the_batch(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = _record(monkeypatch, triton_rows, "attend_rows")
    merges = _record(monkeypatch, triton_rows, "merge_parts")
    spec = AttentionSpec(6, 2, 16, 16, 0.25, window=window)
    layout = PageLayout(1, 2, 16, 16, 16, "bf16")
    pages = layout.pages(torch.zeros(80, layout.block_bytes, dtype=torch.uint8))[0]
    for counts in ([1], [2], [16], [17, 1], [1] * 16, [1, 500, 3], [1200]):
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        positions = [place for count in counts for place in range(count)]
        tables = [list(range(-(-count // 16))) for count in counts]
        batch = build_batch(starts, counts, positions, tables, positions, 16, "cpu")
        q = torch.zeros(starts[-1], 6, 16, dtype=torch.bfloat16)
        triton_rows.RowAttention().attend(q, pages, batch, spec)
    assert len(walks) == len(merges) == 7
    assert all(launch == walks[0] for launch in walks)
    assert all(launch == merges[0] for launch in merges)


COMPILED = [v for v in aot.variants() if v.name in ("linear/k4096-bf16", "norm/w4096")]


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("variant", COMPILED, ids=lambda variant: variant.name)
def test_compiles_for_all(variant: aot.Variant, target: str) -> None:
    """The rest compiles with the decode kernels' variants."""
    built = aot.build(variant, target)
    assert built.binary_bytes > 1000
    assert built.shared_bytes <= aot.SHARED_BYTES_MAX[target]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_gpu_rows_do_not_depend_on_each_other(dtype: str) -> None:
    x = torch.randn(600, 1000, device="cuda").to(DTYPES[dtype])
    weight = torch.randn(700, 1000, device="cuda").to(DTYPES[dtype])
    whole = triton_invariant.linear(x, weight)
    gain = torch.randn(1000, device="cuda")
    normed = triton_invariant.rms_norm(x.float(), gain, 1e-5)
    for rows in (slice(0, 1), slice(5, 22), slice(300, 364), slice(599, 600), slice(1, 600)):
        assert torch.equal(triton_invariant.linear(x[rows], weight), whole[rows])
        assert torch.equal(triton_invariant.rms_norm(x[rows].float(), gain, 1e-5), normed[rows])
    for seed in range(50):
        case = make_case(seed, dtype, device="cuda")
        attend = triton_rows.RowAttention().attend
        check(compare(case, attend(case.q, case.pages, case.batch, case.spec, True)), dtype, seed)
