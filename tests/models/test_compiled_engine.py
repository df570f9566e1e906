"""The engine over the compiled path: cached, chunked, preempted, batched or moved, a request has to
the bit the tokens and logprobs that it has alone.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from exact_runs import Ways, check, every_way
from random_decoders import compiled, config_of, of_folder, random_weights, token_ids

from worker.engine.messages import EngineRequest
from worker.engine.sampling import SamplingParams

REQUESTS = 220
SOAK_PROMPTS = int(os.environ.get("BANYAN_SOAK_PROMPTS", "1000"))
SOAK_OUTPUT = 32


def sampling(number: int, max_tokens: int, n: int = 1) -> SamplingParams:
    """Greedy, drawn, and drawn from the likeliest only, in turn."""
    drawn = {"temperature": 0.9} if number % 3 else {}
    limited = {"top_p": 0.9, "top_k": 20} if number % 3 == 2 else {}
    return SamplingParams(number, max_tokens, ignore_eos=True, logprobs=3, n=n, **drawn, **limited)  # type: ignore[arg-type]


def request(number: int, prompt: tuple[int, ...], max_tokens: int, n: int = 1) -> EngineRequest:
    return EngineRequest(str(number), prompt, len(prompt), sampling(number, max_tokens, n))


def random_requests(count: int, vocab: int, seed: int) -> list[EngineRequest]:
    """Families that share beginnings which end anywhere in a block; some with several choices."""
    rng = random.Random(seed)
    roots = [token_ids(length, vocab, seed=length) for length in (20, 64, 133, 150, 260)]
    made = []
    for number in range(count):
        root = rng.choice(roots)
        own = token_ids(rng.choice([0, 1, 5, 30, 90]), vocab, seed=1000 + number)
        prompt = (*root[: rng.choice([0, 15, 16, 128, 1000])], *own) or (7,)
        made.append(request(number, prompt, rng.choice([1, 9, 20, 40]), rng.choice([1] * 9 + [3])))
    return made


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_every_way_gives_what_a_request_gives_alone(kind: str) -> None:
    config = config_of(kind)
    weights = random_weights(config, torch.bfloat16)
    ways = Ways(lambda: compiled(config, weights), blocks=1200, running_max=48)
    requests = random_requests(REQUESTS, config.vocab_tokens, seed=len(kind))
    right = ways.alone(requests)
    assert right.cached_tokens == right.preemptions == 0
    assert len({token for told in right.tokens.values() for token, _ in told}) > 50
    for name, run in every_way(ways, requests, small_pool=45).items():
        print(f"{kind},", check(name, run(), right))


WORDS = (
    *("river", "bread", "clock", "bee", "map", "rain", "glass", "ship", "tree", "salt"),
    *("why", "tell", "list", "who", "then", "a", "the", "of"),
)


def real_requests(folder: Path, count: int) -> list[EngineRequest]:
    """Chats of ten behind each system prompt, as the model's own format has them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = []
    for number in range(count):
        shared, rng = random.Random(number // 10), random.Random(number)
        system = " ".join(shared.choices(WORDS, k=shared.choice([5, 40, 120, 250])))
        question = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
        text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}"
        text += "<|im_end|>\n<|im_start|>assistant\n"
        ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        made.append(request(number, ids, SOAK_OUTPUT))
    return made


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_real_model_in_every_way(demo_model: Path, dtype: torch.dtype) -> None:
    """$BANYAN_SOAK_PROMPTS prompts (1,000): no difference in any way of computing them."""
    config, weights = of_folder(demo_model, dtype)
    ways = Ways(lambda: compiled(config, weights, threads=0), blocks=3000, running_max=32)
    requests = real_requests(demo_model, SOAK_PROMPTS)
    right = ways.alone(requests)
    print(f"\n{dtype}, alone: {right.seconds / len(requests) * 100:.1f} s per 100 requests")
    for name, run in every_way(ways, requests, small_pool=140).items():
        print(f"{dtype},", check(name, run(), right), flush=True)
