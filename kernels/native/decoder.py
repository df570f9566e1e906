"""NativeDecoder: a Llama-family decoder whose step is one call into the compiled library.

Pages differ from kernels/layout.py's in the order of their numbers only: one head's keys are
[dim/STEP][block_tokens][STEP] and its values [block_tokens/STEP][dim][STEP], STEP = 2 for bf16 and
1 for fp32, so that one vector holds one number of 16 tokens (keys) or of 16 columns (values). How
codes lie in pages is kernels/native/pages.py's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.build import load_library
from kernels.native.memory import huge_bytes
from kernels.native.pages import LayerPlaces, Vectors, VectorWay, as_vectors

PAGE_LAYOUT = "lkh-paired"  # the Representation.layout of such blocks
DTYPES = {"fp32": (0, torch.float32), "bf16": (1, torch.bfloat16)}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
PANEL = INNER = 32
HEAD_DIM_UNIT, HEAD_DIM_MAX = 32, 256
SUBPAGE_TOKENS = 16

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DecoderShape:
    """What the compiled code needs to know of a model. `dtype` is a key of DTYPES."""

    dtype: str
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    block_tokens: int
    groups: int
    tied: bool
    norm_eps: float
    attention_scale: float
    activation: str = "silu"
    attention_cap: float = 0.0
    final_cap: float = 0.0
    embedding_scale: float = 1.0

    def unsupported(self) -> str:
        """Why the compiled path cannot run such a model, one sentence; empty if it can."""
        if self.dtype not in DTYPES:
            return f"The compiled CPU path has no {self.dtype}."
        if self.head_dim % HEAD_DIM_UNIT or self.head_dim > HEAD_DIM_MAX:
            return f"The compiled CPU path has no head dimension of {self.head_dim}."
        if self.block_tokens % SUBPAGE_TOKENS:
            return f"The compiled CPU path has no blocks of {self.block_tokens} tokens."
        if self.activation not in ACTIVATIONS:
            return f"The compiled CPU path has no activation {self.activation}."
        return ""

    def matrices(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of one layer's matrices."""
        attended = self.query_heads * self.head_dim
        return {
            "qkv": ((self.query_heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "output": (self.hidden, attended),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


@dataclass(frozen=True)
class LayerTensors:
    """One layer as loaded: matrices [outputs, inputs] in the model's dtype, the rest float32 or
    castable to it; only read while it is packed. Rotary tables are float32 [positions, dim/2]."""

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    group: int
    places: LayerPlaces
    window: int = 0
    attention_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "dtype", "layers", "hidden", "intermediate", "query_heads", "kv_heads", "head_dim",
            "vocab", "block_tokens", "groups", "activation", "tied",
        )),
        *((name, ctypes.c_float) for name in (
            "norm_eps", "attention_scale", "attention_cap", "final_cap", "embedding_scale",
        )),
    ]  # fmt: skip


MATRICES = ("qkv", "output", "gate_up", "down")
NORMS = ("input_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")
HEAD_NORMS = ("query_norm", "key_norm")
BIASES = ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")


class _Pages(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("block_bytes", "keys_at", "values_at")),
        ("keys", Vectors),
        ("values", Vectors),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*MATRICES, *NORMS, *HEAD_NORMS, *BIASES)),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("group", "window")),
        ("pages", _Pages),
    ]  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "sequences", "samples")),
        *((name, ctypes.c_void_p) for name in (
            "token_ids", "positions", "starts", "lengths", "tables", "widths", "sample_rows",
            "pools", "logits",
        )),
        ("logits_stride", ctypes.c_int64),
    ]  # fmt: skip


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class NativeDecoder:
    """Weights, packed, and the team of threads that computes steps. One step at a time.

    Takes the memory of the packed weights once more than `layers` holds while they are packed; the
    caller may drop each layer as the iterator moves on. Raises NativeUnavailable or MemoryError.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Iterable[LayerTensors],
        embedding: torch.Tensor,
        head: torch.Tensor,
        norm: torch.Tensor,
        threads: int,
        isa: str = "",
    ) -> None:
        """embedding and head [vocab, hidden] in the shape's dtype (head is not read if tied)."""
        assert not shape.unsupported() and threads > 0
        self.shape = shape
        self._library, self.isa = load_library(isa)
        self._declare()
        self._kept: list[torch.Tensor | VectorWay] = []  # what the compiled side points to
        self._weights = huge_bytes(self._weight_bytes())
        self._packed = 0
        packed = [self._layer(layer) for layer in layers]
        assert len(packed) == shape.layers
        head_at = self._pack(embedding if shape.tied else head)
        embedding_at = head_at if shape.tied else self._keep(embedding.contiguous())
        norm_at = self._vector(norm, INNER)
        config = self._config()
        self._decoder = self._library.banyan_decoder_new(
            ctypes.byref(config), (_Layer * len(packed))(*packed), embedding_at, head_at, norm_at,
            threads,
        )  # fmt: skip
        if not self._decoder:
            raise MemoryError
        self._pools = (ctypes.c_void_p * shape.groups)()
        self._logits = torch.empty(0, _padded(shape.vocab, PANEL), dtype=torch.float32)

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self._library.banyan_decoder_free(self._decoder)

    def bind(self, pools: Sequence[torch.Tensor]) -> None:
        """The pools uint8 [blocks, block_bytes] that steps read and write; they are kept alive."""
        self._bound = list(pools)
        self._pools = (ctypes.c_void_p * len(pools))(*(pool.data_ptr() for pool in pools))

    def recode(self, places: Sequence[LayerPlaces]) -> None:
        """Between steps: keys and values are stored so from now on, by layer. What the bound pools
        hold is not converted."""
        assert len(places) == self.shape.layers
        pages = (_Pages * len(places))(*(self._pages(each) for each in places))
        self._library.banyan_decoder_recode(self._decoder, pages)

    def step(
        self,
        token_ids: Ints,
        positions: Ints,
        starts: Ints,
        lengths: Ints,
        tables: Sequence[Ints],
        sample_rows: Ints,
    ) -> torch.Tensor:
        """Compute all rows, write their keys and values, return float32 logits [samples, vocab].

        token_ids, positions [N]; starts [S+1]; lengths [S] valid positions, new ones included;
        tables[g] [S, width]; all int32 and contiguous. Every block that a row sees or writes must
        be in its table: nothing is checked. Drops the GIL. The logits are valid until the next
        step. Raises MemoryError.
        """
        samples = len(sample_rows)
        if len(self._logits) < samples:
            self._logits = torch.empty(samples, self._logits.shape[1], dtype=torch.float32)
        pointers = (ctypes.c_void_p * len(tables))(*(table.ctypes.data for table in tables))
        widths = np.asarray([table.shape[1] for table in tables], dtype=np.int32)
        step = _Step(
            rows=len(token_ids),
            sequences=len(lengths),
            samples=samples,
            token_ids=token_ids.ctypes.data,
            positions=positions.ctypes.data,
            starts=starts.ctypes.data,
            lengths=lengths.ctypes.data,
            tables=ctypes.addressof(pointers),
            widths=widths.ctypes.data,
            sample_rows=sample_rows.ctypes.data,
            pools=ctypes.addressof(self._pools),
            logits=self._logits.data_ptr(),
            logits_stride=self._logits.shape[1],
        )
        if self._library.banyan_step(self._decoder, ctypes.byref(step)) != 0:
            raise MemoryError
        return self._logits[:samples, : self.shape.vocab]

    @property
    def weight_bytes(self) -> int:
        """Of the packed matrices: what a decode step has to read."""
        return len(self._weights)

    def read_rate(self) -> float:
        """Bytes per second at which all threads together read the packed weights, once over: the
        bound of a decode step. For benchmarks, between steps."""
        begin = time.perf_counter()
        self._library.banyan_read(self._decoder, self._weights.data_ptr(), len(self._weights))
        return len(self._weights) / (time.perf_counter() - begin)

    # --- packing -----------------------------------------------------------------------------

    def _declare(self) -> None:
        native = self._library
        native.banyan_packed_bytes.restype = ctypes.c_int64
        native.banyan_pack.argtypes = [
            ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int32] * 3,
        ]  # fmt: skip
        native.banyan_decoder_new.restype = ctypes.c_void_p
        native.banyan_decoder_new.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int32]
        native.banyan_decoder_free.argtypes = [ctypes.c_void_p]
        native.banyan_decoder_recode.argtypes = [ctypes.c_void_p] * 2
        native.banyan_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        native.banyan_read.restype = ctypes.c_int64
        native.banyan_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def _config(self) -> _Config:
        shape = self.shape
        config = _Config()
        for name, *_ in _Config._fields_:
            if name not in ("dtype", "activation", "tied"):
                setattr(config, name, getattr(shape, name))
        config.dtype, config.tied = DTYPES[shape.dtype][0], shape.tied
        config.activation = ACTIVATIONS[shape.activation]
        return config

    def _packed_bytes(self, outputs: int, inputs: int) -> int:
        dtype = DTYPES[self.shape.dtype][0]
        return int(self._library.banyan_packed_bytes(dtype, outputs, inputs))

    def _weight_bytes(self) -> int:
        shape = self.shape
        layer = sum(self._packed_bytes(*size) for size in shape.matrices().values())
        return shape.layers * layer + self._packed_bytes(shape.vocab, shape.hidden)

    def _pack(self, matrix: torch.Tensor, halves: bool = False) -> int:
        """The matrix's place in the arena; address."""
        dtype, torch_dtype = DTYPES[self.shape.dtype]
        assert matrix.dtype is torch_dtype
        matrix = matrix.contiguous()
        outputs, inputs = matrix.shape
        at = self._weights.data_ptr() + self._packed
        self._packed += self._packed_bytes(outputs, inputs)
        assert self._packed <= len(self._weights)
        self._library.banyan_pack(dtype, matrix.data_ptr(), at, outputs, inputs, halves)
        return at

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _vector(self, values: torch.Tensor, unit: int) -> int:
        """float32, padded with zeros to whole units; address."""
        padded = torch.zeros(_padded(len(values), unit), dtype=torch.float32)
        padded[: len(values)] = values.float()
        return self._keep(padded)

    def _gate_up_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """In the order of the packed panels: 16 of the gate, 16 of the up projection."""
        inner = self.shape.intermediate
        halves = torch.zeros(2, _padded(inner, 16), dtype=torch.float32)
        halves[:, :inner] = bias.float().view(2, inner)
        return halves.view(2, -1, 16).transpose(0, 1).reshape(-1)

    def _layer(self, layer: LayerTensors) -> _Layer:
        packed = _Layer(group=layer.group, window=layer.window, pages=self._pages(layer.places))
        for name in MATRICES:
            setattr(packed, name, self._pack(getattr(layer, name), halves=name == "gate_up"))
        for name in (*NORMS, *HEAD_NORMS, *BIASES):
            vector = getattr(layer, name)
            if vector is not None:
                if name == "gate_up_bias":
                    vector = self._gate_up_bias(vector)
                setattr(packed, name, self._vector(vector, INNER))
        packed.cos, packed.sin = (
            self._keep(t.float().contiguous()) for t in (layer.cos, layer.sin)
        )
        return packed

    def _pages(self, places: LayerPlaces) -> _Pages:
        return _Pages(
            block_bytes=places.block_bytes,
            keys_at=places.keys_at,
            values_at=places.values_at,
            keys=self._vectors(places.keys),
            values=self._vectors(places.values),
        )

    def _vectors(self, way: VectorWay) -> Vectors:
        self._kept.append(way)
        return as_vectors(way)
