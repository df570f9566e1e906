"""Random attention problems from a seed: shapes, block tables, NaN wherever nothing was written.

A case is small enough for the reference and covers what AttentionSpec and AttentionBatch can say.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kernels.attention import Attended, AttentionBatch, AttentionSpec
from kernels.batch import build_batch
from kernels.layout import DTYPES, LayerPages, PageLayout
from kernels.reference import ReferenceAttention

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Case:
    """One attention problem; `pages` hold NaN in every place no sequence uses."""

    seed: int
    q: torch.Tensor
    pages: LayerPages
    batch: AttentionBatch
    spec: AttentionSpec


@dataclass(frozen=True)
class _Sequences:
    """Lengths and rows before they become tensors; `heads[s][h]` is a physical length."""

    lengths: list[int]
    rows: list[int]
    heads: list[list[int]]
    per_head: bool
    gaps: list[int] | None  # logical minus physical position, None = equal


def _sequences(rng: random.Random, kv_heads: int, tokens: int, pure_decode: bool) -> _Sequences:
    lengths = [
        max(1, rng.randint(1, 5) * tokens + rng.choice([-1, 0, 1]))  # the block edge and beside it
        for _ in range(rng.randint(1, 6))
    ]
    rows = [1 if rng.random() < 0.6 else rng.randint(0, length) for length in lengths]
    if pure_decode:
        rows = [1] * len(lengths)
        if rng.random() < 0.3:
            lengths[0] += 40 * tokens  # more than one split of the keys, a bucket of its own
    per_head = rng.random() < 0.3
    heads = [[length] * kv_heads for length in lengths]
    if per_head:
        heads = [
            [rng.randint(max(n, 1), length) for _ in range(kv_heads)]
            for n, length in zip(rows, lengths, strict=True)
        ]
        lengths = [max(each) for each in heads]
    gaps = [rng.randint(0, 20) for _ in lengths] if rng.random() < 0.3 else None
    return _Sequences(lengths, rows, heads, per_head, gaps)


def _tables(rng: random.Random, sequences: _Sequences, tokens: int) -> tuple[list[list[int]], int]:
    counts = [-(-length // tokens) for length in sequences.lengths]
    blocks = list(range(sum(counts) + 3))
    total = len(blocks)
    rng.shuffle(blocks)
    return [[blocks.pop() for _ in range(count)] for count in counts], total


def _drop_blocks(
    rng: random.Random,
    tables: list[list[int]],
    sequences: _Sequences,
    window: int,
    tokens: int,
) -> None:
    """What a window group no longer holds; with positions of their own, keys may go anywhere."""
    for table, length, n in zip(tables, sequences.lengths, sequences.rows, strict=True):
        if sequences.gaps is not None:
            if rng.random() < 0.5 and len(table) > 1:
                table[rng.randrange(len(table) - 1)] = -1
        elif window and not sequences.per_head:
            gone = max(0, length - n - window + 1) // tokens
            table[:gone] = [-1] * gone


def _fill(
    pages: LayerPages,
    sequences: _Sequences,
    tables: list[list[int]],
    generator: torch.Generator,
) -> None:
    tokens = pages.layout.block_tokens
    for table, heads in zip(tables, sequences.heads, strict=True):
        for head, length in enumerate(heads):
            place = torch.arange(length)
            block, offset = torch.tensor(table)[place // tokens], place % tokens
            for page in (pages.keys, pages.values):
                fresh = torch.rand(length, page.shape[-1], generator=generator) * 2 - 1
                page[block, head, offset] = fresh.to(page.dtype)


def _kv_positions(sequences: _Sequences) -> torch.Tensor | None:
    if sequences.gaps is None:
        return None
    shape = (len(sequences.lengths), len(sequences.heads[0]), max(sequences.lengths))
    positions = torch.zeros(shape, dtype=torch.int64)
    for s, (heads, gap) in enumerate(zip(sequences.heads, sequences.gaps, strict=True)):
        for head, length in enumerate(heads):  # a shorter head lost its oldest
            newest = sequences.lengths[s] + gap
            positions[s, head, :length] = torch.arange(newest - length, newest)
    return positions if sequences.per_head else positions[:, 0].clone()


def make_case(seed: int, dtype: str, pure_decode: bool = False, device: str = "cpu") -> Case:
    """The case of this seed, the same on every device."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 8, 20] * 3 + [80])
    qk_dim = rng.choice([8, 16, 24, 64])
    v_dim = qk_dim if rng.random() < 0.7 else rng.choice([8, 16])
    tokens = rng.choice([4, 16])
    sequences = _sequences(rng, kv_heads, tokens, pure_decode)
    tables, blocks = _tables(rng, sequences, tokens)
    layout = PageLayout(LAYERS, kv_heads, tokens, qk_dim, v_dim, dtype)
    pool = torch.full((blocks, layout.block_bytes), 255, dtype=torch.uint8)  # NaN in every dtype
    assert pool.view(DTYPES[dtype]).isnan().all()
    _fill(layout.pages(pool)[LAYER], sequences, tables, generator)
    window = rng.choice([0, 0, 1, 5, 16, 40])
    _drop_blocks(rng, tables, sequences, window, tokens)
    starts, positions = [0], []
    for s, (length, n) in enumerate(zip(sequences.lengths, sequences.rows, strict=True)):
        newest = length + (sequences.gaps[s] if sequences.gaps else 0)
        positions += range(newest - n, newest)
        starts.append(starts[-1] + n)
    kv_positions = _kv_positions(sequences)
    batch = build_batch(
        starts,
        sequences.heads if sequences.per_head else sequences.lengths,
        positions,
        tables,
        [0] * len(positions),  # nothing is written any more
        tokens,
        device,
        None if kv_positions is None else kv_positions.to(device),
    )
    heads = kv_heads * group
    spec = AttentionSpec(
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        scale=2.0 * qk_dim**-0.5,
        window=window,
        soft_cap=rng.choice([0.0, 0.0, 0.0, 5.0]),
        sinks=torch.randn(heads, generator=generator).to(device) if rng.random() < 0.3 else None,
    )
    q = torch.randn(len(positions), heads, qk_dim, generator=generator).to(DTYPES[dtype])
    return Case(seed, q.to(device), layout.pages(pool.to(device))[LAYER], batch, spec)


def compare(case: Case, got: Attended) -> dict[str, float]:
    """Errors against the reference: `rms` of the output; the largest of `out`, beyond half a unit
    in the last place of the result's dtype (which no kernel can avoid), and of `lse`. NaN counts
    as infinite."""
    expected = ReferenceAttention().attend(case.q, case.pages, case.batch, case.spec)
    assert expected.lse is not None and got.lse is not None
    assert got.out.dtype == case.q.dtype and got.out.shape == expected.out.shape
    got_out, got_lse = got.out.float().cpu(), got.lse.cpu()
    error = (got_out - expected.out).abs()
    rounding = expected.out.abs() * (torch.finfo(got.out.dtype).eps / 2)
    both_nothing = (got_lse == -torch.inf) & (expected.lse == -torch.inf)
    lse = (got_lse - expected.lse).abs().masked_fill(both_nothing, 0.0)
    if error.numel() == 0:
        return {"rms": 0.0, "out": 0.0, "lse": 0.0}
    figures = {
        "rms": error.square().mean().sqrt(),
        "out": (error - rounding).max(),
        "lse": lse.max(),
    }
    return {name: float(figure.nan_to_num(nan=torch.inf)) for name, figure in figures.items()}


# Scenario 4's figures, for values in [-1, 1]: root mean square, and largest beyond the rounding of
# the result itself. For bf16 the largest is the bound of what is left, the rounding of the
# softmax's weights: unit roundoff 2^-8 times sum(weight * |value|) <= 1.
RMS_MAX = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-3}
OUT_MAX = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2.0**-8}


def check(errors: dict[str, float], dtype: str, seed: int) -> None:
    """Raise AssertionError, naming the seed, if `errors` of `compare` are too large."""
    told = f"seed {seed} {dtype}: {errors}"
    assert errors["rms"] <= RMS_MAX[dtype], told
    assert errors["out"] <= OUT_MAX[dtype], told
    assert errors["lse"] <= 1e-4, told
