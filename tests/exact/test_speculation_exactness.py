"""On the real model, compiled, in bf16: speculation changes no token and no bit of a logprob."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from seams.clock import SystemClock
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest, Logprobs
from worker.engine.sampling import SamplingParams
from worker.models.load import load_model

pytestmark = pytest.mark.timeout(900)
OUTPUT = 40
THINGS = ("rivers", "bread", "clocks", "bees", "maps", "rain", "glass", "ships", "trees", "salt")


def repetitive_prompts(folder: Path) -> list[tuple[int, ...]]:
    """Twenty whose answers repeat what the prompt says."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = []
    for thing in THINGS:
        listing = "\n".join(f"{n}. {thing} number {7 * n} cost {3 * n} euros" for n in range(1, 7))
        saying = f"I like {thing}. Old {thing} beat new {thing}, and many {thing} are best."
        for ask in (f"Copy this list exactly:\n{listing}", f"Repeat word for word: {saying}"):
            text = f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n"
            made.append(tuple(tokenizer.encode(text, add_special_tokens=False).ids))
    return made


def run(folder: Path, speculate: int) -> tuple[dict[str, list[tuple[int, Logprobs]]], EngineCore]:
    """Every prompt greedily and drawn, eight requests at a time."""
    config = ReplicaConfig("r", str(folder), "demo", (), "", device="cpu", dtype="bf16")
    model = load_model(config)
    if "-invariant-" not in model.spec.numeric_class:
        pytest.skip("without the compiled path a batch may change a bit")
    settings = EngineConfig((400,), running_max=8, speculate=speculate)
    core = EngineCore(model, settings, SystemClock())
    for number, prompt in enumerate(repetitive_prompts(folder)):
        for name, temperature in (("greedy", 0.0), ("drawn", 0.7)):
            params = SamplingParams(number, OUTPUT, temperature, top_p=0.95, logprobs=2)
            core.submit(EngineRequest(f"{number} {name}", prompt, len(prompt), params))
    told: dict[str, list[tuple[int, Logprobs]]] = {}
    while core.has_work():
        step = core.step()
        for emission in step.emissions if step else ():
            assert emission.error is None, emission.error
            pairs = zip(emission.token_ids, emission.logprobs, strict=True)
            told.setdefault(emission.request_id, []).extend(pairs)
    core.check_integrity()
    return told, core


def test_speculation_changes_no_bit(demo_model: Path) -> None:
    told, core = run(demo_model, speculate=8)
    speculator = core.scheduler.speculator
    print(f"{speculator.accepted} of {speculator.drafted} drafted tokens accepted")
    assert speculator.accepted > 20 and speculator.accepted < speculator.drafted
    assert told == run(demo_model, speculate=0)[0]
