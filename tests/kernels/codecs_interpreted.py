"""Run in a process of its own with TRITON_INTERPRET=1, which must be set before Triton is imported:
compares decode attention over pages of codes with torch's over what the codes stand for, and prints
one JSON object.

usage: codecs_interpreted.py DTYPE FIRST_SEED SEEDS
"""

from __future__ import annotations

import json
import sys

import torch
from attention_cases import Case, make_case
from coded_pages import coded_case, decodable

from kernels import triton_codecs
from kernels.codecs.base import LayerCodec
from kernels.codecs.pages import CodecPages
from kernels.paged import PagedAttention

HEADS_MAX = 24  # query heads: the interpreter takes each program in turn
CODECS_PER_SEED = 2


def errors(case: Case, codec: LayerCodec) -> dict[str, float]:
    """The largest of output and lse; NaN counts as infinite."""
    pages, expected = coded_case(case, codec)
    assert isinstance(pages, CodecPages) and triton_codecs.can_decode(pages)
    turned = codec.rotate_q(case.q.float()).to(case.q.dtype)
    got = triton_codecs.decode(turned, pages, case.batch, case.spec, want_lse=True)
    q = case.q.float()
    exact = PagedAttention().attend(q, expected.pages, case.batch, case.spec, want_lse=True)
    assert got.lse is not None and exact.lse is not None
    found = {"out": codec.unrotate_o(got.out.float()) - exact.out, "lse": got.lse - exact.lse}
    nothing = (got.lse == -torch.inf) & (exact.lse == -torch.inf)
    found["lse"] = found["lse"].masked_fill(nothing, 0.0)
    return {name: float(x.abs().nan_to_num(nan=torch.inf).max()) for name, x in found.items()}


def run(dtype: str, first: int, count: int) -> dict[str, list[dict[str, float]]]:
    """Errors of each codec's cases; every seed takes the next codecs that fit it."""
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(first, first + count):
        case = make_case(seed, dtype, pure_decode=True)
        if case.spec.query_heads > HEADS_MAX:
            continue
        fitting = decodable(case)
        rarest = sorted(fitting, key=lambda name: len(found.get(name, [])))
        for name in rarest[:CODECS_PER_SEED]:
            told = errors(case, fitting[name])
            found.setdefault(name, []).append({"seed": seed, **told})
    return found


if __name__ == "__main__":
    dtype, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(run(dtype, first, count)))
