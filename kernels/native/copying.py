"""Copies past the CPU's caches, for memory that nobody reads soon. It knows addresses, no owners.

A plain copy first reads the lines that it is about to write over: a third of what memory moves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kernels.native.build import built_library


def streaming_copy() -> Callable[[int, int, int], None] | None:
    """copy(to, source, bytes) of memory that the caller keeps alive; other threads run meanwhile.

    The bytes are there for every thread at the return. Fast where `to` is aligned to 64 bytes.
    None where the compiled library is not built: nothing is built for this.
    """
    library = built_library()
    if library is None:
        return None
    copy = library.banyan_copy_streaming
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    copy.restype = None
    return copy
