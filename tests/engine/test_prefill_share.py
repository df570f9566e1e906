"""Prompts beside decoding sequences: what they may take of a step, and who comes first.

Time is virtual: a step takes what its rows are said to cost.
"""

from statistics import quantiles

import pytest
from engine_rig import Rig, request, tokens

from seams.clock import VirtualClock
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.plan import StepPlan
from worker.engine.scheduler import OVERTAKEN_MAX
from worker.engine.timing import StepTimes
from worker.models.fake import FakeModel, fake_model

STEP_S, ROW_S, PREFILL_S = 0.010, 0.0001, 0.001


def costly(model: FakeModel, clock: VirtualClock) -> list[list[int]]:
    """Let each execute take its time; returns the rows of each plan from then on."""
    plans: list[list[int]] = []
    execute = model.execute

    def timed(plan: StepPlan) -> object:
        rows = [int(b - a) for a, b in zip(plan.starts, plan.starts[1:], strict=False)]
        plans.append(rows)
        clock.advance(STEP_S + sum(ROW_S if n == 1 else n * PREFILL_S for n in rows))
        return execute(plan)

    model.execute = timed  # type: ignore[assignment,method-assign]
    return plans


def gaps_beside_a_long_prompt(
    prompt_tokens: int, decoders: int, slowdown: float
) -> tuple[list[float], list[float], list[list[int]]]:
    """Seconds between tokens of decoding sequences before and while a long prompt is computed, and
    the rows of the steps of the latter time."""
    model = fake_model("full", context_tokens=prompt_tokens + 64)
    clock = VirtualClock()
    output = prompt_tokens // 8 + 300
    blocks = prompt_tokens // 16 + 2 + decoders * (output // 16 + 3)
    config = EngineConfig((blocks,), decode_slowdown_max=slowdown)
    core = EngineCore(model, config, clock)
    plans = costly(model, clock)
    for i in range(decoders):
        core.submit(request(f"d{i}", tokens(8, i), output))
    for _ in range(40):
        core.step()
    quiet, busy, since = [], [], clock.now()

    def step() -> float:
        nonlocal since
        output = core.step()
        assert output is not None
        decoded = sum(e.request_id != "long" for e in output.emissions)
        assert decoded == decoders, "a decoder got no token"
        gap, since = clock.now() - since, clock.now()
        return gap

    for _ in range(100):
        quiet.append(step())
    core.submit(request("long", tuple(i * i % 241 for i in range(prompt_tokens)), 1))
    first = len(plans)
    while core._requests.get("long") is not None:
        busy.append(step())
    return quiet, busy, plans[first:]


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


@pytest.mark.parametrize(
    "prompt_tokens", [2_000, pytest.param(100_000, marks=pytest.mark.soak)], ids=str
)
def test_a_long_prompt_at_most_doubles_the_time_between_tokens(prompt_tokens: int) -> None:
    """Scenario 25: 32 decoders; p99 of their inter-token latency at most twice the usual."""
    quiet, busy, plans = gaps_beside_a_long_prompt(prompt_tokens, 32, slowdown=1.8)
    ratio = p99(busy) / p99(quiet)
    chunks = [max(rows) for rows in plans]
    print(f"p99 {p99(busy) * 1e3:.1f} ms beside {p99(quiet) * 1e3:.1f} ms, {len(busy)} steps")
    assert ratio <= 2.0
    # It is not merely held back: three quarters of what is allowed are used.
    allowed = 0.8 * (STEP_S + 32 * ROW_S) / PREFILL_S
    assert sum(chunks) / len(chunks) >= 0.75 * allowed


def test_without_the_bound_a_long_prompt_stalls_decoding() -> None:
    quiet, busy, _ = gaps_beside_a_long_prompt(2_000, 32, slowdown=0)
    assert max(busy) > 10 * p99(quiet)


def test_alone_a_prompt_has_the_whole_step() -> None:
    rig = Rig(blocks=200, step_tokens_max=64)
    costly(rig.model, rig.clock)
    rig.submit(request("warm", tokens(40), 20))
    rig.run()
    rig.submit(request("a", tokens(200, 1), 1))
    rig.run()
    assert [max(rows) for rows in rig.rows()[-4:]] == [64, 64, 64, 8]


def test_many_prompts_beside_one_decoder_are_not_held_back() -> None:
    """The waits of ten prompts weigh more than one decoder's."""
    shares = []
    for others in (1, 10):
        rig = Rig(blocks=800, step_tokens_max=400)
        costly(rig.model, rig.clock)
        rig.submit(request("d", tokens(40), 100))
        rig.step(20)
        rig.submit(*(request(f"p{i}", tokens(200, 1 + i), 1) for i in range(others)))
        rig.step()
        shares.append(sum(rig.rows()[-1]) - 1)
    assert 4 <= shares[0] <= 12
    assert shares[1] >= 8 * shares[0]


def test_a_shorter_prompt_shares_the_step_with_a_long_one() -> None:
    rig = Rig(blocks=300, step_tokens_max=40)
    rig.submit(request("long", tokens(400), 1))
    rig.step()
    assert rig.rows() == [[40]]
    rig.submit(request("short", tokens(30, 1), 1), request("third", tokens(399, 2), 1))
    rig.step(2)
    assert rig.rows()[1:] == [[20, 20], [30, 10]]  # what the short one left went to the long one
    assert len(rig.lasts("short")) == 1
    rig.run()
    first_of = [rig.emissions.index(rig.last(name)) for name in ("short", "long", "third")]
    assert first_of == sorted(first_of)
    rig.assert_exact()


def test_the_oldest_prompt_always_has_half_of_the_share() -> None:
    rig = Rig(blocks=400, step_tokens_max=32)
    rig.submit(request("long", tokens(320), 1))
    rig.step()
    for i in range(1, 60):
        rig.submit(request(f"s{i}", tokens(17, i), 1))
    steps = 1
    while not rig.lasts("long"):
        rig.step()
        steps += 1
    assert steps <= 1 + 2 * 10
    rig.run()
    rig.assert_exact()


def test_step_times_by_batch_size() -> None:
    times = StepTimes()
    assert times.prefill_within(4, 2.0) == float("inf") and times.decode_s(3) == 0.0
    times.record(0.010, 1, 0)
    times.record(0.040, 32, 0)
    assert (times.decode_s(1), times.decode_s(2), times.decode_s(60)) == (0.010, 0.010, 0.040)
    times.record(0.060, 33, 20)
    assert times.prefill_s_per_token == pytest.approx(0.001)
    assert times.prefill_within(32, 1.5) == pytest.approx(20)
    assert times.prefill_within(1, 1.5) == pytest.approx(5)


# --- whose prefix is being computed -------------------------------------------------------------


def test_who_shares_a_prompt_computed_over_several_steps_waits_and_holds_up_nobody_else() -> None:
    rig = Rig(blocks=300, step_tokens_max=32)
    rig.submit(request("first", tokens(200), 4, tenant="a"))
    rig.step()
    rig.submit(request("same", tokens(200) + tokens(3, 5), 4, tenant="a"))
    rig.submit(request("other", tokens(10, 7), 4, tenant="a"))
    rig.submit(request("b", tokens(10, 8), 4, tenant="b"))
    rig.step()
    names = [s.request.spec.request_id for s in rig.core.scheduler.running]
    assert names == ["first", "other", "b"]
    rig.run()
    assert rig.usage("same").cached_tokens == 200 and rig.usage("same").preemptions == 0
    assert sum(map(sum, rig.rows())) == 200 + 3 + 10 + 10 + 4 * 3
    rig.assert_exact()


def test_nobody_waits_for_a_prompt_that_has_no_credit_to_go_on() -> None:
    rig = Rig(blocks=300, step_tokens_max=64)
    rig.submit(request("paused", tokens(40), 4, credit_tokens=1, n=2, temperature=1.0))
    rig.run()
    rig.submit(request("b", tokens(40), 4))
    rig.run()
    assert len(rig.lasts("b")) == 1


def test_a_held_request_is_served_although_others_keep_coming() -> None:
    rig = Rig(blocks=600, step_tokens_max=32, running_max=4)
    rig.submit(request("first", tokens(300), 2))
    rig.step()
    rig.submit(request("same", (*tokens(300), 1), 2))
    for i in range(200):
        rig.submit(request(f"x{i}", tokens(8, 3 + i), 2, tenant="b"))
        rig.step()
        if rig.lasts("same"):
            break
    assert rig.lasts("same"), "it starved"
    rig.run()
    rig.assert_exact()


# --- who has most cached ------------------------------------------------------------------------


def first_served(rig: Rig) -> list[str]:
    return list(dict.fromkeys(e.request_id for e in rig.emissions))


def busy_rig(warm: bool) -> Rig:
    """One place, taken; what tokens(40, 1) names is cached, if `warm`."""
    rig = Rig(blocks=300, running_max=1)
    if warm:
        rig.submit(request("warm", tokens(40, 1), 1))
        rig.run()
        rig.emissions.clear()
    rig.submit(request("running", tokens(4), tenant="z"))
    rig.step()
    return rig


def test_of_a_tenants_equals_who_has_most_cached_comes_first() -> None:
    rig = busy_rig(warm=True)
    rig.submit(
        request("a", tokens(40, 3)),
        request("b", tokens(20, 1) + tokens(20, 4)),
        request("c", tokens(40, 1)),
        request("low", tokens(40, 1), priority=-1),
        request("high", tokens(40, 5), priority=1),
    )
    rig.run()
    assert first_served(rig) == ["running", "high", "c", "b", "a", "low"]


def test_who_is_overtaken_is_served_after_a_bounded_number() -> None:
    rig = busy_rig(warm=True)
    rig.submit(request("cold", tokens(40, 3), 1))
    for i in range(40):
        rig.submit(request(f"hot{i}", tokens(40, 1), 1))
    rig.run()
    assert first_served(rig).index("cold") == 1 + OVERTAKEN_MAX


def test_what_a_tenant_has_cached_never_moves_another_tenants_turn() -> None:
    """Prompts of different lengths: tenant a's own order changes, the tenants' turns do not."""
    turns, orders = [], []
    for warm in (False, True):
        rig = busy_rig(warm)
        for i, prompt in enumerate((tokens(90, 3), tokens(20, 6), tokens(40, 1), tokens(10, 7))):
            rig.submit(request(f"a{i}", prompt, 3, tenant="a"))
        for i in range(8):
            rig.submit(request(f"b{i}", tokens(25, 50 + i), 3, tenant="b"))
        rig.run()
        order = first_served(rig)
        turns.append("".join(name[0] for name in order))
        orders.append([name for name in order if name[0] == "a"])
    assert orders[0] == ["a0", "a1", "a2", "a3"] and orders[1][0] == "a2"
    assert turns[0] == turns[1]
