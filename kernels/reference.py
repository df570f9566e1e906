"""Attention one row and one head at a time, in float64: slow, obviously right, knows no shortcut.

What every other backend is compared with.
"""

from __future__ import annotations

import math

import torch

from kernels.attention import Attended, AttentionBatch, AttentionSpec, PageLoader


def _head_length(batch: AttentionBatch, sequence: int, head: int) -> int:
    lengths = batch.lengths[sequence]
    return int(lengths[head] if lengths.dim() else lengths)


def _logical(batch: AttentionBatch, sequence: int, head: int, physical: int) -> int:
    if batch.kv_positions is None:
        return physical
    positions = batch.kv_positions[sequence]
    return int(positions[head, physical] if positions.dim() == 2 else positions[physical])


def visible_keys(
    batch: AttentionBatch, spec: AttentionSpec, sequence: int, row: int, head: int
) -> list[int]:
    """Physical positions that KV head `head` of flat row `row` attends to."""
    last_row = batch.starts_list[sequence + 1] - 1
    limit = _head_length(batch, sequence, head) - 1 - (last_row - row)
    query = int(batch.positions[row])
    visible = []
    for physical in range(limit + 1):
        if int(batch.tables[sequence, physical // batch.block_tokens]) < 0:
            continue
        age = query - _logical(batch, sequence, head, physical)
        if spec.window == 0 or age < spec.window:
            visible.append(physical)
    return visible


def _attend_row(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, head: int
) -> tuple[torch.Tensor, float]:
    """q [qk_dim], keys [L, qk_dim], values [L, v_dim], all float64 -> out [v_dim], lse."""
    logits = keys @ q * spec.scale
    if spec.soft_cap:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    terms = logits
    if spec.sinks is not None:
        terms = torch.cat([logits, spec.sinks[head : head + 1].double().cpu()])
    if terms.numel() == 0:
        return torch.zeros(values.shape[1], dtype=torch.float64), -math.inf
    lse = torch.logsumexp(terms, 0)
    return torch.exp(logits - lse) @ values, float(lse)


class ReferenceAttention:
    """The yardstick. Results are float32 on the CPU, lse always there."""

    name = "reference"

    def attend(
        self,
        q: torch.Tensor,
        pages: PageLoader,
        batch: AttentionBatch,
        spec: AttentionSpec,
        want_lse: bool = True,
    ) -> Attended:
        """As AttentionBackend.attend."""
        rows, group = q.shape[0], spec.query_heads // spec.kv_heads
        out = torch.zeros(rows, spec.query_heads, spec.v_dim)
        lse = torch.full((rows, spec.query_heads), -math.inf)
        for sequence in range(len(batch.lengths_list)):
            blocks = batch.tables[sequence].clamp(min=0).long()
            # [B, Hkv, T, D] -> [Hkv, B*T, D]
            keys, values = (page.transpose(0, 1).flatten(1, 2) for page in pages.gather(blocks))
            for row in range(batch.starts_list[sequence], batch.starts_list[sequence + 1]):
                for head in range(spec.query_heads):
                    kv_head = head // group
                    seen = visible_keys(batch, spec, sequence, row, kv_head)
                    out[row, head], lse[row, head] = _attend_row(
                        q[row, head].double().cpu(),
                        keys[kv_head, seen].double().cpu(),
                        values[kv_head, seen].double().cpu(),
                        spec,
                        head,
                    )
        return Attended(out, lse)
