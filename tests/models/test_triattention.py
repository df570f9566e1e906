"""TriAttention's score in every form that the paper has, held together in float64."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from random_decoders import config_of, in_torch, random_weights, token_ids

from seams.errors import InvalidRequest, LaunchError
from worker.calibration.capture import capture
from worker.calibration.statistics import Statistics
from worker.engine.plan import StepPlan
from worker.engine.retention.base import PageView, Quota
from worker.engine.retention.policies import Policies
from worker.engine.retention.selection import choose, standardised, united
from worker.engine.retention.triattention import OFFSETS, Centres, TriAttention, mean_phases

BANDS, KEYS = 16, 40
POSITION = 5_000  # of the next query, less one


def frequencies() -> torch.Tensor:
    return 10_000.0 ** (-torch.arange(BANDS, dtype=torch.float64) / BANDS)


def complex_normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.view_as_complex(torch.randn(*shape, 2, generator=generator, dtype=torch.float64))


def halves(bands: torch.Tensor) -> torch.Tensor:
    """complex [..., F] -> [..., 2F], as heads are stored."""
    return torch.cat([bands.real, bands.imag], -1)


def phase(angles: torch.Tensor) -> torch.Tensor:
    """exp(i angle), complex128."""
    return torch.polar(torch.ones_like(angles), angles)


def turned(bands: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE: complex [..., n, F] rotated by n positions."""
    return bands * torch.polar(
        torch.ones(1, dtype=torch.float64), positions.double()[:, None] * frequencies()
    )


def centres(layers: int = 2, heads: int = 4) -> Centres:
    mean = complex_normal(layers, heads, BANDS, seed=1)
    generator = torch.Generator().manual_seed(2)
    spread = torch.rand(layers, heads, BANDS, generator=generator, dtype=torch.float64)
    return Centres(mean, spread, frequencies())


def test_the_score_is_the_papers_sum_of_cosines() -> None:
    """Bands before RoPE, distances and angles; and, the same, one product with stored keys."""
    given = centres()
    keys = complex_normal(2, 2, KEYS, BANDS, seed=3)  # before RoPE
    at = torch.arange(KEYS) * 97
    found = given.scores(halves(turned(keys, at)), POSITION)
    for layer in range(2):
        for head in range(4):
            mean, spread = given.mean[layer, head], given.spread[layer, head]
            key = keys[layer, head // 2]
            total = (spread * key.abs()).sum(1)
            for offset in OFFSETS:
                distance = (POSITION + offset - at).double()[:, None]
                angle = frequencies() * distance + mean.angle() - key.angle()
                total = total + (mean.abs() * key.abs() * angle.cos()).sum(1) / len(OFFSETS)
            assert (found[layer, head] - total).abs().max() < 1e-9 * total.abs().max()


def test_the_mean_over_offsets_is_one_phase() -> None:
    phases = mean_phases(frequencies(), POSITION)
    single = torch.stack(
        [
            torch.polar(torch.ones(BANDS, dtype=torch.float64), (POSITION + o) * frequencies())
            for o in OFFSETS
        ]
    )
    assert (phases - single.mean(0)).abs().max() < 1e-12
    assert OFFSETS[0] == 1 and OFFSETS[-1] == 65_536 and len(OFFSETS) == 17


def test_concentrated_queries_are_foretold() -> None:
    """Where queries lie around a centre, the score is the mean logit to come; size alone is not."""
    heads = 8
    mean = 3 * complex_normal(1, heads, BANDS, seed=4)
    noise = 0.4
    spread = torch.full((1, heads, BANDS), noise / 2, dtype=torch.float64)
    keys = complex_normal(1, heads, 300, BANDS, seed=5)
    at = torch.arange(300)
    stored = halves(turned(keys, at))
    scores = Centres(mean, spread, frequencies()).scores(stored, 300)[0]
    ahead = 301 + torch.tensor([0, 1, 3, 7, 15, 31, 63, 127, 255])
    queries = mean[0][:, None] + noise * complex_normal(heads, len(ahead), BANDS, seed=6)
    logits = halves(turned(queries, ahead)) @ stored[0].transpose(1, 2)
    future = logits.mean(1)
    found = [np.corrcoef(scores[h], future[h])[0, 1] for h in range(heads)]
    size = keys[0].abs().sum(-1)
    blind = [np.corrcoef(size[h], future[h])[0, 1] for h in range(heads)]
    print("correlation", np.round(found, 3), "by size", np.round(blind, 3))
    assert np.mean(found) > 0.8 > 0.2 > abs(np.mean(blind))


def view(scores: torch.Tensor, fixed: int, kept: int, stored: int, size: int = 4) -> PageView:
    positions = np.arange(stored, dtype=np.int32)[None]
    return PageView(size, fixed, kept, stored, positions, lambda: scores, lambda count: scores)


def policy(per_head: bool, band: float = 0.0, window: int = 4) -> TriAttention:
    return TriAttention(Quota(12, 8), centres(), "test", window, per_head, band)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("band", [0.0, 0.5])
def test_as_many_stay_as_are_to(per_head: bool, band: float) -> None:
    keys = halves(complex_normal(2, 2, 20, BANDS, seed=7)).float()
    kept = policy(per_head, band).select(view(keys, 6, 18, 26))
    assert kept.shape == (4 if per_head else 1, 26)
    assert (kept.sum(axis=1) == 18).all() and kept[:, :6].all() and kept[:, -4:].all()
    if per_head:
        assert len({row.tobytes() for row in kept}) > 1, "heads chose alike"


def test_heads_keep_their_best() -> None:
    given = policy(True)
    keys = halves(complex_normal(2, 2, 20, BANDS, seed=8))
    kept = given.select(view(keys, 6, 18, 26))
    scores = given.centres.scores(keys, 26)[:, :, :16]
    scores = (scores - scores.mean(2, keepdim=True)) / scores.std(2, keepdim=True, correction=0)
    best = scores.unflatten(1, (2, 2)).amax(2).flatten(0, 1)
    for row, score in zip(kept, best, strict=True):
        chosen = {int(slot) - 6 for slot in np.nonzero(row)[0] if 6 <= slot < 22}
        assert chosen == set(score.topk(8).indices.tolist())


def test_a_union_ranks_what_heads_nominate() -> None:
    scores = np.array([[9.0, 1.0, 2.0, 3.0, 0.0], [0.0, 1.5, 4.0, 5.0, -np.inf]])
    found = united(scores, 2)
    assert found.tolist() == [[9.0, -math.inf, 4.0, 5.0, -math.inf]]
    forced = np.zeros((1, 5), dtype=np.bool_)
    assert choose(found, forced, 2, 4, 0.0).tolist() == [[True, False, False, True, False]]


def test_scores_that_are_not_candidates_do_not_count() -> None:
    scores = np.array([[[1.0, 2.0, 3.0, 1e9]]])
    found = standardised(scores, np.array([[True, True, True, False]]))
    assert np.allclose(found[0, 0, :3], [-1.2247449, 0.0, 1.2247449]) and found[0, 0, 3] == -np.inf


def test_near_equals_stay_where_pages_are_full() -> None:
    """Slots 4 to 7 hold one sure survivor, 8 to 11 three: the near ones of the fuller page stay."""
    scores = np.array([[0.0, 0.0, 0.0, 0.0, 5.0, 1.02, 1.01, 0.0, 5.0, 5.0, 5.0, 1.0]])
    forced = np.zeros((1, 12), dtype=np.bool_)
    plain = np.nonzero(choose(scores, forced, 5, 4, 0.0)[0])[0].tolist()
    aware = np.nonzero(choose(scores, forced, 5, 4, 0.1)[0])[0].tolist()
    assert plain == [4, 5, 8, 9, 10] and aware == [4, 8, 9, 10, 11]


def statistics(fingerprint: str = "model") -> Statistics:
    config = config_of("qwen3")
    model = in_torch(config, random_weights(config, torch.float32))
    found = capture(model, config, token_ids(300, config.vocab_tokens))
    return replace(found, fingerprint=fingerprint)


def test_statistics_are_those_of_the_queries() -> None:
    """Taken again by hand, from what a model tells: after its norm, before RoPE, all but the first
    few rows."""
    config = config_of("qwen3")
    model = in_torch(config, random_weights(config, torch.float32))
    rows: list[torch.Tensor] = []
    ids = token_ids(300, config.vocab_tokens)
    model.allocate((19,))
    model.tap = lambda layer, before, query, out: rows.append(before.double())
    places = range(300)
    model.execute(
        StepPlan.of_lists(1, ids, places, [0, 300], [300], [[range(19)]], [places], [], [])
    )
    found = statistics()
    for layer, before in enumerate(rows):
        real, imaginary = before[6:].chunk(2, dim=-1)
        assert (found.query_mean[layer, :, 0] - real.mean(0)).abs().max() < 1e-5
        assert (found.query_mean[layer, :, 1] - imaginary.mean(0)).abs().max() < 1e-5
        size = torch.complex(real, imaginary).abs().mean(0)
        assert (found.query_size[layer] - size).abs().max() < 1e-5
    for rotation in (found.key_rotation, found.value_rotation):
        identity = rotation @ rotation.transpose(-1, -2)
        assert (identity - torch.eye(config.head_dim)).abs().max() < 1e-5


def test_a_calibration_is_a_file_of_one_model(tmp_path: Path) -> None:
    given, path = statistics(), tmp_path / "c"
    given.save(path)
    read = Statistics.load(path, "model")
    assert read.hash == given.hash and read.tokens == 300
    assert torch.equal(read.query_mean, given.query_mean)
    changed = replace(given, query_mean=given.query_mean + 1e-3)
    assert changed.hash != given.hash
    with pytest.raises(LaunchError, match="is of another model"):
        Statistics.load(path, "other")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LaunchError, match="cannot be read"):
        Statistics.load(path, "model")
    with pytest.raises(LaunchError, match="cannot be written"):
        given.save(tmp_path / "nowhere" / "c")


def test_a_round_comes_no_oftener_than_its_cost_allows() -> None:
    config = config_of("qwen3")
    spec = in_torch(config, random_weights(config, torch.float32)).spec
    policies = Policies(spec, statistics=statistics())
    eager = policies.make("triattention:budget=6400,interval=16")
    rare = policies.make("triattention:budget=64,interval=128")
    assert eager is not None and eager.quota.interval_tokens >= 400
    assert rare is not None and rare.quota.interval_tokens == 128


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("triattention:window=64,budget=64", "triattention's window is smaller than its budget"),
        ("triattention:select=layer", "triattention's select is one of union, head"),
        ("triattention:band=much", "triattention's band is a number from 0 to 10"),
    ],
)
def test_options_that_cannot_be(text: str, sentence: str) -> None:
    config = config_of("qwen3")
    spec = in_torch(config, random_weights(config, torch.float32)).spec
    with pytest.raises(InvalidRequest, match=sentence):
        Policies(spec, statistics=statistics()).make(text)
    with pytest.raises(InvalidRequest, match="needs the replica's calibration file"):
        Policies(spec).make(text)
