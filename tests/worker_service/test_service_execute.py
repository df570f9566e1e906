"""Execute over real gRPC: a fake router's requests on a real engine over FakeModel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service_peers import WAIT_S, ExecuteStream, FakeRouter, StartReplica, eventually

from banyan.v1 import common_pb2, internal_pb2
from seams.errors import LaunchError
from seams.proof import session_token
from worker.engine.core import FAILED_STEPS_MAX, EngineCore
from worker.models.fake import fake_model
from worker.service.replica import DRAIN_SETTLE_S

LONG = {"max_tokens": 3000}


def oracle(token_ids: list[int], count: int = 8) -> list[int]:
    return fake_model("full").oracle(token_ids, count, ignore_eos=True)


def health(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        return int(reply.status)


def settled(replica: Any, core: EngineCore) -> None:
    """Nothing runs, every block is free or cached, the engine's own law holds."""
    eventually(lambda: (load := replica._parts.engine.load()).running + load.waiting == 0)
    core.check_integrity()
    load = core.load()
    assert load.blocks_free + load.blocks_cached == load.blocks_total


def test_tokens_are_the_models(router: FakeRouter, start_replica: StartReplica) -> None:
    start_replica()
    stream = router.execute()
    prompts = {f"r{i}": [i + 1] * (20 + i) for i in range(4)}
    for request_id, prompt in prompts.items():
        stream.submit(request_id, prompt)
    for request_id, prompt in prompts.items():
        assert stream.tokens(request_id) == oracle(prompt)
        final = stream.finished(request_id)[-1]
        assert final.finish == common_pb2.FINISH_REASON_LENGTH
        assert final.usage.prompt_tokens == len(prompt)
        assert final.usage.cached_tokens + final.usage.computed_tokens == len(prompt)
    assert [f.step for f in stream.frames] == sorted({f.step for f in stream.frames})


def test_requests_of_one_step_share_a_frame(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    start_replica()
    stream = router.execute()
    for i in range(8):
        stream.submit(f"r{i}", [i + 1] * 20, sampling={"max_tokens": 200})
    for i in range(8):
        stream.finished(f"r{i}")
    assert max(len(frame.emissions) for frame in stream.frames) == 8
    assert len({frame.step for frame in stream.frames}) == len(stream.frames)


def test_the_cache_is_used_and_counted(router: FakeRouter, start_replica: StartReplica) -> None:
    start_replica()
    stream, prompt = router.execute(), list(range(100))
    stream.submit("first", prompt)
    first = stream.tokens("first")
    stream.submit("second", prompt)
    assert stream.tokens("second") == first == oracle(prompt)
    usage = stream.finished("second")[-1].usage
    assert (usage.cached_tokens, usage.computed_tokens) == (99, 1)
    stream.submit("third", prompt, no_cache=True)
    assert stream.tokens("third") == first
    assert stream.finished("third")[-1].usage.cached_tokens == 0
    beats = len(router.beats)
    eventually(lambda: router.beats[beats:])
    load = router.beats[-1].load
    assert (load.prompt_tokens, load.cached_tokens) == (300, 99)  # the warm-up is not in it


def test_another_salt_shares_nothing(router: FakeRouter, start_replica: StartReplica) -> None:
    start_replica()
    stream, prompt = router.execute(), list(range(64))
    cached = []
    for i, salt in enumerate((b"a", b"a", b"b")):
        stream.submit(f"r{i}", prompt, salt=salt)
        cached.append(stream.finished(f"r{i}")[-1].usage.cached_tokens)
    assert cached == [0, 63, 0]


def test_choices_and_logprobs(router: FakeRouter, start_replica: StartReplica) -> None:
    start_replica()
    stream = router.execute()
    sampling = {"n": 3, "logprobs": 2, "temperature": 1.0}
    stream.submit("r", [1] * 20, sampling=sampling)
    emissions = stream.finished("r")
    for choice in range(3):
        own = [e for e in emissions if e.choice == choice]
        assert sum(len(e.token_ids) for e in own) == 8
        assert [e.finish for e in own if e.finish] == [common_pb2.FINISH_REASON_LENGTH]
        for emission in own:
            assert len(emission.logprobs) == len(emission.token_ids)
            assert all(len(p.top) == 2 and p.chosen.logprob <= 0 for p in emission.logprobs)
    assert [e.HasField("usage") for e in emissions].count(True) == 1
    assert emissions[-1].usage.completion_tokens == 24


@pytest.mark.parametrize("emitted", [1, 5, 8])
def test_a_moved_stream_goes_on_where_it_was(
    router: FakeRouter, start_replica: StartReplica, emitted: int
) -> None:
    start_replica()
    stream, prompt = router.execute(), [3] * 20
    before = oracle(prompt)[:emitted]
    stream.submit("r", prompt + before, prompt_tokens=20)
    emissions = stream.finished("r")
    new = [token for e in emissions for token in e.token_ids]
    assert before + new == oracle(prompt)
    assert emissions[0].position == emitted
    assert emissions[-1].finish == common_pb2.FINISH_REASON_LENGTH


# ---- who may ------------------------------------------------------------------------------------


def tokens_that_are_none(router: FakeRouter) -> list[str]:
    nonces = router.nonces[-1]
    return [
        "",
        "00" * 32,
        router.token()[:-1],
        session_token(router.secret, "events", *nonces),
        session_token(b"other" * 8, "execute", *nonces),
        session_token(router.secret, "execute", nonces[1], nonces[0]),
    ]


def test_a_stream_without_a_session_is_refused(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    start_replica()
    hello = router.attached()
    for token in tokens_that_are_none(router):
        stream = ExecuteStream(hello, token)
        stream.submit("r", [1])
        assert stream.ended.wait(WAIT_S)
        assert stream.error is not None
        assert stream.error.code() is grpc.StatusCode.UNAUTHENTICATED
    good = router.execute()
    good.submit("r", [1] * 20)
    assert good.tokens("r") == oracle([1] * 20)


def test_a_session_ends_with_its_attach(router: FakeRouter, start_replica: StartReplica) -> None:
    start_replica()
    running = router.execute()
    running.submit("r", [1] * 20, sampling={"max_tokens": 400})
    old = router.token()
    eventually(lambda: running.emissions("r"))  # the replica has accepted the stream
    router.stop()
    assert len(running.tokens("r")) == 400  # its stream is judged by itself
    stream = ExecuteStream(router.hellos[-1], old)
    assert stream.ended.wait(WAIT_S)
    assert stream.error is not None and stream.error.code() is grpc.StatusCode.UNAUTHENTICATED


# ---- malformed requests -------------------------------------------------------------------------

MALFORMED: list[tuple[str, dict[str, Any], int]] = [
    ("root", {"root_id": bytes(32)}, 5),
    ("tokens", {"token_ids": []}, 3),
    ("vocabulary", {"token_ids": [1, 256], "prompt_tokens": 2}, 3),
    ("prompt", {"prompt_tokens": 21}, 3),
    ("context", {"sampling": {"max_tokens": 4096}}, 3),
    ("seed", {"sampling": {"seed": None}}, 3),
    ("temperature", {"sampling": {"temperature": -1}}, 3),
    ("nan", {"sampling": {"top_p": float("nan")}}, 3),
    ("choices", {"sampling": {"n": 65}}, 3),
    ("resumed choices", {"sampling": {"n": 2}, "prompt_tokens": 19}, 3),
    ("tenant", {"tenant": "t" * 257}, 3),
    ("salt", {"salt": bytes(65)}, 3),
    ("priority", {"priority": 1 << 20}, 3),
    ("private_from", {"private_from": 1 << 21}, 3),
]


def test_a_malformed_submit_ends_only_itself(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    start_replica()
    stream, prompt = router.execute(), [2] * 20
    stream.submit("good", prompt, sampling={"max_tokens": 300})
    for name, fields, _ in MALFORMED:
        token_ids = fields.get("token_ids", prompt)
        rest = {key: value for key, value in fields.items() if key != "token_ids"}
        stream.submit(name, token_ids, **({"prompt_tokens": max(1, len(token_ids))} | rest))
    stream.submit("", prompt)
    stream.submit("x" * 257, prompt)
    for name, _, code in [*MALFORMED, ("", {}, 3), ("x" * 257, {}, 3)]:
        (emission,) = stream.finished(name)
        assert emission.error.code == code, name
        assert emission.finish == common_pb2.FINISH_REASON_ERROR
        assert emission.error.message.endswith(".") and "\n" not in emission.error.message
    assert stream.tokens("good") == oracle(prompt, 300)


def test_messages_for_nobody_change_nothing(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    start_replica()
    stream = router.execute()
    stream.send(cancel=internal_pb2.Cancel(request_id="none"))
    stream.send(credit=internal_pb2.Credit(request_id="none", tokens=5))
    stream.send()
    stream.submit("r", [1] * 20)
    assert stream.tokens("r") == oracle([1] * 20)


def test_a_credit_over_its_limit_ends_its_request(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    start_replica()
    stream = router.execute()
    stream.submit("r", [1] * 20, credit_tokens=1)
    stream.send(credit=internal_pb2.Credit(request_id="r", tokens=1 << 30))
    assert stream.finished("r")[-1].error.code == 3


def test_an_id_in_use_ends_once(router: FakeRouter, start_replica: StartReplica) -> None:
    replica = start_replica()
    stream = router.execute()
    stream.submit("r", [1] * 20, credit_tokens=1)
    stream.submit("r", [1] * 20)
    assert stream.finished("r")[-1].error.code == 3
    stream.submit("r", [4] * 20)
    eventually(lambda: sum(e.last for e in stream.emissions("r")) == 2)
    assert [t for e in stream.emissions("r")[-8:] for t in e.token_ids] == oracle([4] * 20)
    assert replica.describe()["replica"] == "replica-0"


# ---- flow control, cancel, deadlines ------------------------------------------------------------


def test_without_credit_a_request_waits_and_others_do_not(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    start_replica()
    stream = router.execute()
    stream.submit("slow", [1] * 20, credit_tokens=3)
    for i in range(20):
        stream.submit(f"r{i}", [i] * 20)
    for i in range(20):
        assert stream.tokens(f"r{i}") == oracle([i] * 20)
    assert sum(len(e.token_ids) for e in stream.emissions("slow")) == 3
    stream.send(credit=internal_pb2.Credit(request_id="slow", tokens=2))
    eventually(lambda: sum(len(e.token_ids) for e in stream.emissions("slow")) == 5)
    stream.send(credit=internal_pb2.Credit(request_id="slow", tokens=100))
    assert stream.tokens("slow") == oracle([1] * 20)


def test_a_router_that_never_reads_holds_up_nobody(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    replica = start_replica()
    deaf = ExecuteStream(router.attached(), router.token(), read=False)
    for i in range(32):
        deaf.submit(f"d{i}", [i] * 20, sampling=LONG, credit_tokens=16)
    stream = router.execute()
    for i in range(10):
        stream.submit(f"r{i}", [i] * 20)
        assert stream.tokens(f"r{i}") == oracle([i] * 20)
    assert replica._dispatcher.running == 32
    assert not replica._dispatcher.pending  # waiting for credit is not a stall
    deaf.cancel()
    eventually(lambda: replica._dispatcher.running == 0)


def recorded_cancels(replica: Any) -> dict[str, int]:
    """Engine steps done when each cancel reached the engine."""
    engine, steps = replica._parts.engine, {}
    plain: Callable[[str], None] = engine.cancel

    def cancel(request_id: str) -> None:
        steps[request_id.partition("/")[2]] = engine.load().steps
        plain(request_id)

    engine.cancel = cancel
    return steps


def test_cancel_frees_blocks_within_two_steps(
    router: FakeRouter, start_replica: StartReplica, cores: list[EngineCore]
) -> None:
    replica = start_replica()
    steps = recorded_cancels(replica)
    stream = router.execute()
    for i in range(8):
        stream.submit(f"r{i}", [i] * 40, sampling=LONG)
    for i in range(8):
        eventually(lambda i=i: stream.emissions(f"r{i}"))
        stream.send(cancel=internal_pb2.Cancel(request_id=f"r{i}"))
    for i in range(8):
        final = stream.finished(f"r{i}")[-1]
        assert final.finish == common_pb2.FINISH_REASON_CANCELLED
        frame = next(f for f in stream.frames if final in f.emissions)
        assert frame.step - steps[f"r{i}"] <= 2
    settled(replica, cores[0])


@pytest.mark.parametrize("how", ["cancel", "half_close"])
def test_a_stream_that_ends_takes_its_requests_along(
    router: FakeRouter, start_replica: StartReplica, cores: list[EngineCore], how: str
) -> None:
    replica = start_replica(blocks=4096)
    stream, other = router.execute(), router.execute()
    for i in range(8):
        stream.submit(f"r{i}", [i] * 40, sampling=LONG)
    other.submit("r0", [9] * 20, sampling={"max_tokens": 600})
    eventually(lambda: stream.emissions("r7"))
    getattr(stream, how)()
    eventually(lambda: replica._dispatcher.running <= 1, within_s=1.0)
    assert other.tokens("r0") == oracle([9] * 20, 600)  # the same id on another stream
    settled(replica, cores[0])


def test_a_deadline_ends_a_request(router: FakeRouter, start_replica: StartReplica) -> None:
    start_replica()
    stream = router.execute()
    started = time.monotonic()
    stream.submit("r", [1] * 20, deadline_ms=100, credit_tokens=1)
    final = stream.finished("r")[-1]
    assert final.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert 0.09 <= time.monotonic() - started < 5


# ---- health, drain, stop ------------------------------------------------------------------------

SERVING, NOT_SERVING = 1, 2


def test_drain_finishes_what_runs(router: FakeRouter, start_replica: StartReplica) -> None:
    replica = start_replica()
    stream = router.execute()
    assert health(replica.address, "ready") == health(replica.address, "") == SERVING
    stream.submit("r", [1] * 20, credit_tokens=1)
    eventually(lambda: stream.emissions("r"))
    drained = replica._call(replica._drain(grace_s=WAIT_S))
    eventually(lambda: router.beats[-1].draining)
    beats = len(router.beats)
    assert health(replica.address, "ready") == NOT_SERVING
    assert health(replica.address, "") == SERVING
    stream.submit("on its way", [2] * 20)  # the router could not know yet
    assert stream.tokens("on its way") == oracle([2] * 20)
    eventually(lambda: replica._dispatcher.refuses)
    assert len(router.beats) - beats < 2 * DRAIN_SETTLE_S / (router.heartbeat_ms / 1000)
    stream.submit("late", [1] * 20)
    assert stream.finished("late")[-1].error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert not drained.done()
    stream.send(credit=internal_pb2.Credit(request_id="r", tokens=100))
    assert stream.tokens("r") == oracle([1] * 20)
    assert drained.result(WAIT_S) is True
    replica.stop()
    assert stream.ended.wait(WAIT_S) and stream.error is None


def test_drain_gives_up_after_its_grace(router: FakeRouter, start_replica: StartReplica) -> None:
    replica = start_replica()
    stream = router.execute()
    stream.submit("r", [1] * 20, credit_tokens=1)
    eventually(lambda: stream.emissions("r"))
    assert replica.drain(grace_s=0.2) is False
    replica.stop()
    eventually(lambda: stream.emissions("r")[-1].last)
    assert stream.finished("r")[-1].finish == common_pb2.FINISH_REASON_CANCELLED
    replica.stop()


def test_a_stalled_engine_is_not_ready(
    router: FakeRouter, start_replica: StartReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.service.replica.STALL_S_MIN", 0.5)
    monkeypatch.setattr("worker.service.replica.WATCH_EVERY_S", 0.05)
    monkeypatch.setattr("worker.service.replica.STALL_STEPS", 0)
    replica = start_replica()
    stream = router.execute()
    model = replica._parts.engine._core._model
    plain, hold = model.execute, [True]

    def execute(plan: Any) -> Any:
        while hold[0]:
            time.sleep(0.01)
        return plain(plan)

    model.execute = execute
    stream.submit("r", [1] * 20)
    try:
        eventually(lambda: health(replica.address, "ready") == NOT_SERVING)
        eventually(lambda: router.beats[-1].load.stalled)
        assert health(replica.address, "") == SERVING
    finally:
        hold[0] = False
    assert stream.tokens("r") == oracle([1] * 20)
    eventually(lambda: health(replica.address, "ready") == SERVING)
    eventually(lambda: not router.beats[-1].load.stalled)


def test_a_failed_engine_ends_the_replica(router: FakeRouter, start_replica: StartReplica) -> None:
    """What it was serving may go on elsewhere; the launcher starts it anew."""
    failed = threading.Event()
    replica = start_replica(on_failure=failed.set)
    stream = router.execute()
    stream.submit("r", [1] * 20, credit_tokens=1)
    eventually(lambda: stream.emissions("r"))

    def step() -> None:
        raise RuntimeError("on purpose")

    replica._parts.engine._core.step = step
    stream.submit("s", [2] * 20)
    assert failed.wait(WAIT_S)
    assert stream.ended.wait(WAIT_S)
    for request_id in ("r", "s"):
        error = stream.emissions(request_id)[-1].error
        assert error.error == "NoReplica" and "purpose" not in error.message
    with pytest.raises(grpc.RpcError):
        health(replica.address, "ready")


def test_a_device_that_fails_every_step_ends_the_replica(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    """Or it would look idle and draw, and fail, every request of the cluster."""
    failed = threading.Event()
    replica = start_replica(on_failure=failed.set)
    stream = router.execute()

    def execute(plan: Any) -> Any:
        raise RuntimeError("the device fell off the bus")

    replica._parts.engine._core._model.execute = execute
    said = []
    for i in range(FAILED_STEPS_MAX):
        assert not failed.is_set()
        stream.submit(f"r{i}", [i + 1] * 20)
        eventually(lambda i=i: stream.emissions(f"r{i}"))  # type: ignore[misc]
        said.append(stream.emissions(f"r{i}")[-1].error.error)
    assert said == ["InternalError"] * (FAILED_STEPS_MAX - 1) + ["NoReplica"]
    assert failed.wait(WAIT_S)


def test_two_replicas_never_share_a_port(start_replica: StartReplica) -> None:
    first = start_replica()
    with pytest.raises(LaunchError, match="port is busy"):
        start_replica(listen=first.address)
    assert health(first.address, "ready") == SERVING
