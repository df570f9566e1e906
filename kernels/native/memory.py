"""Large runs of memory in huge pages: weights and KV blocks are read at the speed of memory."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE_PAGE = 2 << 20


def huge_bytes(count: int) -> torch.Tensor:
    """uint8 [count], zeros, in its own mapping; takes physical memory only as it is written.

    Reading 4 KiB pages is a third slower than 2 MiB ones (TLB misses), and transparent huge pages
    are given to those who ask. Raises MemoryError.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        # Private: a shared mapping, Python's default, is not given huge pages.
        area = mmap.mmap(-1, -(-count // HUGE_PAGE) * HUGE_PAGE, mmap.MAP_PRIVATE)
    except OSError:
        raise MemoryError from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: slower, not wrong
            area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8, count=count)
