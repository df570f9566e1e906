"""The engine over adapted decoders: chunks, batches and cache hits leave transformers' greedy text.

Every token of an output must be the likeliest one of transformers itself, given all before it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers_yardstick import WHOLE, load, reference_logits, reference_models, save_small

from seams.clock import SystemClock
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest
from worker.engine.sampling import SamplingParams

OUTPUT = 12
TIE = 1e-3  # of logits that spread over several units
MODELS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "cohere2": ("Cohere2Config", {"sliding_window": 21}),  # a full and a window group
}


def prompts() -> list[tuple[int, ...]]:
    """Three that share 70 tokens, two that share none, and the first again."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 320, (count,), generator=generator).tolist())

    shared = tokens(70)
    made = [shared + tokens(n) for n in (5, 30, 1)] + [tokens(9), tokens(100)]
    return [*made, made[0]]


@pytest.mark.parametrize("name", MODELS)
def test_engine_over_an_adapted_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))
    save_small(tmp_path / "model", *MODELS[name])
    model = load(tmp_path / "model")
    blocks = (80,) * len(model.spec.groups)
    core = EngineCore(model, EngineConfig(blocks=blocks, step_tokens_max=32), SystemClock())
    reference = reference_models(tmp_path / "model")["eager"]
    cached = 0
    for round_ in range(2):
        for index, prompt in enumerate(prompts()):
            params = SamplingParams(seed=index, max_tokens=OUTPUT, ignore_eos=True)
            core.submit(EngineRequest(str(index), prompt, len(prompt), params))
        outputs: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(prompts())), ())
        while core.has_work():
            step = core.step()
            for emission in step.emissions if step else ():
                assert emission.error is None, emission.error
                outputs[int(emission.request_id)] += emission.token_ids
                cached += emission.usage.cached_tokens if emission.usage else 0
        core.check_integrity()
        for index, prompt in enumerate(prompts()):
            assert len(outputs[index]) == OUTPUT
            told = [*prompt, *outputs[index]]
            logits = reference_logits(reference, told[:-1], WHOLE)[len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(outputs[index]).unsqueeze(1)).squeeze(1)
            behind = float((logits.amax(1) - chosen).max())
            assert behind <= TIE, f"round {round_}, prompt {index}: {behind:.1e}"
    assert cached > sum(map(len, prompts()))  # the whole second round, but for a token each
