"""SnapKV, the baseline beside TriAttention: its choice against attention computed densely."""

import numpy as np
import pytest
import torch
from random_decoders import config_of, in_torch, random_weights, token_ids

from seams.clock import VirtualClock
from seams.errors import InvalidRequest
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest
from worker.engine.plan import StepPlan
from worker.engine.retention.base import PageView, Quota
from worker.engine.retention.policies import Policies
from worker.engine.retention.snapkv import SnapKV
from worker.engine.sampling import SamplingParams
from worker.models.fake import fake_model

CONFIG = config_of("qwen3")
COUNT, WINDOW, FIXED = 60, 5, 7


def test_queries_are_told_again() -> None:
    """Of rows computed before, and nothing of what is stored changes."""
    model = in_torch(CONFIG, random_weights(CONFIG, torch.float32))
    model.allocate((6,))
    ids, table = token_ids(COUNT, CONFIG.vocab_tokens), [4, 1, 5, 0]
    slots = [table[p // 16] * 16 + p % 16 for p in range(COUNT)]
    watched: list[torch.Tensor] = []
    model.tap = lambda layer, before, query, out: watched.append(query)
    step = StepPlan.of_lists(1, ids, range(COUNT), [0, COUNT], [COUNT], [[table]], [slots], [], [])
    model.execute(step)
    model.tap = None
    keys = model.read_keys(0, np.array(slots))
    first = COUNT - WINDOW
    again = StepPlan.of_lists(
        1, ids[first:], range(first, COUNT), [0, WINDOW], [COUNT], [[table]], [slots[first:]]
    )
    queries = model.read_queries(again)
    assert queries.shape == (CONFIG.layers, CONFIG.query_heads, WINDOW, CONFIG.head_dim)
    for layer, query in enumerate(watched):
        expected = query[first:].transpose(0, 1) * CONFIG.attention_scale
        assert (queries[layer] - expected).abs().max() < 1e-5
    assert (model.read_keys(0, np.array(slots)) - keys).abs().max() < 1e-5
    assert model.tap is None


@pytest.mark.parametrize("kernel", [1, 5])
def test_what_the_window_looks_at_stays(kernel: int) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 2, COUNT - FIXED, 8, generator=generator)
    queries = 2 * torch.randn(2, 4, WINDOW, 8, generator=generator)
    order = np.random.default_rng(2).permutation(np.arange(FIXED, COUNT)).astype(np.int32)
    positions = np.concatenate([np.arange(FIXED, dtype=np.int32), order])[None]
    view = PageView(16, FIXED, 30, COUNT, positions, lambda: keys, lambda count: queries)
    kept = SnapKV(Quota(23, 30), WINDOW, kernel).select(view)
    assert kept.shape == (4, COUNT) and (kept.sum(axis=1) == 30).all()
    for row in range(4):
        layer, head = divmod(row, 2)
        logits = queries[layer, 2 * head : 2 * head + 2] @ keys[layer, head].T
        weights = logits.softmax(-1).mean((0, 1)).numpy()
        by_position = dict(zip(order.tolist(), weights.tolist(), strict=True))
        half = kernel // 2
        scores = {
            p: max(by_position.get(p + near, 0.0) for near in range(-half, half + 1))
            for p in by_position
            if p < COUNT - WINDOW
        }
        best = sorted(scores, key=lambda p: -scores[p])[: 23 - WINDOW]
        worst_kept = scores[best[-1]]
        chosen = {int(positions[0, slot]) for slot in np.nonzero(kept[row])[0]}
        assert set(range(FIXED)) | set(range(COUNT - WINDOW, COUNT)) <= chosen
        between = [p for p in chosen if FIXED <= p < COUNT - WINDOW]
        assert all(scores[p] >= worst_kept - 1e-7 for p in between)


def test_it_serves() -> None:
    model = in_torch(CONFIG, random_weights(CONFIG, torch.float32))
    policies = Policies(model.spec, "snapkv:budget=24,interval=16,window=8")
    core = EngineCore(
        model, EngineConfig((40,), poison_freed=True), VirtualClock(), retention=policies
    )
    for number in range(3):
        prompt = tuple(token_ids(10 + 7 * number, CONFIG.vocab_tokens, seed=number))
        params = SamplingParams(seed=1, max_tokens=90, ignore_eos=True, temperature=1.0)
        core.submit(EngineRequest(f"r{number}", prompt, len(prompt), params))
    tokens = 0
    while core.has_work():
        output = core.step()
        core.check_integrity()
        for emission in output.emissions if output else ():
            assert emission.error is None
            tokens += len(emission.token_ids)
    found = core.load().compacted
    assert tokens == 270 and found is not None and found.rounds == 12
    assert found.freed_blocks >= 0.95 * found.dropped_tokens / 16


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("snapkv:window=20,budget=20", "snapkv's window is below its budget"),
        ("snapkv:kernel=4", "snapkv's kernel is an odd number"),
    ],
)
def test_options_that_cannot_be(text: str, sentence: str) -> None:
    model = in_torch(CONFIG, random_weights(CONFIG, torch.float32))
    with pytest.raises(InvalidRequest, match=sentence):
        Policies(model.spec).make(text)
    with pytest.raises(InvalidRequest, match="snapkv needs a model that torch computes"):
        Policies(fake_model("full").spec).make(text)
