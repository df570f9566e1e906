"""The compiled step over pages of codes: its bytes are torch's, its attention is that over what the
bytes stand for, and a row's logits are the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_runs import Ways, check, every_way
from model_stepper import Stepper, Stream, run_chunked
from random_decoders import (
    compiled,
    config_of,
    in_torch,
    of_folder,
    random_weights,
    token_ids,
)
from test_compiled_engine import random_requests
from test_compiled_exact import (
    DTYPES,
    PROMPT_TOKENS,
    PROMPTS,
    Scene,
    any_schedule,
    batched,
    chunked,
    share_a_root,
)
from test_triattention_pages import streams

from kernels.codecs.base import KVCodec
from kernels.codecs.choose import make_codec
from kernels.codecs.fp8 import Fp8Vectors, LayerScales
from kernels.codecs.names import parse_codec
from kernels.codecs.pages import CodecLayout, CodecPages
from kernels.native.build import supported
from kernels.native.pages import coded_views
from kernels.slots import Slots
from worker.models.compiled import CompiledModel
from worker.models.config import ModelConfig
from worker.models.llama import LlamaModel
from worker.models.weights import Weights

BUILDS = [one.name for one in supported()]
WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)
# Every width of a number, as a key and as a value.
NAMES = ("fp8", "turboquant:k8v4", "turboquant:k4v3", "turboquant:k3v2", "turboquant:k2v1",
         "turboquant:k1v4")  # fmt: skip
SERVED = ("fp8", "turboquant:k8v4", "turboquant:k4v4", "turboquant:k3v2,boundary=1")
SCALES = torch.tensor([2.0, 1.0, 4.0, 1.0])  # of FP8, by head


def codec_of(name: str, config: ModelConfig, dtype: torch.dtype) -> KVCodec:
    parsed = parse_codec(name)
    assert parsed is not None
    scales = [LayerScales(SCALES[: config.kv_heads], SCALES[: config.kv_heads])] * config.layers
    made = make_codec(parsed, config.layers, config.head_dim, dtype, scales=scales)
    assert made is not None
    return made


def coded(name: str, config: ModelConfig, weights: Weights, **how: Any) -> CompiledModel:
    model = compiled(config, weights, **how)
    model.recode(codec_of(name, config, weights.embedding.dtype))
    return model


def wide(dim: int, **more: Any) -> ModelConfig:
    """One layer whose heads are that wide."""
    heads = {"query_heads": 4, "kv_heads": 2, "head_dim": dim, "layers": 1, "windows": (0,)}
    return replace(config_of("llama"), **{**heads, "attention_scale": dim**-0.5, **more})


def pools(model: CompiledModel | LlamaModel) -> list[torch.Tensor]:
    return model._pools.pools


def places(stream: Stream, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset of the stream's first tokens, blocks of 16."""
    place = torch.arange(count)
    return torch.tensor(stream.tables[0])[place // 16], place % 16


# ---- bytes --------------------------------------------------------------------------------------


def stored(model: CompiledModel, ids: list[int]) -> tuple[Stepper, Stream]:
    stepper = Stepper(model, len(ids) // 16 + 1)
    stream = stepper.add(ids)
    stepper.step([(stream, len(ids))])
    return stepper, stream


def compare_bytes(
    name: str, config: ModelConfig, weights: Weights, ids: list[int], isa: str
) -> int:
    """The first layer's codes against torch's of the same numbers, which a model without a codec
    has, since they do not depend on attention. How many vectors there were."""
    exact = compiled(config, weights, isa=isa)
    _, stream = stored(exact, ids)
    block, offset = places(stream, len(ids))
    slots = (block * 16 + offset).numpy()
    keys = exact.read_keys(0, slots)[0].unsqueeze(0)  # [1, heads, n, dim]
    values = paired_values(exact, slots).unsqueeze(0)
    model = coded(name, config, weights, isa=isa)
    _, stream = stored(model, ids)
    block, offset = places(stream, len(ids))
    layer = model._coded[0].layers[0]
    views = coded_views(model._coded[0], 0, pools(model)[0])
    for what, codec, numbers, view in (
        ("keys", layer.keys, keys, views[0]),
        ("values", layer.values, values, views[1]),
    ):
        ours = view[block, :, offset].transpose(0, 1)
        theirs = codec.encode(numbers)[0]
        assert codec.decode(theirs).isfinite().all(-1).any(), "nothing to compare"
        wrong = (ours != theirs).any(-1)
        if isinstance(codec, Fp8Vectors):  # a NaN has two codes
            wrong = ((ours != theirs) & ~((ours & 0x7F == 0x7F) & (theirs & 0x7F == 0x7F))).any(-1)
        assert not wrong.any(), f"{name} {config.head_dim}: {int(wrong.sum())} of {what} differ"
    return 2 * keys[0, ..., 0].numel()


def paired_values(model: CompiledModel, slots: np.ndarray) -> torch.Tensor:
    """Values in these slots of a model without a codec, float32 [heads, n, dim]."""
    mover = model._slots[0]
    assert isinstance(mover, Slots)
    index = torch.from_numpy(slots)
    found: torch.Tensor = mover._values[mover._value_place(index, (slice(None), slice(None)))]
    return found[:, 0].transpose(0, 1).float()


@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_that_torch_writes(dtype: str, isa: str) -> None:
    """All widths of heads and of numbers; lengths from below fp16's least to beyond its largest."""
    count = 0
    for number, dim in enumerate(WIDTHS):
        config = wide(dim)
        weights = random_weights(config, DTYPES[dtype], seed=number)
        [layer] = weights.layers
        for turn, gain in enumerate((1.0, 2.0**-22, 2.0**12)):
            scaled = replace(weights, layers=(replace(layer, qkv=layer.qkv * gain),))
            ids = token_ids(40, config.vocab_tokens, seed=dim)
            for name in NAMES[number % 2 :: 2] if turn == 0 else NAMES[(number + turn) % 6 :: 6]:
                count += compare_bytes(name, config, scaled, ids, isa)
    print(count, "vectors, seeds of weights 0 to 7, of tokens their widths")


@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_what_lies_on_a_border(dtype: str, isa: str) -> None:
    """Values of a few ones and zeros: turned, many coordinates are exactly 0, the border between
    two centroids, which belongs to the lower one. Some are all zeros, some are not finite."""
    config = replace(wide(64), hidden=128)
    weights = random_weights(config, DTYPES[dtype], seed=3)
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(-1, 2, (config.vocab_tokens, 128), generator=generator)
    rows *= torch.rand(rows.shape, generator=generator) < 0.1
    rows[::5] = 0
    embedding = rows.to(DTYPES[dtype])
    embedding[3, 17], embedding[8, 100] = torch.inf, torch.nan
    [layer] = weights.layers
    qkv = layer.qkv.clone()
    qkv[-128:] = torch.eye(128).to(qkv.dtype)  # values are what the norm makes of embeddings
    layer = replace(layer, qkv=qkv, input_norm=torch.ones(128))
    bordering = replace(weights, embedding=embedding, head=embedding, layers=(layer,))
    for name in NAMES:
        compare_bytes(name, config, bordering, list(range(64)), isa)


# ---- attention ----------------------------------------------------------------------------------


def give_codes(source: CompiledModel, table: list[list[int]], target: LlamaModel) -> None:
    """The blocks' codes, or numbers, into the same blocks of torch's model."""
    for group, layout in enumerate(source._coded):
        blocks = torch.tensor([block for block in table[group] if block >= 0])
        assert isinstance(layout, CodecLayout)
        for layer, pages in enumerate(target._pages[group]):
            if isinstance(pages, CodecPages):
                keys, values = coded_views(layout, layer, pools(source)[group])
                pages.keys[blocks], pages.values[blocks] = keys[blocks], values[blocks]
                continue
            mover = source._slots[group]._layers[layer]  # type: ignore[attr-defined]
            assert isinstance(mover, Slots)
            places = (blocks.unsqueeze(1) * 16 + torch.arange(16)).flatten()
            every = (slice(None), slice(None))
            keys = mover.keys(places.numpy())[0]  # [heads, n, dim]
            values = mover._values[mover._value_place(places, every)][:, 0].transpose(0, 1)
            for numbers, into in ((keys, pages.keys), (values, pages.values)):  # type: ignore[attr-defined]
                into[blocks] = numbers.unflatten(1, (-1, 16)).transpose(0, 1).to(into.dtype)


CASES = ("llama", "group_3", "group_40", "dim_96", "dim_128", "dim_256", "qwen3", "mixed_window",
         "gemma3")  # fmt: skip


@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_over_what_codes_stand_for(case: str, isa: str) -> None:
    """A decode step over the same codes, here and by torch, which decodes them first."""
    config = config_of(case)
    weights = random_weights(config, torch.float32, seed=7)
    ids = token_ids(131, config.vocab_tokens, seed=8)
    found = {}
    for name in (*NAMES, *SERVED[-1:]):
        ours = coded(name, config, weights, isa=isa)
        theirs = in_torch(config, weights)
        theirs.recode(codec_of(name, config, torch.float32))
        here, there = Stepper(ours, 16), Stepper(theirs, 16)
        stream = here.add(ids)
        here.step([(stream, 130)])
        twin = there.add(ids)
        twin.tables, twin.computed = [list(table) for table in stream.tables], 130
        give_codes(ours, stream.tables, theirs)
        here.step([(stream, 1)])
        there.step([(twin, 1)])
        found[name] = float((stream.logits[-1] - twin.logits[-1]).abs().max())
        assert found[name] < 2e-3, (name, found)
    print(case, isa, found)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_torch_has_the_same_logits(name: str) -> None:
    """Nearly: where a rounding of the product before moved a number to another code, rows move."""
    config = config_of("llama")
    weights = random_weights(config, torch.float32, seed=9)
    ids = token_ids(150, config.vocab_tokens, seed=10)
    theirs = in_torch(config, weights)
    theirs.recode(codec_of(name, config, torch.float32))
    right = run_chunked(Stepper(theirs, 12), ids, 150)
    ours = run_chunked(Stepper(coded(name, config, weights), 12), ids, 150)
    apart = (ours - right).abs().amax(1)
    print(name, "largest", float(apart.max()), "median", float(apart.median()))
    assert float(apart.median()) < 1e-4 and float(apart.max()) < 0.5


def test_fewer_bits_are_farther_off() -> None:
    """So the codes are really what is attended to, in both dtypes."""
    config = config_of("llama")
    ids = token_ids(150, config.vocab_tokens, seed=12)
    for dtype in DTYPES.values():
        weights = random_weights(config, dtype, seed=11)
        exact = run_chunked(Stepper(compiled(config, weights), 12), ids, 150).log_softmax(-1)
        kl = []
        for name in ("fp8", "turboquant:k4v4", "turboquant:k3v3", "turboquant:k2v2"):
            logits = run_chunked(Stepper(coded(name, config, weights), 12), ids, 150)
            kl.append(float((exact.exp() * (exact - logits.log_softmax(-1))).sum(-1).mean()))
        print(dtype, kl)
        assert 0 < kl[0] < kl[1] < kl[2] < kl[3] and kl[1] < 0.1


# ---- invariance ---------------------------------------------------------------------------------


class CodedScene(Scene):
    """As a Scene, its pages in a codec."""

    def __init__(
        self, name: str, kind: str, dtype: str, isa: str = "", threads: int = 1, tokens: int = 16
    ) -> None:
        config = config_of(kind)
        weights = random_weights(config, DTYPES[dtype], seed=5)
        how = {"block_tokens": tokens, "threads": threads, "isa": isa}
        self.model = coded(name, config, weights, **how)
        self.stepper = Stepper(self.model, 400)
        vocab = config.vocab_tokens
        self.prompts = [token_ids(PROMPT_TOKENS, vocab, seed) for seed in range(PROMPTS)]
        self.lone = [run_chunked(self.stepper, ids, PROMPT_TOKENS) for ids in self.prompts]
        self._all_free = [sorted(free) for free in self.stepper._free]


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "isa"),
    [
        ("fp8", "group_3", "bf16", ""),
        ("turboquant:k8v4", "llama", "bf16", ""),
        ("turboquant:k4v4", "group_3", "bf16", ""),
        ("turboquant:k4v4", "gemma2", "fp32", ""),
        ("turboquant:k3v2,boundary=1", "mixed_window", "bf16", ""),
        ("turboquant:k3v2,boundary=1", "gemma3", "fp32", ""),
        ("turboquant:k8v4", "dim_96", "fp32", ""),
        *(("turboquant:k4v3", "group_3", "bf16", isa) for isa in BUILDS[1:]),
        *(("fp8", "llama", "fp32", isa) for isa in BUILDS[1:]),
    ],
)
def test_batches_chunks_and_prefixes_change_no_bit(
    name: str, kind: str, dtype: str, isa: str
) -> None:
    on = CodedScene(name, kind, dtype, isa)
    chunked(on, (1, 31))
    batched(on, (3, 17))
    if kind in ("llama", "group_3"):
        share_a_root(on, [16, 127, 128, 129, 255, 256, 262], PROMPT_TOKENS)


@pytest.mark.parametrize(("threads", "tokens"), [(3, 16), (2, 64)])
def test_threads_and_longer_blocks_change_no_bit(threads: int, tokens: int) -> None:
    for name in ("fp8", "turboquant:k4v4"):
        one = CodedScene(name, "llama", "bf16", tokens=tokens)
        many = CodedScene(name, "llama", "bf16", threads=threads, tokens=tokens)
        plain = CodedScene(name, "llama", "bf16")
        for a, b, c in zip(one.lone, many.lone, plain.lone, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)
        batched(many, (17,))


@pytest.mark.soak
@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SERVED)
def test_any_schedule_soak(name: str, dtype: str, isa: str) -> None:
    generator = torch.Generator().manual_seed(6)
    for kind in ("llama", "group_3", "gemma3", "mixed_window", "dim_128"):
        on = CodedScene(name, kind, dtype, isa)
        for _ in range(4):
            long = (torch.randint(1, 160, (16,), generator=generator)).tolist()
            steps = torch.randint(0, 34, (24,), generator=generator).tolist()
            any_schedule(on, long, steps)


def test_poison_would_be_seen() -> None:
    """The premise of the others: what no token was written to is NaN, whatever the codec."""
    for name in SERVED:
        on = CodedScene(name, "mixed_window", "bf16")
        stream = on.add(0, 100)
        on.stepper.step([(stream, 99)])
        for group in range(len(on.model.spec.groups)):
            on.model.poison(group, [stream.tables[group][-2]])
        on.stepper.step([(stream, 1)])
        assert bool(stream.logits[-1].isnan().all()), name


@pytest.mark.parametrize("way", ["cached, preempted", "cached, tiered"])
def test_an_engine_tells_what_a_request_has_alone(way: str) -> None:
    compare_ways("turboquant:k8v4", 24, (way,), small_pool=24)


@pytest.mark.soak
@pytest.mark.parametrize("name", SERVED)
def test_an_engine_in_every_way_soak(name: str) -> None:
    compare_ways(name, 120, (), small_pool=40)


def compare_ways(name: str, count: int, only: tuple[str, ...], small_pool: int) -> None:
    """Cached, chunked, preempted, through the tiers and moved: the bits of each request alone."""
    config = config_of("llama")
    weights = random_weights(config, torch.bfloat16)
    ways = Ways(lambda: coded(name, config, weights), blocks=1200, running_max=48)
    requests = random_requests(count, config.vocab_tokens, seed=5)
    right = ways.alone(requests)
    for way, run in every_way(ways, requests, small_pool).items():
        if not only or way in only:
            print(name, check(way, run(), right))


@pytest.mark.parametrize("select", ["union", "head"])
def test_pruned_streams_over_codes_are_exact(select: str) -> None:
    """Alone, together and after preemption, their token slots moved as codes."""
    config = config_of("untied")

    def make() -> CompiledModel:
        return coded("turboquant:k4v4", config, random_weights(config, torch.bfloat16))

    policy = f"triattention:budget=24,interval=16,window=8,select={select}"
    together, alone = streams(make, policy), streams(make, policy, running_max=1)
    pressed = streams(make, policy, credit=13, running_max=2)
    assert pressed.pop("preemptions")[0][0] > 5
    assert together.pop("preemptions") == alone.pop("preemptions")
    assert together == alone == pressed
    assert together["r0"] != streams(make, "none")["r0"], "nothing was pruned that mattered"


# ---- what a model says and does -----------------------------------------------------------------


def test_what_it_says_of_itself() -> None:
    config = config_of("llama")
    weights = random_weights(config, torch.bfloat16)
    plain = compiled(config, weights).spec
    every = [plain, *(coded(name, config, weights).spec for name in (*NAMES, *SERVED[2:]))]
    assert len({spec.representation.id for spec in every}) == len(every)
    assert len({spec.numeric_class for spec in every}) == len(every)
    torchs = in_torch(config, weights)
    torchs.recode(codec_of("turboquant:k8v4", config, torch.bfloat16))
    mine = coded("turboquant:k8v4", config, weights).spec
    assert mine.groups == torchs.spec.groups, "the same bytes"
    assert mine.representation.codec == torchs.spec.representation.codec
    assert mine.representation.id != torchs.spec.representation.id, "in another order"
    for spec in every[1:]:
        assert spec.numeric_class.startswith(f"{plain.numeric_class}-kv-")
        assert "-invariant-" in spec.numeric_class and spec.layouts == () and spec.reads_keys


@pytest.mark.parametrize("name", SERVED)
def test_token_slots_move_and_keys_are_read(name: str) -> None:
    """Keys are near a plain model's; a slot that moves takes its keys with it, all heads or one."""
    config = config_of("mixed_window")
    weights = random_weights(config, torch.float32)
    plain, model = compiled(config, weights), coded(name, config, weights)
    ids = token_ids(30, config.vocab_tokens, 8)
    found = {}
    for what, each in (("plain", plain), ("coded", model)):
        _, stream = stored(each, ids)
        [table] = stream.tables[:1]
        found[what] = np.array([table[0] * 16 + 3, table[1] * 16 + 9])
        free = ({0, 1} - set(table)) or {table[0]}
    exact, near = plain.read_keys(0, found["plain"]), model.read_keys(0, found["coded"])
    assert exact.shape == near.shape == (2, config.kv_heads, 2, config.head_dim)
    first = float((near[0] - exact[0]).norm() / exact[0].norm())
    assert first == 0 if "boundary" in name else 0 < first < 0.2
    targets = np.array([min(free) * 16 + 5, min(free) * 16 + 6])
    before = model.read_keys(0, targets)
    values = [view.clone() for view in views_of(model)]
    model.move_slots(0, found["coded"][:1], targets[:1], np.array([config.kv_heads + 1]))
    after = model.read_keys(0, targets)
    assert torch.equal(after[1, 1, 0], near[1, 1, 0]), "that head of the second layer"
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, 0], before[1, 0])
    model.move_slots(0, found["coded"], targets)
    assert torch.equal(model.read_keys(0, targets), near)
    for old, new in zip(values, views_of(model), strict=True):
        source, target = found["coded"], targets
        flat = new.transpose(1, 2).flatten(0, 1), old.transpose(1, 2).flatten(0, 1)
        assert torch.equal(flat[0][target], flat[1][source])


def views_of(model: CompiledModel) -> list[torch.Tensor]:
    """Value codes of group 0's layers, [blocks, heads, 16, bytes]."""
    layout = model._coded[0]
    layers = [n for n, _ in enumerate(layout.layers) if hasattr(layout.layers[n].keys, "encode")]
    coded_layers = [n for n in layers if layout.layers[n].keys.vector_bytes < 128]
    return [coded_views(layout, layer, pools(model)[0])[1] for layer in coded_layers]


def test_a_block_written_elsewhere_is_the_same_block() -> None:
    config = config_of("llama")
    model = coded("turboquant:k4v4", config, random_weights(config, torch.bfloat16))
    stepper = Stepper(model, 8)
    stream, twin = (stepper.add(token_ids(40, config.vocab_tokens, 7)) for _ in range(2))
    stepper.step([(stream, 39)])
    twin.tables, twin.computed = [[7 - block for block in stream.tables[0]]], 39
    kept = [model.read_block(0, block) for block in stream.tables[0]]
    for block, content in zip(twin.tables[0], kept, strict=True):
        model.write_block(0, block, content)
    stepper.step([(twin, 1)])
    for block, content in zip(stream.tables[0], kept, strict=True):
        model.write_block(0, block, content)
    stepper.step([(stream, 1)])
    assert torch.equal(stream.logits[-1], twin.logits[-1])


@pytest.mark.soak
def test_the_real_model(demo_model: Path) -> None:
    """Bits of each request alone in every way, and FP8 and four bits near the model without."""
    config, weights = of_folder(demo_model, torch.bfloat16)
    ids = token_ids(300, config.vocab_tokens, seed=1)
    exact = run_chunked(Stepper(compiled(config, weights, threads=2), 24), ids, 300)
    for name, most in (("fp8", 0.1), ("turboquant:k8v4", 0.2), ("turboquant:k4v4", 0.6)):
        model = coded(name, config, weights, threads=2)
        stepper = Stepper(model, 64)
        whole = run_chunked(stepper, ids, 300)
        assert torch.equal(whole, run_chunked(stepper, ids, 77))
        p, q = exact.log_softmax(-1), whole.log_softmax(-1)
        kl = float((p.exp() * (p - q)).sum(-1).mean())
        print(name, "KL", kl)
        assert 0 < kl < most
