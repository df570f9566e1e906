"""Attention over pages: the interface every path implements, on CPU and GPU, now and later.

N token rows of S sequences (ragged), Hq query heads, Hkv key/value heads (Hq % Hkv == 0, query head
h reads KV head h // (Hq // Hkv)). Dtypes: q, k, v and out in the model's, lse in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class AttentionSpec:
    """What is constant over a layer's life. `v_dim` may differ from `qk_dim` (MLA)."""

    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    window: int = 0  # 0 = unbounded; else a row sees its own position and window-1 before it
    soft_cap: float = 0.0  # 0 = off; else logits become cap * tanh(logits / cap)
    sinks: torch.Tensor | None = None  # [Hq] extra logits that take part in the softmax only


@dataclass(frozen=True)
class AttentionBatch:
    """What is constant over a step, for one KV group, all on the pools' device.

    Physical position p of sequence s lies in block tables[s, p // block_tokens] at offset
    p % block_tokens. The new rows of a sequence are its last physical positions: row i of n sees
    physical positions <= lengths[s] - n + i. Masks by window compare logical positions: `positions`
    for queries, `kv_positions` for keys (None = logical equals physical). Where heads hold
    different tokens, lengths and slots have a head axis and kv_positions may have one. An absent
    block is outside the window of every row, or anywhere if there are kv_positions: none see it.
    """

    starts: torch.Tensor  # int32 [S+1] first row of each sequence
    lengths: torch.Tensor  # int32 [S] or [S, Hkv] valid physical positions, new rows included
    tables: torch.Tensor  # int32 [S, blocks_max], -1 = absent, or past the sequence's end
    slots: torch.Tensor  # int64 [N] or [N, Hkv]: block * block_tokens + offset row r goes to
    positions: torch.Tensor  # int64 [N] logical
    block_tokens: int
    rows_max: int  # most rows of one sequence (1 = pure decode)
    length_max: int
    starts_list: tuple[int, ...]  # starts and lengths on the host, to plan without a device sync
    lengths_list: tuple[int, ...]  # the longest head's where they differ
    kv_positions: torch.Tensor | None = None  # int64 [S, length_max] or [S, Hkv, length_max]
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What backends derive from the batch once a step (index tensors, masks); theirs to fill."""


class PageLoader(Protocol):
    """Reads and writes the pages of one layer; the only one who knows their bytes (codecs plug in).

    A page is one block of one layer: keys [Hkv, block_tokens, qk_dim], values [..., v_dim].
    """

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows: slots int64 [N] or [N, Hkv], keys [N, Hkv, qk_dim], values [N, Hkv, v_dim].

        `slots` must not be changed afterwards: what follows from it may be kept for other layers.
        """
        ...

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of pages: int64 [B] -> [B, Hkv, block_tokens, qk_dim] and [..., v_dim].

        Any strides. The caller may write into them; they are valid until the pool's next gather, of
        any layer. `blocks` must not be changed afterwards, as for `write`.
        """
        ...


@dataclass(frozen=True)
class Attended:
    """out [N, Hq, v_dim]; lse [N, Hq] float32, log-sum-exp of each row's logits (to merge).

    lse is there if it was asked for. A row that sees nothing has out 0 and lse -inf.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """One implementation. It writes nothing: rows must be in the pages before the call."""

    name: str

    def attend(
        self,
        q: torch.Tensor,
        pages: PageLoader,
        batch: AttentionBatch,
        spec: AttentionSpec,
        want_lse: bool = False,
    ) -> Attended:
        """q [N, Hq, qk_dim]; the result is valid until the caller drops it."""
        ...
