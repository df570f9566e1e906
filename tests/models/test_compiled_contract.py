"""What worker/models/base.py asks of any Model, on every implementation: fake, torch, compiled."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from random_decoders import CPU, compiled, config_of, in_torch, random_weights, token_ids

from kernels.native import build
from kvstore.groups import GroupKind
from seams.errors import ModelLoadError, OutOfBlocks
from worker.config import ReplicaConfig
from worker.engine.plan import BlockCopy, SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models import pools
from worker.models.base import Model
from worker.models.compiled import CompiledModel
from worker.models.config import ModelConfig
from worker.models.fake import fake_model
from worker.models.llama import LlamaModel
from worker.models.making import compiled_dtype, make_model
from worker.models.weights import Weights

BLOCK, BLOCKS = 16, 40
PROMPT = token_ids(150, 250, seed=3)  # longer than a window, and than a chunk of attention
GREEDY = SamplingParams(seed=0, max_tokens=1)


def decoder(
    make: Callable[[ModelConfig, Weights], Model], kind: str, dtype: torch.dtype
) -> Callable[[], Model]:
    config = config_of(kind)
    return lambda: make(config, random_weights(config, dtype))


MODELS: dict[str, Callable[[], Model]] = {
    "fake": lambda: fake_model("full", block_tokens=BLOCK),
    "fake window": lambda: fake_model("window", block_tokens=BLOCK),
    "torch fp32": decoder(in_torch, "llama", torch.float32),
    "torch bf16 window": decoder(in_torch, "mixed_window", torch.bfloat16),
    "compiled fp32": decoder(compiled, "llama", torch.float32),
    "compiled bf16": decoder(compiled, "llama", torch.bfloat16),
    "compiled fp32 window": decoder(compiled, "mixed_window", torch.float32),
    "compiled bf16 window": decoder(compiled, "mixed_window", torch.bfloat16),
    "compiled bf16 window everywhere": decoder(compiled, "mistral_window", torch.bfloat16),
    "compiled bf16 gemma": decoder(compiled, "gemma2", torch.bfloat16),
}
WINDOWED = [name for name in MODELS if "window" in name or "gemma" in name]
every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, blocks: int = BLOCKS) -> Model:
    """With pools in which every byte is poison."""
    model = MODELS[name]()
    model.allocate((blocks,) * len(model.spec.groups))
    for group in model.spec.groups:
        model.poison(group.id, list(range(blocks)))
    return model


def tables_of(model: Model, seed: int = 0) -> list[list[int]]:
    """A shuffled table per group, long enough for the prompt and a block more."""
    rng = random.Random(seed)
    return [rng.sample(range(BLOCKS), -(-len(PROMPT) // BLOCK) + 1) for _ in model.spec.groups]


def plan(tables: list[list[int]], ids: list[int], start: int, rows: list[int]) -> StepPlan:
    """Compute ids[start:] and sample from `rows`."""
    positions = list(range(start, len(ids)))
    slots = [[table[p // BLOCK] * BLOCK + p % BLOCK for p in positions] for table in tables]
    return StepPlan.of_lists(
        step=1,
        token_ids=ids[start:],
        positions=positions,
        starts=[0, len(positions)],
        lengths=[len(ids)],
        tables=[[list(table[: -(-len(ids) // BLOCK)])] for table in tables],
        slots=slots,
        samples=[SampleRow(row, 0, 0, 0, GREEDY) for row in rows],
    )


def prefill(model: Model, tables: list[list[int]]) -> None:
    model.execute(plan(tables, PROMPT, 0, []))


def next_logits(model: Model, tables: list[list[int]]) -> torch.Tensor:
    """Of the token after the prompt, [vocab]."""
    return model.execute(plan(tables, [*PROMPT, 5], len(PROMPT), [0]))[0].clone()


@every_model
def test_logits_are_those_of_the_rows_asked_for(name: str) -> None:
    model = made(name)
    tables = tables_of(model)
    every = model.execute(plan(tables, PROMPT, 0, list(range(len(PROMPT))))).clone()
    assert every.dtype is torch.float32
    assert every.shape == (len(PROMPT), model.spec.vocab_tokens)
    assert bool(every.isfinite().all()) and every.std() > 0.1
    assert len({tuple(row[:8].tolist()) for row in every}) > 100
    rows = [149, 0, 3, 149, 77]
    some = model.execute(plan(tables, PROMPT, 0, rows))
    if name.startswith("torch"):  # its products may sum in another order for fewer rows
        torch.testing.assert_close(some, every[rows], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(some, every[rows])
    none = model.execute(plan(tables, PROMPT, 0, []))
    assert none.shape == (0, model.spec.vocab_tokens)


@every_model
def test_spec(name: str) -> None:
    spec = made(name).spec
    assert [group.id for group in spec.groups] == list(range(len(spec.groups)))
    assert (len(spec.groups) > 1) == (name in WINDOWED)
    assert all(g.window_tokens > 0 for g in spec.groups if g.kind is GroupKind.WINDOW)
    assert spec.block_tokens == BLOCK and spec.numeric_class and spec.representation.id


def test_pages_of_torch_are_foreign_but_as_large() -> None:
    ours, theirs = made("compiled fp32").spec, made("torch fp32").spec
    assert ours.groups == theirs.groups
    assert ours.representation.id != theirs.representation.id
    assert ours.numeric_class != theirs.numeric_class
    assert made("compiled bf16").spec.numeric_class != ours.numeric_class


@every_model
def test_blocks_move_to_another_place_of_another_model(name: str) -> None:
    """What a tier does, and a migration."""
    source, target = made(name), made(name)
    tables, moved = tables_of(source, 1), tables_of(source, 2)
    prefill(source, tables)
    expected = next_logits(source, tables)
    for group in source.spec.groups:
        for rank in range(group.ranks):
            for old, new in zip(tables[group.id], moved[group.id], strict=True):
                data = source.read_block(group.id, old, rank)
                assert len(data) == group.block_bytes
                target.write_block(group.id, new, data, rank)
                assert target.read_block(group.id, new, rank) == data
    assert torch.equal(next_logits(target, moved), expected)


@every_model
def test_tables_matter(name: str) -> None:
    model = made(name)
    tables = tables_of(model)
    prefill(model, tables)
    expected = next_logits(model, tables)
    for group in range(len(tables)):
        wrong = [list(table) for table in tables]
        wrong[group][-3:-1] = wrong[group][-2:-4:-1]  # two full blocks of the end, swapped
        assert not torch.equal(next_logits(model, wrong), expected), f"group {group}"


@every_model
def test_what_is_visible_is_read(name: str) -> None:
    """A poisoned block changes the logits exactly if a layer sees it."""
    model = made(name)
    tables = tables_of(model)
    prefill(model, tables)
    expected = next_logits(model, tables)
    for group in model.spec.groups:
        window = group.window_tokens or (21 if "everywhere" in name else len(PROMPT) + 1)
        first = max(0, len(PROMPT) + 1 - window)
        for index in range(len(PROMPT) // BLOCK):
            visible = (index + 1) * BLOCK > first
            if not visible:
                tables[group.id][index] = -1  # as a scheduler lets go of it
                assert torch.equal(next_logits(model, tables), expected), (group.id, index)
                continue
            block = tables[group.id][index]
            kept = [model.read_block(group.id, block, rank) for rank in range(group.ranks)]
            model.poison(group.id, [block])
            assert not torch.equal(next_logits(model, tables), expected), (group.id, index)
            for rank, data in enumerate(kept):
                model.write_block(group.id, block, data, rank)
            assert torch.equal(next_logits(model, tables), expected)


@every_model
def test_copies_come_before_the_step(name: str) -> None:
    """A boundary block taken over in part; the rest of it stays nobody's."""
    model = made(name)
    tables = tables_of(model)
    prefill(model, tables)
    length = 100
    whole = model.execute(plan(tables, PROMPT[:length], 0, [length - 1]))[0].clone()
    shared = length - length % BLOCK
    prefill(model, tables)
    step = plan(tables, PROMPT[:length], shared + 2, [length - shared - 3])
    for group, table in enumerate(tables):
        fresh = next(block for block in range(BLOCKS) if block not in table)
        step.copies.append(BlockCopy(group, table[shared // BLOCK], fresh, 2))
        step.tables[group][0][-1] = fresh
        step.slots[group][:] = [fresh * BLOCK + p % BLOCK for p in step.positions]
    before = [model.read_block(g, table[shared // BLOCK]) for g, table in enumerate(tables)]
    found = model.execute(step)[0]
    after = [model.read_block(g, table[shared // BLOCK]) for g, table in enumerate(tables)]
    assert before == after, "the source was written to"
    if "torch" in name:  # which rounds a smaller batch in its own way
        assert float((found - whole).abs().max()) < (1e-4 if "fp32" in name else 0.5)
    else:
        assert torch.equal(found, whole)


@every_model
def test_poison_fills_those_blocks_only(name: str) -> None:
    model = made(name)
    for group in model.spec.groups:
        zeros = bytes(group.block_bytes)
        for rank in range(group.ranks):
            for block in (3, 4, 5):
                model.write_block(group.id, block, zeros, rank)
        model.poison(group.id, [3, 5])
        for rank in range(group.ranks):
            found = [model.read_block(group.id, block, rank) for block in (2, 3, 4, 5)]
            assert found[2] == zeros
            assert found[0] == found[1] == found[3] and set(found[1]) != {0}


@pytest.mark.parametrize("name", [name for name in MODELS if "fake" not in name])
def test_pools_that_memory_does_not_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    groups = len(model.spec.groups)
    with pytest.raises(OutOfBlocks, match=r"no memory left for .* GiB of KV blocks"):
        model.allocate((1 << 36,) * groups)
    monkeypatch.setattr(pools, "available_bytes", lambda device: 1 << 62)
    with pytest.raises(OutOfBlocks, match="no memory left"):  # by the allocator itself
        model.allocate((1 << 36,) * groups)
    monkeypatch.undo()
    model.allocate((BLOCKS,) * groups)  # less may still be had
    assert model.read_block(0, BLOCKS - 1) == bytes(model.spec.groups[0].block_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_step_side_by_side_on_any_thread(dtype: torch.dtype) -> None:
    """Made here, run elsewhere, two at a time: nothing is shared, tile registers neither."""
    config = config_of("llama")
    weights = random_weights(config, dtype)
    alone = compiled(config, weights)
    alone.allocate((BLOCKS,))
    tables = tables_of(alone)
    expected = alone.execute(plan(tables, PROMPT, 0, [40, 149])).clone()
    models = [compiled(config, weights, threads=threads) for threads in (1, 2)]
    for model in models:
        model.allocate((BLOCKS,))

    def steps(model: CompiledModel) -> bool:
        step = plan(tables, PROMPT, 0, [40, 149])
        return all(torch.equal(model.execute(step), expected) for _ in range(30))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(steps, models)) == [True, True]


def choose(dtype: str = "auto", compute: str = "auto", **fields: object) -> torch.dtype | None:
    replica = ReplicaConfig("r", "m", "m", (), "", device="cpu", dtype=dtype, compute=compute)
    config = ModelConfig(**{**vars(config_of("llama")), **fields})  # type: ignore[arg-type]
    return compiled_dtype(replica, config, torch.bfloat16, CPU)


def test_without_a_compiled_path_torch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of log says why; who asked for the compiled path is told instead."""
    assert choose() is torch.bfloat16 and choose(dtype="fp32") is torch.float32
    assert choose(compute="torch") is None
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path))
    monkeypatch.delenv("BANYAN_NATIVE", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert choose() is None
    (record,) = caplog.records
    assert record.getMessage().endswith("There is no C++ compiler on this machine.")
    with pytest.raises(ModelLoadError, match=r"^There is no C\+\+ compiler on this machine\.$"):
        choose(compute="compiled")
    config = config_of("llama")
    model = make_model(
        ReplicaConfig("r", "m", "m", (), ""),
        config,
        random_weights(config, torch.float32),
        fingerprint="f",
        context_tokens=64,
        compiled=False,
    )
    assert isinstance(model, LlamaModel)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"head_dim": 24}, "head dimension of 24"),
        ({"head_dim": 288}, "head dimension of 288"),
        ({"activation": "relu"}, "activation relu"),
        ({"dtype": "fp16"}, "no fp16"),
    ],
)
def test_what_the_compiled_path_lacks(asked: dict[str, object], named: str) -> None:
    assert choose(**asked) is None  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=named) as caught:
        choose(compute="compiled", **asked)  # type: ignore[arg-type]
    assert str(caught.value).endswith(".")
