"""Compacted pages of real decoders: what attention gives over them is what it gives over all pages
with the dropped tokens masked; and whole pruned streams, to the bit in every way of running."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from random_decoders import (
    CPU,
    DenseDecoder,
    LayerWeights,
    Weights,
    _linear,
    compiled,
    config_of,
    in_torch,
    random_weights,
    token_ids,
)

from kernels.codecs.choose import make_codec
from kernels.codecs.names import parse_codec
from seams.clock import VirtualClock
from worker.calibration.capture import capture
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest
from worker.engine.packing import pack
from worker.engine.plan import SampleRow, StepPlan
from worker.engine.retention.policies import Policies
from worker.engine.sampling import SamplingParams
from worker.models.base import Model
from worker.models.config import ModelConfig
from worker.models.llama import LlamaModel

SIZE, PROMPT = 16, 120
GREEDY = SamplingParams(seed=0, max_tokens=1)
MODELS: dict[str, tuple[Callable[[ModelConfig, Weights], Model], torch.dtype, float]] = {
    "torch fp32": (in_torch, torch.float32, 1e-4),
    "torch bf16": (in_torch, torch.bfloat16, 0.3),
    "compiled fp32": (compiled, torch.float32, 1e-4),
    "compiled bf16": (compiled, torch.bfloat16, 0.3),
}
every_model = pytest.mark.parametrize("name", MODELS)


class MaskedDecoder(DenseDecoder):
    """A dense decoder whose last row does not see what was dropped: hidden [L, Hkv, tokens]."""

    hidden: np.ndarray

    def _attention(self, number: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        config, count = self._config, len(x)
        heads = _linear(x, layer.qkv, layer.qkv_bias).view(count, -1, config.head_dim)
        q, k, v = heads.split([config.query_heads, config.kv_heads, config.kv_heads], dim=1)
        q, k = self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)
        q, k = self._rotated(number, q), self._rotated(number, k)
        group = config.query_heads // config.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.attention_scale
        visible = torch.ones(count, count, dtype=torch.bool).tril().expand_as(scores).clone()
        unseen = torch.from_numpy(self.hidden[number]).repeat_interleave(group, 0)
        visible[:, -1, : unseen.shape[1]] &= ~unseen
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return _linear(attended, layer.output, layer.output_bias)


def plan(ids: Sequence[int], first: int, stored: int, table: list[int]) -> StepPlan:
    """Compute `ids` at logical positions from `first`, behind `stored` slots; sample the last."""
    count = len(ids)
    places = range(stored, stored + count)
    return StepPlan.of_lists(
        step=1,
        token_ids=ids,
        positions=range(first, first + count),
        starts=[0, count],
        lengths=[stored + count],
        tables=[[table]],
        slots=[[table[p // SIZE] * SIZE + p % SIZE for p in places]],
        samples=[SampleRow(count - 1, 0, 0, 0, GREEDY)],
    )


@every_model
@pytest.mark.parametrize("per_head", [False, True])
def test_attention_over_compacted_pages_is_masked_attention(name: str, per_head: bool) -> None:
    make, dtype, tolerance = MODELS[name]
    config = config_of("qwen3")
    weights = random_weights(config, dtype)
    model = make(config, weights)
    model.allocate((20,))
    model.poison(0, list(range(20)))
    chance = np.random.default_rng(5)
    table = chance.permutation(20)[: -(-PROMPT // SIZE) + 1].tolist()
    ids = token_ids(PROMPT + 1, config.vocab_tokens)
    model.execute(plan(ids[:PROMPT], 0, 0, table))
    rows = config.layers * config.kv_heads if per_head else 1
    kept = np.zeros((rows, PROMPT), dtype=np.bool_)
    kept[:, :20] = True
    for row in kept:
        row[20 + chance.permutation(PROMPT - 20)[:37]] = True
    packing = pack(kept, 20, SIZE)
    old = np.array(table)
    new = old[packing.order]
    model.move_slots(
        0,
        old[packing.sources // SIZE] * SIZE + packing.sources % SIZE,
        new[packing.targets // SIZE] * SIZE + packing.targets % SIZE,
        packing.rows if per_head else None,
    )
    gone = sorted(set(range(20)) - set(new.tolist()))
    model.poison(0, gone)
    found = model.execute(plan(ids[PROMPT:], PROMPT, 57, new.tolist()))[0].double()
    dense = MaskedDecoder(config, weights)
    by_head = np.broadcast_to(~kept, (config.layers * config.kv_heads, PROMPT)).copy()
    dense.hidden = by_head.reshape(config.layers, config.kv_heads, PROMPT)
    expected = dense.logits(ids)[-1]
    dense.hidden = np.zeros_like(dense.hidden)
    whole = dense.logits(ids)[-1]
    print("off by", (found - expected).abs().max(), "dropped", (whole - expected).abs().max())
    assert (found - expected).abs().max() < tolerance
    assert (whole - expected).abs().max() > 5 * tolerance, "the mask hides nothing that matters"


@every_model
def test_keys_read_back_are_those_of_every_layer(name: str) -> None:
    make, dtype, _ = MODELS[name]
    config = config_of("qwen3")
    model = make(config, random_weights(config, dtype))
    other = in_torch(config, random_weights(config, dtype))
    ids, table = token_ids(40, config.vocab_tokens), [3, 0, 2]
    slots = np.array([table[p // SIZE] * SIZE + p % SIZE for p in range(40)])
    for one in (model, other):
        one.allocate((5,))
        one.execute(plan(ids, 0, 0, table))
    found, expected = model.read_keys(0, slots), other.read_keys(0, slots)
    assert found.shape == (config.layers, config.kv_heads, 40, config.head_dim)
    assert (found - expected).abs().max() < (1e-4 if dtype is torch.float32 else 0.1)


def streams(
    make: Callable[[], Model], retention: str, credit: int = 1000, **config: int
) -> dict[str, list[tuple[int, float]]]:
    """Tokens and logprobs of five generations; with little credit they pause, and those that pause
    are preempted for others."""
    given = {"blocks": (60,), "poison_freed": True, "cache": False, **config}
    model = make()
    policies = Policies(model.spec, retention, STATISTICS)
    core = EngineCore(model, EngineConfig(**given), VirtualClock(), retention=policies)  # type: ignore[arg-type]
    for number in range(5):
        prompt = tuple(token_ids(10 + 7 * number, 320, seed=number))
        params = SamplingParams(
            seed=number, max_tokens=70, temperature=1.0, ignore_eos=True, logprobs=0
        )
        core.submit(EngineRequest(f"r{number}", prompt, len(prompt), params, credit_tokens=credit))
    found: dict[str, list[tuple[int, float]]] = {}
    preemptions = 0
    while core.has_work():
        output = core.step()
        core.check_integrity()
        for emission in output.emissions if output else ():
            assert emission.error is None
            found.setdefault(emission.request_id, []).extend(
                logprobs.chosen for logprobs in emission.logprobs
            )
            preemptions += emission.usage.preemptions if emission.usage else 0
        if not core.has_work():
            for number in range(5):
                core.grant(f"r{number}", credit)
    found["preemptions"] = [(preemptions, 0.0)]
    return found


CONFIG = config_of("untied")
WEIGHTS = random_weights(CONFIG, torch.bfloat16)
STATISTICS = capture(in_torch(CONFIG, WEIGHTS), CONFIG, token_ids(300, 320, seed=9))


@pytest.mark.parametrize("select", ["union", "head"])
def test_pruned_streams_are_exact_in_every_way_of_running(select: str) -> None:
    """Alone, together, in chunks, and after preemption: the same tokens and bits of logprobs."""
    policy = f"triattention:budget=24,interval=16,window=8,select={select}"

    def make() -> Model:
        return compiled(CONFIG, WEIGHTS)

    together = streams(make, policy)
    alone = streams(make, policy, running_max=1)
    chunked = streams(make, policy, step_tokens_max=9)
    pressed = streams(make, policy, credit=13, running_max=2)
    plain = streams(make, "none")
    assert pressed.pop("preemptions")[0][0] > 5
    for other in (together, alone, chunked):
        other.pop("preemptions")
    assert together == alone == chunked == pressed
    assert {name: len(tokens) for name, tokens in together.items()} == {
        f"r{n}": 70 for n in range(5)
    }
    assert plain["r0"] != together["r0"], "nothing was pruned that mattered"
    assert plain["r0"][:24] == together["r0"][:24]


@pytest.mark.parametrize(
    "policy", ["streaming:window=24,interval=16", "triattention:budget=24,interval=16,window=8"]
)
def test_pages_of_codes_are_pruned_too(policy: str) -> None:
    """Codes are moved as they are; what they stand for is what scores see."""

    def make() -> LlamaModel:
        model = in_torch(CONFIG, WEIGHTS)
        name = parse_codec("turboquant:k4v4")
        assert name is not None
        codec = make_codec(name, CONFIG.layers, CONFIG.head_dim, torch.bfloat16, CPU, None)
        assert codec is not None
        model.recode(codec)
        return model

    pruned, whole = streams(make, policy), streams(make, "none")
    for name in (f"r{n}" for n in range(5)):
        assert len(pruned[name]) == 70
        assert [token for token, _ in pruned[name][:40]] == [token for token, _ in whole[name][:40]]
    assert pruned != whole, "nothing was pruned that mattered"
