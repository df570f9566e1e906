"""Settled TurboQuant by the compiled library and by torch: the same bytes for any vectors, and
across both ways."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cold_trip import run

from kernels.codecs.cold import TurboCold
from kernels.codecs.hadamard import mixing
from kernels.codecs.turboquant import TurboVectors
from kernels.layout import DTYPES, PageLayout
from kernels.native import settled
from kernels.native.build import NativeUnavailable, load_library, supported
from kernels.native.settled import DIMS, SettledVectors, settled_vectors

SEED = 11
COUNT = 400
SPARE = 6  # bytes between codes that nobody may touch
LAYOUTS = [
    PageLayout(layers=3, kv_heads=2, block_tokens=16, qk_dim=64, v_dim=64, dtype="bf16"),
    PageLayout(layers=2, kv_heads=1, block_tokens=16, qk_dim=96, v_dim=64, dtype="bf16"),
    PageLayout(layers=2, kv_heads=2, block_tokens=16, qk_dim=32, v_dim=128, dtype="bf16"),
    PageLayout(layers=1, kv_heads=3, block_tokens=8, qk_dim=32, v_dim=32, dtype="fp32"),
    PageLayout(layers=1, kv_heads=1, block_tokens=16, qk_dim=64, v_dim=64, dtype="fp16"),
]


def codec_of(dim: int) -> TurboVectors:
    return TurboVectors(dim, 4, returns_as=torch.bfloat16)


def families(dim: int, seed: int) -> dict[str, torch.Tensor]:
    """bf16 [count, dim] each."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(COUNT, dim, generator=generator)
    sizes = 10.0 ** torch.linspace(-38, 37, COUNT).unsqueeze(1)
    outliers = random.clone()
    outliers[:, :: dim // 4] *= 30.0
    exponents = torch.randint(-120, 120, (COUNT, dim), generator=generator)
    bits = torch.randint(-(1 << 15), 1 << 15, (COUNT, dim), generator=generator)
    broken = random.clone()
    broken[::3, 5], broken[1::3, 7], broken[2::3, 0] = torch.nan, torch.inf, -torch.inf
    sparse = torch.zeros(COUNT, dim)
    places = torch.randint(dim, (COUNT,), generator=generator)
    sparse[torch.arange(COUNT), places] = sizes[:, 0]
    fitted = (
        mixing(dim, 0).T.float().contiguous()
    )  # each of them is one coordinate in the codec's basis
    return {
        "random": random.bfloat16(),
        "sizes": (random * sizes).bfloat16(),
        "outliers": outliers.bfloat16(),
        "wide": torch.ldexp(random, exponents).bfloat16(),
        "any bits": bits.to(torch.int16).view(torch.bfloat16),
        "broken": broken.bfloat16(),
        "one number": sparse.bfloat16(),
        "zeros": torch.zeros(3, dim).bfloat16(),
        "fitted": (fitted * 0.7).bfloat16(),
        "fitted in two": (fitted + 0.9 * fitted.roll(1, 0)).bfloat16(),
        "near the longest": (random / random.norm(dim=1, keepdim=True) * 65504).bfloat16(),
        "longest": torch.full((2, dim), 3e38).bfloat16(),
        "whole numbers": random.round().bfloat16(),
    }


@pytest.fixture(params=[one.name for one in supported()])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    try:
        return load_library(request.param)[0]
    except NativeUnavailable as error:
        pytest.skip(str(error))


def compiled_codes(compiled: SettledVectors, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Codes that lie apart, and how many were left to torch."""
    size = codec_of(x.shape[1]).vector_bytes
    apart = torch.full((len(x), size + SPARE), 0xA5, dtype=torch.uint8)
    left = compiled.encode(x, apart[:, :size])
    assert bool((apart[:, size:] == 0xA5).all()), "nothing beside the codes"
    return apart[:, :size].contiguous(), left


def compiled_vectors(compiled: SettledVectors, codes: torch.Tensor, dim: int) -> torch.Tensor:
    found = torch.empty(len(codes), dim, dtype=torch.bfloat16)
    compiled.decode(codes, found)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit; a NaN's payload is nobody's."""
    return torch.equal(
        a.nan_to_num(nan=-1.5).view(torch.int16), b.nan_to_num(nan=-1.5).view(torch.int16)
    )


@pytest.mark.parametrize("dim", DIMS)
def test_both_ways_write_and_read_the_same_bytes(library: ctypes.CDLL, dim: int) -> None:
    codec = codec_of(dim)
    compiled = SettledVectors(codec, library)
    for name, x in families(dim, SEED + dim).items():
        expected = codec.encode(x.unsqueeze(0)).squeeze(0)
        codes, _ = compiled_codes(compiled, x)
        assert torch.equal(codes, expected), (name, SEED)
        vectors = codec.restore(expected).bfloat16()
        found = compiled_vectors(compiled, codes, dim)
        assert same(found, vectors), (name, SEED)
        # Of two numbers that hold all, or of any bits, torch's own second encoding may be another.
        second = codec.encode(vectors.unsqueeze(0)).squeeze(0)
        assert torch.equal(second, expected) or name in ("wide", "any bits"), (name, SEED)
        assert torch.equal(compiled_codes(compiled, vectors)[0], second), (name, "torch, compiled")
        assert torch.equal(codec.encode(found.unsqueeze(0)).squeeze(0), second), (name, "and back")


@pytest.mark.parametrize("dim", DIMS)
def test_what_is_left_to_torch(library: ctypes.CDLL, dim: int) -> None:
    """Nothing that a model writes; and what is settled only by many round trips."""
    compiled, x = SettledVectors(codec_of(dim), library), families(dim, SEED)
    for name in ("random", "outliers", "broken", "zeros"):
        assert compiled_codes(compiled, x[name])[1] <= 2, name
    for name in ("fitted", "fitted in two"):
        assert compiled_codes(compiled, x[name])[1] >= dim // 2, name


@pytest.mark.parametrize("dim", DIMS)
def test_bytes_that_nobody_wrote_are_read_alike(library: ctypes.CDLL, dim: int) -> None:
    codec, generator = codec_of(dim), torch.Generator().manual_seed(SEED)
    shape = (COUNT, codec.vector_bytes)
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    found = compiled_vectors(SettledVectors(codec, library), codes, dim)
    assert same(found, codec.restore(codes).bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_block_has_the_same_bytes_whoever_encodes_it(
    library: ctypes.CDLL, layout: PageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled, "built_library", lambda: library)
    generator = torch.Generator().manual_seed(SEED)
    count = layout.layers * layout.layer_elements
    block = torch.randn(count, generator=generator).to(DTYPES[layout.dtype])
    encoded, decoded = run(TurboCold(layout, compiled=False), block)
    ours, found = run(TurboCold(layout), block)
    assert ours == encoded and torch.equal(found, decoded)
    assert run(TurboCold(layout), decoded)[0] == encoded


def test_there_is_none_for_other_codecs_or_without_a_library(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled, "built_library", lambda: library)
    assert settled_vectors(codec_of(64)) is not None
    for dim in (24, 80, 96):
        assert settled_vectors(codec_of(dim)) is None
    assert settled_vectors(TurboVectors(64, 4)) is None
    assert settled_vectors(TurboVectors(64, 4, returns_as=torch.float16)) is None
    assert settled_vectors(TurboVectors(64, 3, returns_as=torch.bfloat16)) is None
    monkeypatch.setattr(settled, "built_library", lambda: None)
    assert settled_vectors(codec_of(64)) is None
