"""Block prefill with patched prompts: against attention computed densely, masked head by head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from episode_runs import logits
from random_decoders import DenseDecoder, compiled, config_of, in_torch, random_weights, token_ids

from kernels.codecs.choose import make_codec
from kernels.codecs.names import parse_codec
from seams.errors import LaunchError, PromptTooLong
from worker.engine.plan import StepPlan
from worker.episodes.base import EpisodeOptions, Ints
from worker.episodes.build import EpisodeBuilder
from worker.models.config import ModelConfig
from worker.models.fake import fake_model
from worker.models.llama import LlamaModel
from worker.models.weights import LayerWeights, Weights

CASES = ["llama", "group_3", "qwen3"]
HISTORY, BUDGET, BLOCK, PATCH = 224, 64, 48, 20
OPTIONS = EpisodeOptions(budget_tokens=BUDGET, block_tokens=BLOCK, sink_tokens=5)
# The second and last chunk is the only one after which anything is dropped.
ONCE = EpisodeOptions(budget_tokens=64, block_tokens=96, sink_tokens=5)


def decoder(name: str) -> tuple[ModelConfig, Weights, LlamaModel]:
    config = config_of(name)
    weights = random_weights(config, torch.float32)
    return config, weights, in_torch(config, weights)


class MaskedDecoder(DenseDecoder):
    """Rows from `history` on see of the first `history` positions only `kept` [layers, KV heads],
    each a set of positions."""

    def __init__(self, config: ModelConfig, weights: Weights, kept: Ints, history: int) -> None:
        super().__init__(config, weights)
        self._kept = kept.reshape(config.layers, config.kv_heads, -1)
        self._history = history

    def _attention(self, number: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        config, count = self._config, len(x)
        heads = x @ layer.qkv.double().T
        heads = heads.view(count, -1, config.head_dim)
        q, k, v = heads.split([config.query_heads, config.kv_heads, config.kv_heads], dim=1)
        q, k = self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)
        q, k = self._rotated(number, q), self._rotated(number, k)
        group = config.query_heads // config.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.attention_scale
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        seen = visible.repeat(config.query_heads, 1, 1)
        for head in range(config.query_heads):
            dropped = torch.ones(self._history, dtype=torch.bool)
            dropped[torch.from_numpy(self._kept[number, head // group]).long()] = False
            seen[head, self._history :, : self._history] &= ~dropped
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ layer.output.double().T


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("patch_tokens", [1, PATCH, BLOCK // 2])
def test_no_more_is_ever_stored_and_each_head_keeps_its_budget(
    case: str, patch_tokens: int
) -> None:
    config, _, model = decoder(case)
    history = token_ids(HISTORY, config.vocab_tokens)
    builder = EpisodeBuilder(model, history, OPTIONS)
    (pool,) = model._pools.pools
    assert len(pool) == (BUDGET + BLOCK) // 16  # nothing beyond could be stored
    most: list[int] = []
    real = model.execute

    def watched(plan: StepPlan) -> torch.Tensor:
        most.append(int(plan.lengths[0]))
        return real(plan)

    model.execute = watched  # type: ignore[method-assign]
    for seed in (1, 2):
        builder.build(token_ids(patch_tokens, config.vocab_tokens, seed=seed))
    assert builder.peak_tokens == max(most) == BUDGET + BLOCK
    assert builder.stored == BUDGET and len(set(builder.pages)) == BUDGET // 16
    positions = builder.positions
    assert positions.shape == (config.layers * config.kv_heads, BUDGET)
    for row in positions.tolist():
        assert len(set(row)) == BUDGET and min(row) >= 0 and max(row) < HISTORY
        assert row[:5] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("case", CASES)
def test_moved_slots_hold_the_tokens_that_they_say(case: str) -> None:
    """In the first layer a key depends on its token and position alone: over many rounds none may
    be another's, or a patched prompt's."""
    config, weights, model = decoder(case)
    history = token_ids(HISTORY, config.vocab_tokens)
    builder = EpisodeBuilder(model, history, OPTIONS)
    builder.build(token_ids(PATCH, config.vocab_tokens, seed=1))
    plain = in_torch(config, weights)
    plain.allocate((HISTORY // 16,))
    logits(plain, range(HISTORY // 16), 0, history, 0)
    expected = plain.read_keys(0, np.arange(HISTORY))[0]
    found = model.read_keys(0, builder._slots(0, BUDGET))[0]
    for head in range(config.kv_heads):
        own = expected[head, torch.from_numpy(builder.positions[head]).long()]
        assert (found[head] - own).abs().max() < 1e-5
    assert (builder.positions != builder.positions[0]).any(), "heads chose alike: a weak test"


@pytest.mark.parametrize("case", CASES)
def test_what_the_patched_prompt_looks_at_most_stays(case: str) -> None:
    """One round, over a cache that is still whole: the softmax of its queries, said again here."""
    config, weights, model = decoder(case)
    history = token_ids(128, config.vocab_tokens)
    patch = token_ids(32, config.vocab_tokens, seed=1)
    builder = EpisodeBuilder(model, history, ONCE)
    builder.build(patch)
    plain = in_torch(config, weights)
    plain.allocate((10,))
    seen: list[torch.Tensor] = []
    plain.tap = lambda layer, before, query, out: seen.append(query)
    logits(plain, range(10), 0, [*history, *patch], 0)
    keys = plain.read_keys(0, np.arange(160))
    group = config.query_heads // config.kv_heads
    for layer, query in enumerate(seen):
        for head in range(config.kv_heads):
            best = torch.zeros(128)
            for one in range(head * group, (head + 1) * group):
                scores = query[128:, one] @ keys[layer, head].T * config.attention_scale
                for row in range(32):
                    weights_of_row = scores[row, : 128 + row + 1].softmax(-1)
                    best = torch.maximum(best, weights_of_row[:128])
            chosen = builder.positions[layer * config.kv_heads + head]
            others = np.setdiff1d(np.arange(128), chosen)
            assert set(range(5)) <= set(chosen.tolist()) and len(chosen) == 64
            free = chosen[chosen >= 5]
            assert best[torch.from_numpy(free).long()].min() >= best[others].max() - 1e-6


@pytest.mark.parametrize("case", CASES)
def test_a_question_sees_what_is_kept_and_nothing_else(case: str) -> None:
    """Over the pages of an episode, at positions that follow the whole conversation, against dense
    attention with a mask per head. That the prompt's own keys are gone is part of it."""
    config, weights, model = decoder(case)
    history = token_ids(128, config.vocab_tokens)
    builder = EpisodeBuilder(model, history, ONCE)
    builder.build(token_ids(32, config.vocab_tokens, seed=1))
    question = token_ids(24, config.vocab_tokens, seed=2)
    found = logits(model, builder.pages, builder.stored, question, len(history))
    dense = MaskedDecoder(config, weights, builder.positions, len(history))
    expected = dense.logits([*history, *question])[len(history) :]
    assert (found - expected).abs().max() < 2e-4
    wrong = logits(model, builder.pages, builder.stored, question, builder.stored)
    assert (wrong - expected).abs().max() > 1e-2, "positions make no difference: a weak test"
    full = DenseDecoder(config, weights).logits([*history, *question])[len(history) :]
    assert (full - expected).abs().max() > 1e-2, "nothing was dropped: a weak test"


@pytest.mark.parametrize("case", CASES)
def test_a_budget_for_everything_is_the_full_cache(case: str) -> None:
    config, weights, model = decoder(case)
    history = token_ids(HISTORY, config.vocab_tokens)
    builder = EpisodeBuilder(model, history, replace(OPTIONS, budget_tokens=256))
    builder.build(token_ids(PATCH, config.vocab_tokens, seed=1))
    assert builder.stored == HISTORY and (builder.positions == np.arange(HISTORY)).all()
    question = token_ids(10, config.vocab_tokens, seed=2)
    found = logits(model, builder.pages, HISTORY, question, HISTORY)
    expected = DenseDecoder(config, weights).logits([*history, *question])[HISTORY:]
    assert (found - expected).abs().max() < 2e-4


def test_another_prompt_keeps_other_tokens_and_the_same_one_the_same() -> None:
    config, _, model = decoder("llama")
    builder = EpisodeBuilder(model, token_ids(HISTORY, config.vocab_tokens), OPTIONS)
    kept = []
    for seed in (1, 2, 1):
        builder.build(token_ids(PATCH, config.vocab_tokens, seed=seed))
        kept.append(builder.positions)
    assert np.array_equal(kept[0], kept[2]) and not np.array_equal(kept[0], kept[1])


def test_codes_of_a_codec_are_moved_as_they_are() -> None:
    config, weights, model = decoder("llama")
    name = parse_codec("turboquant:k4v4")
    assert name is not None
    codec = make_codec(name, config.layers, config.head_dim, torch.float32, torch.device("cpu"))
    assert codec is not None
    model.recode(codec)
    history = token_ids(128, config.vocab_tokens)
    builder = EpisodeBuilder(model, history, ONCE)
    builder.build(token_ids(32, config.vocab_tokens, seed=1))
    plain = in_torch(config, weights)
    plain.recode(codec)
    plain.allocate((8,))
    logits(plain, range(8), 0, history[:64], 0)
    logits(plain, range(8), 64, history[64:], 64)
    expected = plain.read_keys(0, np.arange(128)).flatten(0, 1)
    found = model.read_keys(0, builder._slots(0, 64)).flatten(0, 1)
    for row, own in enumerate(builder.positions):
        assert torch.equal(found[row], expected[row, torch.from_numpy(own).long()])


def test_models_and_conversations_that_cannot_be() -> None:
    config, weights, model = decoder("llama")
    ids = token_ids(496, config.vocab_tokens)
    with pytest.raises(PromptTooLong, match="496 tokens, and with a patched prompt"):
        EpisodeBuilder(model, ids, OPTIONS)
    with pytest.raises(LaunchError, match="a model that torch computes"):
        EpisodeBuilder(compiled(config, weights), ids[:64], OPTIONS)
    with pytest.raises(LaunchError, match="a model that torch computes"):
        EpisodeBuilder(fake_model("full"), ids[:64], OPTIONS)
    sliding = config_of("mistral_window")
    with pytest.raises(LaunchError, match="without sliding windows"):
        EpisodeBuilder(in_torch(sliding, random_weights(sliding, torch.float32)), ids[:64], OPTIONS)
