"""Decisions of the whole core: bursts, spreading, tenants, classes, sessions, load, explaining."""

from __future__ import annotations

from collections import Counter

import pytest
from router_core_world import (
    BLOCK,
    STORED,
    attach_ready,
    batch_of,
    hello_of,
    keys_of,
    new_core,
    op_of,
    prompt,
    request_of,
    snapshot_of,
)

from banyan.v1 import common_pb2, internal_pb2
from kvstore.keys import tenant_salt
from router.bookings import BACKLOG_SHARE, HEAD_SHARE
from router.core import RouterCore
from router.cost import TERMS
from router.index import DISK, HOST
from router.index import SHARED as SHARED_TIER
from router.placement import Observed
from seams.clock import VirtualClock
from seams.errors import NoReplica

SHARED = prompt(1, 100)  # 1.6 s of prefill at the prior


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def core(clock: VirtualClock) -> RouterCore:
    core = new_core(clock, lease_s=1e6)
    attach_ready(core, "r1", "r2", "r3", "r4")
    return core


def store(core: RouterCore, replica: str, tokens: list[int], seq: int = 1) -> None:
    assert not core.events(batch_of(replica, seq, op_of(STORED, keys_of(tokens))))


def beat(core: RouterCore, replica: str, **load: float) -> None:
    core.heartbeat(replica, 1, internal_pb2.Heartbeat(load=internal_pb2.Load(**load)))  # type: ignore[arg-type]


def test_the_holder_is_chosen(core: RouterCore) -> None:
    store(core, "r3", SHARED)
    decision = core.place(request_of("q1", SHARED + prompt(2, 2))).decision
    assert decision.replica == "r3"
    assert decision.available_tokens == decision.chosen_tokens == len(SHARED)
    assert decision.prompt_tokens == len(SHARED) + 2 * BLOCK


def test_a_burst_of_sixteen_siblings_follows_the_first(core: RouterCore) -> None:
    """They arrive before any event, at the same moment, each with a tail of its own."""
    placed = [core.place(request_of(f"q{n}", SHARED + prompt(2 + n, 1))).replica for n in range(16)]
    assert len(set(placed)) == 1, placed
    assert core.explain("q15") is not None
    core.check_integrity()


def test_without_provisional_entries_the_same_burst_scatters(core: RouterCore) -> None:
    """The counterpart: it is the entries that hold the burst together."""
    placed = set()
    for n in range(16):
        placed.add(core.place(request_of(f"q{n}", SHARED + prompt(2 + n, 1))).replica)
        core.failed(f"q{n}")
    assert len(placed) > 1


def test_two_bursts_go_to_two_replicas(core: RouterCore) -> None:
    other = prompt(50, 100)
    first = {core.place(request_of(f"a{n}", SHARED + prompt(2 + n, 1))).replica for n in range(8)}
    second = {core.place(request_of(f"b{n}", other + prompt(2 + n, 1))).replica for n in range(8)}
    assert len(first) == len(second) == 1 and first != second


def test_sixty_four_prefixes_spread_over_four_replicas_that_answer_at_once(
    core: RouterCore, clock: VirtualClock
) -> None:
    """Each prefix three times; answers are instant and noisy, so load never shows."""
    homes: dict[int, list[str]] = {}
    seqs: Counter[str] = Counter()
    for turn in range(3):
        for number in range(64):
            tokens, name = prompt(10 + number, 8), f"q{turn}-{number}"
            placed = core.place(request_of(name, tokens))
            homes.setdefault(number, []).append(placed.replica)
            clock.advance(0.001 * (1 + number % 7))
            core.first_token(name)
            seqs[placed.replica] += 1
            op = op_of(STORED, keys_of(tokens))
            core.events(batch_of(placed.replica, seqs[placed.replica], op))
            computed = len(tokens) if turn == 0 else 1
            took_s = 0.001 * (1 + number % 7)
            core.finished(name, len(tokens) - computed, Observed(computed, took_s, 8, took_s))
    first = Counter(places[0] for places in homes.values())
    assert len(first) == 4 and min(first.values()) >= 6, first
    assert all(len(set(places)) == 1 for places in homes.values()), "they return to their blocks"


def test_a_busy_holder_is_passed_over_and_the_reason_says_why(core: RouterCore) -> None:
    store(core, "r1", SHARED)
    asked = SHARED + prompt(9, 50)
    for name in ("r1", "r2", "r3", "r4"):
        queued = 5000 if name == "r1" else 0
        beat(core, name, queued_prefill_tokens=queued, waiting=10 if queued else 0)
    decision = core.place(request_of("q1", asked)).decision
    assert decision.replica != "r1"
    assert decision.available_tokens == len(SHARED) and decision.chosen_tokens == 0
    assert "r1 holds 1600 but was passed over for its booked_prefill" in decision.reason
    beat(core, "r1", queued_prefill_tokens=100)
    assert core.preview(request_of("q2", SHARED + prompt(10, 50))).replica == "r1"


def test_a_short_prompt_passes_long_ones_and_a_long_one_does_not_pass_short_ones(
    core: RouterCore,
) -> None:
    """The line is what comes before this prompt, not all that waits."""
    store(core, "r1", SHARED)
    for name in ("r1", "r2", "r3", "r4"):
        queued = 5000 if name == "r1" else 0
        beat(core, name, queued_prefill_tokens=queued, waiting=2 if queued else 0)
    assert core.place(request_of("short", SHARED)).replica == "r1", "it has one token to compute"
    terms = {
        candidate.replica: dict(zip(TERMS, [t.seconds for t in candidate.terms], strict=True))
        for candidate in core.preview(request_of("long", prompt(9, 600))).candidates
    }
    assert terms["r1"]["booked_prefill"] == pytest.approx(5.0, rel=0.01)
    assert terms["r1"]["interference"] < terms["r1"]["booked_prefill"]


def test_a_replica_out_of_memory_pays_for_what_it_would_preempt(core: RouterCore) -> None:
    store(core, "r1", SHARED)
    for name in ("r1", "r2", "r3", "r4"):
        full = name == "r1"
        beat(core, name, blocks_total=4000, blocks_free=0 if full else 4000)
    decision = core.preview(request_of("q1", SHARED + prompt(2, 200)))
    assert decision.replica != "r1"
    assert "for its memory" in decision.reason
    beat(core, "r1", blocks_total=4000, blocks_free=0, blocks_cached=100)
    mine = core.preview(request_of("q1", SHARED + prompt(2, 200)))
    assert memory_of(mine, "r1") == pytest.approx(202 * BLOCK * 1e-3), "it shall not evict its own"
    beat(core, "r1", blocks_total=4000, blocks_free=0, blocks_cached=4000)
    assert core.preview(request_of("q1", SHARED + prompt(2, 200))).replica == "r1"


def test_booked_memory_counts_until_the_next_report(core: RouterCore) -> None:
    core.failed("nothing")
    for name in ("r1", "r2", "r3", "r4"):
        beat(core, name, blocks_total=200, blocks_free=150)
    for number in range(4):  # 102 blocks each
        placed = core.place(request_of(f"q{number}", prompt(60 + number, 100)))
        core.first_token(f"q{number}")
        memory = memory_of(placed.decision, placed.replica)
        assert memory == 0, "each finds a replica with room"
    assert all(memory_of(core.preview(request_of("q", prompt(80, 100))), r) > 0 for r in ("r1",))
    beat(core, "r1", blocks_total=200, blocks_free=150)
    assert memory_of(core.preview(request_of("q", prompt(80, 100))), "r1") == 0
    for number in range(4):
        core.failed(f"q{number}")
        core.check_integrity()


def memory_of(decision: common_pb2.Decision, replica: str) -> float:
    candidate = next(c for c in decision.candidates if c.replica == replica)
    return next(term.seconds for term in candidate.terms if term.name == "memory")


def test_the_first_token_ends_the_booked_prefill(core: RouterCore, clock: VirtualClock) -> None:
    placed = core.place(request_of("q1", SHARED)).replica

    def booked() -> float:  # as a prompt finds it that is longer than all in line
        decision = core.preview(request_of("q", prompt(9, 200)))
        candidate = next(c for c in decision.candidates if c.replica == placed)
        return candidate.terms[TERMS.index("booked_prefill")].seconds

    assert booked() == pytest.approx(1.6)
    seen = 1 - BACKLOG_SHARE  # of what is done: it is a guess
    clock.advance(0.6)
    assert booked() == pytest.approx(1.6 - seen * 0.6 * HEAD_SHARE), "the first is under way"
    clock.advance(1.6 / HEAD_SHARE)
    assert booked() == pytest.approx(1.6 - seen * 1.6), "overdue, and not there yet"
    core.place(request_of("q2", SHARED[: 80 * BLOCK] + prompt(7, 20)))
    core.first_token("q1")
    core.first_token("q1")
    assert core.explain("q2").replica == placed  # type: ignore[union-attr]
    assert booked() == pytest.approx(0.32), "the next one only starts now"
    clock.advance(0.12)
    assert booked() == pytest.approx(0.32 - seen * 0.12 * HEAD_SHARE)
    core.failed("q2")
    core.check_integrity()
    assert booked() == 0.0


def test_other_routers_requests_count_through_reports(core: RouterCore) -> None:
    for name in ("r1", "r2", "r3"):
        beat(core, name, running=8, queued_prefill_tokens=800)
    beat(core, "r4", running=1)
    assert core.place(request_of("q1", prompt(5, 10))).replica == "r4"


def test_own_bookings_in_a_report_are_not_counted_twice(core: RouterCore) -> None:
    tokens = prompt(5, 100)
    placed = core.place(request_of("q1", tokens)).replica

    def terms() -> list[float]:
        decision = core.preview(request_of("q", prompt(9, 200)))
        candidate = next(c for c in decision.candidates if c.replica == placed)
        return [term.seconds for term in candidate.terms]

    before = terms()
    assert before[TERMS.index("booked_prefill")] == pytest.approx(len(tokens) * 1e-3)
    beat(core, placed, waiting=1, queued_prefill_tokens=len(tokens))
    assert terms() == before


@pytest.mark.parametrize("how", ["gone", "suspect", "draining", "excluded", "restarted"])
def test_affinity_never_chooses_a_replica_that_is_not_there(
    core: RouterCore, clock: VirtualClock, how: str
) -> None:
    store(core, "r2", SHARED)
    assert core.place(request_of("q0", SHARED, session="chat")).replica == "r2"
    excluded = frozenset({"r2"}) if how == "excluded" else frozenset[str]()
    if how == "suspect":
        core.link_lost("r2", 1)
    elif how == "draining":
        core.heartbeat("r2", 1, internal_pb2.Heartbeat(draining=True))
    elif how == "restarted":
        core.attach(hello_of("r2", epoch=2))
        core.heartbeat("r2", 2, internal_pb2.Heartbeat(draining=True))
    elif how == "gone":
        clock.advance(2e6)
        for name in ("r1", "r3", "r4"):
            beat(core, name)
        assert core.tick() == [("r2", 1)]
    for number in range(1, 30):
        request = request_of(f"q{number}", SHARED, session="chat", excluded=excluded)
        placed = core.place(request)
        assert placed.replica != "r2"
        assert "r2" not in [c.replica for c in placed.decision.candidates]
        core.finished(f"q{number}", 0, Observed())


def test_a_suspect_serves_only_if_nobody_else_does(core: RouterCore) -> None:
    store(core, "r2", SHARED)
    for name in ("r1", "r2", "r3", "r4"):
        core.link_lost(name, 1)
    assert core.place(request_of("q1", SHARED)).replica == "r2"
    beat(core, "r4")
    assert core.place(request_of("q2", SHARED)).replica == "r4"
    with pytest.raises(NoReplica):
        core.place(request_of("q3", SHARED, excluded=frozenset({"r1", "r2", "r3", "r4"})))


def test_tenants_with_equal_prompts_never_match_each_other(core: RouterCore) -> None:
    salts = [tenant_salt(b"secret", name) for name in ("alice", "bob")]
    first = core.place(request_of("q1", SHARED, salts[0], tenant="alice"))
    core.events(batch_of(first.replica, 1, op_of(STORED, keys_of(SHARED, salts[0]))))
    other = core.preview(request_of("q2", SHARED, salts[1], tenant="bob"))
    assert other.available_tokens == 0
    same = core.preview(request_of("q3", SHARED, salts[0], tenant="alice"))
    assert same.available_tokens == len(SHARED) - 1, "the counterpart: the same tenant does"


def test_a_session_stays_where_it_was_unless_that_costs(core: RouterCore) -> None:
    short = prompt(3, 1)[:10]  # no full block: nothing the index could see
    home = core.place(request_of("q0", short, session="chat")).replica
    core.first_token("q0")
    core.finished("q0", 0, Observed())
    for number in range(1, 20):
        placed = core.place(request_of(f"q{number}", short, session="chat"))
        assert placed.replica == home
        core.finished(f"q{number}", 0, Observed())
    elsewhere = {
        core.preview(request_of("q", short, session="chat", tenant="bob")).replica
        for _ in range(50)
    }
    assert len(elsewhere) == 4, "another tenant's session of the same name is another"
    beat(core, home, queued_prefill_tokens=1000)
    assert core.place(request_of("q99", short, session="chat")).replica != home


def test_a_moved_stream_prefers_its_numeric_class_and_says_when_it_leaves_it(
    clock: VirtualClock,
) -> None:
    core = new_core(clock)
    attach_ready(core, "c1", "c2", numeric_class="cpu")
    attach_ready(core, "g1", numeric_class="cuda")
    store(core, "c1", SHARED)
    moved = request_of("q1", SHARED, numeric_class="cuda")
    placed = core.place(moved)
    assert placed.replica == "g1" and not placed.left_numeric_class
    core.link_lost("g1", 1)
    placed = core.place(moved)
    assert placed.replica == "c1" and placed.left_numeric_class
    assert "numeric class" in placed.decision.reason
    assert not core.place(request_of("q2", SHARED)).left_numeric_class


def test_a_window_group_shortens_the_match(clock: VirtualClock) -> None:
    core = new_core(clock)
    core.attach(hello_of("r1", windows={1: 33}))  # two blocks back
    keys = keys_of(SHARED)
    ops = [op_of(STORED, keys), op_of(STORED, keys[10:14], group=1)]
    core.events(batch_of("r1", 0, *ops, snapshot=True))
    assert core.preview(request_of("q1", SHARED)).available_tokens == 14 * BLOCK
    assert core.preview(request_of("q1", SHARED[: 13 * BLOCK + 5])).available_tokens == 13 * BLOCK
    assert core.preview(request_of("q1", SHARED[: 11 * BLOCK])).available_tokens == 0


def test_tiers_are_weighed_against_recomputing(clock: VirtualClock) -> None:
    core = new_core(clock)
    attach_ready(core, "r1", "r2", cache_domain="rack")
    keys = keys_of(SHARED)
    host, shared = internal_pb2.TIER_HOST, internal_pb2.TIER_SHARED
    core.events(batch_of("r1", 1, op_of(STORED, keys[:50], tier=host)))
    decision = core.preview(request_of("q1", SHARED))
    assert decision.replica == "r1" and decision.chosen_tokens == 50 * BLOCK
    load = decision.candidates[0].terms[TERMS.index("tier_load")].seconds
    assert 0 < load < 0.01
    core.events(batch_of("r1", 2, op_of(STORED, keys, tier=shared)))
    decision = core.preview(request_of("q1", SHARED))
    matched = {c.replica: c.matched_tokens for c in decision.candidates}
    assert matched == {"r1": len(SHARED) - 1, "r2": len(SHARED) - 1}, "both reach the shared tier"


def tier_load_s(core: RouterCore) -> float:
    [candidate] = core.preview(request_of("q", SHARED)).candidates
    return candidate.terms[TERMS.index("tier_load")].seconds


@pytest.mark.parametrize(
    ("name", "tier", "assumed"),
    [("host", HOST, 8e9), ("disk", DISK, 2e9), ("shared", SHARED_TIER, 5e8)],
)
def test_tiers_cost_what_heartbeats_measure(
    clock: VirtualClock, name: str, tier: int, assumed: float
) -> None:
    """A hello is said before anything was loaded: its 0 is no speed, and no last word."""
    core = new_core(clock)
    attach_ready(core, "r1")
    core.events(batch_of("r1", 1, op_of(STORED, keys_of(SHARED), tier=tier)))
    size = 4096 * 100  # of the blocks, as hello_of tells
    assert tier_load_s(core) == pytest.approx(size / assumed, rel=0.01)

    def measured(tier: str = name, **speed: float) -> None:
        other = common_pb2.TierLoad(tier="of a later version", load_bytes_per_s=1.0)
        load = internal_pb2.Load(tiers=[other, common_pb2.TierLoad(tier=tier, **speed)])  # type: ignore[arg-type]
        core.heartbeat("r1", 1, internal_pb2.Heartbeat(load=load))

    measured()
    assert tier_load_s(core) == pytest.approx(size / assumed, rel=0.01)
    measured(load_bytes_per_s=1e6)
    assert tier_load_s(core) == pytest.approx(size / 1e6, rel=0.01)
    measured(load_bytes_per_s=2e6)
    core.attach(hello_of("r1"))  # a reconnect that tells nothing
    assert tier_load_s(core) == pytest.approx(size / 2e6, rel=0.01)
    for each in ("host", "disk", "shared"):
        measured(each, load_bytes_per_s=1e-320)
    assert tier_load_s(core) == pytest.approx(1.6, rel=0.01), "no dearer than computing it"


def test_a_new_replica_gets_work_and_then_copies_of_what_is_hot(
    core: RouterCore, clock: VirtualClock
) -> None:
    store(core, "r1", SHARED)
    placed = Counter(  # an endless burst on one prefix: more than one replica can take
        core.place(request_of(f"q{n}", SHARED + prompt(5 + n, 2), max_tokens=64)).replica
        for n in range(200)
    )
    assert len(placed) > 1 and max(placed.values()) < 160, placed


def test_decisions_are_kept_bounded_and_get_what_was_delivered(clock: VirtualClock) -> None:
    core = new_core(clock, decisions_kept=10)
    attach_ready(core, "r1")
    for number in range(30):
        core.place(request_of(f"q{number}", prompt(number, 2)))
    assert [core.explain(f"q{n}") is not None for n in range(30)] == [False] * 20 + [True] * 10
    decision = core.explain("q29")
    assert decision is not None and not decision.HasField("delivered_tokens")
    core.finished("q29", 17, Observed())
    core.finished("q3", 5, Observed())  # no longer kept
    core.finished("unknown", 5, Observed())
    assert decision.delivered_tokens == 17
    core.failed("q29")
    core.finished("q28", None, Observed())
    untold = core.explain("q28")
    assert untold is not None and not untold.HasField("delivered_tokens")
    core.check_integrity()


def test_a_decision_shows_every_term_cheapest_first_and_always_the_longest_holder(
    clock: VirtualClock,
) -> None:
    core = new_core(clock)
    names = [f"r{number:02}" for number in range(20)]
    attach_ready(core, *names)
    store(core, "r19", SHARED)
    for name in names:
        beat(core, name, queued_prefill_tokens=100 * int(name[1:]), waiting=1)
    beat(core, "r19", queued_prefill_tokens=100_000, waiting=100)
    decision = core.preview(request_of("q1", SHARED + prompt(9, 50)))
    assert len(decision.candidates) == 8
    assert [c.replica for c in decision.candidates] == [*names[:7], "r19"]
    for candidate in decision.candidates:
        assert tuple(term.name for term in candidate.terms) == TERMS
        total = sum(term.seconds for term in candidate.terms)
        assert candidate.total_s == pytest.approx(total)


def test_equal_seeds_make_equal_decisions() -> None:
    runs = []
    for _ in range(2):
        core = new_core(VirtualClock(), seed=5)
        attach_ready(core, "r1", "r2", "r3")
        runs.append([core.place(request_of(f"q{n}", prompt(n, 3))).replica for n in range(50)])
    assert runs[0] == runs[1] and len(set(runs[0])) == 3


def test_a_router_that_just_started_uses_a_snapshot_of_what_others_learnt(
    clock: VirtualClock,
) -> None:
    core = new_core(clock)
    for name in ("r1", "r2"):
        core.attach(hello_of(name))
    core.events(snapshot_of("r2", 77, keys_of(SHARED)))
    assert core.place(request_of("q1", SHARED)).replica == "r2"


def test_lengths_of_answers_are_learnt(core: RouterCore) -> None:
    def output_s() -> float:
        decision = core.preview(request_of("q", prompt(1, 2), max_tokens=0))
        return decision.candidates[0].terms[TERMS.index("output")].seconds

    before = output_s()
    for number in range(40):
        core.place(request_of(f"q{number}", prompt(number, 2), max_tokens=0))
        core.finished(f"q{number}", 0, Observed(32, 0.03, 9, 0.2))
    assert output_s() < before / 5


def test_rates_are_learnt_from_reports_of_new_steps_only(core: RouterCore) -> None:
    def miss_s() -> float:
        decision = core.preview(request_of("q", prompt(1, 10)))
        return decision.candidates[0].terms[TERMS.index("miss_prefill")].seconds

    for step in range(60):
        beat(core, "r1", steps=step + 1, prefill_s_per_token=3e-3, step_s=0.1, running=1)
    assert miss_s() == pytest.approx(160 * 3e-3, rel=0.05), "its whole class is as slow"
    learnt = miss_s()
    for _ in range(60):
        beat(core, "r1", steps=60, prefill_s_per_token=9e-3)
    assert miss_s() == learnt, "an idle replica repeats itself"
