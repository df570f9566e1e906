"""Compiles the Triton kernels ahead of time, without a GPU: proves that they build, not that they
run. `python -m kernels.aot [--json FILE]` prints what each costs on each target.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_codecs, triton_decode, triton_invariant, triton_rows
from kernels.attention import AttentionSpec
from kernels.codecs.base import VectorCodec
from kernels.codecs.fp8 import Fp8Vectors
from kernels.codecs.turboquant import TurboVectors
from kernels.codecs.uniform import UniformVectors
from kernels.layout import DTYPES
from seams.bench import Report, Row

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What one block of threads may have: A100 163 KiB, H100 and B200 227 KiB, MI300 64 KiB.
SHARED_BYTES_MAX = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
BINARIES = {"cuda": "cubin", "hip": "hsaco"}

_PLAIN = AttentionSpec(32, 8, 128, 128, 128**-0.5)
_EXOTIC = AttentionSpec(64, 8, 64, 64, 0.125, window=128, soft_cap=50.0)
_WIDE = AttentionSpec(4, 1, 256, 256, 0.0625, window=512)


@dataclass(frozen=True)
class Variant:
    """One kernel with its types and constants, as the launch would have them."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    launch: dict[str, Any] = field(default_factory=lambda: triton_decode.LAUNCH)


@dataclass(frozen=True)
class Built:
    """What a compilation gave. Sizes in bytes."""

    variant: str
    target: str
    shared_bytes: int
    binary_bytes: int
    seconds: float


def _split(name: str, spec: AttentionSpec, dtype: str, kv_positions: bool) -> Variant:
    types = {
        **dict.fromkeys(("q", "keys", "values"), f"*{dtype}"),
        **dict.fromkeys(("tables", "spans"), "*i32"),
        **dict.fromkeys(("positions", "kv_positions"), "*i64"),
        **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
        "scale": "fp32",
        **{f"{of}_stride": "i32" for of in ("block", "table", "kv_position", "kv_position_head")},
    }
    constants = triton_decode.split_constants(spec, 16) | {"HAS_KV_POSITIONS": kv_positions}
    return Variant(f"split/{name}", triton_decode.attend_split, types, constants)


def _reduce(name: str, spec: AttentionSpec, dtype: str, sinks: bool) -> Variant:
    types = {
        **dict.fromkeys(("part_out", "part_lse", "sinks", "lse"), "*fp32"),
        "spans": "*i32",
        "out": f"*{dtype}",
        "splits": "i32",
    }
    split = triton_decode.split_constants(spec, 16)
    constants = {key: split[key] for key in ("GROUP", "V_DIM", "BLOCK_V", "SPLIT")}
    return Variant(
        f"reduce/{name}", triton_decode.reduce_splits, types, constants | {"HAS_SINKS": sinks}
    )


def _rows(name: str, spec: AttentionSpec, dtype: str, kv_positions: bool) -> Variant:
    types = {
        **dict.fromkeys(("q", "keys", "values"), f"*{dtype}"),
        **dict.fromkeys(("tables", "tiles", "spans"), "*i32"),
        **dict.fromkeys(("positions", "kv_positions"), "*i64"),
        **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
        "scale": "fp32",
        **{f"{of}_stride": "i32" for of in ("block", "table", "kv_position", "kv_position_head")},
        **dict.fromkeys(("splits", "row_first"), "i32"),
    }
    constants = triton_rows.row_constants(spec, 16, DTYPES[dtype]) | {
        "HAS_KV_POSITIONS": kv_positions
    }
    launch = triton_rows.LAUNCH
    return Variant(f"rows/{name}", triton_rows.attend_rows, types, constants, launch)


def _codes(
    name: str, spec: AttentionSpec, dtype: str, kv_positions: bool, *codecs: VectorCodec
) -> Variant:
    types = {
        "q": f"*{dtype}",
        **dict.fromkeys(("keys", "values"), "*u8"),
        **dict.fromkeys(("key_table", "value_table", "part_out", "part_lse"), "*fp32"),
        **dict.fromkeys(("tables", "spans"), "*i32"),
        **dict.fromkeys(("positions", "kv_positions"), "*i64"),
        "scale": "fp32",
        **{f"{of}_stride": "i32" for of in ("block", "table", "kv_position", "kv_position_head")},
    }
    loads = [triton_codecs.load_of(codec, spec.kv_heads, torch.device("cpu")) for codec in codecs]
    keys, values = (load for load in loads if load is not None)
    constants = triton_codecs.code_constants(spec, 16, keys, values)
    constants |= {"HAS_KV_POSITIONS": kv_positions}
    return Variant(f"codes/{name}", triton_codecs.attend_codes, types, constants)


def _merge(name: str, spec: AttentionSpec, dtype: str) -> Variant:
    types = {
        **dict.fromkeys(("part_out", "part_lse", "sinks", "lse"), "*fp32"),
        **dict.fromkeys(("tiles", "spans"), "*i32"),
        "out": f"*{dtype}",
        **dict.fromkeys(("splits", "row_first"), "i32"),
    }
    row = triton_rows.row_constants(spec, 16, DTYPES[dtype])
    constants = triton_rows.merge_constants(spec, row)
    launch = triton_rows.LAUNCH
    return Variant(f"merge/{name}", triton_rows.merge_parts, types, constants, launch)


def _linear(name: str, outputs: int, inputs: int, dtype: str, bias: bool) -> Variant:
    types = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}") | {"rows": "i32"}
    constants = triton_invariant.linear_constants(outputs, inputs, DTYPES[dtype], bias)
    launch = triton_invariant.LINEAR_LAUNCH
    return Variant(f"linear/{name}", triton_invariant.linear_tile, types, constants, launch)


def _norm(name: str, width: int) -> Variant:
    types = dict.fromkeys(("x", "weight", "out"), "*fp32") | {"eps": "fp32", "rows": "i32"}
    constants = triton_invariant.norm_constants(width)
    launch = triton_invariant.NORM_LAUNCH
    return Variant(f"norm/{name}", triton_invariant.norm_rows, types, constants, launch)


def _coded() -> list[Variant]:
    """Every load function, every width of packed numbers."""

    def turbo(dim: int, bits: int) -> VectorCodec:
        return TurboVectors(dim, bits)

    return [
        _codes("d128-bf16", _PLAIN, "bf16", False, turbo(128, 4), turbo(128, 4)),
        _codes("k3v2-d64-window-fp16", _EXOTIC, "fp16", True, turbo(64, 3), turbo(64, 2)),
        _codes("k8-d128-fp16", _PLAIN, "fp16", False, Fp8Vectors(128), UniformVectors(128, 2)),
        _codes("d128-bf16-oscar", _PLAIN, "bf16", False, *[UniformVectors(128, 2)] * 2),
    ]


def variants() -> list[Variant]:
    """One of each kind of model: Llama 3, gpt-oss-like with everything on, Gemma-3-like."""
    return [
        _split("d128-bf16", _PLAIN, "bf16", False),
        _split("d64-window-cap-positions-fp16", _EXOTIC, "fp16", True),
        _split("d256-window-bf16", _WIDE, "bf16", False),
        _reduce("d128-bf16", _PLAIN, "bf16", False),
        _reduce("d64-sinks-fp16", _EXOTIC, "fp16", True),
        _rows("d128-bf16", _PLAIN, "bf16", False),
        _rows("d64-window-cap-positions-fp16", _EXOTIC, "fp16", True),
        _rows("d256-window-bf16", _WIDE, "bf16", False),
        _rows("d128-fp32", _PLAIN, "fp32", False),
        *_coded(),
        _merge("d128-bf16", _PLAIN, "bf16"),
        _linear("k4096-bf16", 6144, 4096, "bf16", False),
        _linear("k1000-bias-fp16", 1000, 1000, "fp16", True),
        _linear("k4096-fp32", 6144, 4096, "fp32", False),
        _norm("w4096", 4096),
        _norm("w1000", 1000),
    ]


def build(variant: Variant, target: str) -> Built:
    """Compile for a key of TARGETS, never from Triton's cache. Raises Triton's own errors."""
    types = {name: variant.types.get(name, "constexpr") for name in variant.kernel.arg_names}
    aligned = {  # torch's allocations are, and the launch specialises on it
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name == "block_stride"
    }
    source = ASTSource(variant.kernel, types, variant.constants, aligned)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        built = triton.compile(source, target=TARGETS[target], options=variant.launch)
    seconds = time.perf_counter() - began
    binary = built.asm[BINARIES[TARGETS[target].backend]]
    return Built(variant.name, target, built.metadata.shared, len(binary), seconds)


def build_all() -> Iterator[Built]:
    """Every variant for every target."""
    for variant in variants():
        for target in TARGETS:
            yield build(variant, target)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    report = Report()
    path = parser.parse_args().json
    for built in build_all():
        name = f"{built.variant}/{built.target}"
        report.add(
            Row(
                f"{name}/shared",
                built.shared_bytes,
                "bytes",
                1,
                "limit",
                SHARED_BYTES_MAX[built.target],
            )
        )
        report.add(Row(f"{name}/binary", built.binary_bytes, "bytes", 1))
        report.add(Row(f"{name}/compile", built.seconds, "s", 1))
    report.show(path)


if __name__ == "__main__":
    main()
