"""Attention over pages in Triton that gives a row the same bits in prefill and in decode, in any
batch and any chunk; knows no model.

Every row goes through the same two kernels. The rows of a tile are the query heads of one KV head,
of as many tokens of one sequence as there is room for: one tile shape for one token and for a
thousand. Keys are cut at fixed positions (SPLIT_KEYS) and walked in fixed steps from there; a row's
parts are merged in the order of positions. What a row does not see has the weight 0, so keys that
only its neighbours see add exactly nothing to it.
"""

# Parameters of @triton.jit functions are what Triton makes of them, not Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import Attended, AttentionBatch, AttentionSpec, PageLoader
from kernels.layout import LayerPages
from kernels.row_plan import SPLIT_KEYS, TILE_ROWS, Launch, RowPlan, plan_rows
from kernels.triton_decode import DOT_ROWS_MIN
from kernels.triton_invariant import settled

# These change from step to step; a kernel of their own for 1 or a multiple of 16 would be another.
PLAIN_INTEGERS = [
    "table_stride", "kv_position_stride", "kv_position_head_stride", "splits", "row_first",
]  # fmt: skip
LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


@triton.jit
def _keys_of(
    table,
    logical,
    base,
    first,  # [rows]
    end,  # [rows]
    position,  # [rows]
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_KV_POSITIONS: tl.constexpr,
):
    """Block and offset of the physical positions base ... base + BLOCK_N - 1, [keys]; whether one
    is there to be read, [keys], and which row sees which, [rows, keys]."""
    place = base + tl.arange(0, BLOCK_N)
    # Between the first that any row sees and the last, all are written: no NaN is read.
    there = (place >= tl.min(first, 0)) & (place < tl.max(end, 0))
    block = tl.load(table + place // BLOCK_TOKENS, there, other=-1).to(tl.int64)
    there = there & (block >= 0)
    seen = there[None, :] & (place[None, :] >= first[:, None]) & (place[None, :] < end[:, None])
    if HAS_KV_POSITIONS and WINDOW > 0:
        key_position = tl.load(logical + place, there, other=0)
        seen = seen & (position[:, None] - key_position[None, :] < WINDOW)
    return block, place % BLOCK_TOKENS, there, seen


@triton.jit
def fold(rows, key, value, seen, scale, highest, total, acc, SOFT_CAP: tl.constexpr):
    """One step of the online softmax: what a row does not see leaves its three numbers as they
    are, for exp(0) is 1 and exp(-inf) is 0."""
    logits = tl.dot(rows, key, input_precision="ieee") * scale
    if SOFT_CAP > 0:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        logits = SOFT_CAP * (1.0 - 2.0 / (tl.exp(2.0 * logits / SOFT_CAP) + 1.0))
    logits = tl.where(seen, logits, float("-inf"))
    above = tl.maximum(highest, tl.max(logits, 1))
    shift = tl.where(above == float("-inf"), 0.0, above)
    weights, fade = tl.exp(logits - shift[:, None]), tl.exp(highest - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return above, total, acc


@triton.jit(do_not_specialize=PLAIN_INTEGERS)
def attend_rows(
    q,  # [N, Hq, QK_DIM]
    keys,  # [blocks, Hkv, BLOCK_TOKENS, QK_DIM], one layer of a pool
    values,  # [blocks, Hkv, BLOCK_TOKENS, V_DIM]
    tables,  # int32 [S, blocks_max]
    tiles,  # int32 [T, 3] sequence, first and end of its row * GROUP + query head of the group
    spans,  # int32 [N, Hkv, 2] first and end of the physical positions to look at
    positions,  # int64 [N]
    kv_positions,  # int64 [S, 1 or Hkv, length_max]
    part_out,  # float32 [rows of the launch, Hq, splits, V_DIM]
    part_lse,  # float32 [rows of the launch, Hq, splits]
    scale,
    block_stride,  # numbers from one block to the next
    table_stride,
    kv_position_stride,
    kv_position_head_stride,
    splits,
    row_first,  # of the launch
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_TOKENS: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_KV_POSITIONS: tl.constexpr,
):
    """Program (tile, KV head, split): output and lse of the tile's rows over one split's keys."""
    tile, kv_head, kv_heads = tiles + tl.program_id(0) * 3, tl.program_id(1), tl.num_programs(1)
    sequence, tile_end = tl.load(tile).to(tl.int64), tl.load(tile + 2)
    in_tile = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    is_row, row = in_tile < tile_end, (in_tile // GROUP).to(tl.int64)
    head = row * kv_heads * GROUP + kv_head * GROUP + in_tile % GROUP
    span = spans + (row * kv_heads + kv_head) * 2
    first, end = tl.load(span, is_row, other=2147483647), tl.load(span + 1, is_row, other=0)
    lowest, last = tl.min(first, 0), tl.max(end, 0)
    start = (lowest // SPLIT + tl.program_id(2)) * SPLIT
    if start >= last:
        return
    d_qk, d_v = tl.arange(0, BLOCK_QK)[None, :], tl.arange(0, BLOCK_V)[None, :]
    is_qk, is_v = d_qk < QK_DIM, d_v < V_DIM
    rows = tl.load(q + head[:, None] * QK_DIM + d_qk, is_row[:, None] & is_qk, other=0.0)
    position = tl.load(positions + row, is_row, other=0)
    logical = kv_positions + sequence * kv_position_stride + kv_head * kv_position_head_stride
    highest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    begin = tl.maximum(start, lowest // BLOCK_N * BLOCK_N)  # whole steps that no row sees
    for base in range(begin, tl.minimum(start + SPLIT, last), BLOCK_N):
        block, offset, there, seen = _keys_of(
            tables + sequence * table_stride, logical, base, first, end, position,
            BLOCK_TOKENS, BLOCK_N, WINDOW, HAS_KV_POSITIONS,
        )  # fmt: skip
        at = block * block_stride + (kv_head * BLOCK_TOKENS + offset) * QK_DIM
        key = tl.load(keys + at[:, None] + d_qk, there[:, None] & is_qk, other=0.0)
        at = block * block_stride + (kv_head * BLOCK_TOKENS + offset) * V_DIM
        value = tl.load(values + at[:, None] + d_v, there[:, None] & is_v, other=0.0)
        highest, total, acc = fold(
            rows, tl.trans(key), value, seen, scale, highest, total, acc, SOFT_CAP
        )
    divisor = tl.where(total > 0, total, 1.0)  # highest is -inf where total is 0
    own = start // SPLIT - first // SPLIT  # which of the row's parts this is
    mine = is_row & (own >= 0) & (start < end)
    part = (head - row_first.to(tl.int64) * kv_heads * GROUP) * splits + own
    tl.store(part_lse + part, highest + tl.log(divisor), mine)
    at = part[:, None] * V_DIM + d_v
    tl.store(part_out + at, acc / divisor[:, None], mine[:, None] & is_v)


@triton.jit(do_not_specialize=["splits", "row_first"])
def merge_parts(
    part_out,  # float32 [rows of the launch, Hq, splits, V_DIM]
    part_lse,  # float32 [rows of the launch, Hq, splits]
    tiles,  # int32 [T, 3], as for attend_rows
    spans,  # int32 [N, Hkv, 2]
    sinks,  # float32 [Hq]
    out,  # [N, Hq, V_DIM]
    lse,  # float32 [N, Hq]
    splits,
    row_first,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (tile, KV head): each row's parts weighted by log-sum-exp, in order of position."""
    tile, kv_head, kv_heads = tiles + tl.program_id(0) * 3, tl.program_id(1), tl.num_programs(1)
    in_tile = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    is_row, row = in_tile < tl.load(tile + 2), (in_tile // GROUP).to(tl.int64)
    head = kv_head * GROUP + in_tile % GROUP
    span = spans + (row * kv_heads + kv_head) * 2
    first, end = tl.load(span, is_row, other=0), tl.load(span + 1, is_row, other=0)
    count = tl.cdiv(end, SPLIT) - first // SPLIT
    own = row * kv_heads * GROUP + head
    part = (own - row_first.to(tl.int64) * kv_heads * GROUP) * splits
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + head, is_row, other=float("-inf"))
    shift, most = highest, tl.max(count, 0)
    for split in range(most):
        found = tl.load(part_lse + part + split, split < count, other=float("-inf"))
        shift = tl.maximum(shift, found)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    total = tl.exp(highest - shift)  # the sink's share, 0 without one
    d_v = tl.arange(0, BLOCK_V)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for split in range(most):
        there = split < count  # a row without such a part adds 0
        found = tl.load(part_lse + part + split, there, other=float("-inf"))
        weight = tl.exp(found - shift)
        at = (part + split)[:, None] * V_DIM + d_v
        acc += weight[:, None] * tl.load(part_out + at, there[:, None] & (d_v < V_DIM), other=0.0)
        total += weight
    divisor = tl.where(total > 0, total, 1.0)
    merged = (acc / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + own[:, None] * V_DIM + d_v, merged, is_row[:, None] & (d_v < V_DIM))
    tl.store(lse + own, tl.where(total > 0, shift + tl.log(divisor), float("-inf")), is_row)


def row_constants(
    spec: AttentionSpec, block_tokens: int, dtype: torch.dtype
) -> dict[str, int | float]:
    """The compile-time constants of `attend_rows`: of model and pages, never of the batch."""
    keys = 64 if max(spec.qk_dim, spec.v_dim) <= 128 else 32
    if dtype.itemsize > 2:
        keys //= 2
    assert SPLIT_KEYS % keys == 0, "a step must not reach into the next split"
    return {
        "GROUP": spec.query_heads // spec.kv_heads,
        "BLOCK_TOKENS": block_tokens,
        "QK_DIM": spec.qk_dim,
        "V_DIM": spec.v_dim,
        "BLOCK_M": TILE_ROWS,
        "BLOCK_N": keys,
        "BLOCK_QK": max(DOT_ROWS_MIN, triton.next_power_of_2(spec.qk_dim)),
        "BLOCK_V": max(DOT_ROWS_MIN, triton.next_power_of_2(spec.v_dim)),
        "SPLIT": SPLIT_KEYS,
        "WINDOW": spec.window,
        "SOFT_CAP": float(spec.soft_cap),
    }


def merge_constants(
    spec: AttentionSpec, constants: dict[str, int | float]
) -> dict[str, int | float | bool]:
    """Those of `merge_parts`, of `attend_rows`' own."""
    names = ("GROUP", "V_DIM", "BLOCK_M", "BLOCK_V", "SPLIT")
    return {name: constants[name] for name in names} | {"HAS_SINKS": spec.sinks is not None}


class RowAttention:
    """AttentionBackend for pages that lie in a PageLayout, prefill and decode alike."""

    name = "triton-rows"

    def attend(
        self,
        q: torch.Tensor,
        pages: PageLoader,
        batch: AttentionBatch,
        spec: AttentionSpec,
        want_lse: bool = False,
    ) -> Attended:
        """As AttentionBackend.attend."""
        assert isinstance(pages, LayerPages), "reads pages in place"
        assert (pages.layout.qk_dim, pages.layout.v_dim) == (spec.qk_dim, spec.v_dim)
        assert q.shape == (batch.starts_list[-1], spec.query_heads, spec.qk_dim)
        q, plan = settled(q), plan_rows(batch, spec)
        out = q.new_empty(len(q), spec.query_heads, spec.v_dim)
        lse = q.new_empty(out.shape[:2], dtype=torch.float32)
        for launch in plan.launches:
            _attend(q, pages, batch, spec, plan, launch, out, lse)
        return Attended(out, lse if want_lse else None)


def _attend(
    q: torch.Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    spec: AttentionSpec,
    plan: RowPlan,
    launch: Launch,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Fills the launch's rows of `out` and `lse`."""
    constants = row_constants(spec, batch.block_tokens, q.dtype)
    part_shape = (launch.row_end - launch.row_first, spec.query_heads, plan.splits)
    part_out = q.new_empty((*part_shape, spec.v_dim), dtype=torch.float32)
    part_lse = q.new_empty(part_shape, dtype=torch.float32)
    attend_rows[(len(launch.tiles), spec.kv_heads, plan.tile_splits)](
        q, pages.keys, pages.values, batch.tables, launch.tiles, plan.spans, batch.positions,
        plan.kv_positions, part_out, part_lse, spec.scale, pages.keys.stride(0),
        batch.tables.stride(0), *plan.kv_strides, plan.splits, launch.row_first,
        HAS_KV_POSITIONS=batch.kv_positions is not None, **constants, **LAUNCH,
    )  # fmt: skip
    merge_parts[(len(launch.tiles), spec.kv_heads)](
        part_out, part_lse, launch.tiles, plan.spans,
        part_lse if spec.sinks is None else spec.sinks.float(), out, lse, plan.splits,
        launch.row_first, **merge_constants(spec, constants), **LAUNCH,
    )  # fmt: skip
