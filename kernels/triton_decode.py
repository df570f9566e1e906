"""Decode attention over pages in Triton, for GPUs: one query row per sequence, pages read in place.

Split KV and reduce after FlashDecoding (Dao et al., 2023), but a sequence's keys are cut at fixed
places, so its result does not depend on what else is in the batch. The query heads of a KV head are
the rows of one matrix tile (at least 16, what a tensor core takes), so its keys are read once.
Imported where a GPU computes, and by `aot`: importing triton takes a second.
"""

# Parameters of @triton.jit functions are what Triton makes of them, not Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention import Attended, AttentionBatch, AttentionSpec
from kernels.layout import LayerPages

SPLIT_KEYS = 256  # keys one program reads; a constant, or results would depend on the batch
DOT_ROWS_MIN = 16  # smallest side of a matrix tile
GROUP_ROWS_MAX = 64
# These change from step to step: compiled again for each multiple of 16, serving would stall.
PLAIN_INTEGERS = ["table_stride", "kv_position_stride", "kv_position_head_stride", "splits"]
# Fusion is said, not left to a default that Triton 3.10 changes.
LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


@triton.jit
def places_of(
    table,
    logical,
    base,
    first,
    end,
    position,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_KV_POSITIONS: tl.constexpr,
):
    """Block, offset and visibility of the physical positions base ... base + BLOCK_N - 1."""
    place = base + tl.arange(0, BLOCK_N)
    seen = (place >= first) & (place < end)
    block = tl.load(table + place // BLOCK_TOKENS, seen, other=-1)
    seen = seen & (block >= 0)
    if HAS_KV_POSITIONS and WINDOW > 0:
        seen = seen & (position - tl.load(logical + place, seen, other=0) < WINDOW)
    return block.to(tl.int64), place % BLOCK_TOKENS, seen


@triton.jit
def _logits(rows, key, seen, scale, SOFT_CAP: tl.constexpr):
    """Logits [rows, keys] in float32, -inf where not seen."""
    logits = tl.dot(rows, key, input_precision="ieee") * scale
    if SOFT_CAP > 0:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        logits = SOFT_CAP * (1.0 - 2.0 / (tl.exp(2.0 * logits / SOFT_CAP) + 1.0))
    return tl.where(seen[None, :], logits, float("-inf"))


@triton.jit(do_not_specialize=PLAIN_INTEGERS)
def attend_split(
    q,  # [S, Hq, QK_DIM]
    keys,  # [blocks, Hkv, BLOCK_TOKENS, QK_DIM], one layer of a pool
    values,  # [blocks, Hkv, BLOCK_TOKENS, V_DIM]
    tables,  # int32 [S, blocks_max]
    spans,  # int32 [S, Hkv, 2] first and end of the physical positions to look at
    positions,  # int64 [S]
    kv_positions,  # int64 [S, 1 or Hkv, length_max]
    part_out,  # float32 [S, Hq, splits, V_DIM]
    part_lse,  # float32 [S, Hq, splits]
    scale,
    block_stride,  # numbers from one block to the next
    table_stride,
    kv_position_stride,
    kv_position_head_stride,
    GROUP: tl.constexpr,  # query heads of a KV head
    TILES: tl.constexpr,  # of BLOCK_G of them
    BLOCK_TOKENS: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_KV_POSITIONS: tl.constexpr,
):
    """Program (sequence, KV head x tile, split): output and lse over one split's keys."""
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1) // TILES
    kv_heads, splits = tl.num_programs(1) // TILES, tl.num_programs(2)
    span = spans + (sequence * kv_heads + kv_head) * 2
    first, end = tl.load(span), tl.load(span + 1)
    start = (first // SPLIT + tl.program_id(2)) * SPLIT
    if start >= end:
        return
    in_group = tl.program_id(1) % TILES * BLOCK_G + tl.arange(0, BLOCK_G)
    head = sequence * kv_heads * GROUP + kv_head * GROUP + in_group
    d_qk, d_v = tl.arange(0, BLOCK_QK), tl.arange(0, BLOCK_V)
    is_head, is_qk, is_v = in_group < GROUP, d_qk < QK_DIM, d_v < V_DIM
    rows = tl.load(q + head[:, None] * QK_DIM + d_qk[None, :], is_head[:, None] & is_qk, other=0.0)
    logical = kv_positions + sequence * kv_position_stride + kv_head * kv_position_head_stride
    position = tl.load(positions + sequence)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for base in range(start, tl.minimum(start + SPLIT, end), BLOCK_N):
        block, offset, seen = places_of(
            tables + sequence * table_stride, logical, base, first, end, position,
            BLOCK_TOKENS, BLOCK_N, WINDOW, HAS_KV_POSITIONS,
        )  # fmt: skip
        # What is not seen is not read either: a place that was never written may hold NaN.
        at = block * block_stride + (kv_head * BLOCK_TOKENS + offset) * QK_DIM
        key = tl.load(keys + at[None, :] + d_qk[:, None], seen & is_qk[:, None], other=0.0)
        at = block * block_stride + (kv_head * BLOCK_TOKENS + offset) * V_DIM
        value = tl.load(values + at[:, None] + d_v[None, :], seen[:, None] & is_v, other=0.0)
        logits = _logits(rows, key, seen, scale, SOFT_CAP)
        above = tl.maximum(highest, tl.max(logits, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights, fade = tl.exp(logits - shift[:, None]), tl.exp(highest - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = above
    divisor = tl.where(total > 0, total, 1.0)  # highest is -inf where total is 0
    part = head * splits + tl.program_id(2)
    tl.store(part_lse + part, highest + tl.log(divisor), is_head)
    at = part[:, None] * V_DIM + d_v[None, :]
    tl.store(part_out + at, acc / divisor[:, None], is_head[:, None] & is_v)


@triton.jit(do_not_specialize=PLAIN_INTEGERS)
def reduce_splits(
    part_out,  # float32 [S, Hq, splits, V_DIM]
    part_lse,  # float32 [S, Hq, splits]
    spans,  # int32 [S, Hkv, 2]
    sinks,  # float32 [Hq]
    out,  # [S, Hq, V_DIM]
    lse,  # float32 [S, Hq]
    splits,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (sequence, query head): its splits weighted by log-sum-exp, always in order."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    span = spans + head // GROUP * 2
    first, end = tl.load(span), tl.load(span + 1)
    count = tl.cdiv(end, SPLIT) - first // SPLIT
    highest = tl.full([], float("-inf"), tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + tl.program_id(1))
    shift = highest
    for split in range(count):
        shift = tl.maximum(shift, tl.load(part_lse + head * splits + split))
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    total = tl.exp(highest - shift)  # the sink's share, 0 without one
    d_v = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for split in range(count):
        part = head * splits + split
        weight = tl.exp(tl.load(part_lse + part) - shift)
        acc += weight * tl.load(part_out + part * V_DIM + d_v, d_v < V_DIM, other=0.0)
        total += weight
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(out + head * V_DIM + d_v, (acc / divisor).to(out.dtype.element_ty), d_v < V_DIM)
    tl.store(lse + head, tl.where(total > 0, shift + tl.log(divisor), float("-inf")))


@dataclass(frozen=True)
class SplitPlan:
    """What is constant over a step for one window."""

    spans: torch.Tensor  # int32 [S, Hkv, 2]
    splits: int  # most of any sequence
    kv_positions: (
        torch.Tensor
    )  # [S, length_max] or [S, Hkv, length_max], or anything if there are none
    kv_strides: tuple[int, int]  # of sequence and KV head


def split_plan(batch: AttentionBatch, kv_heads: int, window: int) -> SplitPlan:
    """The plan of a pure decode `batch`. Kept in batch.plans."""
    key = ("triton", kv_heads, window)
    found: SplitPlan | None = batch.plans.get(key)
    if found is not None:
        return found
    sequences = len(batch.lengths_list)
    ends = batch.lengths if batch.lengths.dim() == 2 else batch.lengths.unsqueeze(1)
    ends = ends.expand(sequences, kv_heads)
    firsts = torch.zeros_like(ends)
    reach = batch.length_max
    kv_positions, kv_strides = batch.positions, (0, 0)
    if batch.kv_positions is not None:
        kv_positions = batch.kv_positions.contiguous()
        head_stride = kv_positions.stride(1) if kv_positions.dim() == 3 else 0
        kv_strides = (kv_positions.stride(0), head_stride)
    elif window:
        first = (batch.positions - (window - 1)).clamp(min=0).to(torch.int32)
        firsts = first.unsqueeze(1).expand_as(ends)
        reach = min(reach, window + SPLIT_KEYS)
    found = SplitPlan(
        torch.stack([firsts, ends], 2).contiguous(),
        -(-reach // SPLIT_KEYS),
        kv_positions,
        kv_strides,
    )
    batch.plans[key] = found
    return found


def split_constants(spec: AttentionSpec, block_tokens: int) -> dict[str, int | float]:
    """The compile-time constants of `attend_split` that follow from the model."""
    group = spec.query_heads // spec.kv_heads
    rows = min(GROUP_ROWS_MAX, max(DOT_ROWS_MIN, triton.next_power_of_2(group)))
    keys = 32 if max(spec.qk_dim, spec.v_dim) > 128 else 64
    assert SPLIT_KEYS % keys == 0, "a tile must not reach into the next split"
    return {
        "GROUP": group,
        "TILES": -(-group // rows),
        "BLOCK_TOKENS": block_tokens,
        "QK_DIM": spec.qk_dim,
        "V_DIM": spec.v_dim,
        "BLOCK_G": rows,
        "BLOCK_N": keys,
        "BLOCK_QK": max(DOT_ROWS_MIN, triton.next_power_of_2(spec.qk_dim)),
        "BLOCK_V": max(DOT_ROWS_MIN, triton.next_power_of_2(spec.v_dim)),
        "SPLIT": SPLIT_KEYS,
        "WINDOW": spec.window,
        "SOFT_CAP": float(spec.soft_cap),
    }


def decode(
    q: torch.Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    spec: AttentionSpec,
    want_lse: bool = False,
) -> Attended:
    """As AttentionBackend.attend, for pure decode: every sequence has exactly one row."""
    sequences = len(batch.lengths_list)
    assert q.shape == (sequences, spec.query_heads, spec.qk_dim), "pure decode only"
    layout, block_stride = pages.layout, pages.keys.stride(0)
    assert (layout.qk_dim, layout.v_dim) == (spec.qk_dim, spec.v_dim)
    q = q.contiguous()
    plan = split_plan(batch, spec.kv_heads, spec.window)
    constants = split_constants(spec, batch.block_tokens)
    part_shape = (sequences, spec.query_heads, plan.splits)
    part_out = q.new_empty((*part_shape, spec.v_dim), dtype=torch.float32)
    part_lse = q.new_empty(part_shape, dtype=torch.float32)
    out = q.new_empty(sequences, spec.query_heads, spec.v_dim)
    lse = q.new_empty(part_shape[:2], dtype=torch.float32)
    if sequences == 0:
        return Attended(out, lse if want_lse else None)
    has_kv_positions = batch.kv_positions is not None
    attend_split[(sequences, spec.kv_heads * constants["TILES"], plan.splits)](
        q, pages.keys, pages.values, batch.tables, plan.spans, batch.positions, plan.kv_positions,
        part_out, part_lse, spec.scale, block_stride, batch.tables.stride(0), *plan.kv_strides,
        HAS_KV_POSITIONS=has_kv_positions, **constants, **LAUNCH,
    )  # fmt: skip
    reduce_splits[(sequences, spec.query_heads)](
        part_out, part_lse, plan.spans, part_lse if spec.sinks is None else spec.sinks.float(),
        out, lse, plan.splits, GROUP=constants["GROUP"], V_DIM=spec.v_dim,
        BLOCK_V=constants["BLOCK_V"], SPLIT=SPLIT_KEYS, HAS_SINKS=spec.sinks is not None, **LAUNCH,
    )  # fmt: skip
    return Attended(out, lse if want_lse else None)
