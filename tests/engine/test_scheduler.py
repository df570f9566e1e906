"""What the scheduler promises, rule by rule."""

import itertools

import pytest
from engine_rig import BLOCK, Rig, request, tokens
from hypothesis import given
from hypothesis import strategies as st

from seams.errors import OutOfBlocks
from worker.engine.admission import LengthHistory, predicted_peak
from worker.engine.messages import EngineRequest, Finish
from worker.engine.request import State


def running(rig: Rig) -> list[str]:
    return [s.request.spec.request_id for s in rig.core.scheduler.running]


def preempt(rig: Rig, name: str, choice: int = 0) -> None:
    """Force what a lack of blocks would do."""
    from worker.engine.planning import StepDraft

    victims = {(s.request.spec.request_id, s.choice): s for s in rig.core.scheduler.running}
    rig.core.scheduler._preempt(StepDraft(1, 1), victims[name, choice])
    rig.core.check_integrity()


# --- budget and order --------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    rig = Rig(step_tokens_max=30)
    rig.submit(request("a", tokens(100), max_tokens=1))
    rig.run()
    assert rig.rows() == [[30], [30], [30], [10]]
    assert [len(p.samples) for p in rig.model.plans] == [0, 0, 0, 1]
    rig.assert_exact()


def test_decode_rows_come_first_and_prefill_gets_the_rest() -> None:
    rig = Rig(step_tokens_max=10)
    rig.submit(request("a", tokens(3)), request("b", tokens(3, 1)))
    rig.step()
    rig.submit(request("long", tokens(60, 2)))
    rig.step(3)
    assert rig.rows()[1:4] == [[1, 1, 8]] * 3
    rig.run()
    assert all(sum(rows) <= 10 for rows in rig.rows())
    rig.assert_exact()


def test_decoders_beyond_the_budget_take_turns() -> None:
    rig = Rig(step_tokens_max=2)
    names = ["a", "b", "c", "d", "e"]
    for i, name in enumerate(names):
        rig.submit(request(name, tokens(1, i), max_tokens=6, credit_tokens=1))
    rig.run()
    for name in names:
        rig.core.grant(name, 100)
    before = {name: len(rig.output(name)) for name in names}
    rig.step(5)
    gained = [len(rig.output(name)) - before[name] for name in names]
    assert sum(gained) == 10 and min(gained) >= 1
    rig.run()
    rig.assert_exact()


def test_blocks_are_taken_when_their_first_slot_is_needed() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(3), max_tokens=11))
    held = []
    while rig.core.has_work():
        rig.step()
        held.append(64 - rig.core.memory.available(0))
    assert held[:-1] == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert held[-1] == 0


def test_plans_hold_no_object_of_the_scheduler() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(9), max_tokens=9))
    rig.step()
    plan = rig.model.plans[0]
    table = plan.tables[0][0].tolist()
    assert len(table) == 3
    rig.run()
    assert plan.tables[0][0].tolist() == table


# --- sharing -----------------------------------------------------------------------------------


def test_a_repeated_prompt_computes_its_last_token_only() -> None:
    for count in (1, 4, 5, 8, 30, 31):
        rig = Rig()
        rig.submit(request("first", tokens(count)))
        rig.run()
        rig.submit(request("again", tokens(count)))
        rig.run()
        assert rig.usage("again").cached_tokens == count - 1
        assert rig.usage("again").computed_tokens == 1
        assert rig.output("again") == rig.output("first")
        rig.assert_exact()


def test_matches_are_to_the_token_and_copy_the_boundary() -> None:
    rig = Rig()
    rig.submit(request("first", tokens(30)))
    rig.run()
    rig.submit(request("second", tokens(22) + tokens(9, 5)))
    rig.step()
    (copy,) = rig.model.plans[-1].copies
    assert copy.tokens == 22 % BLOCK
    assert rig.model.plans[-1].tables[0][0][22 // BLOCK] == copy.target != copy.source
    rig.run()
    assert rig.usage("second").cached_tokens == 22
    rig.submit(request("third", tokens(30)))  # the source was not written to
    rig.run()
    assert rig.usage("third").cached_tokens == 29
    rig.assert_exact()


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    rig = Rig()
    rig.submit(request("turn1", tokens(21), max_tokens=10))
    rig.run()
    history = tokens(21) + tuple(rig.output("turn1"))
    rig.submit(request("turn2", (*history, 1, 2, 3)))
    rig.run()
    assert rig.usage("turn2").cached_tokens == len(history) - 1  # the last token had no KV yet
    rig.assert_exact()


def test_a_computed_prompt_is_shared_while_its_request_runs() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(18), max_tokens=50))
    rig.step(2)
    assert not rig.model.plans[-1].copies  # offering the prompt did not make its tail shared
    rig.submit(request("b", tokens(18), max_tokens=50))
    rig.step()
    a, b = rig.core.scheduler.running
    assert a.tables[0][:4] == b.tables[0][:4]
    assert a.tables[0][4] != b.tables[0][4]
    rig.run()
    assert rig.usage("b").cached_tokens == 16
    rig.assert_exact()


def test_who_shares_a_prefix_computed_in_this_step_waits_for_it() -> None:
    rig = Rig(blocks=200)
    rig.submit(*(request(f"r{i}", tokens(40) + tokens(5, i), max_tokens=3) for i in range(6)))
    rig.step()
    assert running(rig) == ["r0"]
    rig.step()
    assert len(running(rig)) == 6
    rig.run()
    assert [rig.usage(f"r{i}").cached_tokens for i in range(6)] == [0, 40, 40, 40, 40, 40]
    rig.submit(*(request(f"s{i}", tokens(40, 9 + i), max_tokens=3) for i in range(3)))
    rig.step()
    assert len(running(rig)) == 3  # nothing in common: nobody waits
    rig.run()
    rig.assert_exact()


def test_doubles_computed_side_by_side_end_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.core.scheduler, "_will_be_cached", lambda *_: False)
    rig.submit(request("a", tokens(18), max_tokens=9), request("b", tokens(18), max_tokens=9))
    rig.step()
    assert rig.rows() == [[18, 18]]
    a, b = rig.core.scheduler.running
    assert a.tables[0][:4] == b.tables[0][:4]
    rig.run()
    rig.assert_exact()


def test_choices_share_the_prompt_and_copy_the_boundary_on_write() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(10), n=3, temperature=1.0))
    rig.step()
    tables = [s.tables[0] for s in rig.core.scheduler.running]
    assert len(tables) == 3 and tables[0] == tables[1] == tables[2]
    rig.step()
    assert len(rig.model.plans[-1].copies) == 2  # the last to write keeps the block
    tables = [s.tables[0] for s in rig.core.scheduler.running]
    assert len({t[2] for t in tables}) == 3 and len({tuple(t[:2]) for t in tables}) == 1
    rig.run()
    assert len({tuple(rig.output("a", choice)) for choice in range(3)}) > 1
    assert rig.usage("a").computed_tokens == 10 and rig.usage("a").completion_tokens == 24


def test_all_choices_draw_their_first_token_from_one_row() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(10), n=4, temperature=1.0))
    rig.step()
    samples = rig.model.plans[0].samples
    assert [(s.row, s.choice, s.position) for s in samples] == [(9, c, 0) for c in range(4)]


@pytest.mark.parametrize("cache", [True, False])
def test_no_cache_neither_reads_nor_feeds(cache: bool) -> None:
    rig = Rig(cache=cache)
    rig.submit(request("fed", tokens(20)))
    rig.run()
    rig.submit(request("apart", tokens(40), no_cache=True))
    rig.run()
    assert rig.usage("apart").cached_tokens == 0
    rig.submit(request("after", tokens(40)))
    rig.run()
    assert rig.usage("after").cached_tokens == (20 if cache else 0)
    if not cache:
        assert rig.free() == 64
    rig.assert_exact()


def test_tenants_share_only_what_is_public() -> None:
    rig = Rig()
    secret = {"tenant": "a", "salt": b"a" * 32}
    rig.submit(request("mine", tokens(40), **secret))
    rig.run()
    rig.submit(request("mine again", tokens(40), **secret))
    rig.submit(request("other", tokens(40), tenant="b", salt=b"b" * 32))
    rig.run()
    assert rig.usage("mine again").cached_tokens == 39
    assert rig.usage("other").cached_tokens == 0
    rig.submit(request("public a", tokens(40, 3), private_from=16, **secret))
    rig.run()
    rig.submit(request("public b", tokens(40, 3), private_from=16, tenant="b", salt=b"b" * 32))
    rig.run()
    assert rig.usage("public b").cached_tokens == 16


# --- admission ---------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=12),
    st.sampled_from([1, 4, 16]),
)
def test_the_predicted_peak_bounds_a_simulated_run(
    sequences: list[tuple[int, int]], block_tokens: int
) -> None:
    """Everyone decodes a token a step and leaves when done: the real peak is at most the
    prediction, which is at most one block a sequence more."""
    demands = [(-(-length // block_tokens), left) for length, left in sequences]
    real = max(
        sum(-(-(length + at) // block_tokens) for length, left in sequences if left >= at)
        for at in range(61)
    )
    predicted = predicted_peak(demands, block_tokens)
    assert real <= predicted <= real + len(sequences)


def test_admission_waits_for_room_at_the_peak() -> None:
    """Each needs 12 blocks at its end and 4 at its start; three would fit at once, at first."""
    rig = Rig(blocks=25)
    rig.submit(*(request(name, tokens(16, i), max_tokens=32) for i, name in enumerate("abc")))
    rig.step()
    assert running(rig) == ["a", "b"]
    rig.run()
    assert all(rig.usage(name).preemptions == 0 for name in "abc")
    rig.assert_exact()


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    rig = Rig(blocks=16)
    rig.submit(request("big", tokens(20), max_tokens=30))
    rig.step()
    rig.submit(request("head", tokens(30, 1), max_tokens=20), request("small", tokens(2, 2)))
    rig.step(5)
    assert running(rig) == ["big"]
    rig.run()
    starts = [
        rig.emissions.index(next(e for e in rig.emissions if e.request_id == name))
        for name in ("big", "head", "small")
    ]
    assert starts == sorted(starts)


def test_short_outputs_are_learned() -> None:
    """Requests that could write much but never do let more run beside each other."""
    rig = Rig(blocks=24)
    eos = rig.model.spec.eos_token_ids[0]
    assert eos == 255
    lengths = rig.core.scheduler.lengths
    assert lengths.predict_left(0, 300) == 300
    for _ in range(20):
        lengths.record(5)
    rig.submit(*(request(name, tokens(8, i), max_tokens=60) for i, name in enumerate("abcd")))
    rig.step()
    assert running(rig) == ["a", "b", "c", "d"]
    rig.run()
    rig.assert_exact()


def test_length_history_forgets_and_looks_past_what_is_behind() -> None:
    history = LengthHistory(kept=20, trusted_from=4, quantile=0.5)
    for length in (10, 10, 10):
        history.record(length)
    assert history.predict_left(0, 99) == 99
    history.record(50)
    assert history.predict_left(0, 99) == 10
    assert history.predict_left(4, 99) == 6
    assert history.predict_left(10, 99) == 40
    assert history.predict_left(10, 7) == 7
    assert history.predict_left(50, 33) == 33
    for _ in range(20):
        history.record(3)
    assert history.predict_left(4, 99) == 99


def test_running_max_counts_the_choices_to_come() -> None:
    rig = Rig(running_max=4)
    rig.submit(
        request("a", tokens(40), n=3), request("b", tokens(4, 1)), request("c", tokens(4, 2))
    )
    rig.step()
    assert running(rig) == ["a", "a", "a", "b"]
    rig.run()
    assert len(rig.lasts("c")) == 1
    rig.assert_exact("b", "c")


def test_more_choices_than_places_still_all_end() -> None:
    rig = Rig(running_max=2)
    rig.submit(request("a", tokens(9), n=5, temperature=1.0))
    rig.step()
    assert len(running(rig)) == 2
    rig.run()
    wide = Rig()
    wide.submit(request("a", tokens(9), n=5, temperature=1.0))
    wide.run()
    for choice in range(5):
        assert rig.output("a", choice) == wide.output("a", choice)
    assert len(rig.lasts("a")) == 1


# --- order between requests --------------------------------------------------------------------


def first_served(rig: Rig) -> list[str]:
    """Names in the order of their first emission."""
    return list(dict.fromkeys(e.request_id for e in rig.emissions))


def test_first_come_first_served_inside_a_tenant_but_for_priority() -> None:
    rig = Rig(running_max=1)
    rig.submit(request("running", tokens(4)))
    rig.step()
    rig.submit(
        request("a", tokens(4, 1)),
        request("b", tokens(4, 2), priority=-1),
        request("c", tokens(4, 3), priority=7),
        request("d", tokens(4, 4)),
    )
    rig.run()
    assert first_served(rig) == ["running", "c", "a", "d", "b"]


def test_priority_does_not_reach_across_tenants() -> None:
    rig = Rig(running_max=1)
    rig.submit(request("a1", tokens(4), tenant="a"))
    rig.step()
    rig.submit(request("a2", tokens(4, 1), tenant="a", priority=100))
    rig.submit(request("b1", tokens(4, 2), tenant="b"))
    rig.run()
    assert first_served(rig) == ["a1", "b1", "a2"]


def test_a_flooding_tenant_gets_its_share_only() -> None:
    rig = Rig(running_max=1)
    rig.submit(*(request(f"a{i}", tokens(20, i), tenant="a") for i in range(12)))
    rig.submit(*(request(f"b{i}", tokens(20, 50 + i), tenant="b") for i in range(4)))
    rig.run()
    order = "".join(name[0] for name in first_served(rig))
    assert order == "abababab" + "a" * 8


@pytest.mark.parametrize("known", [False, True])
def test_an_idle_tenant_saves_up_no_turns(known: bool) -> None:
    rig = Rig(running_max=1)
    rig.submit(*(request(f"a{i}", tokens(20, i), tenant="a") for i in range(8)))
    if known:
        rig.submit(request("b", tokens(60, 90), tenant="b"))
    while len(first_served(rig)) < 6:
        rig.step()
    rig.submit(*(request(f"b{i}", tokens(20, 50 + i), tenant="b") for i in range(4)))
    rig.run()
    order = "".join(name[0] for name in first_served(rig))[6:]
    assert order.count("a") == 2 + known and order[:4].count("b") == 2


def test_what_is_cached_never_changes_whose_turn_it_is() -> None:
    """Prompts charged whole: the order is the same whether tenant a's prompts are cached or not."""
    orders = []
    for warm in (False, True):
        rig = Rig(blocks=300, running_max=1)
        if warm:
            rig.submit(*(request(f"w{i}", tokens(40, i), tenant="w") for i in range(6)))
            rig.run()
            rig.emissions.clear()
        for i in range(6):
            rig.submit(request(f"a{i}", tokens(40, i), tenant="a"))
            rig.submit(request(f"b{i}", tokens(33, 50 + i), tenant="b"))
        rig.run()
        cached = sum(rig.usage(f"a{i}").cached_tokens for i in range(6))
        assert (cached > 200) == warm
        orders.append(first_served(rig))
    assert orders[0] == orders[1]


# --- preemption --------------------------------------------------------------------------------


def pressed(blocks: int, *requests: EngineRequest, **config: object) -> Rig:
    """A rig that believes outputs are short, so that it admits too much."""
    rig = Rig(blocks=blocks, **config)
    for _ in range(32):
        rig.core.scheduler.lengths.record(1)
        rig.core.scheduler.lengths.record(200)
    rig.core.scheduler.lengths._quantile = 0.0
    rig.submit(*requests)
    return rig


def test_preempted_sequences_go_on_exactly_and_count_apart() -> None:
    requests = [request(name, tokens(12, i), max_tokens=40) for i, name in enumerate("abcd")]
    rig = pressed(20, *requests)
    rig.run()
    usages = [rig.usage(name) for name in "abcd"]
    assert usages[0].preemptions == 0  # the oldest is never a victim
    assert sum(u.preemptions for u in usages) > 0
    assert all(u.prompt_tokens == 12 == u.cached_tokens + u.computed_tokens for u in usages)
    rig.assert_exact()
    computed = sum(sum(rows) for rows in rig.rows())
    expected = sum(u.computed_tokens + u.recomputed_tokens + 39 for u in usages)
    assert computed == expected


def test_the_victim_is_younger_and_least_computed() -> None:
    rig = Rig(blocks=64)
    lengths = {"a": 8, "b": 20, "c": 12, "d": 16}
    rig.submit(*(request(name, tokens(n, n), max_tokens=9) for name, n in lengths.items()))
    rig.step()
    scheduler = rig.core.scheduler
    a, b, c, d = scheduler.running
    assert scheduler._victim(a) is c
    assert scheduler._victim(b) is c
    assert scheduler._victim(c) is d
    assert scheduler._victim(d) is None


def test_a_preempted_sequence_is_its_tenants_next() -> None:
    rig = Rig(running_max=2)
    rig.submit(request("a", tokens(4)), request("b", tokens(4, 1)))
    rig.step()
    rig.submit(request("c", tokens(4, 2), priority=50))
    preempt(rig, "b")
    rig.step()
    assert running(rig) == ["a", "b"]
    rig.run()
    rig.assert_exact()
    assert rig.usage("b").preemptions == 1 and rig.usage("c").preemptions == 0


def test_recomputation_takes_what_is_still_cached() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(30), max_tokens=20))
    rig.step(10)
    preempt(rig, "a")
    rig.run()
    assert rig.usage("a").recomputed_tokens == 0  # all of it was still there
    rig.submit(request("b", tokens(30, 1), max_tokens=20))
    rig.step(10)
    preempt(rig, "b")
    assert rig.core.memory.cache is not None
    rig.core.memory.cache.clear()
    rig.run()
    assert rig.usage("b").recomputed_tokens == 30 + 9
    assert rig.usage("b").cached_tokens == 0 and rig.usage("b").computed_tokens == 30
    rig.assert_exact()


@pytest.mark.parametrize("at", range(1, 12))
def test_preempted_at_any_point(at: int) -> None:
    rig = Rig(step_tokens_max=5)
    rig.submit(request("a", tokens(22), max_tokens=7, n=2, temperature=1.0))
    alone = Rig()
    alone.submit(request("a", tokens(22), max_tokens=7, n=2, temperature=1.0))
    alone.run()
    rig.step(at)
    for sequence in list(rig.core.scheduler.running):
        preempt(rig, "a", sequence.choice)
    rig.run()
    assert [rig.output("a", c) for c in (0, 1)] == [alone.output("a", c) for c in (0, 1)]
    assert rig.reclaimable()


def test_a_victim_of_the_same_step_takes_its_copies_with_it() -> None:
    """A forked choice with a pending copy is preempted before the copy ran: what it caches ends
    before the block that was never filled."""
    rig = Rig()
    rig.submit(request("a", tokens(10), n=2, temperature=1.0, max_tokens=9))
    rig.step()
    child = rig.core.scheduler.running[1]
    assert rig.core.memory.grow(child, 1) == 1
    assert len(child.copies) == 1
    preempt(rig, "a", 1)
    cached = rig.core.memory.match(child)
    assert cached is not None and cached.tokens == 8
    rig.run()
    alone = Rig()
    alone.submit(request("a", tokens(10), n=2, temperature=1.0, max_tokens=9))
    alone.run()
    assert [rig.output("a", c) for c in (0, 1)] == [alone.output("a", c) for c in (0, 1)]


def test_the_last_resort_forgets_what_forces_a_copy() -> None:
    """All blocks in use, the last one shared with the cache only: no copy can be made, but the
    request fits alone, so the cache gives way."""
    rig = Rig(blocks=3)
    rig.submit(request("a", tokens(10), max_tokens=3, n=2))
    rig.step()
    preempt(rig, "a", 1)  # its partial block, shared with choice 0, is cached now
    first = rig.core.scheduler.running[0]
    assert rig.core.memory.pools[0].references(first.tables[0][2]) > 1
    rig.run()
    assert rig.last("a").error is None
    assert rig.output("a", 0) == rig.output("a", 1) == rig.model.oracle(tokens(10), 3)


def test_a_request_that_can_never_fit_is_refused_or_ends() -> None:
    rig = Rig(blocks=5)
    rig.submit(request("never", tokens(21)))
    assert rig.step() is not None
    assert isinstance(rig.last("never").error, OutOfBlocks)
    rig.submit(request("too far", tokens(18), max_tokens=40), request("ok", tokens(3), 5))
    rig.run()
    error = rig.last("too far")
    assert isinstance(error.error, OutOfBlocks) and error.finish is Finish.ERROR
    assert len(rig.output("too far")) == 3  # positions 18 and 19, and the last token needs no KV
    assert rig.last("ok").error is None
    rig.assert_exact("too far", "ok")
    assert rig.reclaimable()


@pytest.mark.parametrize("shape", ["full", "window", "latent", "ranks"])
def test_a_request_fits_exactly(shape: str) -> None:
    """20 tokens of KV in 5 blocks, whatever the cache holds."""
    rig = Rig(shape, blocks=5)
    for salt in range(4):
        rig.submit(request(f"r{salt}", tokens(11, salt), max_tokens=10, n=2, temperature=0.7))
        rig.submit(request(f"s{salt}", tokens(11, salt), max_tokens=10))
    rig.run()
    for salt, kind in itertools.product(range(4), "rs"):
        assert rig.last(f"{kind}{salt}").error is None
    rig.assert_exact(*(f"s{salt}" for salt in range(4)))


# --- windows -----------------------------------------------------------------------------------


def test_blocks_that_a_window_has_passed_are_free_while_it_runs() -> None:
    rig = Rig("window", blocks=64, step_tokens_max=8)
    rig.submit(request("a", tokens(40), max_tokens=60, no_cache=True))
    pool, most = rig.core.memory.pools[1], 0
    while rig.core.has_work():
        rig.step()
        most = max(most, pool.total - pool.free)
    window = pool.group.window_tokens
    for plan in rig.model.plans:
        first_visible = plan.positions[0] - window + 1
        for index, block in enumerate(plan.tables[1][0]):
            assert (block == -1) == ((index + 1) * BLOCK <= first_visible)
    assert most <= (window + 8) // BLOCK + 2
    rig.assert_exact()


def test_a_window_pool_far_smaller_than_the_sequence_suffices() -> None:
    rig = Rig("window", blocks=6)  # 24 positions of the full group
    rig.core.memory.pools[0].__init__(rig.model.spec.groups[0], 6)  # type: ignore[misc]
    rig.submit(request("a", tokens(10), max_tokens=15))
    rig.run()
    assert rig.last("a").error is None
    rig.assert_exact()


# --- credit ------------------------------------------------------------------------------------


def test_without_credit_a_sequence_keeps_its_blocks_and_waits() -> None:
    rig = Rig()
    rig.submit(request("slow", tokens(10), max_tokens=20, credit_tokens=3), request("b", tokens(5)))
    rig.run()
    assert len(rig.output("slow")) == 3 and len(rig.lasts("b")) == 1
    assert not rig.core.has_work() and rig.core.step() is None
    assert running(rig) == ["slow"] and not rig.reclaimable()
    rig.core.grant("slow", 2)
    rig.run()
    assert len(rig.output("slow")) == 5
    rig.core.grant("nobody", 5)
    rig.core.grant("slow", 100)
    rig.run()
    assert len(rig.output("slow")) == 20
    rig.assert_exact()


def test_without_credit_from_the_start_nothing_is_computed() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(10), credit_tokens=0))
    rig.run()
    assert not rig.model.plans and len(rig.core.scheduler.parked) == 1
    rig.core.grant("a", 100)
    rig.run()
    rig.assert_exact()


def test_each_choice_has_its_own_credit() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(10), n=3, credit_tokens=2))
    rig.run()
    assert [len(rig.output("a", c)) for c in range(3)] == [2, 2, 2]
    rig.core.grant("a", 100)
    rig.run()
    assert [len(rig.output("a", c)) for c in range(3)] == [8, 8, 8]


def test_those_without_credit_are_preempted_first_and_parked() -> None:
    rig = Rig(blocks=9)
    rig.submit(request("slow", tokens(16), max_tokens=9, credit_tokens=1))
    rig.run()
    rig.submit(request("b", tokens(24, 1), max_tokens=9))  # needs the slow one's blocks
    rig.run()
    assert len(rig.lasts("b")) == 1
    (slow,) = rig.core.scheduler.parked.values()
    assert slow.state is State.PARKED and slow.request.preemptions == 1
    rig.core.grant("slow", 50)
    rig.run()
    assert len(rig.output("slow")) == 9
    rig.assert_exact()


def test_those_without_credit_hold_no_place() -> None:
    rig = Rig(running_max=2)
    rig.submit(*(request(f"slow{i}", tokens(8, i), credit_tokens=1) for i in range(2)))
    rig.run()
    rig.submit(request("quick", tokens(8, 9)))
    rig.run()
    assert len(rig.lasts("quick")) == 1
    rig.core.grant("slow0", 90)
    rig.core.grant("slow1", 90)
    rig.run()
    rig.assert_exact()


def test_who_waits_behind_one_that_runs_out_of_credit_is_let_in() -> None:
    rig = Rig(blocks=25)
    rig.submit(request("slow", tokens(20), max_tokens=60, credit_tokens=6))
    rig.step()
    rig.submit(request("next", tokens(20, 1), max_tokens=30))
    rig.step(2)
    assert running(rig) == ["slow"]  # they do not fit beside each other
    rig.run()
    assert len(rig.output("slow")) == 6 and len(rig.lasts("next")) == 1
    rig.core.grant("slow", 90)
    rig.run()
    rig.assert_exact()
