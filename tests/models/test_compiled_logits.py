"""The compiled path's logits against a dense float64 decoder and against LlamaModel.

The measure is the error over the spread (standard deviation) of the prompt's logits. In float32 it
may be ERROR_FP32; in bfloat16, whose rounding dominates, at most what LlamaModel's own bfloat16 is
off by, times BF16_FACTOR.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from model_stepper import Stepper, Stream, run_chunked
from random_decoders import (
    CASES,
    DenseDecoder,
    compiled,
    config_of,
    in_torch,
    of_folder,
    random_weights,
    token_ids,
)

from kernels.native.build import supported
from worker.models.base import Model
from worker.models.config import ModelConfig
from worker.models.weights import Weights

LENGTHS = (5, 40, 300)  # within a chunk of attention, and over two of them
WHOLE = 1 << 20
ERROR_FP32 = 3e-5
BF16_FACTOR = 1.5


@cache
def made(name: str, dtype: torch.dtype) -> tuple[ModelConfig, Weights]:
    config = config_of(name)
    return config, random_weights(config, dtype, seed=list(CASES).index(name))


@cache
def expected(name: str, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """float64 [length, vocab] per length of prompt."""
    config, weights = made(name, dtype)
    dense = DenseDecoder(config, weights)
    return {n: dense.logits(prompt(config, n)) for n in LENGTHS}


def prompt(config: ModelConfig, count: int) -> list[int]:
    return token_ids(count, config.vocab_tokens, seed=count)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the spread of what is right."""
    return float((ours.double() - theirs).abs().max() / theirs.std())


def divergence(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """KL in nats per position, from float64 logits to ours."""
    p, q = theirs.log_softmax(-1), ours.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def blocks_for(block_tokens: int) -> int:
    return 4 + sum(LENGTHS) * 2 // block_tokens


def side_by_side(stepper: Stepper, prompts: list[list[int]]) -> list[Stream]:
    """All prompts at once, some token by token, some in chunks: mixed steps, then decode alone."""
    streams = [stepper.add(one) for one in prompts]
    chunks = (1, 7, 33)
    while work := [
        (stream, min(chunk, len(stream.token_ids) - stream.computed))
        for stream, chunk in zip(streams, chunks, strict=True)
        if stream.computed < len(stream.token_ids)
    ]:
        stepper.step(work)
    return streams


@pytest.mark.parametrize("name", CASES)
def test_fp32_is_the_dense_decoder(name: str) -> None:
    config, weights = made(name, torch.float32)
    stepper = Stepper(compiled(config, weights), blocks_for(16))
    right = expected(name, torch.float32)
    found = {
        f"{n} tokens in chunks of {chunk}": error(
            run_chunked(stepper, prompt(config, n), chunk), right[n]
        )
        for n in LENGTHS
        for chunk in (WHOLE, 19, 1)
    }
    streams = side_by_side(stepper, [prompt(config, n) for n in LENGTHS])
    for n, stream in zip(LENGTHS, streams, strict=True):
        found[f"{n} tokens in mixed steps"] = error(torch.stack(stream.logits), right[n])
    worst = max(found, key=found.__getitem__)
    print(f"{name}: {found[worst]:.1e} of the spread ({worst})")
    assert found[worst] < ERROR_FP32, worst


@pytest.mark.parametrize("name", CASES)
def test_fp32_is_as_near_as_torch(name: str) -> None:
    """LlamaModel through its own pages; both may be off by their rounding."""
    config, weights = made(name, torch.float32)
    ours, theirs = (
        run_chunked(Stepper(model, blocks_for(16)), prompt(config, 300), 64)
        for model in (compiled(config, weights), in_torch(config, weights))
    )
    difference = error(ours, theirs.double())
    print(f"{name}: {difference:.1e} of the spread from LlamaModel")
    assert difference < 2 * ERROR_FP32


def errors(model: Model, name: str, dtype: torch.dtype, chunk: int) -> float:
    """Of 300 tokens in chunks."""
    config, _ = made(name, dtype)
    stepper = Stepper(model, blocks_for(model.spec.block_tokens))
    return error(run_chunked(stepper, prompt(config, 300), chunk), expected(name, dtype)[300])


@pytest.mark.parametrize("name", ["llama", "dim_96", "ragged_biased", "gemma2", "gemma3"])
@pytest.mark.parametrize("block_tokens", [32, 64])
def test_longer_blocks(name: str, block_tokens: int) -> None:
    exact = compiled(*made(name, torch.float32), block_tokens)
    assert errors(exact, name, torch.float32, 19) < ERROR_FP32
    coarse, torchs = (
        errors(build(*made(name, torch.bfloat16), block_tokens), name, torch.bfloat16, 19)
        for build in (compiled, in_torch)
    )
    assert coarse <= BF16_FACTOR * torchs


@pytest.mark.parametrize("isa", [one.name for one in supported()])
@pytest.mark.parametrize("name", ["dim_96", "ragged_biased", "gemma2"])
def test_every_build(isa: str, name: str) -> None:
    """The same formulas, each with the rounding of its instructions."""
    for dtype in (torch.float32, torch.bfloat16):
        model = compiled(*made(name, dtype), isa=isa)
        assert isa in model.spec.numeric_class
        ours = errors(model, name, dtype, 64)
        theirs = errors(in_torch(*made(name, dtype)), name, dtype, 64)
        print(f"{name}, {isa}, {dtype}: {ours:.1e} of the spread, torch {theirs:.1e}")
        assert ours < (ERROR_FP32 if dtype is torch.float32 else BF16_FACTOR * theirs)


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_as_near_as_torch(name: str) -> None:
    config, weights = made(name, torch.bfloat16)
    right = expected(name, torch.bfloat16)[300]

    def measured(model: Model) -> tuple[float, float, float]:
        logits = run_chunked(Stepper(model, blocks_for(16)), prompt(config, 300), 100)
        kl = divergence(logits, right)
        return error(logits, right), float(kl.mean()), float(kl.max())

    ours, theirs = measured(compiled(config, weights)), measured(in_torch(config, weights))
    for label, (largest, mean, most) in (("compiled", ours), ("torch", theirs)):
        print(f"{name}, {label}: error {largest:.1e}, KL mean {mean:.1e}, max {most:.1e}")
    assert ours[0] <= BF16_FACTOR * theirs[0] and ours[1] <= BF16_FACTOR * theirs[1]


PASSAGE = (
    "A banyan is a fig that begins its life on another tree. Its seeds are spread by birds, and a "
    "seedling sends roots down towards the ground; in time the aerial roots become trunks of their "
    "own: def grove(trunks: int) -> str:\n    return 'one canopy' if trunks > 1 else 'a tree'\n"
)


def test_the_real_model(demo_model: Path) -> None:
    """float32 beside torch's, and what bfloat16 costs on either path, in KL of nats."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(PASSAGE * 4).ids[:260]
    assert len(ids) == 260

    def logits(build: Callable[[ModelConfig, Weights], Model], dtype: torch.dtype) -> torch.Tensor:
        return run_chunked(Stepper(build(*of_folder(demo_model, dtype)), 40), ids, 150)

    right = logits(in_torch, torch.float32).double()
    exact = error(logits(compiled, torch.float32), right)
    print(f"fp32: {exact:.1e} of the spread from torch")
    assert exact < 10 * ERROR_FP32  # thirty layers, and torch's own rounding
    ours, theirs = (divergence(logits(b, torch.bfloat16), right) for b in (compiled, in_torch))
    for label, kl in (("compiled", ours), ("torch", theirs)):
        print(f"bf16, {label}: KL mean {float(kl.mean()):.1e}, max {float(kl.max()):.1e}")
    assert float(ours.mean()) <= BF16_FACTOR * float(theirs.mean())
    assert float(ours.max()) < 0.015
