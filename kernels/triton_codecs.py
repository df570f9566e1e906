"""Decode attention over pages of codes in Triton: keys and values are decoded in registers, in the
basis they are stored in. Knows the codecs' bytes (kernels/codecs), no sequence.

Split and reduced as in triton_decode. A load function per way of storing vectors answers float32
[keys, dim]; which one a kernel has is a compile-time constant for keys and for values. Queries must
come turned, and output leaves turned (kernels.codecs.pages.CodecAttention).
"""

# Parameters of @triton.jit functions are what Triton makes of them, not Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention import Attended, AttentionBatch, AttentionSpec
from kernels.codecs.base import VectorCodec
from kernels.codecs.fp8 import Fp8Vectors
from kernels.codecs.pages import CodecPages
from kernels.codecs.turboquant import TurboVectors
from kernels.codecs.uniform import UniformVectors
from kernels.triton_decode import (
    LAUNCH,
    PLAIN_INTEGERS,
    SPLIT_KEYS,
    places_of,
    reduce_splits,
    split_constants,
    split_plan,
)
from kernels.triton_rows import fold

FP8, TURBO, UNIFORM = 1, 2, 3  # KIND of a load function
KEYS = 32  # decoded at once: both tiles are in registers, in float32, before they are multiplied


@triton.jit
def _bytes(codes, at, byte, there):
    """The bytes `byte` of the vectors that begin at `at`, int32; 0 where none is."""
    return tl.load(codes + at[:, None] + byte, there, other=0).to(tl.int32)


@triton.jit
def _half(codes, at, byte, seen):
    """A number in fp16 from two bytes at any address, float32 [keys]."""
    low = tl.load(codes + at + byte, seen, other=0).to(tl.int16)
    high = tl.load(codes + at + (byte + 1), seen, other=0).to(tl.int16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_fp8(codes, table, at, d, seen, kv_head, DIM: tl.constexpr):
    """e4m3 by its bits, since not every GPU has the type; `table` has the scale of each head."""
    code = _bytes(codes, at, d, seen[:, None] & (d < DIM))
    magnitude = code & 127
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # 2^-9
    value = tl.where(magnitude == 127, float("nan"), value)
    return tl.where(code > 127, -value, value) * tl.load(table + kv_head)


@triton.jit
def _indices(codes, at, d, there, BITS: tl.constexpr, INDEX_BYTES: tl.constexpr):
    """Packed numbers of BITS bits: the `d`-th of each vector."""
    bit = d * BITS
    word = _bytes(codes, at, bit // 8, there)
    if BITS == 3:  # may reach into the next byte
        word |= _bytes(codes, at, bit // 8 + 1, there & (bit // 8 + 1 < INDEX_BYTES)) << 8
    return (word >> (bit % 8)) & ((1 << BITS) - 1)


@triton.jit
def _load_turbo(
    codes, table, at, d, seen, DIM: tl.constexpr, BITS: tl.constexpr, INDEX_BYTES: tl.constexpr
):
    """Centroids of `table` [2 ** BITS], stretched to the stored norm."""
    there = seen[:, None] & (d < DIM)
    index = _indices(codes, at, d, there, BITS, INDEX_BYTES)
    value = tl.load(table + index, there, other=0.0)
    length = tl.sqrt(tl.sum(value * value, 1))
    norm = _half(codes, at, INDEX_BYTES, seen)
    stretch = norm / tl.where(seen, length, 1.0)
    return value * stretch[:, None]


@triton.jit
def _load_uniform(
    codes, at, d, seen, DIM: tl.constexpr, BITS: tl.constexpr, INDEX_BYTES: tl.constexpr
):
    """Steps above the least number."""
    there = seen[:, None] & (d < DIM)
    index = _indices(codes, at, d, there, BITS, INDEX_BYTES).to(tl.float32)
    step = _half(codes, at, INDEX_BYTES, seen)
    least = _half(codes, at, INDEX_BYTES + 2, seen)
    return tl.where(there, index * step[:, None] + least[:, None], 0.0)


@triton.jit
def load_vectors(
    codes,
    table,
    at,  # int64 [keys] first byte of each vector
    d,  # [1, dims]
    seen,  # [keys]; what is not seen is not read and gives 0
    kv_head,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    INDEX_BYTES: tl.constexpr,
):
    """Decoded vectors, float32 [keys, dims]."""
    if KIND == 1:
        return _load_fp8(codes, table, at, d, seen, kv_head, DIM)
    elif KIND == 2:
        return _load_turbo(codes, table, at, d, seen, DIM, BITS, INDEX_BYTES)
    else:
        return _load_uniform(codes, at, d, seen, DIM, BITS, INDEX_BYTES)


@triton.jit(do_not_specialize=PLAIN_INTEGERS)
def attend_codes(
    q,  # [S, Hq, QK_DIM], turned
    keys,  # uint8 [blocks, Hkv, BLOCK_TOKENS, K_BYTES], one layer of a pool
    values,  # uint8 [blocks, Hkv, BLOCK_TOKENS, V_BYTES]
    key_table,  # float32: centroids, or scales of the heads
    value_table,
    tables,  # int32 [S, blocks_max]
    spans,  # int32 [S, Hkv, 2] first and end of the physical positions to look at
    positions,  # int64 [S]
    kv_positions,  # int64 [S, 1 or Hkv, length_max]
    part_out,  # float32 [S, Hq, splits, V_DIM]
    part_lse,  # float32 [S, Hq, splits]
    scale,
    block_stride,  # bytes from one block to the next
    table_stride,
    kv_position_stride,
    kv_position_head_stride,
    GROUP: tl.constexpr,  # query heads of a KV head
    TILES: tl.constexpr,  # of BLOCK_G of them
    BLOCK_TOKENS: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    HAS_KV_POSITIONS: tl.constexpr,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_INDEX_BYTES: tl.constexpr, K_BYTES: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_INDEX_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head x tile, split): output and lse over one split's keys."""
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1) // TILES
    kv_heads, splits = tl.num_programs(1) // TILES, tl.num_programs(2)
    span = spans + (sequence * kv_heads + kv_head) * 2
    first, end = tl.load(span), tl.load(span + 1)
    start = (first // SPLIT + tl.program_id(2)) * SPLIT
    if start >= end:
        return
    in_group = tl.program_id(1) % TILES * BLOCK_G + tl.arange(0, BLOCK_G)
    head = sequence * kv_heads * GROUP + kv_head * GROUP + in_group
    d_qk, d_v = tl.arange(0, BLOCK_QK)[None, :], tl.arange(0, BLOCK_V)[None, :]
    is_head = in_group < GROUP
    rows = tl.load(q + head[:, None] * QK_DIM + d_qk, is_head[:, None] & (d_qk < QK_DIM), other=0.0)
    logical = kv_positions + sequence * kv_position_stride + kv_head * kv_position_head_stride
    position = tl.load(positions + sequence)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for base in range(start, tl.minimum(start + SPLIT, end), BLOCK_N):
        block, offset, seen = places_of(
            tables + sequence * table_stride, logical, base, first, end, position,
            BLOCK_TOKENS, BLOCK_N, WINDOW, HAS_KV_POSITIONS,
        )  # fmt: skip
        page, slot = block * block_stride, kv_head * BLOCK_TOKENS + offset
        key = load_vectors(
            keys, key_table, page + slot * K_BYTES, d_qk, seen, kv_head,
            K_KIND, QK_DIM, K_BITS, K_INDEX_BYTES,
        ).to(rows.dtype)  # fmt: skip
        value = load_vectors(
            values, value_table, page + slot * V_BYTES, d_v, seen, kv_head,
            V_KIND, V_DIM, V_BITS, V_INDEX_BYTES,
        ).to(rows.dtype)  # fmt: skip
        highest, total, acc = fold(
            rows, tl.trans(key), value, seen[None, :], scale, highest, total, acc, SOFT_CAP
        )
    divisor = tl.where(total > 0, total, 1.0)  # highest is -inf where total is 0
    part = head * splits + tl.program_id(2)
    tl.store(part_lse + part, highest + tl.log(divisor), is_head)
    at = part[:, None] * V_DIM + d_v
    tl.store(part_out + at, acc / divisor[:, None], is_head[:, None] & (d_v < V_DIM))


@dataclass(frozen=True)
class CodeLoad:
    """One side's load function: its constants, and the table it looks into."""

    kind: int
    bits: int
    index_bytes: int
    vector_bytes: int
    table: torch.Tensor

    def constants(self, side: str) -> dict[str, int]:
        """As `attend_codes` names them."""
        return {
            f"{side}_KIND": self.kind,
            f"{side}_BITS": self.bits,
            f"{side}_INDEX_BYTES": self.index_bytes,
            f"{side}_BYTES": self.vector_bytes,
        }


def load_of(codec: VectorCodec, kv_heads: int, device: torch.device) -> CodeLoad | None:
    """How the kernel reads what `codec` writes; None if it cannot."""
    size = codec.vector_bytes
    if isinstance(codec, Fp8Vectors):
        return CodeLoad(FP8, 8, size, size, codec.scales(kv_heads, device))
    if isinstance(codec, TurboVectors):
        return CodeLoad(TURBO, codec.bits, codec.index_bytes, size, codec.centroids)
    if isinstance(codec, UniformVectors):
        return CodeLoad(UNIFORM, codec.bits, codec.index_bytes, size, torch.zeros(1, device=device))
    return None


def code_constants(
    spec: AttentionSpec, block_tokens: int, keys: CodeLoad, values: CodeLoad
) -> dict[str, int | float]:
    """The compile-time constants of `attend_codes` that follow from model and codec."""
    return {
        **split_constants(spec, block_tokens),
        "BLOCK_N": KEYS,
        **keys.constants("K"),
        **values.constants("V"),
    }


def can_decode(pages: CodecPages) -> bool:
    """Whether there is a load function for both keys and values."""
    heads, device = pages.layout.kv_heads, pages.keys.device
    codec = pages.codec
    return all(load_of(side, heads, device) is not None for side in (codec.keys, codec.values))


def decode(
    q: torch.Tensor,
    pages: CodecPages,
    batch: AttentionBatch,
    spec: AttentionSpec,
    want_lse: bool = False,
) -> Attended:
    """As AttentionBackend.attend, for pure decode: every sequence has exactly one row. Queries and
    output in the codec's basis."""
    sequences = len(batch.lengths_list)
    assert q.shape == (sequences, spec.query_heads, spec.qk_dim), "pure decode only"
    q, codec = q.contiguous(), pages.codec
    assert (codec.keys.dim, codec.values.dim) == (spec.qk_dim, spec.v_dim)
    key_load = load_of(codec.keys, spec.kv_heads, q.device)
    value_load = load_of(codec.values, spec.kv_heads, q.device)
    assert key_load is not None and value_load is not None
    plan = split_plan(batch, spec.kv_heads, spec.window)
    constants = code_constants(spec, batch.block_tokens, key_load, value_load)
    part_shape = (sequences, spec.query_heads, plan.splits)
    part_out = q.new_empty((*part_shape, spec.v_dim), dtype=torch.float32)
    part_lse = q.new_empty(part_shape, dtype=torch.float32)
    out = q.new_empty(sequences, spec.query_heads, spec.v_dim)
    lse = q.new_empty(part_shape[:2], dtype=torch.float32)
    if sequences == 0:
        return Attended(out, lse if want_lse else None)
    attend_codes[(sequences, spec.kv_heads * constants["TILES"], plan.splits)](
        q, pages.keys, pages.values, key_load.table, value_load.table, batch.tables, plan.spans,
        batch.positions, plan.kv_positions, part_out, part_lse, spec.scale, pages.keys.stride(0),
        batch.tables.stride(0), *plan.kv_strides,
        HAS_KV_POSITIONS=batch.kv_positions is not None, **constants, **LAUNCH,
    )  # fmt: skip
    reduce_splits[(sequences, spec.query_heads)](
        part_out, part_lse, plan.spans, part_lse if spec.sinks is None else spec.sinks.float(),
        out, lse, plan.splits, GROUP=constants["GROUP"], V_DIM=spec.v_dim,
        BLOCK_V=constants["BLOCK_V"], SPLIT=SPLIT_KEYS, HAS_SINKS=spec.sinks is not None, **LAUNCH,
    )  # fmt: skip
    return Attended(out, lse if want_lse else None)
