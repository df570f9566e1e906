"""The cost of one candidate, term by term; ties; the sentence that explains a decision."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cost import (
    DELAYS_DECODE,
    DELAYS_LATER,
    DELAYS_PROMPT,
    OUTPUT_SHARE,
    TERMS,
    Candidate,
    Cost,
    predict,
    ranked,
    reason,
    usual_line,
)
from seams.rng import SeededRng

IDLE = Candidate(
    replica="r1",
    device_tokens=0,
    host_tokens=0,
    disk_tokens=0,
    shared_tokens=0,
    booked_prefill_s=0.0,
    prefill_s_per_token=1e-3,
    overhead_s=0.002,
    decoding=0,
    passed=0,
    prompts=0,
    step_s=0.02,
    blocks_needed=70,
    blocks_free=100,
    blocks_evictable=0,
    block_tokens=16,
    host_s_per_token=1e-5,
    disk_s_per_token=1e-4,
    shared_s_per_token=1e-2,
    off_session=False,
)


def terms(
    at: Candidate, tokens: int = 1000, output: float = 50.0, line: float = 0.0
) -> dict[str, float]:
    cost = predict(at, tokens, output, line)
    assert cost.total_s == pytest.approx(sum(cost.terms))
    return dict(zip(TERMS, cost.terms, strict=True))


def but(**changes: object) -> Candidate:
    return dataclasses.replace(IDLE, **changes)  # type: ignore[arg-type]


def test_an_idle_replica_that_holds_nothing() -> None:
    assert terms(IDLE) == pytest.approx(
        {
            "booked_prefill": 0.0,
            "miss_prefill": 1.0,
            "tier_load": 0.0,
            "rtt": 0.002,
            "interference": DELAYS_DECODE,
            "later": 0.0,
            "output": OUTPUT_SHARE,
            "memory": 0.0,
            "session": 0.0,
        }
    )


def test_what_is_held_is_not_computed_save_the_last_token() -> None:
    held = but(device_tokens=800, host_tokens=800, disk_tokens=800, shared_tokens=800)
    assert terms(held)["miss_prefill"] == pytest.approx(0.2)
    whole = but(device_tokens=1008, host_tokens=1008, disk_tokens=1008, shared_tokens=1008)
    cost = predict(whole, 1008, 50.0, 0.0)
    assert cost.matched_tokens == 1007
    assert cost.terms[1] == pytest.approx(0.001)


def test_each_tier_loads_at_its_own_speed_or_is_computed_if_that_is_faster() -> None:
    tiered = but(device_tokens=100, host_tokens=300, disk_tokens=600, shared_tokens=900)
    got = terms(tiered)
    assert got["tier_load"] == pytest.approx(200 * 1e-5 + 300 * 1e-4 + 300 * 1e-3)
    assert got["miss_prefill"] == pytest.approx(0.1)


def test_prefill_delays_prompts_that_it_passes_and_sequences_that_decode() -> None:
    whole = DELAYS_PROMPT * 3 + DELAYS_DECODE * 8
    assert terms(but(decoding=7, passed=3))["interference"] == pytest.approx(whole)
    held = but(device_tokens=900, host_tokens=900, disk_tokens=900, shared_tokens=900)
    held = dataclasses.replace(held, decoding=7, passed=3)
    assert terms(held)["interference"] == pytest.approx(0.1 * whole)
    assert 3 * DELAYS_DECODE < DELAYS_PROMPT, "a first token is waited for more than the next one"


def test_what_is_computed_delays_who_comes_later_by_how_long_lines_are() -> None:
    """The same to all that miss as much: a hit is worth more under load, nobody is gated off."""
    held = but(device_tokens=900, host_tokens=900, disk_tokens=900, shared_tokens=900)
    later = DELAYS_LATER * 2.0 * 3.0
    assert terms(IDLE, line=2.0)["later"] == pytest.approx(later)
    assert terms(held, line=2.0)["later"] == pytest.approx(0.1 * later)
    waits = dataclasses.replace(held, booked_prefill_s=2.0, prompts=2)
    calm, busy = (
        predict(waits, 1000, 50.0, mean).total_s - predict(IDLE, 1000, 50.0, mean).total_s
        for mean in (0.0, 2.0)
    )
    assert calm > 0 > busy, "recomputed while the fleet idles, waited for while it is busy"


def test_one_long_line_is_no_busy_fleet() -> None:
    assert usual_line([0, 0, 0, 0]) == 0.0
    assert usual_line([0, 0, 0, 40]) == 0.25
    assert usual_line([2, 2, 3, 40]) == 2.5
    assert usual_line([7]) == 7.0


def test_memory_costs_a_little_to_evict_and_in_full_to_preempt() -> None:
    assert terms(but(blocks_free=70))["memory"] == 0.0
    assert terms(but(blocks_free=60, blocks_evictable=10))["memory"] == pytest.approx(0.016)
    assert terms(but(blocks_free=60))["memory"] == pytest.approx(0.16)
    assert terms(but(blocks_free=-30, blocks_evictable=40))["memory"] == pytest.approx(
        (40 * 0.1 + 60) * 0.016
    )


def test_leaving_the_session_costs_one_block() -> None:
    assert terms(but(off_session=True))["session"] == pytest.approx(0.016)


@settings(derandomize=True, database=None)
@given(
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(1, 2000),
    st.integers(-50, 200),
    st.integers(0, 200),
)
def test_no_term_is_ever_negative(
    device: int, host: int, disk: int, shared: int, tokens: int, free: int, evictable: int
) -> None:
    held = sorted((device, host, disk, shared))
    at = but(
        device_tokens=held[0],
        host_tokens=held[1],
        disk_tokens=held[2],
        shared_tokens=held[3],
        blocks_free=free,
        blocks_evictable=evictable,
        off_session=True,
    )
    cost = predict(at, tokens, 3.0, 1.5)
    assert all(seconds >= 0 for seconds in cost.terms)
    assert 0 <= cost.matched_tokens < tokens
    computed = cost.terms[1] / at.prefill_s_per_token
    assert computed == pytest.approx(tokens - cost.matched_tokens)


def cost_of(replica: str, matched: int = 0, **seconds: float) -> Cost:
    values = tuple(seconds.get(name, 0.0) for name in TERMS)
    return Cost(replica, sum(values), values, matched)


def test_the_cheapest_wins_and_equals_are_drawn() -> None:
    rng = SeededRng(1)
    costs = [
        cost_of("a", miss_prefill=1.0, output=9.0),
        cost_of("b", miss_prefill=1.0, output=9.0),
        cost_of("c", miss_prefill=1.2, output=9.0),
        cost_of("d", miss_prefill=1.001, output=9.0),
    ]
    drawn = Counter(ranked(costs, rng)[0].replica for _ in range(600))
    assert set(drawn) == {"a", "b", "d"}
    assert min(drawn.values()) > 150
    order = ranked(costs, rng)
    assert sorted(c.replica for c in order) == ["a", "b", "c", "d"] and order[-1].replica == "c"


def test_a_large_output_term_does_not_make_equals_of_hit_and_miss() -> None:
    hit = cost_of("hit", matched=100, miss_prefill=0.001, output=60.0)
    miss = cost_of("miss", miss_prefill=0.101, output=60.0)
    rng = SeededRng(1)
    assert all(ranked([miss, hit], rng)[0].replica == "hit" for _ in range(200))


def test_the_reason_names_the_holder_that_was_passed_over_and_the_term() -> None:
    holder = cost_of("r1", matched=96, booked_prefill=3.0, miss_prefill=0.01)
    other = cost_of("r2", matched=16, miss_prefill=0.5)
    text = reason(other, [other, holder], 100)
    assert "r2" in text and "r1 holds 96" in text and "booked_prefill, 3 s more" in text
    assert text.count(".") - text.count("0.") <= 1 and text.endswith(".")
    assert "holds the most, 96 of 100 tokens" in reason(holder, [holder, other], 100)
    assert "nobody holds any" in reason(cost_of("r1"), [cost_of("r1"), cost_of("r2")], 100)
    drawn = reason(cost_of("r2", miss_prefill=0.1), [cost_of("r1", 1, miss_prefill=0.1)], 100)
    assert "drawn among equals" in drawn and "r1, which holds 1 of 100" in drawn
