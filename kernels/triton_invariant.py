"""Linear layers and RMS norms in Triton whose rows do not depend on each other's number, to the
bit; knows no layer and no model.

Source: "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025). Every sum has one
order: one tile shape whatever the number of rows, K walked from its first column to its last by one
program, no split of it. Nothing that is compiled or launched may follow from the number of rows,
except how many programs there are. Every row of a tile goes through the same instructions, so it
does not matter which row of which tile it is; rows past the end are zeros.
"""

# Parameters of @triton.jit functions are what Triton makes of them, not Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMERICS = 1  # raised whenever these kernels or triton_rows change a bit of any result
NORM_TILE = 1024  # numbers of one program: of several short rows, or part of a long one
# Fusion is said, not left to a default that Triton 3.10 changes.
LINEAR_LAUNCH = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
NORM_LAUNCH = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
ALIGNED_BYTES = 16  # what Triton compiles another kernel for


# A number that is 1 or a multiple of 16 would be compiled into a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def linear_tile(
    x,  # [rows, INPUTS]
    weight,  # [OUTPUTS, INPUTS]
    bias,  # [OUTPUTS], or anything if there is none
    out,  # [rows, OUTPUTS]
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (rows' tile, outputs' tile): x W^T + b, summed in float32, rounded once."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_m, is_n = m < rows, n < OUTPUTS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        is_k = k < INPUTS - first
        at = m[:, None] * INPUTS + (first + k)[None, :]
        left = tl.load(x + at, is_m[:, None] & is_k[None, :], other=0.0)
        at = n[None, :] * INPUTS + (first + k)[:, None]
        right = tl.load(weight + at, is_k[:, None] & is_n[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + n, is_n, other=0.0).to(tl.float32)[None, :]
    at = m[:, None] * OUTPUTS + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), is_m[:, None] & is_n[None, :])


@triton.jit(do_not_specialize=["rows"])
def norm_rows(
    x,  # float32 [rows, WIDTH]
    weight,  # float32 [WIDTH]
    out,  # float32 [rows, WIDTH]
    eps,
    rows,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (BLOCK_M rows): x / sqrt(mean(x^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    squares = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, WIDTH, BLOCK_D):
        is_x = (row < rows) & (first + d < WIDTH)
        value = tl.load(x + row * WIDTH + first + d, is_x, other=0.0)
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / WIDTH + eps)
    for first in range(0, WIDTH, BLOCK_D):
        is_x = (row < rows) & (first + d < WIDTH)
        value = tl.load(x + row * WIDTH + first + d, is_x, other=0.0)
        gain = tl.load(weight + first + d, first + d < WIDTH, other=0.0)
        tl.store(out + row * WIDTH + first + d, value * scale[:, None] * gain, is_x)


def linear_constants(
    outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool
) -> dict[str, int | bool]:
    """The compile-time constants of `linear_tile`: of the weight alone, never of the rows."""
    return {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "HAS_BIAS": has_bias,
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "BLOCK_K": 32 if dtype.itemsize > 2 else 64,
    }


def norm_constants(width: int) -> dict[str, int]:
    """The compile-time constants of `norm_rows`."""
    block = min(NORM_TILE, triton.next_power_of_2(width))
    return {"WIDTH": width, "BLOCK_M": NORM_TILE // block, "BLOCK_D": block}


def settled(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it that lies as kernels are compiled for: contiguous and aligned."""
    if x.is_contiguous() and x.data_ptr() % ALIGNED_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, in] W^T + b with weight [out, in] and bias [out], all of one dtype; a new [N, out].

    Weight and bias must be `settled`.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    assert x.shape == (rows, inputs) and x.dtype == weight.dtype
    out = x.new_empty(rows, outputs)
    if rows == 0:
        return out
    constants = linear_constants(outputs, inputs, weight.dtype, bias is not None)
    grid = (triton.cdiv(rows, constants["BLOCK_M"]), triton.cdiv(outputs, constants["BLOCK_N"]))
    linear_tile[grid](
        settled(x), weight, weight if bias is None else bias, out, rows,
        **constants, **LINEAR_LAUNCH,
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x float32 [..., width] normed over its last axis, times weight float32 [width]; new."""
    assert x.dtype is torch.float32 and weight.dtype is torch.float32
    assert x.shape[-1:] == weight.shape
    x = settled(x)
    out = torch.empty_like(x)
    rows = x.numel() // len(weight)
    if rows:
        constants = norm_constants(len(weight))
        grid = (triton.cdiv(rows, constants["BLOCK_M"]),)
        norm_rows[grid](x, weight, out, eps, rows, **constants, **NORM_LAUNCH)
    return out
