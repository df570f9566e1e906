"""OSCAR's rotations and its quantiser, given activations. What it gains needs a real model's."""

from __future__ import annotations

import pytest
import torch
from codec_cases import relative_error, restored
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.codecs.hadamard import sylvester
from kernels.codecs.oscar import (
    LayerRotations,
    calibration_of,
    fit_layer,
    fit_rotation,
    oscar,
    second_moment,
)
from kernels.codecs.uniform import SETTLE_PASSES_2_BITS, UniformVectors

DIM, KV_HEADS, GROUP = 64, 2, 3


def activations(seed: int, count: int = 400) -> torch.Tensor:
    """[count, Hq, DIM] with some directions far larger than others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(1.5 * torch.randn(DIM, generator=generator))
    basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator)).Q
    rows = torch.randn(count, KV_HEADS * GROUP, DIM, generator=generator)
    return rows * sizes @ basis


@pytest.fixture(scope="module")
def fitted() -> LayerRotations:
    return fit_layer(activations(1), activations(2), KV_HEADS)


def test_rotations_are_orthonormal_and_one_per_head(fitted: LayerRotations) -> None:
    for rotation in (fitted.keys, fitted.values):
        assert rotation.shape == (KV_HEADS, DIM, DIM)
        product = rotation @ rotation.transpose(1, 2)
        assert torch.allclose(product, torch.eye(DIM).expand_as(product), atol=1e-5)
    assert not torch.allclose(fitted.keys[0], fitted.keys[1], atol=1e-2)


def test_every_coordinate_has_the_same_energy_afterwards() -> None:
    """The diagonal of H'LH is the trace over dim: so Hadamard follows the eigenvectors."""
    moment = second_moment(activations(3).transpose(0, 1))
    rotation = fit_rotation(moment).double()
    turned = rotation.transpose(1, 2) @ moment @ rotation
    energy = turned.diagonal(dim1=1, dim2=2)
    mean = moment.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    assert torch.allclose(energy, mean.expand_as(energy), rtol=1e-4)
    plain = moment.diagonal(dim1=1, dim2=2)
    assert float((plain / mean).max()) > 1.5, "it was not so before"


def test_a_head_width_that_is_no_power_of_two_has_a_rotation_too() -> None:
    rotation = fit_rotation(torch.diag(torch.arange(1.0, 97.0, dtype=torch.float64)))
    assert torch.allclose(rotation @ rotation.T, torch.eye(96), atol=1e-5)


def test_queries_of_a_group_are_pooled_by_their_kv_head() -> None:
    queries = activations(4)
    mine = queries[:, :GROUP].flatten(0, 1)
    expected = fit_rotation(second_moment(mine))
    found = fit_layer(queries, queries, KV_HEADS).keys[0]
    assert torch.allclose(found, expected, atol=1e-4)


def test_layers_turn_each_query_head_as_its_kv_head(fitted: LayerRotations) -> None:
    layer = oscar([fitted]).layers[0]
    q = activations(5, 7)
    turned = layer.rotate_q(q)
    for head in range(KV_HEADS * GROUP):
        expected = q[:, head] @ fitted.keys[head // GROUP]
        assert torch.allclose(turned[:, head], expected, atol=1e-4)
        back = q[:, head] @ fitted.values[head // GROUP].T
        assert torch.allclose(layer.unrotate_o(q)[:, head], back, atol=1e-4)


@pytest.mark.parametrize(
    ("dim", "clip", "expected"),
    [(128, 0.0, 0.250), (128, 0.96, 0.156), (128, 0.92, 0.127), (64, 0.0, 0.202)],
)
def test_error_on_normal_rows(dim: int, clip: float, expected: float) -> None:
    rotation = (sylvester(dim) / dim**0.5).float().unsqueeze(0)
    codec = UniformVectors(dim, 2, rotation=rotation, clip=clip)
    x = torch.randn(1, 4000, dim, generator=torch.Generator().manual_seed(6))
    assert relative_error(x, restored(codec, codec.encode(x))) == pytest.approx(expected, rel=0.03)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dim=st.sampled_from([64, 80, 128]),
    clip=st.sampled_from([0.96, 0.92]),
    exponent=st.integers(-8, 6),
    power=st.sampled_from([1, 3]),
)
def test_cut_codes_settle_a_pass_before_the_last(
    seed: int, dim: int, clip: float, exponent: int, power: int
) -> None:
    """So that nobody has to ask a device whether they have."""
    x = torch.randn(500, dim, generator=torch.Generator().manual_seed(seed)) ** power
    codec = UniformVectors(dim, 2, clip=clip)
    codes = codec._rounded(x * 2.0**exponent)
    for _ in range(SETTLE_PASSES_2_BITS - 1):
        codes = codec._rounded(codec.decode(codes))
    assert torch.equal(codec._rounded(codec.decode(codes)), codes), f"seed {seed}"
    assert torch.equal(codec.encode(x * 2.0**exponent), codes), f"seed {seed}"


@pytest.mark.parametrize(("dim", "token_bytes"), [(128, 72), (64, 40)])
def test_bytes(dim: int, token_bytes: int) -> None:
    rotations = LayerRotations(*(torch.eye(dim).expand(KV_HEADS, -1, -1),) * 2)
    codec = oscar([rotations, rotations])
    assert codec.layers[0].token_bytes == token_bytes
    assert codec.bytes_per_block(0, 16, KV_HEADS) == 16 * KV_HEADS * token_bytes
    assert codec.bytes_per_token(KV_HEADS) == 2 * KV_HEADS * token_bytes
    assert codec.token_local


def test_calibration_names_the_rotations(fitted: LayerRotations) -> None:
    other = LayerRotations(fitted.keys, fitted.values.flip(-1))
    assert oscar([fitted]).calibration == calibration_of([fitted]) != calibration_of([other])
