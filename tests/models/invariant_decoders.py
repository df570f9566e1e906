"""Run in a process of its own with TRITON_INTERPRET=1, which must be set before Triton is imported:
small decoders through the batch-invariant kernels, every row in different company and against
transformers. Prints one JSON object.

usage: invariant_decoders.py exact DTYPE KIND ... | long DTYPE | near FOLDER | engine DTYPE KIND
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from exact_runs import Ways, differences
from model_stepper import Stepper, Stream, run_chunked
from random_decoders import config_of, random_weights, token_ids
from row_sums import sum_rows_alike
from transformers_yardstick import Yardstick, load, reference_models, small_prompts

from kernels.layout import DTYPES
from worker.engine.messages import EngineRequest
from worker.engine.sampling import SamplingParams
from worker.models.config import ModelConfig
from worker.models.invariant import invariant
from worker.models.llama import LlamaModel

PROMPT_TOKENS = (22, 39, 6)
BLOCKS = 120


def decoder(config: ModelConfig, dtype: str) -> LlamaModel:
    arithmetic, backend = invariant()
    return LlamaModel(
        config,
        random_weights(config, DTYPES[dtype], seed=5),
        backend,
        name="small",
        fingerprint="small",
        block_tokens=16,
        context_tokens=config.context_tokens,
        arithmetic=arithmetic,
    )


class Scene:
    """One model, what each row of its prompts is when computed alone, and what was not so."""

    def __init__(self, config: ModelConfig, dtype: str, lengths: Sequence[int]) -> None:
        self.stepper = Stepper(decoder(config, dtype), BLOCKS)
        self.prompts = [
            token_ids(count, config.vocab_tokens, seed) for seed, count in enumerate(lengths)
        ]
        self.lone = [run_chunked(self.stepper, prompt, len(prompt)) for prompt in self.prompts]
        self.wrong: list[str] = []
        assert not any(logits.isnan().any() for logits in self.lone)

    def compare(self, label: str, prompt: int, ours: torch.Tensor, first: int = 0) -> None:
        """`ours` are the logits of the prompt's positions from `first` on."""
        right = self.lone[prompt][first : first + len(ours)]
        if not torch.equal(ours, right):
            positions = (ours != right).any(1).nonzero().flatten() + first
            self.wrong.append(f"{label}, prompt {prompt}: {positions.tolist()[:8]}")

    def chunked(self, size: int, prompts: Iterable[int]) -> None:
        for prompt in prompts:
            ours = run_chunked(self.stepper, self.prompts[prompt], size)
            self.compare(f"chunks of {size}", prompt, ours)

    def together(self, sizes: Sequence[int]) -> None:
        """All prompts in the same steps, of so many tokens each."""
        streams = [self.stepper.add(ids) for ids in self.prompts]
        while work := [
            (s, min(size, len(s.token_ids) - s.computed))
            for s, size in zip(streams, sizes, strict=True)
            if s.computed < len(s.token_ids)
        ]:
            self.stepper.step(work)
        for prompt, stream in enumerate(streams):
            self.compare(f"together {sizes}", prompt, torch.stack(stream.logits))
            self.stepper.remove(stream)

    def behind_a_prefix(self, prompt: int, shared: Iterable[int]) -> None:
        """Cached whole blocks by reference, the boundary block by copy, a neighbour beside them."""
        ids, other = self.prompts[prompt], (prompt + 1) % len(self.prompts)
        root = self.stepper.add(ids)
        self.stepper.step([(root, len(ids))])
        for tokens in shared:
            hit, copies = self.stepper.share(root, ids, tokens)
            beside = self.stepper.add(self.prompts[other])
            self.stepper.step(
                [(beside, len(self.prompts[other])), (hit, len(ids) - tokens)], copies
            )
            self.compare(f"hit of {tokens}", prompt, torch.stack(hit.logits), first=tokens)
            self.compare(f"beside a hit of {tokens}", other, torch.stack(beside.logits))
            self.stepper.remove(beside)
            self._forget(root, hit)
        self.stepper.remove(root)

    def _forget(self, root: Stream, hit: Stream) -> None:
        for mine, theirs in zip(hit.tables, root.tables, strict=True):
            mine[:] = [block for block in mine if block >= 0 and block not in theirs]
        self.stepper.remove(hit)


def _config(kind: str) -> ModelConfig:
    """One of random_decoders' kinds; `everything`: all that a model may have, in one."""
    if kind != "everything":
        return config_of(kind)
    biased = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
    return replace(config_of("gemma2"), qk_norm=True, **biased)


def exact(dtype: str, kinds: Sequence[str]) -> dict[str, list[str]]:
    """By kind, what was not the same to the last bit."""
    found = {}
    for kind in kinds:
        scene = Scene(_config(kind), dtype, PROMPT_TOKENS)
        assert "-invariant-" in scene.stepper.model.spec.numeric_class
        scene.chunked(7, (0, 1, 2))
        scene.chunked(3, (0, 2))
        scene.chunked(1, (0,))
        scene.together((2, 19, 1))
        scene.together((64, 64, 64))
        if len(scene.stepper.model.spec.groups) == 1:  # a window lets go of what a hit would need
            scene.behind_a_prefix(1, (16, 37))
        found[kind] = scene.wrong
    return found


def long(dtype: str) -> dict[str, list[str]]:
    """Over a split of the keys, for which one prompt must be longer than that."""
    config = replace(config_of("llama"), layers=1, context_tokens=1024)
    scene = Scene(config, dtype, (545, 30))
    scene.together((200, 1))
    scene.behind_a_prefix(0, (500, 540))
    return {"long": scene.wrong}


def near(folder: str) -> dict[str, list[str]]:
    """Logits through the loader against transformers', as the yardstick allows; fails by itself."""
    yardstick = Yardstick(reference_models(Path(folder)), small_prompts()[:2])
    model = load(Path(folder), compute="torch", batch_invariant=True)
    assert "-invariant-" in model.spec.numeric_class
    stepper = Stepper(model, blocks=40)
    for number, prompt in enumerate(yardstick.prompts):
        # Our rows are rounded as if each were alone, so transformers' difference from itself
        # between whole prompts and single tokens counts too.
        yardstick.check(number, run_chunked(stepper, prompt, 200), "whole", chunk=1)
    return {"near": []}


def engine(dtype: str, kind: str) -> dict[str, list[str]]:
    """Requests through an engine: batched, cached, in chunks; tokens and logprobs as if alone."""
    config = config_of(kind)
    ways = Ways(lambda: decoder(config, dtype), blocks=120, running_max=8)
    root = token_ids(33, config.vocab_tokens, 1)
    prompts = [(*root[: 11 * (i % 4)], *token_ids(5 + i, 320, i)) for i in range(5)]
    params = SamplingParams(seed=3, max_tokens=4, ignore_eos=True, temperature=0.8, logprobs=1)
    requests = [EngineRequest(str(i), p, len(p), params) for i, p in enumerate(prompts)]
    right = ways.alone(requests)
    found = {
        "batched": ways.together(requests),
        "cached, chunks of 20": ways.together(requests[::-1], cache=True, step_tokens_max=20),
    }
    assert found["cached, chunks of 20"].cached_tokens > 0
    return {name: [str(key) for key in differences(told, right)] for name, told in found.items()}


def main() -> None:
    sum_rows_alike()
    scene, given, *more = sys.argv[1:]
    with torch.inference_mode():
        if scene == "exact":
            report = exact(given, more)
        elif scene == "long":
            report = long(given)
        elif scene == "near":
            report = near(given)
        else:
            report = engine(given, more[0])
    print(json.dumps(report))


if __name__ == "__main__":
    main()
