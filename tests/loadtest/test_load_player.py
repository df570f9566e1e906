"""Sessions are played as they are meant: in time, in order, and nothing that fails is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
from load_rig import LoopClock, QueueTarget, Silent, measured, plan_of, virtually

from loadtest.arrivals import CONSTANT, SCHEDULE, Arrivals
from loadtest.records import OK, SKIPPED, Record
from loadtest.run import Player
from loadtest.targets.base import Ask, Ended, Heard, Piece
from loadtest.workloads.base import Message, Session, Shape, Turn
from seams.errors import NoReplica


def turn(text: str, tokens: int = 2, *needs: int, wait_s: float = 0.0) -> Turn:
    """Follows the first of the turns that it needs and quotes the others."""
    follows = needs[0] if needs else None
    return Turn((Message("user", text),), tokens, follows, needs[1:], wait_s)


def played(
    sessions: Sequence[Session],
    target: QueueTarget,
    times_s: Sequence[float] | None = None,
    *,
    concurrency: int = 1,
    duration_s: float | None = None,
    timeout_s: float = 300.0,
) -> list[Record]:
    """The records, in the order of their ends."""
    records: list[Record] = []

    async def play() -> None:
        await target.open()
        clock, watch = LoopClock(), Silent()
        player = Player(
            target, clock, clock.now(), records.append, watch, stage=0, timeout_s=timeout_s
        )
        if times_s is None:
            await player.closed_loop(sessions, concurrency, duration_s)
        else:
            await player.open_loop(sessions, times_s)
        assert watch.ended_count == len(records)
        assert watch.sent_count == sum(r.sent_s is not None for r in records)

    virtually(play())
    return records


def test_a_later_turn_holds_all_before_it_and_the_answers() -> None:
    target = QueueTarget()
    session = Session("chat", (turn("one"), turn("two", 2, 0), turn("three", 2, 1)))
    played([session], target)
    assert [m.role for m in target.asked[2].messages] == [
        "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert [m.content for m in target.asked[2].messages] == [
        "one", "answer0.0 answer0.1 ", "two", "answer1.0 answer1.1 ", "three",
    ]  # fmt: skip


def test_a_join_waits_for_all_branches_and_quotes_them() -> None:
    target = QueueTarget(token_s=0.01, servers=9)
    session = Session(
        "agent",
        (turn("plan", 3), turn("a", 2, 0), turn("b", 20, 0, wait_s=1.0), turn("join", 1, 0, 1, 2)),
    )
    records = {record.turn: record for record in played([session], target)}
    plan, a, b, join = (records[number] for number in range(4))
    assert a.sent_s == a.intended_s == plan.end_s == pytest.approx(0.03)
    assert b.sent_s == pytest.approx(plan.end_s + 1.0)
    assert join.sent_s == join.intended_s == b.end_s
    last = target.asked[3].messages
    assert [m.content for m in last[:2]] == ["plan", "answer0.0 answer0.1 answer0.2 "]
    said, one, other = last[2].content.split("\n\n")
    assert said == "join" and one == "answer1.0 answer1.1 " and other.startswith("answer2.0 ")


def test_an_open_loop_does_not_wait_for_the_server() -> None:
    sessions = [Session(f"s{number}", (turn("hello", 10),)) for number in range(5)]
    records = played(sessions, QueueTarget(token_s=1.0), [0.0, 0.5, 1.0, 1.5, 2.0])
    assert [r.sent_s for r in records] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert [r.end_s for r in records] == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert [r.ttft_s for r in records] == [1.0, 10.5, 20.0, 29.5, 39.0]


def test_a_closed_loop_keeps_so_many_running() -> None:
    sessions = [Session(f"s{number}", (turn("hello", 1),)) for number in range(6)]
    records = played(sessions, QueueTarget(token_s=1.0, servers=9), concurrency=2)
    assert [r.sent_s for r in records] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    begun = played(sessions, QueueTarget(token_s=1.0, servers=9), concurrency=2, duration_s=1.5)
    assert len(begun) == 4


class Busy(QueueTarget):
    """Takes the generator's own time: nothing else runs meanwhile."""

    async def ask(self, ask: Ask) -> AsyncGenerator[Heard, None]:
        asyncio.get_running_loop().now_s += 0.4  # type: ignore[attr-defined]
        yield Piece("x")
        yield Ended(1, None, 1)


def test_the_generators_own_delay_is_seen_and_latency_counts_from_the_intended_time() -> None:
    sessions = [Session(f"s{number}", (turn("hello", 1),)) for number in range(4)]
    records = played(sessions, Busy(), [0.0, 0.1, 0.2, 0.3])
    delays_s = [record.delay_s for record in records]
    assert delays_s == pytest.approx([0.0, 0.3, 0.6, 0.9])
    assert all(record.ttft_s == pytest.approx(0.4) for record in records)
    assert records[3].end_s - records[3].intended_s == pytest.approx(1.3)


def test_what_needs_a_failed_turn_is_not_sent_and_not_forgotten() -> None:
    target = QueueTarget(servers=9, fail_when="bad")
    session = Session(
        "agent",
        (turn("plan"), turn("bad", 2, 0), turn("good", 2, 0), turn("join", 2, 0, 1, 2),
         turn("more", 2, 3)),
    )  # fmt: skip
    found = {record.turn: record for record in played([session], target)}
    assert [found[n].status for n in range(5)] == [
        OK, "RESOURCE_EXHAUSTED", OK, SKIPPED, SKIPPED,
    ]  # fmt: skip
    assert found[1].error == "The queue is full." and found[1].sent_s is not None
    assert found[3].sent_s is None and found[3].delay_s is None
    assert found[4].error == "A turn that it needs has failed."
    assert len(target.asked) == 3


def test_a_request_that_takes_too_long_is_cut_off() -> None:
    sessions = [Session("slow", (turn("hello", 50),)), Session("quick", (turn("hello", 1),))]
    slow, quick = played(sessions, QueueTarget(token_s=1.0), timeout_s=5.5)
    assert slow.status == "DEADLINE_EXCEEDED" and slow.end_s == 5.5
    assert slow.error == "No whole answer within 5.5 s." and len(slow.chunks_s) == 5
    assert quick.ok and quick.sent_s == 5.5  # the server's place was given back


class Endless(QueueTarget):
    """Ends its streams without their end."""

    async def ask(self, ask: Ask) -> AsyncGenerator[Heard, None]:
        yield Piece("x")


class Broken(QueueTarget):
    """Is our own fault."""

    async def ask(self, ask: Ask) -> AsyncGenerator[Heard, None]:
        raise ZeroDivisionError
        yield Piece("x")


def test_a_stream_without_its_end_is_an_error() -> None:
    (record,) = played([Session("s", (turn("hello"),))], Endless())
    assert record.status == "INTERNAL" and "without its usage" in record.error


def test_what_is_no_error_of_a_server_ends_the_run() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        played([Session("s", (turn("hello"),))], Broken())
    assert caught.group_contains(ZeroDivisionError)


# ---- whole measurements ------------------------------------------------------------------------


def test_warm_up_is_apart_and_has_other_texts() -> None:
    target = QueueTarget()
    plan = plan_of("prefix-groups", warmup=3, shape=Shape(groups=1, prefix_tokens=30))
    run = virtually(measured(plan, target))
    assert sum(record.warmup for record in run.records) == 3
    counted = run.of(run.stages[0])
    assert len(counted) == 8 and not any(record.warmup for record in counted)
    prefixes = [ask.messages[0].content for ask in target.asked]
    assert len(set(prefixes[:3])) == len(set(prefixes[3:])) == 1
    assert prefixes[0] != prefixes[3]
    assert counted[0].cached_tokens == 0  # of the first prompt after the warm-up


def test_stages_find_nothing_of_each_other_in_a_cache() -> None:
    plan = plan_of(
        "prefix-groups", arrivals=Arrivals(CONSTANT), rates_hz=(1.0, 2.0), sessions=4,
        shape=Shape(groups=1, prefix_tokens=30),
    )  # fmt: skip
    run = virtually(measured(plan, QueueTarget()))
    assert [stage.load for stage in run.stages] == ["1/s", "2/s"]
    for stage in run.stages:
        first, *others = run.of(stage)
        assert first.cached_tokens == 0 and all((r.cached_tokens or 0) >= 30 for r in others)


def test_the_same_seed_sends_the_same_and_another_does_not() -> None:
    def sent(seed: int) -> list[Ask]:
        target = QueueTarget()
        plan = plan_of(
            "chat", arrivals=Arrivals("poisson"), rates_hz=(3.0,), duration_s=3.0, sessions=None,
            shape=Shape(spread=0.3), seed=seed,
        )  # fmt: skip
        virtually(measured(plan, target))
        return target.asked

    assert sent(4) == sent(4) != sent(5)


def test_a_trace_is_played_on_its_schedule(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = (
        f'{{"timestamp": {ms}, "input_length": 9, "output_length": 2, "hash_ids": [{ms}]}}'
        for ms in (0, 3000, 9000)
    )
    path.write_text("\n".join(lines))
    plan = plan_of("trace", arrivals=Arrivals(SCHEDULE, speed=3.0), trace=path, sessions=None)
    run = virtually(measured(plan, QueueTarget()))
    assert [r.intended_s for r in run.records] == [0.0, 1.0, 3.0]
    assert run.stages[0].load == "schedule x3"


def test_nobody_there_is_said_at_once() -> None:
    class Nobody(QueueTarget):
        async def open(self) -> None:
            await asyncio.sleep(1e9)

    from loadtest.measure import opened

    with pytest.raises(NoReplica, match="The target does not answer"):
        virtually(opened(Nobody()))
