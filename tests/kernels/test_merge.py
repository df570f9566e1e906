"""Attention over parts of the keys, put together, is attention over all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import pairwise

import pytest
import torch

from kernels.attention import Attended, AttentionSpec
from kernels.batch import build_batch
from kernels.layout import PageLayout
from kernels.merge import merge, with_sinks
from kernels.paged import PagedAttention
from kernels.reference import ReferenceAttention

LENGTH, TOKENS = 100, 16
LAYOUT = PageLayout(1, 2, TOKENS, 32, 32, "fp32")


def _pages():
    generator = torch.Generator().manual_seed(5)
    pages = LAYOUT.pages(torch.zeros(7, LAYOUT.block_bytes, dtype=torch.uint8))[0]
    rows = torch.randn(2, LENGTH, 2, 32, generator=generator)
    pages.write(torch.arange(LENGTH), rows[0], rows[1])
    return pages


def _attend(pages, q: torch.Tensor, blocks: range, spec: AttentionSpec) -> Attended:
    """One decode row over the keys of `blocks` only."""
    length = min(LENGTH, blocks.stop * TOKENS) - blocks.start * TOKENS
    batch = build_batch([0, 1], [length], [length - 1], [list(blocks)], [0], TOKENS, "cpu")
    return PagedAttention().attend(q, pages, batch, spec, want_lse=True)


@pytest.mark.parametrize("cuts", [[3], [1, 6], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_make_the_whole(cuts: list[int], soft_cap: float, sinks: bool) -> None:
    pages = _pages()
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(1, 6, 32, generator=generator)
    sink = torch.randn(6, generator=generator)
    spec = AttentionSpec(6, 2, 32, 32, 0.5, soft_cap=soft_cap, sinks=sink if sinks else None)
    batch = build_batch([0, 1], [LENGTH], [LENGTH - 1], [list(range(7))], [0], TOKENS, "cpu")
    whole = ReferenceAttention().attend(q, pages, batch, spec)
    without = replace(spec, sinks=None)
    edges = [0, *cuts, 7]
    parts = [_attend(pages, q, range(a, b), without) for a, b in pairwise(edges)]
    got = reduce(merge, parts)
    if sinks:
        got = with_sinks(got, sink)
    torch.testing.assert_close(got.out, whole.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.lse, whole.lse, rtol=0, atol=1e-5)


def test_a_part_that_sees_nothing_changes_nothing() -> None:
    some = Attended(torch.randn(2, 3, 4), torch.randn(2, 3))
    none = Attended(torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf))
    for got in (merge(some, none), merge(none, some)):
        assert torch.equal(got.out, some.out) and torch.equal(got.lse, some.lse)
    both = merge(none, none)
    assert (both.out == 0).all() and (both.lse == -torch.inf).all()
