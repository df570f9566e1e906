"""Dispatcher, progress and settings: the service's own rules, without a socket or a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from banyan.v1 import internal_pb2
from seams.clock import VirtualClock
from seams.errors import InvalidRequest, LaunchError, NoReplica
from seams.proof import read_secret
from worker.config import ReplicaConfig
from worker.engine.client import OnStep
from worker.engine.messages import (
    CacheOp,
    Emission,
    EngineLoad,
    EngineRequest,
    Finish,
    Forgotten,
    StepOutput,
)
from worker.engine.sampling import SamplingParams
from worker.service import dispatch
from worker.service.dispatch import Dispatcher, FrameStream
from worker.service.progress import ProgressWatch
from worker.service.sessions import Sessions
from worker.service.settings import advertised, parse_config


@dataclass
class RecordingEngine:
    """Remembers the calls; the tests say what it emits."""

    submitted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    granted: list[tuple[str, int]] = field(default_factory=list)

    def start(self, on_step: OnStep) -> None: ...

    def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request.request_id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def grant(self, request_id: str, tokens: int) -> None:
        self.granted.append((request_id, tokens))

    def load(self) -> EngineLoad:
        return EngineLoad()

    def snapshot(self, done: Callable[[tuple[CacheOp, ...]], None]) -> None: ...

    def forget_cache(self, done: Callable[[Forgotten], None]) -> None: ...

    def stop(self) -> None: ...


def submit(stream: FrameStream, wire_id: str, credit: int = 8, n: int = 1) -> str:
    engine_id = stream.engine_id(wire_id)
    params = SamplingParams(seed=0, max_tokens=8, n=n)
    stream.submit(wire_id, EngineRequest(engine_id, (1,), 1, params, credit_tokens=credit))
    return engine_id


async def written(stream: FrameStream) -> list[internal_pb2.Frame]:
    """Ends the stream; all frames that waited."""
    stream.end()
    frames = []
    while (frame := await stream.next()) is not None:
        frames.append(frame)
    return frames


def step(number: int, *emissions: Emission) -> StepOutput:
    return StepOutput(number, emissions)


def last(engine_id: str) -> Emission:
    return Emission(engine_id, 0, 1, (9,), finish=Finish.LENGTH, last=True)


def test_one_frame_per_step_and_stream() -> None:
    async def body() -> None:
        engine = RecordingEngine()
        dispatcher = Dispatcher(engine)
        one, two = dispatcher.open(), dispatcher.open()
        a, b, c = submit(one, "a"), submit(one, "b"), submit(two, "a")
        assert a != c and engine.submitted == [a, b, c]
        emissions = [Emission(i, 0, 0, (n,)) for n, i in enumerate((a, c, b))]
        dispatcher.deliver(step(4, *emissions))
        dispatcher.deliver(step(5, Emission(c, 0, 1, (7,))))
        first = await written(one)
        assert [(f.step, [(e.request_id, *e.token_ids) for e in f.emissions]) for f in first] == [
            (4, [("a", 0), ("b", 2)])
        ]
        assert [[list(e.token_ids) for e in f.emissions] for f in await written(two)] == [
            [[1]],
            [[7]],
        ]

    asyncio.run(body())


def test_after_the_last_emission_nothing_is_sent_or_remembered() -> None:
    async def body() -> None:
        engine = RecordingEngine()
        dispatcher = Dispatcher(engine)
        stream = dispatcher.open()
        a = submit(stream, "a")
        dispatcher.deliver(step(1, last(a)))
        assert dispatcher.running == 0
        await asyncio.wait_for(dispatcher.idle(), 1)
        dispatcher.deliver(step(2, last(a)))
        stream.cancel("a")
        stream.grant("a", 5)
        assert engine.cancelled == engine.granted == []
        assert len(await written(stream)) == 1
        submit(dispatcher.open(), "a")
        assert dispatcher.running == 1  # the id is free again

    asyncio.run(body())


def test_a_repeated_id_ends_that_request_once() -> None:
    async def body() -> None:
        engine = RecordingEngine()
        dispatcher = Dispatcher(engine)
        stream = dispatcher.open()
        a, b = submit(stream, "a"), submit(stream, "b")
        submit(stream, "a")
        dispatcher.deliver(step(1, last(a), Emission(b, 0, 0, (1,))))
        frames = await written(stream)
        ended = [e for f in frames for e in f.emissions if e.request_id == "a"]
        assert [(e.last, e.error.code) for e in ended] == [(True, 3)]
        assert engine.submitted == [a, b] and engine.cancelled[0] == a

    asyncio.run(body())


def test_an_ended_stream_cancels_all_it_has() -> None:
    async def body() -> None:
        engine = RecordingEngine()
        dispatcher = Dispatcher(engine)
        stream, other = dispatcher.open(), dispatcher.open()
        a, b, c = submit(stream, "a"), submit(stream, "b"), submit(other, "c")
        stream.end()
        stream.end()
        assert engine.cancelled == [a, b] and dispatcher.running == 1
        dispatcher.deliver(step(1, last(a), last(c)))
        assert await stream.next() is None
        assert len(await written(other)) == 1

    asyncio.run(body())


def test_a_peer_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "FRAMES_WAITING_MAX", 10)

    async def body() -> None:
        engine = RecordingEngine()
        dispatcher = Dispatcher(engine)
        stream = dispatcher.open()
        a = submit(stream, "a")
        for number in range(11):
            dispatcher.deliver(step(number, Emission(a, 0, number, (1,))))
        assert stream.overflowed and engine.cancelled == [a]
        assert await written(stream) == []

    asyncio.run(body())


def test_refusal_ends_new_requests_only() -> None:
    async def body() -> None:
        engine = RecordingEngine()
        dispatcher = Dispatcher(engine)
        stream = dispatcher.open()
        a = submit(stream, "a")
        dispatcher.refuses = NoReplica("The replica is draining.")
        submit(stream, "b")
        dispatcher.deliver(step(1, last(a)))
        frames = await written(stream)
        ends = [(e.request_id, e.error.code) for f in frames for e in f.emissions if e.last]
        assert ends == [("b", 14), ("a", 0)]

    asyncio.run(body())


def test_pending_follows_credit_per_choice() -> None:
    """A request that waits for credit is no sign of a stalled engine."""

    async def body() -> None:
        dispatcher = Dispatcher(RecordingEngine())
        stream = dispatcher.open()
        a = submit(stream, "a", credit=2, n=2)
        assert dispatcher.pending
        dispatcher.deliver(step(1, Emission(a, 0, 0, (1, 2)), Emission(a, 1, 0, (1,))))
        assert dispatcher.pending
        dispatcher.deliver(step(2, Emission(a, 1, 1, (1,))))
        assert not dispatcher.pending
        stream.grant("a", 1)
        assert dispatcher.pending
        dispatcher.deliver(
            step(3, Emission(a, 0, 2, (1,)), Emission(a, 1, 2, (), finish=Finish.STOP))
        )
        assert not dispatcher.pending

    asyncio.run(body())


# ---- progress -----------------------------------------------------------------------------------


def test_stalled_only_while_pending_and_not_stepping() -> None:
    clock = VirtualClock()
    watch = ProgressWatch(clock, stall_s=8)

    def read(after_s: float, steps: int, pending: bool) -> bool:
        clock.advance(after_s)
        return watch.stalled(steps, pending)

    assert not read(100, 5, True)  # first sight of step 5
    assert not read(7.9, 5, True)
    assert read(0.2, 5, True)
    assert not read(0.1, 6, True)  # moves again
    assert not read(100, 6, False)  # idle for long
    assert not read(7.9, 6, True)  # pending since then only
    assert read(0.2, 6, True)


def test_idle_time_does_not_count_as_stalled() -> None:
    clock = VirtualClock()
    watch = ProgressWatch(clock, stall_s=8)
    for _ in range(100):
        clock.advance(1)
        assert not watch.stalled(3, False)
    clock.advance(1)
    assert not watch.stalled(3, True)


def test_sessions() -> None:
    sessions = Sessions()
    assert not sessions.valid("")
    sessions.open("one")
    sessions.open("two")
    assert sessions.valid("one") and sessions.valid("two") and not sessions.valid("on\u00e9")
    sessions.close("one")
    assert not sessions.valid("one") and sessions.valid("two")


# ---- settings -----------------------------------------------------------------------------------

GOOD = ReplicaConfig("r", "fake:full", "m", ("127.0.0.1:1",), "/secret").as_dict()


def test_a_configuration_survives_json() -> None:
    config = parse_config(json.loads(json.dumps(GOOD)))
    assert config == ReplicaConfig("r", "fake:full", "m", ("127.0.0.1:1",), "/secret")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"replica": ""}, "value for replica"),
        ({"threads": "many"}, "wrong at threads"),
        ({"threads": -1}, "threads"),
        ({"decode_slowdown_max": 0.5}, "decode_slowdown_max"),
        ({"decode_slowdown_max": float("nan")}, "decode_slowdown_max"),
        ({"routers": "r:1"}, "wrong at routers"),
        ({"routers": ["nowhere"]}, "host:port"),
        ({"listen": "127.0.0.1:99999"}, "host:port"),
        ({"listen": "0.0.0.0:0"}, "needs advertise"),
        ({"listen": ":80"}, "needs advertise"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"pool_gib": "x"}, "wrong at pool_gib"),
    ],
)
def test_a_bad_configuration_is_one_sentence(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_config(GOOD | fields)
    assert says in caught.value.message and "\n" not in caught.value.message


def test_a_missing_field_is_named() -> None:
    without = {name: value for name, value in GOOD.items() if name != "secret_file"}
    with pytest.raises(InvalidRequest, match="secret_file"):
        parse_config(without)


@pytest.mark.parametrize(
    ("listen", "advertise", "address"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:4711"),
        ("0.0.0.0:50", "pod:0", "pod:4711"),
        ("0.0.0.0:50", "pod:80", "pod:80"),
        ("[::1]:0", "", "[::1]:4711"),
    ],
)
def test_advertised_address(listen: str, advertise: str, address: str) -> None:
    config = parse_config(GOOD | {"listen": listen, "advertise": advertise})
    assert advertised(config, 4711) == address


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("00" * 32, 0o644, "chmod 600"),
        ("zz" * 32, 0o600, "hex"),
        ("00" * 15, 0o600, "16 bytes"),
        ("\u00e9", 0o600, "cannot be read"),
    ],
)
def test_a_bad_secret_file(tmp_path: Path, text: str, mode: int, says: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(LaunchError) as caught:
        read_secret(path)
    assert says in caught.value.message and str(tmp_path) not in caught.value.message


def test_a_good_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0f" * 16 + "\n")
    path.chmod(0o400)
    assert read_secret(path) == b"\x0f" * 16
    with pytest.raises(LaunchError, match="missing"):
        read_secret(tmp_path / "none")
