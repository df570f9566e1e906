"""One suite for every way of storing vectors: what the contract says, whichever it is."""

from __future__ import annotations

import pytest
import torch
from codec_cases import HEADS, NAMES, relative_error, restored, vector_codecs, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

DIM = 64
CODECS = vector_codecs(DIM)
# Mean square error over mean square on vectors with outlier channels, at most.
ERROR_MAX = {
    **{"bf16": 0.0, "fp16": 1e-7, "fp32": 0.0, "fp8": 1.5e-3, "fp8-scaled": 1.5e-3},
    **{f"turbo{b}{c}": e for b, e in ((1, 0.42), (2, 0.125), (3, 0.036), (4, 0.0098))
       for c in ("", "-cold")},
    **{"uniform2": 0.9, "uniform4": 0.05, "oscar": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_bytes(name: str) -> None:
    codec, x = CODECS[name], vectors(1, 5, DIM)
    codes = codec.encode(x)
    assert codes.dtype == torch.uint8 and codes.shape == (HEADS, 5, codec.vector_bytes)
    assert codec.decode(codes).shape == x.shape
    assert codec.encode(x.expand(3, -1, -1, -1)).shape == (3, HEADS, 5, codec.vector_bytes)
    assert codec.token_local


@pytest.mark.parametrize("name", NAMES)
def test_error_is_that_of_the_codec(name: str) -> None:
    x = vectors(2, 300, DIM)
    error = relative_error(x, restored(CODECS[name], CODECS[name].encode(x)))
    print(name, error)
    assert error <= ERROR_MAX[name]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-6, 6), tokens=st.integers(1, 9))
def test_encoding_what_was_decoded_changes_nothing(
    name: str, seed: int, exponent: int, tokens: int
) -> None:
    codec = CODECS[name]
    codes = codec.encode(vectors(seed, tokens, DIM, 2.0**exponent))
    again = codec.encode(restored(codec, codes))
    assert torch.equal(again, codes), f"seed {seed}"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_vector_has_the_same_bytes_in_any_company(
    name: str, seed: int, tokens: int, dtype: torch.dtype
) -> None:
    """And in any memory order: what is written does not depend on a batch."""
    codec = CODECS[name]
    x = vectors(seed, tokens, DIM, dtype=dtype)
    together = codec.encode(x)
    token = seed % tokens
    assert torch.equal(codec.encode(x[:, token : token + 1]), together[:, token : token + 1])
    rows = x.transpose(0, 1).contiguous().unsqueeze(2)  # [N, H, 1, dim], as pages are written
    assert torch.equal(codec.encode(rows).squeeze(2).transpose(0, 1), together), f"seed {seed}"


@pytest.mark.parametrize("name", NAMES)
def test_turning_keeps_dot_products(name: str) -> None:
    codec, generator = CODECS[name], torch.Generator().manual_seed(3)
    q, x = torch.randn(2, HEADS, 40, DIM, generator=generator)
    plain = q @ x.transpose(1, 2)
    turned = codec.turn(q) @ codec.turn(x).transpose(1, 2)
    assert torch.allclose(turned, plain, atol=2e-5, rtol=1e-5)
    assert torch.allclose(codec.turn_back(codec.turn(x)), x, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_what_decode_gives_is_turned(name: str) -> None:
    """Dot products with turned queries are near those with the vectors themselves."""
    codec, x = CODECS[name], vectors(4, 200, DIM)
    q = vectors(5, 200, DIM).float()
    exact = q @ x.float().transpose(1, 2)
    found = codec.turn(q) @ codec.decode(codec.encode(x)).float().transpose(1, 2)
    assert relative_error(exact, found) <= 2 * ERROR_MAX[name] + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_zero_is_zero_and_poison_is_none(name: str) -> None:
    codec = CODECS[name]
    assert not restored(codec, codec.encode(torch.zeros(HEADS, 2, DIM))).any()
    poison = torch.full((HEADS, 2, codec.vector_bytes), 255, dtype=torch.uint8)
    assert bool(codec.decode(poison).isnan().all()), "what was never written must be seen"


@pytest.mark.parametrize("name", NAMES)
def test_a_number_that_is_none_stays_one_and_harms_its_own_vector_alone(name: str) -> None:
    codec, x = CODECS[name], vectors(6, 3, DIM)
    clean = restored(codec, codec.encode(x))
    x[0, 1, 7] = torch.nan
    found = restored(codec, codec.encode(x))
    assert bool(found[0, 1].isnan().any())
    assert torch.equal(found[0, ::2], clean[0, ::2]) and torch.equal(found[1], clean[1])


@pytest.mark.parametrize("dim", [24, 80, 96, 128, 256])
def test_other_widths(dim: int) -> None:
    for name, codec in vector_codecs(dim).items():
        x = vectors(7, 20, dim)
        codes = codec.encode(x)
        assert torch.equal(codec.encode(restored(codec, codes)), codes), (name, dim)
        if not name.startswith(
            "uniform"
        ):  # the wider a vector, the more its few large channels spoil
            error = relative_error(x, restored(codec, codes))
            assert error <= 1.15 * ERROR_MAX[name], (name, dim)
