"""The compiled path is batch invariant: a row's logits depend on its own tokens only, to the bit.

Every scene compares each row with the same row of a prompt computed alone in one step. Blocks are
handed out in shuffled order, and whatever no valid position lies in is NaN: blocks that nobody
holds, tails of last blocks, blocks that a window has left behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_stepper import Stepper, Stream, run_chunked
from random_decoders import CASES, compiled, config_of, random_weights, token_ids

from kernels.native.build import supported

PROMPTS, PROMPT_TOKENS = 4, 270  # over two chunks of attention's walk
BLOCKS = 800
BATCHES = (1, 2, 15, 16, 17, 31, 32, 33, 40)
BUILDS = [one.name for one in supported()]
KINDS = ("llama", "group_3", "group_40", "gemma2", "mixed_window")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
POISONED = b"\xff" * 64


class Scene:
    """One model on a pool of poisoned blocks, and what each row of its prompts must be."""

    def __init__(
        self, kind: str, dtype: str, isa: str, threads: int = 1, block_tokens: int = 16
    ) -> None:
        config = config_of(kind)
        weights = random_weights(config, DTYPES[dtype], seed=5)
        self.model = compiled(config, weights, block_tokens, threads, isa)
        self.stepper = Stepper(self.model, BLOCKS)
        self.prompts = [
            token_ids(PROMPT_TOKENS, config.vocab_tokens, seed) for seed in range(PROMPTS)
        ]
        self.lone = [run_chunked(self.stepper, prompt, PROMPT_TOKENS) for prompt in self.prompts]
        self._all_free = [sorted(free) for free in self.stepper._free]

    def add(self, prompt: int, length: int) -> Stream:
        return self.stepper.add(self.prompts[prompt][:length])

    def check(self, stream: Stream, prompt: int, first: int = 0) -> None:
        """`stream` computed the prompt's positions from `first` on."""
        assert stream.logits, "nothing was computed"
        ours = torch.stack(stream.logits)
        right = self.lone[prompt][first : first + len(ours)]
        if not torch.equal(ours, right):
            wrong = (ours != right).any(1).nonzero().flatten() + first
            pytest.fail(f"prompt {prompt}: positions {wrong.tolist()[:20]} of {len(ours)} differ")

    def clear(self, streams: Iterable[Stream]) -> None:
        """All blocks are free and poisoned again, shared or not."""
        for group, free in enumerate(self.stepper._free):
            held = {block for s in streams for block in s.tables[group] if block >= 0}
            self.stepper.model.poison(group, sorted(held))
            free[:0] = sorted(held)
            assert sorted(free) == self._all_free[group], "a block was lost or is held twice"


@cache
def scene(kind: str, dtype: str, isa: str = "", threads: int = 1, block_tokens: int = 16) -> Scene:
    return Scene(kind, dtype, isa, threads, block_tokens)


def advance(stepper: Stepper, work: Sequence[tuple[Stream, int]]) -> bool:
    """One step in which each stream computes so many tokens or what it has left; False if none."""
    bounded = [(s, min(count, len(s.token_ids) - s.computed)) for s, count in work]
    bounded = [(s, count) for s, count in bounded if count > 0]
    if bounded:
        stepper.step(bounded)
    return bool(bounded)


def chunked(on: Scene, sizes: Iterable[int] = (1, 7, 31, 128)) -> None:
    for number, size in enumerate(sizes):
        stream = on.add(number, PROMPT_TOKENS)
        while advance(on.stepper, [(stream, size)]):
            pass
        on.check(stream, number)
        on.clear([stream])


def batched(on: Scene, batches: Iterable[int] = BATCHES) -> None:
    """Prefill of everything in one step, then decode side by side, of unequal lengths."""
    for batch in batches:
        lengths = [PROMPT_TOKENS - i if i % 7 == 2 else 4 + 5 * i % 61 for i in range(batch)]
        streams = [on.add(i % PROMPTS, length) for i, length in enumerate(lengths)]
        on.stepper.step([(s, len(s.token_ids) - 3) for s in streams])
        for _ in range(3):
            on.stepper.step([(s, 1) for s in streams])
        for i, stream in enumerate(streams):
            on.check(stream, i % PROMPTS)
        on.clear(streams)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_and_any_chunk(kind: str, dtype: str) -> None:
    on = scene(kind, dtype)
    chunked(on)
    batched(on)


@pytest.mark.parametrize("isa", BUILDS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["group_3", "gemma2"])
def test_every_build(kind: str, dtype: str, isa: str) -> None:
    on = scene(kind, dtype, isa)
    chunked(on, (31, 129))
    batched(on, (3, 33))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in KINDS])
def test_every_kind_of_decoder(kind: str, dtype: str) -> None:
    on = scene(kind, dtype)
    chunked(on, (1, 31))
    batched(on, (17,))


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_any_number_of_threads(kind: str, dtype: str, threads: int) -> None:
    one, many = scene(kind, dtype), scene(kind, dtype, threads=threads)
    assert all(torch.equal(a, b) for a, b in zip(one.lone, many.lone, strict=True))
    chunked(many, (129,))
    batched(many, (3, 40))


@pytest.mark.parametrize("block_tokens", [32, 64])
@pytest.mark.parametrize("kind", ["llama", "mixed_window"])
def test_longer_blocks(kind: str, block_tokens: int) -> None:
    on = scene(kind, "bf16", block_tokens=block_tokens)
    chunked(on, (1, 31))
    batched(on, (17, 33))


def share_a_root(on: Scene, shared: Sequence[int], length: int) -> None:
    """Streams that hold one root's first blocks decode together: what is shared is walked once."""
    root = on.add(0, PROMPT_TOKENS)
    on.stepper.step([(root, PROMPT_TOKENS)])
    sharing, copies = [], []
    for tokens in shared:
        stream, copied = on.stepper.share(root, on.prompts[0][:length], tokens)
        sharing.append(stream)
        copies += copied
    work = [(stream, max(1, length - 5 - s)) for stream, s in zip(sharing, shared, strict=True)]
    apart = [on.add(i, length) for i in range(1, 4)]
    on.stepper.step([*work, *((s, length - 5) for s in apart)], copies)
    while advance(on.stepper, [(s, 1) for s in (*apart, *sharing)]):
        pass
    for stream, tokens in zip(sharing, shared, strict=True):
        on.check(stream, 0, first=tokens)
    for prompt, stream in enumerate(apart, 1):
        on.check(stream, prompt)
    on.clear([root, *sharing, *apart])


@pytest.mark.parametrize(
    ("kind", "isa"),
    [("llama", ""), ("mqa", ""), ("group_40", ""), *(("group_3", isa) for isa in BUILDS)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_common_prefix(kind: str, isa: str, dtype: str) -> None:
    on = scene(kind, dtype, isa)
    if not isa:
        share_a_root(on, [128] * 20, 200)
    share_a_root(on, [16, 127, 128, 129, 144, 255, 256, 256, 257, 262], PROMPT_TOKENS)


steps = st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 16, 17, 33, 160]), min_size=5, max_size=60)
lengths = st.lists(st.integers(1, 160), min_size=1, max_size=40)


def any_schedule(on: Scene, long: list[int], counts: list[int]) -> None:
    """Streams come and compute as many tokens a step as `counts` says, round and round."""
    streams = [on.add(i % PROMPTS, length) for i, length in enumerate(long)]
    at = 0
    while any(s.computed < len(s.token_ids) for s in streams):
        work = []
        for stream in streams:
            work.append((stream, counts[at % len(counts)]))
            at += 1
        if not advance(on.stepper, work):  # counts of 0 only: let each have one
            advance(on.stepper, [(stream, 1) for stream in streams])
    for i, stream in enumerate(streams):
        on.check(stream, i % PROMPTS)
    on.clear(streams)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(long=lengths, counts=steps)
def test_any_schedule(kind: str, dtype: str, long: list[int], counts: list[int]) -> None:
    any_schedule(scene(kind, dtype), long, counts)


@pytest.mark.parametrize("isa", BUILDS[1:])
@settings(max_examples=4)
@given(long=lengths, counts=steps)
def test_any_schedule_on_every_build(isa: str, long: list[int], counts: list[int]) -> None:
    for dtype in DTYPES:
        any_schedule(scene("gemma2", dtype, isa), long, counts)


@pytest.mark.soak
@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CASES)
@settings(max_examples=300)
@given(long=lengths, counts=steps)
def test_any_schedule_soak(
    kind: str, dtype: str, isa: str, long: list[int], counts: list[int]
) -> None:
    any_schedule(scene(kind, dtype, isa), long, counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "mixed_window"])
def test_what_is_not_valid_is_poisoned(kind: str, dtype: str) -> None:
    """The other tests' premise: tails and blocks left behind are NaN, and NaN would be seen."""
    on = scene(kind, dtype)
    stream = on.add(0, 197)
    on.stepper.step([(stream, 190)])
    on.stepper.step([(stream, 7)])  # the last block holds five tokens
    groups = range(len(on.model.spec.groups))
    for group in groups:
        assert POISONED in on.model.read_block(group, stream.tables[group][-1])
        on.stepper.model.poison(group, [stream.tables[group][-2]])  # seen by every layer
    if kind == "mixed_window":
        assert stream.tables[1][:9] == [-1] * 9
    on.check(stream, 0)
    stream.token_ids.append(on.prompts[0][197])
    on.stepper.step([(stream, 1)])
    assert bool(stream.logits[-1].isnan().all())
    on.clear([stream])


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_draws_from_one_row(dtype: str) -> None:
    """A prompt of one token with many choices: the head sees more rows than the step has, and than
    any step before had."""
    config = replace(config_of("llama"), hidden=2048, layers=1)
    stepper = Stepper(compiled(config, random_weights(config, DTYPES[dtype])), blocks=2)
    stream = stepper.add([7])
    plan = stepper.step([(stream, 1)])
    for choices in (2, 16, 17, 33, 200):
        plan.samples[:] = [replace(plan.samples[0], choice=i) for i in range(choices)]
        drawn = stepper.model.execute(plan)
        assert drawn.shape[0] == choices
        assert torch.equal(drawn, stream.logits[0].expand_as(drawn))
