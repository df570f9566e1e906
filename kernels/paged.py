"""Attention over gathered pages in plain torch, on any device; knows pages only by PageLoader.

Query heads that share a KV head are rows over its keys: repeating keys per query head, which
`enable_gqa` does, costs bf16 on CPU several times the attention itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.attention import Attended, AttentionBatch, AttentionSpec, PageLoader
from kernels.merge import with_sinks
from kernels.segments import Segment, segments_of

# The CPU kernel multiplies 1-3 query rows slower than 4 (measured: 638 us for 1, 207 us for 4 at
# 2,000 keys), so a few are padded when there are keys enough to pay for it.
CPU_ROWS_MIN = 4
CPU_ROWS_KEYS_MIN = 256
# A few rows of each head of a group are attended to as rows of one.
CPU_ROWS_FOLDED_MAX = 32

Parts = tuple[torch.Tensor, torch.Tensor | None]
"""Output [A, B, rows, v_dim] and lse [A, B, rows], float32, where it was wanted."""


class PagedAttention:
    """The torch path: fused attention where the layer is ordinary, plain arithmetic elsewhere."""

    name = "torch"

    def attend(
        self,
        q: torch.Tensor,
        pages: PageLoader,
        batch: AttentionBatch,
        spec: AttentionSpec,
        want_lse: bool = False,
    ) -> Attended:
        """As AttentionBackend.attend."""
        need_lse = want_lse or spec.sinks is not None
        segments = segments_of(batch, spec.window)
        whole = len(segments) == 1 and not segments[0].tiles and segments[0].sequences == q.shape[0]
        if whole:
            attended = _decode(q, pages, spec, segments[0], need_lse)
        else:
            attended = _attend_segments(q, pages, spec, segments, need_lse)
        if spec.sinks is not None:
            attended = with_sinks(attended, spec.sinks)
        return attended if want_lse else Attended(attended.out)


def _attend_segments(
    q: torch.Tensor,
    pages: PageLoader,
    spec: AttentionSpec,
    segments: list[Segment],
    need_lse: bool,
) -> Attended:
    out = q.new_zeros(q.shape[0], spec.query_heads, spec.v_dim)
    lse = None
    if need_lse:
        lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for segment in segments:
        if segment.tiles:
            _prefill(q, pages, spec, segment, out, lse)
            continue
        part = _decode(q[segment.rows], pages, spec, segment, need_lse)
        out[segment.rows] = part.out
        if lse is not None and part.lse is not None:
            lse[segment.rows] = part.lse
    return Attended(out, lse)


def _load(
    pages: PageLoader, segment: Segment, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [Hkv, C, keys, D] of a segment, with nothing in them that is not finite."""
    keys, values = pages.gather(segment.blocks)
    return _in_line(keys, segment).to(dtype), _in_line(values, segment).to(dtype)


def _in_line(page: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[C * pages, Hkv, block_tokens, D] -> [Hkv, C, keys, D], unused places zero.

    Masking logits would not do: 0 * NaN is NaN.
    """
    heads, dim = page.shape[1], page.shape[3]
    by_head, unused = page.transpose(0, 1), segment.unused
    if unused is not None and unused.dtype == torch.int64:
        line = by_head.reshape(heads, -1, dim).index_fill_(1, unused, 0)
        return line.view(heads, segment.sequences, -1, dim)
    line = by_head.reshape(heads, segment.sequences, -1, dim)[:, :, : segment.keys]
    return line if unused is None else line.masked_fill(unused, 0)


def _decode(
    q: torch.Tensor, pages: PageLoader, spec: AttentionSpec, segment: Segment, need_lse: bool
) -> Attended:
    """One row of each of C sequences: q [C, Hq, qk_dim]."""
    count = segment.sequences
    keys, values = _load(pages, segment, q.dtype)
    rows = q.view(count, spec.kv_heads, -1, spec.qk_dim)  # [C, Hkv, group, D]
    out, lse = _kernel(
        rows,
        keys.transpose(0, 1),
        values.transpose(0, 1),
        segment.mask,
        spec,
        need_lse,
        segment.hollow,
    )
    return Attended(
        out.reshape(count, spec.query_heads, spec.v_dim),
        lse.reshape(count, spec.query_heads) if need_lse and lse is not None else None,
    )


def _prefill(
    q: torch.Tensor,
    pages: PageLoader,
    spec: AttentionSpec,
    segment: Segment,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """The rows of one sequence, written into `out` and `lse`."""
    keys, values = _load(pages, segment, q.dtype)
    group = spec.query_heads // spec.kv_heads
    grouped = q[segment.rows].view(-1, spec.kv_heads, group, spec.qk_dim)
    out_rows = out[segment.rows].view(-1, spec.kv_heads, group, spec.v_dim)
    for tile in segment.tiles:
        rows = slice(tile.row_first, tile.row_end)
        seen = slice(tile.key_first, tile.key_end)
        part, part_lse = _kernel(
            grouped[rows].permute(1, 2, 0, 3),  # [Hkv, group, rows, D]
            keys[:, :, seen].expand(-1, group, -1, -1),
            values[:, :, seen].expand(-1, group, -1, -1),
            tile.mask,
            spec,
            lse is not None,
            segment.hollow,
        )
        out_rows[rows] = part.permute(2, 0, 1, 3)
        if lse is not None and part_lse is not None:
            lse[segment.rows].view(-1, spec.kv_heads, group)[rows] = part_lse.permute(2, 0, 1)


def _kernel(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
    need_lse: bool,
    hollow: bool,
) -> Parts:
    """q [A, B, rows, qk_dim], keys and values [A, B, L, ...], mask broadcastable to the logits."""
    if spec.soft_cap == 0 and spec.qk_dim == spec.v_dim and not hollow:
        if q.device.type == "cpu":
            return _fused_cpu(q, keys, values, mask, spec.scale)
        if not need_lse:
            bias = None if mask is None else mask.to(q.dtype)
            attend = F.scaled_dot_product_attention
            return attend(q, keys, values, attn_mask=bias, scale=spec.scale), None
    return _plain(q, keys, values, mask, spec)


def _fused_cpu(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> Parts:
    """What scaled_dot_product_attention runs on the CPU, called where it also tells the lse."""
    shape = q.shape
    count = shape[1] * shape[2]
    if shape[1] > 1 and keys.stride(1) == 0 and count <= CPU_ROWS_FOLDED_MAX:
        mask = None if mask is None else mask.repeat(1, 1, shape[1], 1)
        q, keys, values = q.reshape(shape[0], 1, count, shape[3]), keys[:, :1], values[:, :1]
    rows = q.shape[2]
    missing = CPU_ROWS_MIN - rows
    if missing > 0 and keys.shape[2] >= CPU_ROWS_KEYS_MIN:
        q = F.pad(q, (0, 0, 0, missing))
        if mask is not None and mask.shape[2] > 1:
            mask = F.pad(mask, (0, 0, 0, missing))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    if q.shape[2] > rows:
        out, lse = out[:, :, :rows], lse[:, :, :rows]
    if q.shape[1] < shape[1]:
        out, lse = out.reshape(*shape[:3], -1), lse.reshape(shape[:3])
    return out, lse


def _plain(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
) -> Parts:
    """Step by step in float32: soft caps, unequal widths, lse on a GPU."""
    logits = _times(q.float(), keys.float().transpose(-1, -2)) * spec.scale
    if spec.soft_cap:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    if mask is not None:
        logits = logits + mask
    lse = torch.logsumexp(logits, -1)
    shift = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)  # rows that see nothing: exp 0
    out = _times(torch.exp(logits - shift), values.float())
    return out.to(q.dtype), lse


def _times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Batched product that never repeats `matrix` along an expanded second dimension."""
    if matrix.stride(1) != 0 or matrix.shape[1] == 1:
        return rows @ matrix
    flat: torch.Tensor = rows.flatten(1, 2) @ matrix[:, 0]
    return flat.view(*rows.shape[:3], matrix.shape[3])
