"""Rates learnt online: convergence, outliers, and equal replicas that must stay equal."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.estimates import ClassEstimates, LogEwma, Priors

PRIORS = Priors(1e-3, 0.02, 0.0005)


@pytest.mark.parametrize("wrong_by", [1 / 100, 1 / 3, 1.0, 3.0, 100.0])
def test_it_finds_the_truth_from_a_wrong_prior(wrong_by: float) -> None:
    draw = random.Random(7)
    estimate = LogEwma(1e-3 * wrong_by)
    for _ in range(60):
        estimate.add(1e-3 * math.exp(draw.gauss(0, 0.1)))
    assert estimate.value == pytest.approx(1e-3, rel=0.15)


def test_outliers_move_it_little_and_a_real_change_is_followed() -> None:
    draw = random.Random(7)
    estimate = LogEwma(1e-3)
    for turn in range(200):
        estimate.add(1.0 if turn % 20 == 19 else 1e-3 * math.exp(draw.gauss(0, 0.1)))
        assert turn < 20 or estimate.value == pytest.approx(1e-3, rel=0.35)
    for _ in range(60):
        estimate.add(5e-3)
    assert estimate.value == pytest.approx(5e-3, rel=0.1)


@settings(derandomize=True, database=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_no_sample_breaks_it(samples: list[float]) -> None:
    estimate = LogEwma(1e-3)
    for sample in samples:
        estimate.add(sample)
        assert math.isfinite(estimate.value) and estimate.value > 0


def test_impossible_samples_teach_nothing() -> None:
    estimate = LogEwma(1e-3)
    for sample in (0.0, -1.0, math.inf, -math.inf, math.nan):
        estimate.add(sample)
    assert (estimate.value, estimate.samples) == (1e-3, 0)


def test_equal_replicas_keep_equal_costs_in_spite_of_noise() -> None:
    classes, draw = ClassEstimates(), random.Random(3)
    fleet = [classes.of("cpu", "m", PRIORS) for _ in range(4)]
    for _ in range(100):
        for replica in fleet:
            replica.learn_prefill_rate(2e-3 * math.exp(draw.gauss(0, 0.15)))
    assert len({replica.prefill_s_per_token for replica in fleet}) == 1
    assert fleet[0].prefill_s_per_token == pytest.approx(2e-3, rel=0.15)


def test_a_replica_that_is_clearly_slower_is_told_apart() -> None:
    classes, draw = ClassEstimates(), random.Random(3)
    fleet = [classes.of("cpu", "m", PRIORS) for _ in range(4)]
    for _ in range(100):
        for number, replica in enumerate(fleet):
            truth = 6e-3 if number == 3 else 2e-3
            replica.learn_prefill_rate(truth * math.exp(draw.gauss(0, 0.1)))
    assert fleet[3].prefill_s_per_token == pytest.approx(6e-3, rel=0.2)
    assert fleet[0].prefill_s_per_token < 4e-3


def test_a_new_replica_starts_with_what_its_class_knows() -> None:
    classes = ClassEstimates()
    old = classes.of("cpu", "m", PRIORS)
    for _ in range(50):
        old.learn_prefill_rate(5e-3)
    assert classes.of("cpu", "m", PRIORS).prefill_s_per_token == pytest.approx(5e-3, rel=0.1)
    assert classes.of("cuda", "m", PRIORS).prefill_s_per_token == pytest.approx(1e-3)
    assert classes.of("cpu", "other", PRIORS).prefill_s_per_token == pytest.approx(1e-3)


def test_prefill_and_overhead_are_learnt_apart() -> None:
    estimates, draw = ClassEstimates().of("cpu", "m", PRIORS), random.Random(5)
    for _ in range(300):
        tokens = draw.choice([1, 4, 200, 800])
        estimates.learn_prefill(tokens, 0.03 + tokens * 5e-4, queued_s=0.0)
    assert estimates.overhead_s == pytest.approx(0.03, rel=0.2)
    assert estimates.prefill_s_per_token == pytest.approx(5e-4, rel=0.2)


def test_a_request_that_waited_for_others_teaches_nothing() -> None:
    estimates = ClassEstimates().of("cpu", "m", PRIORS)
    before = estimates.prefill_s_per_token
    estimates.learn_prefill(100, 10.0, queued_s=9.0)
    estimates.learn_prefill(0, 0.0, queued_s=0.0)
    assert estimates.prefill_s_per_token == before


def test_step_time_keeps_the_shape_of_the_priors() -> None:
    estimates = ClassEstimates().of("cpu", "m", PRIORS)
    for _ in range(60):
        estimates.learn_step(2 * (0.02 + 0.0005 * 7), batch=8)
    assert estimates.step_s(1) == pytest.approx(0.04, rel=0.05)
    assert estimates.step_s(33) == pytest.approx(0.072, rel=0.05)


def test_a_replica_without_priors_has_usable_ones() -> None:
    estimates = ClassEstimates().of("", "m", Priors())
    assert 0 < estimates.prefill_s_per_token < 0.1
    assert 0 < estimates.step_s(1) < estimates.step_s(9) < 1.0
