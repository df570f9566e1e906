"""Chooses the attention implementation for a device; the rest of the engine names none."""

from __future__ import annotations

import torch

from kernels.attention import Attended, AttentionBackend, AttentionBatch, AttentionSpec, PageLoader
from kernels.codecs.pages import CodecPages
from kernels.layout import LayerPages
from kernels.paged import PagedAttention


def is_pure_decode(batch: AttentionBatch) -> bool:
    """Every sequence has exactly one row."""
    return batch.rows_max == 1 and batch.starts_list[-1] == len(batch.lengths_list)


class GpuAttention:
    """Triton where every sequence has one row and pages lie in a PageLayout or hold codes that a
    kernel can load, torch for the rest."""

    name = "triton"

    def __init__(self) -> None:
        from kernels import triton_codecs, triton_decode  # Linux only, and slow to import

        self._decode = triton_decode.decode
        self._decode_codes, self._can_decode = triton_codecs.decode, triton_codecs.can_decode
        self._torch = PagedAttention()

    def attend(
        self,
        q: torch.Tensor,
        pages: PageLoader,
        batch: AttentionBatch,
        spec: AttentionSpec,
        want_lse: bool = False,
    ) -> Attended:
        """As AttentionBackend.attend."""
        if isinstance(pages, LayerPages) and is_pure_decode(batch):
            return self._decode(q, pages, batch, spec, want_lse)
        if isinstance(pages, CodecPages) and is_pure_decode(batch) and self._can_decode(pages):
            return self._decode_codes(q, pages, batch, spec, want_lse)
        return self._torch.attend(q, pages, batch, spec, want_lse)


def backend_for(device: torch.device | str) -> AttentionBackend:
    """The backend for pools on `device`: Triton for pure decode on a GPU, torch for the rest."""
    if torch.device(device).type == "cuda":  # ROCm calls itself so too
        return GpuAttention()
    return PagedAttention()
