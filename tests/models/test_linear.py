"""Linear layers: packed or not, the same products; packed, the plain matrix is let go."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from random_decoders import config_of, random_weights

from kernels.backends import backend_for
from worker.models.linear import Linear, packs
from worker.models.llama import LlamaModel

CPU = torch.device("cpu")
SHAPES = ((960, 576), (7, 33), (1, 1))  # [out, in]
EXACT_MAX = 256  # whole numbers up to here are exact in bfloat16

PLAIN_SCRIPT = """
import torch
import torch.nn.functional as F
from worker.models.linear import Linear, packs
assert not packs(torch.device("cpu"), torch.bfloat16)
torch.manual_seed(5)
weight = torch.randn(48, 32, dtype=torch.bfloat16)
x = torch.randn(3, 32, dtype=torch.bfloat16)
assert torch.equal(Linear(weight)(x), F.linear(x, weight))
print("plain")
"""


def whole(seed: int, *shape: int) -> torch.Tensor:
    """-1, 0 and 1: their products are exact in any float and any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_the_same_products(dtype: torch.dtype, shape: tuple[int, int], biased: bool) -> None:
    """For no row, one and many, and for rows that do not lie one behind the other."""
    outputs, inputs = shape
    weight, bias = whole(1, outputs, inputs), whole(2, outputs)
    linear = Linear(weight.to(dtype), bias.to(dtype) if biased else None)
    for rows in (0, 1, 5, 33):
        wide = whole(3 + rows, rows, 2 * inputs)
        for x in (wide[:, :inputs], wide[:, ::2]):
            exact = x @ weight.T + bias * biased
            assert not bool((exact.abs() > EXACT_MAX).any())
            found = linear(x.to(dtype))
            assert found.dtype is dtype and found.is_contiguous()
            assert torch.equal(found.long(), exact)


def test_packed_where_it_was_measured_to_gain() -> None:
    """An upgrade of torch that loses the private operators shows here, not as a slower replica."""
    assert not packs(CPU, torch.float32)
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("packing is for AVX-512")
    assert packs(CPU, torch.bfloat16)


def test_plain_on_a_cpu_that_cannot_pack() -> None:
    """oneDNN refuses bfloat16 without AVX-512: the layer computes with the matrix it was given."""
    ran = subprocess.run(
        [sys.executable, "-c", PLAIN_SCRIPT],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout == "plain\n", ran.stderr


def test_other_devices_are_plain() -> None:
    assert not packs(torch.device("cuda"), torch.bfloat16)
    weight = torch.empty(4, 8, device="meta")
    x = torch.empty(3, 8, device="meta")
    assert Linear(weight)(x).shape == F.linear(x, weight).shape


@pytest.mark.parametrize("name", ["untied", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_keeps_no_matrix_twice_but_the_tied_embedding(
    name: str, dtype: torch.dtype
) -> None:
    config = config_of(name)
    weights = random_weights(config, dtype)
    layer = weights.layers[0]
    plain = [weakref.ref(m) for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if not config.tied:
        plain.append(weakref.ref(weights.head))
    embedding = weakref.ref(weights.embedding)
    model = LlamaModel(
        config,
        weights,
        backend_for(CPU),
        name="small",
        fingerprint="small",
        block_tokens=16,
        context_tokens=config.context_tokens,
    )
    packed = packs(CPU, dtype)
    assert ("packed" in model.spec.numeric_class) == packed
    del weights, layer
    gc.collect()
    assert all((matrix() is None) == packed for matrix in plain)
    assert embedding() is not None
