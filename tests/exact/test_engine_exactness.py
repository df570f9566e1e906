"""On the real model: caching, chunks and preemption give what transformers' greedy gives."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from exact_prompts import OUTPUT, PROMPTS, exact_prompts
from oracle import GreedyOracle

from seams.clock import SystemClock
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest, RequestUsage
from worker.engine.sampling import SamplingParams
from worker.models.load import load_model

Outputs = dict[int, tuple[int, ...]]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def oracle(demo_model: Path) -> GreedyOracle:
    return GreedyOracle(demo_model)


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[tuple[int, ...]]:
    return exact_prompts(demo_model)


def learn_short_outputs(core: EngineCore) -> None:
    """The engine now expects short answers, admits too many requests and has to preempt."""
    for _ in range(24):
        core.scheduler.lengths.record(5)


def run(
    folder: Path, prompts: list[tuple[int, ...]], hopeful: bool = False, **engine: object
) -> tuple[Outputs, dict[int, RequestUsage], EngineCore]:
    config = ReplicaConfig("r", str(folder), "demo", (), "", device="cpu", dtype="fp32")
    model = load_model(config)
    settings = EngineConfig(**{"blocks": (1200,), "running_max": 16, **engine})  # type: ignore[arg-type]
    core = EngineCore(model, settings, SystemClock())
    if hopeful:
        learn_short_outputs(core)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(seed=i, max_tokens=OUTPUT, ignore_eos=True)
        core.submit(EngineRequest(str(i), prompt, len(prompt), params))
    outputs: Outputs = dict.fromkeys(range(len(prompts)), ())
    usages: dict[int, RequestUsage] = {}
    while core.has_work():
        step = core.step()
        for emission in step.emissions if step else ():
            assert emission.error is None, emission.error
            index = int(emission.request_id)
            assert emission.position == len(outputs[index])
            outputs[index] += emission.token_ids
            if emission.usage is not None:
                assert index not in usages, "one last emission"
                usages[index] = emission.usage
    core.check_integrity()
    for index, usage in usages.items():
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        assert usage.prompt_tokens == len(prompts[index])
    return outputs, usages, core


def check(oracle: GreedyOracle, prompts: list[tuple[int, ...]], outputs: Outputs) -> Iterator[str]:
    for index, prompt in enumerate(prompts):
        assert len(outputs[index]) == OUTPUT
        for tie in oracle.ties(index, prompt, outputs[index]):
            yield f"tie: {tie}"


MODES = {
    "plain": {"cache": False},
    "cached, chunks of 48": {"step_tokens_max": 48},
    "cached, preempted": {
        "blocks": (160,),
        "running_max": 40,
        "step_tokens_max": 4096,
        "hopeful": True,
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_greedy_is_transformers_greedy(
    mode: str, demo_model: Path, prompts: list[tuple[int, ...]], oracle: GreedyOracle
) -> None:
    outputs, usages, _ = run(demo_model, prompts, **MODES[mode])
    ties = list(check(oracle, prompts, outputs))
    cached = sum(u.cached_tokens for u in usages.values())
    preempted = sum(u.preemptions for u in usages.values())
    print(f"\n{mode}: {PROMPTS} x {OUTPUT} tokens, {len(ties)} ties, epsilon {oracle.epsilon:.1e},")
    print(f"  cached {cached} of {sum(map(len, prompts))} prompt tokens, {preempted} preemptions")
    print("\n".join(ties))
    assert (cached > 0) == (mode != "plain")
    if mode == "cached, preempted":
        assert preempted > 0


def test_a_second_turn_computes_only_what_is_new(
    demo_model: Path, prompts: list[tuple[int, ...]]
) -> None:
    first = prompts[0]
    outputs, _, core = run(demo_model, [first])
    more = prompts[7][-23:]
    second = (*first, *outputs[0], *more)
    params = SamplingParams(seed=0, max_tokens=4, ignore_eos=True)
    core.submit(EngineRequest("turn-2", second, len(second), params))
    usage = None
    while core.has_work():
        step = core.step()
        for emission in step.emissions if step else ():
            usage = emission.usage or usage
    assert usage is not None
    # the last sampled token was never an input, so it has no KV: it and what is new are computed
    assert usage.cached_tokens == len(first) + OUTPUT - 1
    assert usage.computed_tokens == 1 + len(more)
