"""TurboQuant's settled codes by the compiled library: the bytes that the codec itself writes, in a
twentieth of its time. Knows no block and no tier.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.codecs.turboquant import TurboVectors
from kernels.native.build import built_library
from kernels.native.pages import Vectors, as_vectors, turbo_way

DIMS, BITS = (32, 64, 128, 256), 4  # src/settled.h has them


class _Settled(ctypes.Structure):
    _fields_ = [
        ("how", Vectors),
        ("dim", ctypes.c_int32),
        ("lowest", ctypes.c_double),
        ("highest", ctypes.c_double),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("vectors", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("vector_stride", ctypes.c_int64),
        ("code_stride", ctypes.c_int64),
    ]


class SettledVectors:
    """A codec that is settled for bf16, for vectors in CPU memory. Any thread; drops the GIL."""

    def __init__(self, codec: TurboVectors, library: ctypes.CDLL) -> None:
        self._codec = codec
        self._way = turbo_way(codec)  # kept: the struct points into it
        lowest, highest = codec.stretches
        self._settled = _Settled(as_vectors(self._way), codec.dim, lowest, highest)
        self._encode, self._decode = library.banyan_encode_settled, library.banyan_decode_settled
        for call in (self._encode, self._decode):
            call.restype = ctypes.c_int64
        self._encode.argtypes = [ctypes.c_void_p] * 3
        self._decode.argtypes = [ctypes.c_void_p] * 2

    def encode(self, vectors: torch.Tensor, codes: torch.Tensor) -> int:
        """Fill `codes`, uint8 [count, vector_bytes], from bf16 [count, dim]; rows may be apart.

        Returns how many vectors it left to the codec, since the last bit of a sum might decide.
        """
        left = torch.empty(len(vectors), dtype=torch.uint8)
        batch = self._batch(vectors, codes)
        count = self._encode(ctypes.byref(self._settled), ctypes.byref(batch), left.data_ptr())
        assert count >= 0, "the library has no such codec"
        if count:
            rows = left.bool()
            codes[rows] = self._codec.encode(vectors[rows].unsqueeze(0)).squeeze(0)
        return int(count)

    def decode(self, codes: torch.Tensor, vectors: torch.Tensor) -> None:
        """Fill `vectors`, bf16 [count, dim], from uint8 [count, vector_bytes]. As `encode`."""
        batch = self._batch(vectors, codes)
        count = self._decode(ctypes.byref(self._settled), ctypes.byref(batch))
        assert count == 0, "the library has no such codec"

    def _batch(self, vectors: torch.Tensor, codes: torch.Tensor) -> _Batch:
        codec = self._codec
        assert vectors.shape == (len(codes), codec.dim) and vectors.dtype is torch.bfloat16
        assert codes.shape[1] == codec.vector_bytes and codes.dtype is torch.uint8
        assert vectors.stride(1) == codes.stride(1) == 1
        assert vectors.device.type == codes.device.type == "cpu"
        return _Batch(
            len(codes), vectors.data_ptr(), codes.data_ptr(), 2 * vectors.stride(0), codes.stride(0)
        )


def settled_vectors(codec: TurboVectors) -> SettledVectors | None:
    """None where the library has no such codec, or is not built: nothing is built for this."""
    if codec.returns_as is not torch.bfloat16 or codec.bits != BITS or codec.dim not in DIMS:
        return None
    library = built_library()
    return None if library is None else SettledVectors(codec, library)
