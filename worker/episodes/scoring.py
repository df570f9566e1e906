"""How much a patched prompt looks at each stored token. It knows queries and keys; no page and no
sequence.

Source: EpiCache, after KVzip (Kim et al., arXiv:2505.23416): of every layer and KV head the largest
softmax weight that any of the prompt's queries, of any query head of the group, gives a token.
"""

from __future__ import annotations

import numpy as np
import torch

from worker.engine.retention.selection import Scores


def looked_at(keys: torch.Tensor, queries: torch.Tensor) -> Scores:
    """[layers * KV heads, n]: of the first n tokens, where keys are float32 [layers, KV heads,
    n + p, dim] and queries [layers, query heads, p, dim], scaled, of the p tokens behind them, each
    of which sees those before it too. Memory for one layer's weights; pure."""
    layers, kv_heads, both, dim = keys.shape
    p = queries.shape[2]
    assert queries.shape == (layers, queries.shape[1], p, dim) and p < both
    hidden = torch.ones(p, p, dtype=torch.bool, device=keys.device).triu(1)
    best = []
    for layer in range(layers):
        grouped = queries[layer].view(kv_heads, -1, p, dim)
        logits = grouped @ keys[layer].unsqueeze(1).transpose(2, 3)  # [Hkv, group, p, n + p]
        logits[..., both - p :].masked_fill_(hidden, -torch.inf)
        best.append(logits.softmax(-1)[..., : both - p].amax((1, 2)))
    found: Scores = torch.cat(best).double().cpu().numpy()
    return np.ascontiguousarray(found)
