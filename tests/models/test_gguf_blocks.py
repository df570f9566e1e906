"""GGML's types: against gguf-py on random blocks, and against a block worked out by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf_writer import quantise_q4_k

from worker.models import gguf_blocks
from worker.models.gguf_blocks import TYPES, dequantise

SCALES = {  # bytes of a block at which a float16 lies
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "F32": (), "F16": (), "BF16": (),
}  # fmt: skip


def random_blocks(name: str, count: int, seed: int) -> np.ndarray:
    """Every bit random but for scales, which are finite."""
    kind = next(k for k in TYPES.values() if k.name == name)
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    for at in SCALES[name]:
        scales = rng.normal(scale=0.1, size=(count, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if not SCALES[name]:
        blocks[:, -1] &= 0x3F  # an exponent that is neither infinity nor NaN
    return blocks


@pytest.mark.parametrize("number", TYPES, ids=lambda n: TYPES[n].name)
def test_every_type_is_what_gguf_py_reads(number: int) -> None:
    kind = TYPES[number]
    assert Kind(number).name == kind.name
    assert GGML_QUANT_SIZES[Kind(number)] == (kind.block_values, kind.block_bytes)
    blocks = random_blocks(kind.name, 301, seed=number)
    theirs = gguf.quants.dequantize(blocks, Kind(number)).reshape(-1)
    ours = dequantise(blocks.reshape(-1), kind)
    assert ours.dtype == np.float32 and np.array_equal(ours, theirs)
    assert len(np.unique(ours)) > 100


def test_a_block_of_each_kind_by_hand() -> None:
    half = np.array([0.5], dtype=np.float16).tobytes()
    minimum = np.array([-2.0], dtype=np.float16).tobytes()
    packed = bytes(i | (15 - i) << 4 for i in range(16))  # 0 .. 15, then 15 .. 0
    rising = np.concatenate((np.arange(16), np.arange(15, -1, -1))).astype(np.float32)

    def read(name: str, block: bytes) -> np.ndarray:
        kind = next(k for k in TYPES.values() if k.name == name)
        return dequantise(np.frombuffer(block, dtype=np.uint8), kind)

    assert np.array_equal(read("Q4_0", half + packed), (rising - 8) / 2)
    assert np.array_equal(read("Q4_1", half + minimum + packed), rising / 2 - 2)
    fifth = (0b1 | 1 << 31).to_bytes(4, "little")  # of the first and the last value
    lifted = rising.copy()
    lifted[[0, 31]] += 16
    assert np.array_equal(read("Q5_0", half + fifth + packed), (lifted - 16) / 2)
    assert np.array_equal(read("Q5_1", half + minimum + fifth + packed), lifted / 2 - 2)
    signed = np.arange(-16, 16, dtype=np.int8)
    assert np.array_equal(read("Q8_0", half + signed.tobytes()), signed.astype(np.float32) / 2)


def test_q4_k_of_a_quantiser_is_near_what_it_was_given() -> None:
    values = np.random.default_rng(3).normal(size=(7, 512)).astype(np.float32)
    kind = TYPES[Kind.Q4_K]
    found = dequantise(quantise_q4_k(values).reshape(-1), kind).reshape(values.shape)
    assert float(np.abs(found - values).max()) < 0.4  # a step is about a fifteenth of the range
    assert float(np.sqrt(((found - values) ** 2).mean())) < 0.12


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = TYPES[Kind.Q6_K]
    data = random_blocks("Q6_K", 25, seed=1).reshape(-1)
    whole = dequantise(data, kind)
    monkeypatch.setattr(gguf_blocks, "CHUNK_VALUES", 3 * 256)
    assert np.array_equal(dequantise(data, kind), whole)


def test_a_scale_that_is_no_number_is_an_error() -> None:
    blocks = random_blocks("Q8_0", 9, seed=1)
    blocks[5, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="finite"):
        dequantise(blocks.reshape(-1), TYPES[Kind.Q8_0])
