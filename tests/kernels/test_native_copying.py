"""Copies past the caches: the same bytes as a plain copy, and none beside them."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

from kernels.native import copying
from kernels.native.build import NativeUnavailable, load_library, supported
from kernels.native.copying import streaming_copy

SEED = 5
EDGE = 128


@pytest.mark.parametrize("isa", [one.name for one in supported()])
def test_bytes_are_copied_and_nothing_else(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        library, _ = load_library(isa)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(copying, "built_library", lambda: library)
    copy, rng = streaming_copy(), random.Random(SEED)
    assert copy is not None
    for size in [0, 1, 63, 64, 65, 127, 128, 4095, 4096, *(rng.randrange(9000) for _ in range(80))]:
        source = np.frombuffer(rng.randbytes(size + EDGE), np.uint8)
        target = np.zeros(size + 3 * EDGE, np.uint8)
        aligned = -target.ctypes.data % 64
        at, taken = aligned + rng.choice((0, 0, 64, 1, 13)), rng.randrange(EDGE)
        copy(target.ctypes.data + at, source.ctypes.data + taken, size)
        assert (target[at : at + size] == source[taken : taken + size]).all(), (size, at, taken)
        assert not target[:at].any() and not target[at + size :].any(), (size, at, taken)


def test_without_a_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    none: ctypes.CDLL | None = None
    monkeypatch.setattr(copying, "built_library", lambda: none)
    assert streaming_copy() is None
