"""SnapKV: the keys that the newest queries look at stay. Knows queries and stored keys only.

Source: Li et al., "SnapKV" (NeurIPS 2024), asked every so many tokens as R-KV's authors run it
beside theirs. The softmax of a window of queries over all keys, averaged over the window and the
query heads of a KV head; each position counts as the best within half a kernel of it, so that
neighbours of what is looked at stay too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from worker.engine.retention.base import Ints, Mask, PageView, Quota, newest
from worker.engine.retention.selection import choose


@dataclass(frozen=True)
class SnapKV:
    """Each layer and KV head keeps the newest `window_tokens`, whose queries decide, and the best
    of the others."""

    quota: Quota
    window_tokens: int
    kernel_tokens: int
    reads_keys: bool = True
    resume: bool = False

    @property
    def state_hash(self) -> str:
        """See RetentionPolicy."""
        return f"snapkv/1 {self.quota} {self.window_tokens} {self.kernel_tokens}"

    def select(self, view: PageView) -> Mask:
        """See RetentionPolicy."""
        keys, queries = view.keys(), view.queries(self.window_tokens)
        layers, kv_heads, count, _ = keys.shape
        grouped = queries.view(layers, kv_heads, -1, *queries.shape[2:])  # [L, Hkv, group, W, D]
        logits = grouped @ keys.unsqueeze(2).transpose(3, 4)
        weights = logits.softmax(-1).mean((2, 3)).view(layers * kv_heads, count)
        positions = np.broadcast_to(view.positions[:, view.fixed :], (layers * kv_heads, count))
        pooled = self._pooled(weights.double().cpu(), positions)
        forced = newest(view, self.window_tokens)
        scores = np.full((layers * kv_heads, view.stored), -np.inf)
        scores[:, view.fixed :] = np.where(forced[:, view.fixed :], -np.inf, pooled)
        left = view.kept - int(forced[0].sum())
        return choose(scores, forced, left, view.block_tokens, 0.0)

    def _pooled(self, weights: torch.Tensor, positions: Ints) -> np.ndarray:
        """[R, n]: the largest of a kernel around each, among neighbours by position."""
        order = torch.from_numpy(np.argsort(positions, axis=1))
        pooled = F.max_pool1d(
            weights.gather(1, order).unsqueeze(1), self.kernel_tokens, 1, self.kernel_tokens // 2
        ).squeeze(1)
        return torch.empty_like(weights).scatter_(1, order, pooled).numpy()
