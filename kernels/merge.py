"""Puts attention over parts of the keys together by log-sum-exp; knows no pages and no sequences.

Source: "Online normalizer calculation for softmax" (arXiv:1805.02867); FlashDecoding's reduction.
"""

from __future__ import annotations

import torch

from kernels.attention import Attended


def merge(first: Attended, second: Attended) -> Attended:
    """Attention over the union of two disjoint key sets, from attention over each.

    Both need their lse and must be without sinks (`with_sinks` comes after the last merge). A part
    in which a row sees nothing (lse -inf) leaves the other unchanged. Mutates nothing.
    """
    assert first.lse is not None and second.lse is not None, "merging needs both parts' lse"
    lse = torch.logaddexp(first.lse, second.lse)
    weight = torch.exp(first.lse - lse).nan_to_num_(0.0).unsqueeze(-1)  # both -inf: 0
    other = torch.exp(second.lse - lse).nan_to_num_(0.0).unsqueeze(-1)
    out = first.out.float() * weight + second.out.float() * other
    return Attended(out.to(first.out.dtype), lse)


def with_sinks(attended: Attended, sinks: torch.Tensor) -> Attended:
    """Let a sink logit per head, [Hq], take its share of each row's softmax. Mutates nothing."""
    assert attended.lse is not None, "sinks need the lse"
    sinks = sinks.float()
    share = torch.sigmoid(attended.lse - sinks).unsqueeze(-1)
    out = attended.out.float() * share
    return Attended(out.to(attended.out.dtype), torch.logaddexp(attended.lse, sinks))
