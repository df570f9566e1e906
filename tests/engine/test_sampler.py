"""The sampler against exact probabilities, a slow oracle, and its promise to need no batch mate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from worker.engine import sampler
from worker.engine.plan import SampleRow
from worker.engine.sampler import FAILED, Sampled, sample, uniform
from worker.engine.sampling import SamplingParams

EOS = (2,)
GOLDEN = [0.32821607911530626, 0.2765698271686481, 0.9491737997701202]


def row(
    sequence: int = 0,
    choice: int = 0,
    position: int = 0,
    seed: int = 7,
    history: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    **params: Any,
) -> SampleRow:
    return SampleRow(
        row=0,
        sequence=sequence,
        choice=choice,
        position=position,
        params=SamplingParams(seed=seed, max_tokens=100, **params),
        history=history,
        output=output,
    )


def random_logits(seed: int, rows: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def first_largest(values: np.ndarray[Any, Any], count: int) -> list[int]:
    """Ids by falling value, the lower id first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def oracle(logits: torch.Tensor, r: SampleRow) -> np.ndarray[Any, Any]:
    """Exact probabilities of one row, step by step, in float64; written from the definition."""
    p = r.params
    scores = logits.double().numpy().copy()
    if p.allowed_token_ids:
        for token in range(len(scores)):
            if token not in p.allowed_token_ids:
                scores[token] = -math.inf
    if r.position < p.min_tokens:
        for token in set(p.stop_token_ids) | (set() if p.ignore_eos else set(EOS)):
            scores[token] = -math.inf
    for token in set(r.history) | set(r.output):
        scores[token] = (
            scores[token] / p.repetition_penalty
            if scores[token] > 0
            else scores[token] * p.repetition_penalty
        )
    for token in r.output:
        scores[token] -= p.frequency_penalty
    for token in set(r.output):
        scores[token] -= p.presence_penalty
    for token, bias in p.logit_bias:
        scores[token] += bias
    weights = np.exp((scores - scores.max()) / p.temperature)
    keep = set(range(len(weights)))
    if p.top_k:
        keep &= set(first_largest(weights, p.top_k))
    inside = np.where([i in keep for i in range(len(weights))], weights, 0.0)
    nucleus: set[int] = set()
    reached, total = 0.0, inside.sum()
    for token in first_largest(inside, len(inside)):
        if nucleus and p.top_p < 1 and reached >= p.top_p * total:
            break
        nucleus.add(token)
        reached += inside[token]
    keep &= nucleus
    keep &= {i for i in range(len(weights)) if weights[i] >= p.min_p}
    final = np.where([i in keep for i in range(len(weights))], weights, 0.0)
    probabilities: np.ndarray[Any, Any] = final / final.sum()
    return probabilities


def expected_token(probabilities: np.ndarray[Any, Any], u: float) -> int:
    return int(np.searchsorted(probabilities.cumsum(), u, side="right"))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 5},
    "top_k_over_vocab": {"top_k": 10_000},
    "top_p": {"top_p": 0.8},
    "top_p_zero": {"top_p": 0.0},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.9},
    "min_tokens": {"min_tokens": 50, "stop_token_ids": frozenset({5, 9})},
    "min_tokens_ignore_eos": {"min_tokens": 50, "ignore_eos": True, "stop_token_ids": {5}},
    "bias": {"logit_bias": ((3, 4.5), (0, -100.0), (96, 2.0))},
    "allowed": {"allowed_token_ids": (1, 2, 30, 31, 50, 96)},
    "one_allowed": {"allowed_token_ids": (7,)},
    "allowed_and_min_tokens": {"allowed_token_ids": (2, 5, 40), "min_tokens": 50},
    "allowed_and_more": {
        "allowed_token_ids": (1, 2, 7, 11, 13, 17, 96),
        "logit_bias": ((7, 1.5), (8, 50.0)),
        "frequency_penalty": 0.7,
        "top_p": 0.9,
    },
    "all": {
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "min_tokens": 30,
    },
}


def case_rows(params: dict[str, Any], count: int, vocab: int, seed: int) -> list[SampleRow]:
    rng = np.random.default_rng(seed)
    return [
        row(
            sequence=i,
            position=i,
            seed=seed,
            history=tuple(rng.integers(0, vocab, 20).tolist()),
            output=tuple(rng.integers(0, vocab // 4, 15).tolist()),
            **{"temperature": 1.0, **params},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_each_filter_equals_the_slow_oracle(name: str, ties: bool) -> None:
    seed, vocab, count = 20_251 + len(name), 97, 64
    logits = random_logits(seed, count, vocab)
    if ties:
        logits = (logits * 2).round() / 2
    rows = case_rows(CASES[name], count, vocab, seed)
    got = sample(logits, rows, EOS)
    for i, (r, result) in enumerate(zip(rows, got, strict=True)):
        probabilities = oracle(logits[i], r)
        u = uniform(r.params.seed, r.choice, r.position)
        want = expected_token(probabilities, u)
        assert result == Sampled(i, 0, want), f"seed {seed}, row {i}"
        assert probabilities[result.token_id] > 0


@pytest.mark.parametrize("name", CASES)
def test_greedy_is_the_most_likely_of_the_adjusted_and_ignores_the_seed(name: str) -> None:
    seed, vocab, count = 3_141, 97, 32
    logits = (random_logits(seed, count, vocab) * 2).round() / 2
    warm = case_rows({**CASES[name], "temperature": 1.0}, count, vocab, seed)
    for mint in (1, 2, (1 << 64) - 1):
        cold = [
            replace(r, params=replace(r.params, temperature=0.0, seed=mint, top_p=0.5))
            for r in warm
        ]
        got = [s.token_id for s in sample(logits, cold, EOS)]
        want = [int(np.argmax(oracle(logits[i], r))) for i, r in enumerate(warm)]
        assert got == want


def test_top_k_of_one_is_greedy_also_with_ties() -> None:
    logits = (random_logits(5, 200, 50) * 2).round() / 2
    one = sample(logits, [row(position=i, temperature=1.0, top_k=1) for i in range(200)], EOS)
    none = sample(logits, [row(position=i) for i in range(200)], EOS)
    assert [s.token_id for s in one] == [s.token_id for s in none] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.15, "temperature": 0.7}]
)
def test_distribution_by_chi_square(params: dict[str, Any]) -> None:
    draws, vocab, seed = 20_000, 16, 99
    logits = random_logits(seed, 1, vocab, scale=1.5)
    rows = [row(position=i, seed=seed, **{"temperature": 1.0, **params}) for i in range(draws)]
    tokens = [s.token_id for s in sample(logits.expand(draws, -1), rows, EOS)]
    expected = oracle(logits[0], rows[0]) * draws
    counts = np.bincount(tokens, minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    inside = expected > 0
    statistic = float((((counts - expected)[inside] ** 2) / expected[inside]).sum())
    freedom = int(inside.sum()) - 1
    # Wilson-Hilferty: the cube root of chi-square/f is normal; 3.3 sigma is p = 0.0005.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.3, f"seed {seed}: chi-square {statistic:.1f} at {freedom} degrees of freedom"


def test_uniform_numbers_differ_in_each_part_of_the_key_and_are_even() -> None:
    grid = [(s, c, p) for s in range(20) for c in range(20) for p in range(50)]
    numbers = np.array([uniform(*key) for key in grid])
    assert len(set(numbers.tolist())) == len(grid)
    assert (numbers >= 0).all() and (numbers < 1).all()
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    expected = len(grid) / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < 49 + 4 * math.sqrt(2 * 49)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_uniform_is_the_same_everywhere() -> None:
    """Replicas of different builds go on with each other's streams: the numbers are a format."""
    assert [uniform(0, 0, 0), uniform(1, 2, 3), uniform((1 << 64) - 1, 0, 1 << 40)] == GOLDEN


def mixed_rows(count: int, vocab: int, seed: int) -> list[SampleRow]:
    names = list(CASES)
    rows = [
        case_rows(CASES[names[i % len(names)]], count, vocab, seed + i)[i] for i in range(count)
    ]
    return [
        replace(r, params=replace(r.params, temperature=0.0)) if i % 5 == 0 else r
        for i, r in enumerate(rows)
    ]


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    seed, vocab, count = 11, 5_000, 45
    logits = random_logits(seed, count, vocab)
    rows = mixed_rows(count, vocab, seed)
    together = sample(logits, rows, EOS)
    alone = [sample(logits[i : i + 1], [r], EOS)[0] for i, r in enumerate(rows)]
    assert together == alone
    order = np.random.default_rng(seed).permutation(count).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order], EOS)
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize(("chance", "place"), [(0.0, 0), (1 - 2.0**-53, -1)])
def test_the_ends_of_chance_stay_inside_what_was_kept(
    chance: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero must not fall on a removed first token, nor the largest number past the last kept."""
    monkeypatch.setattr(sampler, "uniform", lambda *_: chance)
    count, vocab = 200, 97
    logits = random_logits(6, count, vocab)
    logits[:, [0, -1]] = -50.0
    rows = [row(sequence=i, position=i, temperature=1.0, top_k=9) for i in range(count)]
    for i, result in enumerate(sample(logits, rows, EOS)):
        kept = np.flatnonzero(oracle(logits[i], rows[i]))
        assert result.token_id == kept[place]


WIDE: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 2_000},
    "top_k_as_wide_as_the_first_look": {"top_k": 1_024},
    "top_k_and_top_p": {"top_k": 2_000, "top_p": 0.7},
    "narrow_top_k_and_top_p": {"top_k": 10, "top_p": 0.7},
    "min_p": {"min_p": 0.5},
    "min_p_and_top_p": {"min_p": 0.001, "top_p": 0.95},
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_more_kept_than_the_first_look_shows(name: str, ties: bool) -> None:
    """Nearly flat rows beside peaked ones; with ties, many equals lie beyond the first thousand."""
    seed, vocab, count = 77, 4_000, 12
    logits = random_logits(seed, count, vocab, scale=0.05)
    logits[::2] *= 100
    if ties:
        logits = (logits * 8).round() / 8
    shape = {"temperature": 1.0, "seed": seed, **WIDE[name]}
    rows = [row(sequence=i, position=i, **shape) for i in range(count)]
    for i, result in enumerate(sample(logits, rows, EOS)):
        probabilities = oracle(logits[i], rows[i])
        assert result.token_id == expected_token(probabilities, uniform(seed, 0, i)), f"row {i}"
        assert ties or probabilities[result.token_id] > 0


@st.composite
def any_params(draw: st.DrawFn) -> dict[str, Any]:
    """Any mix of what a request may ask, over a vocabulary of 40."""
    ids = st.integers(0, 39)
    tenths = st.integers(-30, 30).map(lambda n: n / 10)
    made = {
        "temperature": draw(st.sampled_from([0.5, 1.0, 2.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 5, 39, 400])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.3, 0.9])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.05])),
        "repetition_penalty": draw(st.sampled_from([1.0, 0.5, 1.5])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.5, -1.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.25, -0.5])),
        "min_tokens": draw(st.sampled_from([0, 9])),
        "stop_token_ids": draw(st.frozensets(ids, max_size=3)),
        "logit_bias": tuple(draw(st.dictionaries(ids, tenths, max_size=6)).items()),
        "allowed_token_ids": tuple(sorted(draw(st.sets(ids, max_size=8)))),
    }
    ends = made["stop_token_ids"] | set(EOS)
    assume(not (made["allowed_token_ids"] and ends.issuperset(made["allowed_token_ids"])))
    return made


@given(st.lists(any_params(), min_size=1, max_size=8), st.integers(0, 1 << 32))
def test_any_mix_equals_the_slow_oracle_whatever_the_batch(
    params: list[dict[str, Any]], seed: int
) -> None:
    logits = random_logits(seed, len(params), 40)
    rng = np.random.default_rng(seed)
    rows = [
        row(
            sequence=i,
            position=i,
            seed=seed,
            history=tuple(rng.integers(0, 40, i).tolist()),
            output=tuple(rng.integers(0, 40, 5).tolist()),
            **mine,
        )
        for i, mine in enumerate(params)
    ]
    rows.append(row(sequence=len(rows)))  # a greedy mate without any wish
    logits = torch.cat([logits, logits[:1]])
    for i, result in enumerate(sample(logits, rows, EOS)[:-1]):
        probabilities = oracle(logits[i], rows[i])
        cumulative = probabilities.cumsum()
        u = uniform(seed, 0, i)
        assume(np.abs(cumulative - u).min() > 1e-6)  # float32 and float64 may round apart there
        assert result.token_id == expected_token(probabilities, u), f"row {i}"


def test_a_bias_bans_and_forces_and_only_allowed_tokens_come() -> None:
    count, vocab = 300, 50
    logits = random_logits(8, count, vocab)
    allowed = (4, 9, 33)
    kinds: dict[str, dict[str, Any]] = {
        "ban": {"logit_bias": ((int(logits[0].argmax()), -100.0),)},
        "force": {"logit_bias": ((12, 100.0),), "repetition_penalty": 2.0, "output": (12,) * 9},
        "allow": {"allowed_token_ids": allowed},
    }
    for temperature in (0.0, 1.0):
        drawn = {
            kind: {
                s.token_id
                for s in sample(
                    logits[:1].expand(count, -1),
                    [row(position=i, temperature=temperature, **mine) for i in range(count)],
                    EOS,
                )
            }
            for kind, mine in kinds.items()
        }
        assert int(logits[0].argmax()) not in drawn["ban"]
        assert drawn["force"] == {12}
        assert drawn["allow"] <= set(allowed) and (temperature == 0 or len(drawn["allow"]) > 1)


def test_logits_are_not_changed() -> None:
    logits = random_logits(1, 15, 97)
    before = logits.clone()
    sample(logits, mixed_rows(15, 97, 1), EOS)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_of_nan_fails_alone(bad: float, temperature: float) -> None:
    count = 15
    logits = random_logits(2, count, 97)
    rows = [replace(r, params=replace(r.params, logprobs=2)) for r in mixed_rows(count, 97, 2)]
    rows[4] = row(sequence=4, temperature=temperature, top_k=3, top_p=0.5, logprobs=2)
    healthy = sample(logits, rows, EOS)
    logits[4, 50] = bad
    got = sample(logits, rows, EOS)
    assert got[4] == Sampled(4, 0, FAILED)
    assert healthy[4].token_id >= 0
    assert got[:4] + got[5:] == healthy[:4] + healthy[5:]


def test_a_row_with_nothing_to_choose_fails() -> None:
    rows = [row(temperature=t, min_tokens=1, stop_token_ids=frozenset({0, 1})) for t in (0.0, 1.0)]
    assert [s.token_id for s in sample(torch.ones(2, 3), rows, EOS)] == [FAILED, FAILED]


def test_min_tokens_end_when_reached() -> None:
    logits = torch.zeros(1, 8)
    logits[0, EOS[0]] = 5.0
    logits[0, 3] = 4.0
    logits[0, 6] = 3.0
    stops = {"min_tokens": 2, "stop_token_ids": frozenset({3, 1 << 30})}
    got = [sample(logits, [row(position=p, **stops)], EOS)[0].token_id for p in range(3)]
    assert got == [6, 6, EOS[0]]


def test_logprobs_are_of_the_raw_logits_with_ties_by_id() -> None:
    logits = (random_logits(3, 6, 40) * 2).round() / 2
    rows = [
        row(sequence=i, logprobs=i, temperature=(i % 2) * 0.5, output=(1, 1), presence_penalty=1.0)
        for i in range(6)
    ]
    rows[5] = replace(rows[5], params=replace(rows[5].params, logprobs=100))
    for i, result in enumerate(sample(logits, rows, EOS)):
        assert result.logprobs is not None
        want = torch.log_softmax(logits[i].double(), -1)
        token, logprob = result.logprobs.chosen
        assert token == result.token_id
        assert logprob == pytest.approx(float(want[token]), abs=1e-5)
        count = min(i if i < 5 else 100, 40)
        ids = first_largest(logits[i].numpy(), count)
        assert [t for t, _ in result.logprobs.top] == ids
        assert [p for _, p in result.logprobs.top] == pytest.approx(want[ids].tolist(), abs=1e-5)


def test_no_logprobs_unless_asked() -> None:
    assert sample(torch.zeros(1, 4), [row()], EOS)[0].logprobs is None
    assert sample(torch.empty(0, 4), [], EOS) == []


def test_choices_of_one_request_differ() -> None:
    logits = random_logits(4, 1, 1_000, scale=0.1)
    rows = [row(choice=c, temperature=1.0, n=32) for c in range(32)]
    got = sample(logits.expand(32, -1), rows, EOS)
    assert [s.choice for s in got] == list(range(32))
    assert len({s.token_id for s in got}) > 25


@pytest.mark.parametrize("penalty", [1e-45, 1e-38, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_repetition_penalty_still_chooses(penalty: float, temperature: float) -> None:
    logits = random_logits(3, 1, 50)
    extreme = row(
        history=tuple(range(20)), repetition_penalty=penalty, temperature=temperature, top_k=5
    )
    [drawn] = sample(logits, [extreme], EOS)
    assert drawn.token_id != FAILED
