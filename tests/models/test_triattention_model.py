"""TriAttention with a real model: its score against the attention that really came."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from random_decoders import in_torch, of_folder
from tokenizers import Tokenizer

from worker.calibration.capture import capture
from worker.calibration.statistics import Statistics
from worker.engine.plan import StepPlan
from worker.engine.retention.triattention import Centres
from worker.models.llama import LlamaModel

DOCS = Path(__file__).resolve().parents[2] / "docs"
CALIBRATED, SEEN, AHEAD = 512, 256, 96
SINKS = 4  # every head looks at the first tokens, whatever it looks for


def ids_of(folder: Path, name: str, count: int) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode((DOCS / name).read_text()).ids[:count]


@pytest.fixture(scope="module")
def decoder(demo_model: Path) -> LlamaModel:
    config, weights = of_folder(demo_model, torch.float32)
    return in_torch(config, weights)


@pytest.fixture(scope="module")
def statistics(decoder: LlamaModel, demo_model: Path) -> Statistics:
    """Of one text; what is foretold below is another."""
    return capture(decoder, decoder._config, ids_of(demo_model, "architecture.md", CALIBRATED))


def run(model: LlamaModel, ids: list[int], first: int) -> None:
    last = first + len(ids)
    places, table = list(range(first, last)), list(range(-(-last // 16)))
    model.execute(
        StepPlan.of_lists(1, ids, places, [0, len(ids)], [last], [[table]], [places], [], [])
    )


def test_the_score_foretells_attention(
    decoder: LlamaModel, statistics: Statistics, demo_model: Path
) -> None:
    """Per query head, over the keys of the first SEEN tokens: correlation with the mean logit of
    the AHEAD tokens behind them, and how much of their attention the best quarter holds."""
    ids = ids_of(demo_model, "operations.md", SEEN + AHEAD)
    run(decoder, ids[:SEEN], 0)
    keys = decoder.read_keys(0, np.arange(SEEN))
    queries: list[torch.Tensor] = []
    decoder.tap = lambda layer, before, query, out: queries.append(query)
    run(decoder, ids[SEEN:], SEEN)
    decoder.tap = None
    scores = Centres.of(statistics).scores(keys, SEEN)[:, :, SINKS:]
    config, found, held, most = decoder._config, [], [], []
    quarter = (SEEN - SINKS) // 4
    for layer, query in enumerate(queries):
        key = keys[layer, :, SINKS:].repeat_interleave(config.query_heads // config.kv_heads, 0)
        logits = query.transpose(0, 1) @ key.transpose(1, 2) * config.attention_scale
        weights = logits.softmax(-1).mean(1)  # [Hq, keys]
        for score, mean, weight in zip(scores[layer], logits.mean(1), weights, strict=True):
            found.append(float(torch.corrcoef(torch.stack([score, mean]))[0, 1]))
            held.append(float(weight[score.topk(quarter).indices].sum()))
            most.append(float(weight.topk(quarter).values.sum()))
    print(
        f"correlation {np.mean(found):.3f} (median {np.median(found):.3f}); the best quarter holds"
        f" {np.mean(held):.3f} of attention, where {np.mean(most):.3f} can be held"
    )
    assert np.mean(found) > 0.8
    assert np.mean(held) > 0.85 * np.mean(most) > 2 * 0.25
