"""TurboQuant: its codebooks, its error on the sphere, what turning is for, and round trips."""

from __future__ import annotations

import math

import pytest
import torch
from codec_cases import relative_error, restored, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.codecs.codebook import lloyd_max
from kernels.codecs.hadamard import mixing
from kernels.codecs.turboquant import TurboVectors
from kernels.codecs.uniform import UniformVectors

# Of the normal distribution, the positive half; Max (1960) has the first digits.
TABLE = {
    1: ([0.797885], [], 0.363380),
    2: ([0.45278, 1.510418], [0.981599], 0.117482),
    3: ([0.245094, 0.756005, 1.343909, 2.151946], [0.50055, 1.049957, 1.747927], 0.034548),
    4: (
        [0.128395, 0.388048, 0.656759, 0.94234, 1.256231, 1.618046, 2.069017, 2.73259],
        [0.258222, 0.522404, 0.79955, 1.099286, 1.437139, 1.843532, 2.400803],
        0.009501,
    ),
}
# Mean square error of unit vectors, without norm correction: dim -> bits -> what is expected.
SPHERE = {64: (0.35839, 0.11453, 0.03339, 0.00913), 128: (0.36089, 0.11600, 0.03397, 0.00931)}
CORRECTED = {1: 0.401, 2: 0.1188, 3: 0.0338, 4: 0.0092}  # with it, dim 128


SIGNS = [-1, -1, 1, -1, -1, 1, -1, -1, 1, -1, -1, -1, -1, 1, -1, 1]  # of seed 0


def units(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    """[1, count, dim] uniform on the sphere."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, count, dim, generator=generator)
    return rows / rows.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("bits", TABLE)
def test_codebooks_are_the_known_ones(bits: int) -> None:
    centroids, boundaries, error = TABLE[bits]
    book, half = lloyd_max(bits), 1 << (bits - 1)
    assert book.centroids[half:] == pytest.approx(centroids, abs=1e-5)
    assert book.centroids[:half] == pytest.approx([-c for c in reversed(centroids)], abs=1e-5)
    assert book.boundaries[half:] == pytest.approx(boundaries, abs=1e-5)
    assert book.boundaries[half - 1] == 0
    assert book.error == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("dim", SPHERE)
@pytest.mark.parametrize("bits", TABLE)
def test_error_on_the_sphere(dim: int, bits: int) -> None:
    """The codeword without norm correction, which the window is for; then as it is decoded."""
    codec, x = TurboVectors(dim, bits), units(4000, dim)
    decoded = codec.decode(codec.encode(x))
    lengths = codec.centroids[
        torch.bucketize(codec.turn(x) * dim**0.5, torch.tensor(lloyd_max(bits).boundaries))
    ].norm(dim=-1, keepdim=True)
    plain = decoded * lengths / dim**0.5
    expected = SPHERE[dim][bits - 1]
    assert relative_error(codec.turn(x), plain) == pytest.approx(expected, rel=0.02)
    if dim == 128:
        corrected = relative_error(x, restored(codec, codec.encode(x)))
        assert corrected == pytest.approx(CORRECTED[bits], rel=0.02)


@pytest.mark.parametrize("bits", TABLE)
@pytest.mark.parametrize("settled", [False, True])
def test_a_decoded_vector_has_its_stored_norm(bits: int, settled: bool) -> None:
    """To fp16; or as bf16 can have it, where that is what will be encoded again."""
    codec = TurboVectors(64, bits, returns_as=torch.bfloat16 if settled else None)
    x = vectors(1, 200, 64)
    norms = restored(codec, codec.encode(x)).norm(dim=-1) / x.float().norm(dim=-1)
    assert float((norms - 1).abs().max()) <= (2.0**-7 if settled else 2.0**-11)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turning_cuts_the_error_on_outlier_channels(bits: int) -> None:
    """More than fourfold, beside the same code of the vector as it is."""
    x = vectors(2, 500, 64)
    codec = TurboVectors(64, bits)
    book = lloyd_max(bits)
    norm = x.float().norm(dim=-1, keepdim=True) / 8
    index = torch.bucketize(x.float() / norm, torch.tensor(book.boundaries))
    unturned = torch.tensor(book.centroids)[index] * norm
    error = relative_error(x, restored(codec, codec.encode(x)))
    print(f"{bits} bits: turned {error:.4f}, as it is {relative_error(x, unturned):.4f}")
    assert relative_error(x, unturned) > 4 * error


@pytest.mark.parametrize("dim", [1, 2, 3, 20, 64, 80, 96, 128, 160, 256])
def test_mixing_is_orthogonal_and_leaves_no_coordinate_alone(dim: int) -> None:
    matrix = mixing(dim, 0) / dim**0.5
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    odd = dim // (dim & -dim)
    assert float(matrix.abs().min()) > 0
    assert float(matrix.abs().max()) <= math.sqrt(2 if odd > 1 else 1) / math.sqrt(dim) + 1e-12
    if dim > 3:
        assert not torch.equal(mixing(dim, 1), mixing(dim, 0)), "the seed is what signs follow from"


def test_signs_are_the_same_everywhere() -> None:
    """A replica must read what another wrote, whatever its version of torch."""
    assert mixing(64, 0)[:, 0].tolist()[:16] == SIGNS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("bits", TABLE)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**31), dim=st.sampled_from([32, 64, 128, 256]))
def test_a_round_trip_through_the_models_dtype_is_byte_exact(
    dtype: torch.dtype, bits: int, seed: int, dim: int
) -> None:
    """Ten times over: what is lost is lost once."""
    codec = TurboVectors(dim, bits, returns_as=dtype)
    codes = codec.encode(vectors(seed, 8, dim, dtype=dtype))
    for _ in range(10):
        again = codec.encode(restored(codec, codes).to(dtype))
        assert torch.equal(again, codes), f"seed {seed}"


def test_vectors_made_to_fit_the_signs_settle() -> None:
    """One coordinate holds all of the turned vector, or two values fill it: what no model makes."""
    for bits in TABLE:
        codec = TurboVectors(64, bits, returns_as=torch.bfloat16)
        rows = [torch.eye(64)[i] for i in range(4)]
        rows += [torch.where(torch.arange(64) < n, 1.0, t) for n in (1, 8, 32) for t in (0.0, 0.7)]
        edges = torch.tensor([*lloyd_max(bits).boundaries, 3.0])
        rows += [
            torch.where(torch.arange(64) % 2 == 0, e, (2 - e**2).clamp(0) ** 0.5) for e in edges
        ]
        x = codec.turn_back(torch.stack(rows).unsqueeze(0)).bfloat16()
        codes = codec.encode(x)
        assert torch.equal(codec.encode(restored(codec, codes).bfloat16()), codes)


def test_sizes_beyond_the_norms_type() -> None:
    codec = TurboVectors(64, 4)
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
    x *= torch.tensor([1e-12, 1e6, 1.0]).view(1, 3, 1)
    found = restored(codec, codec.encode(x))
    assert not found[0, 0].any(), "below fp16's smallest number it is nothing"
    assert float(found[0, 1].norm()) == pytest.approx(65504, rel=1e-3)
    x[0, 2, 3] = torch.inf
    assert bool(restored(codec, codec.encode(x))[0, 2].isnan().all())


@pytest.mark.parametrize(("bits", "expected"), [(2, 0.25), (4, 0.0099)])
def test_the_uniform_quantiser_is_as_far_off_as_known(bits: int, expected: float) -> None:
    """Normal rows of 128, nothing cut."""
    codec = UniformVectors(128, bits)
    x = torch.randn(1, 4000, 128, generator=torch.Generator().manual_seed(4))
    assert relative_error(x, restored(codec, codec.encode(x))) == pytest.approx(expected, rel=0.03)
