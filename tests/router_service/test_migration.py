"""Streams whose replica dies, at every token index, and what happens when nobody is left."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from loopback_cluster import cluster, prompt, run
from scripted_replica import Script, ScriptedReplica, expected

from banyan.v1 import common_pb2, internal_pb2

TOKENS = 12


class KillOnce:
    """Kills the first replica that is about to emit token `at` of a request."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.killed: ScriptedReplica | None = None
        self.death: asyncio.Task[None] | None = None

    def __call__(
        self, replica: ScriptedReplica, submit: internal_pb2.Submit, position: int
    ) -> None:
        if self.killed is None and position == self.at:
            self.killed = replica
            replica.dead = True
            self.death = asyncio.create_task(replica.die())


@pytest.mark.parametrize("at", range(TOKENS))
def test_a_replica_dies_at_every_token_index(at: int) -> None:
    """16 streams at once; those of the dead replica go on elsewhere, exactly."""

    async def scenario() -> None:
        kill = KillOnce(at)
        script = Script(before_token=kill, token_s=0.002, cached_tokens=2)
        async with cluster(script, script, script) as c:
            requests = [
                prompt(f"prompt {i} " * 3, max_tokens=TOKENS, seed=i, temperature=1.0)
                for i in range(16)
            ]
            answers = await asyncio.gather(*(c.generate(request) for request in requests))
            for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                assert answer.code is grpc.StatusCode.OK, answer.details
                assert answer.ids() == expected(list(request.text.encode()), i, TOKENS)
                assert answer.text() == bytes(answer.ids()).decode()
                usage = answer.usage
                assert usage.prompt_tokens == len(request.text)
                assert usage.completion_tokens == TOKENS
                moved = usage.moves > 0
                assert moved == (answer.started[0].replica == kill.killed.name)
                assert (usage.recomputed_tokens > 0) <= moved
                assert answer.finished[0].decision.replica != kill.killed.name
            assert any(answer.usage.moves for answer in answers)
            assert kill.death is not None
            await kill.death
            await c.quiet()

    run(scenario())


def test_a_death_after_the_last_token_changes_nothing() -> None:
    async def scenario() -> None:
        async with cluster(Script(), Script()) as c:
            answer = await c.generate(prompt(max_tokens=4, seed=1))
            victim = next(r for r in c.replicas if r.name == answer.started[0].replica)
            await victim.die()
            again = await c.generate(prompt(max_tokens=4, seed=1))
            assert again.ids() == answer.ids() and again.started[0].replica != victim.name

    run(scenario())


def test_several_choices_end_with_one_typed_error() -> None:
    async def scenario() -> None:
        script = Script(before_token=KillOnce(4), token_s=0.005)
        async with cluster(script, script) as c:
            answer = await c.generate(prompt(n=3, max_tokens=TOKENS))
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert answer.trailing["banyan-error"] == "ReplicaLost"
            assert answer.ids(), "what had arrived is delivered first"
            await c.quiet()

    run(scenario())


def test_several_choices_may_start_over_before_the_first_token() -> None:
    async def scenario() -> None:
        script = Script(before_token=KillOnce(0), token_s=0.005)
        async with cluster(script, script) as c:
            answer = await c.generate(prompt("abc", n=2, max_tokens=4, seed=2))
            assert [answer.ids(n) for n in range(2)] == [
                expected(list(b"abc"), 2, 4, n) for n in range(2)
            ]

    run(scenario())


@pytest.mark.parametrize("timeout_s", [1.0, None])
def test_all_replicas_dead_gives_one_terminal_in_time(timeout_s: float | None) -> None:
    async def scenario() -> None:
        slow = Script(token_s=0.05)
        async with cluster(slow, slow, queue_wait_s_max=1.0) as c:
            calls = [
                asyncio.create_task(c.generate(prompt(f"{i}", max_tokens=99), timeout_s=timeout_s))
                for i in range(8)
            ]
            await asyncio.sleep(0.3)
            began_s = time.monotonic()
            for replica in c.replicas:
                await replica.die()
            answers = await asyncio.gather(*calls)
            assert time.monotonic() - began_s < 1.0 + 1.0
            allowed = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            assert {answer.code for answer in answers} <= allowed
            await c.quiet()

    run(scenario())


def test_a_stream_waits_for_its_restarted_replica() -> None:
    async def scenario() -> None:
        script = Script(before_token=KillOnce(3), token_s=0.005)
        async with cluster(script) as c:
            call = asyncio.create_task(c.generate(prompt("abc", max_tokens=9, seed=4)))
            await c.until(lambda: c.replicas[0].dead)
            await asyncio.sleep(0.2)
            await c.add("w0", script)  # the same name, a new epoch
            answer = await call
            assert answer.ids() == expected(list(b"abc"), 4, 9) and answer.usage.moves == 1

    run(scenario())


def _emissions(*parts: tuple[int, list[int]], last: bool = True) -> list[internal_pb2.Emission]:
    made = [internal_pb2.Emission(position=at, token_ids=ids) for at, ids in parts]
    if last:
        made[-1].last = True
        made[-1].finish = common_pb2.FINISH_REASON_LENGTH
    return made


def test_duplicates_are_dropped_and_overlaps_cut() -> None:
    async def scenario() -> None:
        parts = _emissions((0, [97, 98]), (0, [97, 98]), (1, [98, 99]), (3, [100]))
        async with cluster(Script(reply=lambda _: list(parts))) as c:
            answer = await c.generate(prompt(max_tokens=4))
            assert answer.ids() == [97, 98, 99, 100] and answer.text() == "abcd"

    run(scenario())


def test_a_gap_or_an_early_end_moves_the_stream() -> None:
    for broken in (
        _emissions((1, [98])),
        _emissions((0, [97]), (2, [99])),
        [internal_pb2.Emission(position=0, token_ids=[97], last=True)],
        [internal_pb2.Emission(choice=7, token_ids=[97], last=True)],
        [internal_pb2.Emission(finish=common_pb2.FINISH_REASON_CANCELLED, last=True)],
        [internal_pb2.Emission(finish=common_pb2.FINISH_REASON_ERROR, last=True)],
    ):

        async def scenario(broken: list[internal_pb2.Emission] = broken) -> None:
            seen: list[str] = []

            def reply(submit: internal_pb2.Submit) -> list[internal_pb2.Emission]:
                seen.append(submit.request_id)
                if len(seen) == 1:
                    return [*broken]
                at = len(submit.token_ids) - submit.prompt_tokens
                return _emissions((at, list(range(97 + at, 101))))

            async with cluster(Script(reply=reply), Script(reply=reply)) as c:
                answer = await c.generate(prompt(max_tokens=4))
                assert answer.ids() == [97, 98, 99, 100] and answer.usage.moves == 1
                await c.quiet()

        run(scenario())


def _failing(code: int, retry_ms: int = 0, error: str = "") -> Script:
    status = common_pb2.Status(
        code=code, message="Says the replica.", retry_after_ms=retry_ms, error=error
    )
    return Script(reply=lambda _: [internal_pb2.Emission(error=status, last=True)])


def test_a_full_replica_is_passed_over_and_all_full_says_when_to_retry() -> None:
    async def scenario() -> None:
        async with cluster(_failing(8, 700), Script()) as c:
            answers = [await c.generate(prompt(f"{i}" * 40, seed=1)) for i in range(6)]
            assert {answer.code for answer in answers} == {grpc.StatusCode.OK}
            assert all(a.finished[0].decision.replica == "w1" for a in answers)
        async with cluster(_failing(8, 700), _failing(8, 700)) as c:
            began_s = time.monotonic()
            answer = await c.generate(prompt())
            assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert answer.trailing["retry-after-ms"] == "700"
            assert time.monotonic() - began_s < 1.0, "no waiting for what will not come"
            await c.quiet()

    run(scenario())


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_fits_no_replica_is_said_to_be_so_and_not_to_be_retried(replicas: int) -> None:
    async def scenario() -> None:
        async with cluster(*[_failing(8, 700, "OutOfBlocks")] * replicas) as c:
            began_s = time.monotonic()
            answer = await c.generate(prompt())
            assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert answer.trailing["banyan-error"] == "OutOfBlocks"
            assert "retry-after-ms" not in answer.trailing
            assert "grpc-retry-pushback-ms" not in answer.trailing
            assert [len(r.submits) for r in c.replicas] == [1] * replicas
            assert time.monotonic() - began_s < 1.0, "no waiting for what will not come"
            await c.quiet()

    run(scenario())


def test_what_fits_a_larger_replica_goes_there() -> None:
    async def scenario() -> None:
        async with cluster(_failing(8, 0, "OutOfBlocks"), Script()) as c:
            for i in range(4):
                assert (await c.generate(prompt(f"{i}" * 40))).code is grpc.StatusCode.OK

    run(scenario())


@pytest.mark.parametrize("error", ["PromptTooLong", "InvalidRequest"])
def test_errors_that_share_a_code_reach_the_client_by_name(error: str) -> None:
    async def scenario() -> None:
        async with cluster(_failing(3, 0, error), _failing(3, 0, error)) as c:
            answer = await c.generate(prompt())
            assert answer.trailing["banyan-error"] == error
            assert sum(len(r.submits) for r in c.replicas) == 1

    run(scenario())


@pytest.mark.parametrize("code", [3, 4, 13])
def test_an_error_of_the_request_itself_is_not_tried_elsewhere(code: int) -> None:
    async def scenario() -> None:
        async with cluster(_failing(code), _failing(code)) as c:
            answer = await c.generate(prompt())
            assert answer.code.value[0] == code and answer.details == "Says the replica."
            assert sum(len(r.submits) for r in c.replicas) == 1
            await c.quiet()

    run(scenario())


def test_attempts_without_a_token_are_bounded() -> None:
    async def scenario() -> None:
        lost = [_failing(14) for _ in range(5)]
        async with cluster(*lost) as c:
            answer = await c.generate(prompt())
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert sum(len(r.submits) for r in c.replicas) <= 5

    run(scenario())


def test_an_execute_stream_that_breaks_alone_is_dialled_again() -> None:
    async def scenario() -> None:
        async with cluster(Script(token_s=0.01)) as c:
            call = asyncio.create_task(c.generate(prompt(max_tokens=50)))
            await asyncio.sleep(0.2)
            began_s = time.monotonic()
            session = c.server._fleet._sessions["w0"]
            assert session.executor is not None
            session.executor._task.cancel()
            assert (await call).code is grpc.StatusCode.OK
            assert time.monotonic() - began_s < 1.9, "it did not wait for its time to be over"
            answer = await c.generate(prompt(max_tokens=3))
            assert answer.code is grpc.StatusCode.OK

    run(scenario())


def test_streams_of_a_lone_replica_survive_broken_connections() -> None:
    """Each cut is followed by a token before the next: that renews the budget of attempts."""

    async def scenario() -> None:
        async with cluster(Script(token_s=0.01)) as c:
            replica = c.replicas[0]
            calls = [
                asyncio.create_task(c.generate(prompt(f"a{i}", max_tokens=80, seed=i)))
                for i in range(4)
            ]
            for cut in range(3):
                await c.until(lambda: len(replica.submits) == 4 * (cut + 1))  # noqa: B023
                before = replica.emitted
                await c.until(lambda: replica.emitted > before + 20)  # noqa: B023
                replica.cut()
            for i, answer in enumerate(await asyncio.gather(*calls)):
                assert answer.code is grpc.StatusCode.OK, answer.details
                assert answer.ids() == expected(list(f"a{i}".encode()), i, 80)
                assert answer.usage.moves == 3
            await c.quiet()

    run(scenario())


def test_a_connection_that_breaks_before_every_token_ends_the_stream() -> None:
    async def scenario() -> None:
        def cut(replica: ScriptedReplica, submit: internal_pb2.Submit, position: int) -> None:
            replica.cut()

        async with cluster(Script(before_token=cut, token_s=0.05)) as c:
            answer = await c.generate(prompt())
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert answer.trailing["banyan-error"] == "ReplicaLost"
            assert len(c.replicas[0].submits) == 2
            await c.quiet()

    run(scenario())
