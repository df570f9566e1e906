"""The cluster under a virtual clock: order, conservation, chance by seed, deaths and joins."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from simulated_world import GRAIN, one_request, small_chats, small_setup

from seams.errors import NoReplica
from simulate.cluster import Cluster, Setup, simulate
from simulate.ideal import ideal_share
from simulate.outcome import Outcome, Slo
from simulate.policies.registry import POLICIES, policy_of
from simulate.workload import Workload


def times(outcome: Outcome) -> list[tuple[object, ...]]:
    return [
        (r.request.number, r.replica, r.arrived_s, r.first_s, r.last_s, r.cached_tokens)
        for r in sorted(outcome.records, key=lambda r: r.request.number)
    ]


def run(policy: str, setup: Setup, workload: Workload | None = None, seed: int = 1) -> Outcome:
    return simulate(setup, workload or small_chats(), policy_of(policy), seed)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_in_the_order_of_time(policy: str) -> None:
    workload = small_chats()
    outcome = run(policy, small_setup(routers=2), workload)
    assert sorted(r.request.number for r in outcome.records) == list(range(len(workload.requests)))
    assert len(outcome.good) == len(workload.requests)
    for record in outcome.records:
        assert record.first_s is not None and record.last_s is not None
        assert record.arrived_s <= record.submitted_s < record.first_s <= record.last_s
        assert 0 <= record.cached_tokens < record.request.prompt_tokens
    figures = outcome.figures(Slo())
    assert figures["failed"][0] == 0 and figures["cached_share"][0] <= 1


@pytest.mark.parametrize("policy", ["cost", "dynamo_predict", "sglang"])
def test_a_seed_says_everything(policy: str) -> None:
    setup = small_setup(routers=3, deaths=((3.0, 1),))
    assert times(run(policy, setup, seed=7)) == times(run(policy, setup, seed=7))
    assert times(run(policy, setup, seed=7)) != times(run(policy, setup, seed=8))


def test_cost_beats_round_robin_where_prefixes_are_shared() -> None:
    workload, setup = small_chats(users=80, rate=12.0), small_setup()
    ours = run("cost", setup, workload).figures(Slo())
    theirs = run("round_robin", setup, workload).figures(Slo())
    assert ours["cached_share"][0] > 1.15 * theirs["cached_share"][0]
    assert ours["ttft_mean"][0] < theirs["ttft_mean"][0]


def test_a_replica_that_dies_loses_no_request() -> None:
    workload = small_chats(users=80, rate=20.0)
    outcome = run("cost", small_setup(deaths=((1.0, 0), (2.0, 1))), workload)
    assert len(outcome.good) == len(workload.requests)
    assert any(record.left for record in outcome.records)
    for name, died_s in (("replica-0", 1.0), ("replica-1", 2.0)):
        ended = [r.last_s for r in outcome.records if r.replica == name]
        assert all(last_s is not None and last_s <= died_s + 0.001 for last_s in ended)
    late = [r for r in outcome.records if r.arrived_s > 2.01]
    assert {r.replica for r in late} == {"replica-2", "replica-3"}


def test_tokens_that_left_before_a_death_are_not_computed_again() -> None:
    """A run of many steps is under way when it dies: those that are whole have been sent."""
    request = one_request(0, range(8), output_tokens=400)
    workload = Workload(GRAIN, (request,), 500)
    (plain,) = run("cost", small_setup(1), workload).records
    for died_s in (0.6, 0.75, 0.9, 1.05, 1.2):
        setup = small_setup(1, deaths=((died_s, 0),), joins=(died_s,))
        (moved,) = run("cost", setup, workload).records
        assert moved.left == ["replica-0"] and 0 < moved.produced < 400
        assert 0 < moved.e2e_s - plain.e2e_s < 0.06, "a step, and its tokens as one prompt"


def test_a_busy_neighbour_makes_steps_longer() -> None:
    requests = (one_request(0, range(8), output_tokens=90), one_request(1, range(50, 58)))
    workload = Workload(GRAIN, requests, 100)
    ends = [
        sorted(r.e2e_s for r in run("least_loaded", small_setup(2, beside=b), workload).records)
        for b in (0.0, 1.0)
    ]
    (short, long), (short_slow, long_slow) = ends
    hops_s = 2 * small_setup().hop_s
    assert short_slow - hops_s == pytest.approx(2 * (short - hops_s), rel=0.15)
    assert long_slow - long == pytest.approx(short - hops_s, rel=0.3), "alone it is as fast as ever"


def test_without_any_replica_requests_fail_after_a_while() -> None:
    setup = small_setup(1, deaths=((0.0, 0),))
    outcome = run("round_robin", setup, small_chats().first(3))
    assert all(isinstance(r.error, NoReplica) for r in outcome.records)


def test_one_that_joins_is_used() -> None:
    outcome = run("cost", small_setup(1, joins=(2.0,)), small_chats(users=60, rate=15.0))
    assert {r.replica for r in outcome.records} == {"replica-0", "replica-1"}
    assert all(r.arrived_s >= 2.0 for r in outcome.records if r.replica == "replica-1")


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    workload = small_chats().first(60)
    outcome = run("cost", small_setup(2, in_flight_max=6), workload)
    moments = sorted(r.arrived_s for r in outcome.records)
    assert len(outcome.good) == 60
    for at_s in moments:
        flying = sum(r.arrived_s <= at_s < (r.last_s or 0) for r in outcome.records)
        assert flying <= 6


def test_conservation_holds_between_all_events() -> None:
    cluster = Cluster(small_setup(2, 100), small_chats().first(60), policy_of("cost"), 3)
    step, checks = cluster._step, 0

    def checked(*arguments: object) -> None:
        nonlocal checks
        step(*arguments)  # type: ignore[arg-type]
        checks += 1
        if checks % 7 == 0:
            cluster.check_integrity()
            for policy in cluster.policies:
                policy.core.check_integrity()  # type: ignore[attr-defined]

    cluster._step = checked  # type: ignore[method-assign]
    cluster.run()
    assert checks > 100


def test_the_ideal_is_what_an_endless_cache_has_and_less_when_smaller() -> None:
    first = one_request(0, range(16), output_tokens=3)
    longer = one_request(1, [*range(16), *range(100, 108)], output_tokens=3)
    foreign = one_request(2, range(200, 216), output_tokens=3)
    again = one_request(3, range(16), output_tokens=3)
    workload = Workload(GRAIN, (first, longer, foreign, again), 10)
    tokens = 16 * 16 + 15 * 16  # the last cell is always computed
    assert ideal_share(workload, 100) == pytest.approx(tokens / workload.prompt_tokens)
    tight = ideal_share(workload, 7)
    assert tight < ideal_share(workload, 100)
    served = run("cost", small_setup(1, 100), workload)
    assert sum(r.cached_tokens for r in served.records) <= tokens


def test_busy_windows_add_up_to_busy_time() -> None:
    outcome = run("cost", small_setup(window_s=1.0))
    for busy_s, windows in zip(outcome.busy_s, outcome.windows, strict=True):
        assert sum(windows.values()) == pytest.approx(busy_s)
        assert all(seconds <= 1.0 + 1e-9 for seconds in windows.values())
    assert 1.0 <= outcome.imbalance() <= 4.0 and outcome.window_imbalance() >= 1.0


def test_a_workload_keeps_its_requests_however_it_is_timed() -> None:
    workload = small_chats()
    fast = workload.at_rate(100.0)
    assert fast.duration_s == pytest.approx(len(workload.requests) / 100.0)
    spread = workload.spread(3)
    assert sorted(astuple(r)[2:] for r in spread.requests) == sorted(
        astuple(r)[2:] for r in workload.requests
    )
    assert [r.at_s for r in spread.requests] == sorted(r.at_s for r in spread.requests)
