"""ThreadEngine: the EngineClient in a real thread. Waits are on conditions with generous limits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from engine_rig import BLOCK, Recorder, request, tokens
from test_tiers_engine import TierRig

from seams.clock import SystemClock
from seams.errors import Cancelled, DeadlineExceeded, InternalError, InvalidRequest, NoReplica
from worker.config import EngineConfig
from worker.engine.client import EngineClient
from worker.engine.core import EngineCore
from worker.engine.messages import (
    CacheOp,
    CacheOpKind,
    Emission,
    Finish,
    Forgotten,
    StepOutput,
)
from worker.engine.thread import ThreadEngine
from worker.models.fake import fake_model

WAIT_S = 60


class Listener:
    """Collects what the engine says, on the engine's thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.emissions: list[Emission] = []
        self.threads: set[str] = set()
        self.outputs = 0
        self.fail = False
        self.stalled = False

    def __call__(self, output: StepOutput) -> None:
        with self.changed:
            self.threads.add(threading.current_thread().name)
            self.emissions += output.emissions
            self.outputs += 1
            self.stalled = output.load.stalled
            self.changed.notify_all()
        if self.fail:
            self.fail = False
            raise RuntimeError("the listener broke")

    def wait(self, predicate: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(predicate, WAIT_S), "it never happened"

    def lasts(self, name: str) -> list[Emission]:
        return [e for e in self.emissions if e.request_id == name and e.last]

    def output(self, name: str) -> list[int]:
        return [t for e in self.emissions if e.request_id == name for t in e.token_ids]

    def wait_last(self, *names: str) -> None:
        for name in names:
            self.wait(lambda name=name: bool(self.lasts(name)))  # type: ignore[misc]


class Running:
    def __init__(self, **config: object) -> None:
        self.model = Recorder(fake_model("full", context_tokens=4096, block_tokens=BLOCK))
        given = {"blocks": (2000,), "poison_freed": True, **config}
        self.core = EngineCore(self.model, EngineConfig(**given), SystemClock())  # type: ignore[arg-type]
        self.engine = ThreadEngine(self.core)
        self.listener = Listener()


@contextmanager
def started(**config: object) -> Iterator[Running]:
    running = Running(**config)
    client: EngineClient = running.engine
    client.start(running.listener)
    try:
        yield running
    finally:
        client.stop()


def test_tokens_arrive_on_the_engines_thread() -> None:
    with started() as run:
        run.engine.submit(request("a", tokens(20), max_tokens=10))
        run.listener.wait_last("a")
        assert run.listener.output("a") == run.model.oracle(tokens(20), 10, ignore_eos=True)
        assert run.listener.threads == {"engine"}


def test_any_thread_may_call() -> None:
    with started() as run:

        def client(index: int) -> None:
            for turn in range(5):
                name = f"{index}.{turn}"
                run.engine.submit(request(name, tokens(15, index), max_tokens=12, credit_tokens=4))
                run.engine.grant(name, 100)
                if turn == 3:
                    run.engine.cancel(name)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = [f"{i}.{t}" for i in range(8) for t in range(5)]
        run.listener.wait_last(*names)
        for name in names:
            assert len(run.listener.lasts(name)) == 1
            out = run.listener.output(name)
            expected = run.model.oracle(tokens(15, int(name[0])), 12, ignore_eos=True)
            assert out == expected[: len(out)]
            assert len(out) == 12 or name.endswith("3")
    run.core.check_integrity()
    assert run.core.memory.available(0) == 2000


def test_an_idle_engine_sleeps() -> None:
    with started() as run:
        checks = 0
        has_work = run.core.has_work

        def counted() -> bool:
            nonlocal checks
            checks += 1
            return has_work()

        run.core.has_work = counted  # type: ignore[method-assign]
        run.engine.submit(request("paused", tokens(9), credit_tokens=1))
        run.listener.wait(lambda: len(run.listener.output("paused")) == 1)
        time.sleep(0.05)
        before, cpu = checks, time.process_time()
        time.sleep(0.5)
        assert checks == before
        assert time.process_time() - cpu < 0.25
        run.engine.grant("paused", 100)
        run.listener.wait_last("paused")


def test_a_deadline_wakes_a_sleeping_engine() -> None:
    with started() as run:
        deadline_s = SystemClock().now() + 0.1
        run.engine.submit(request("a", tokens(9), credit_tokens=1, deadline_s=deadline_s))
        run.listener.wait_last("a")
        assert isinstance(run.listener.lasts("a")[0].error, DeadlineExceeded)
        assert SystemClock().now() >= deadline_s


def test_duplicates_are_refused_to_the_caller_only() -> None:
    with started() as run:
        run.engine.submit(request("a", tokens(9), credit_tokens=2))
        with pytest.raises(InvalidRequest):
            run.engine.submit(request("a", tokens(5)))
        run.engine.grant("a", 100)
        run.listener.wait_last("a")
        run.engine.submit(request("a", tokens(5)))
        run.listener.wait(lambda: len(run.listener.lasts("a")) == 2)
        expected = [run.model.oracle(tokens(n), 8, ignore_eos=True) for n in (9, 5)]
        assert run.listener.output("a") == expected[0] + expected[1]


def test_refusals_arrive_as_emissions() -> None:
    with started() as run:
        run.engine.submit(request("a", ()))
        run.listener.wait_last("a")
        assert isinstance(run.listener.lasts("a")[0].error, InvalidRequest)


def test_snapshots_come_between_steps_and_load_never_waits() -> None:
    with started() as run:
        run.engine.submit(request("a", tokens(41), max_tokens=2))
        run.listener.wait_last("a")
        found: list[tuple[CacheOp, ...]] = []
        done = threading.Event()

        def take(ops: tuple[CacheOp, ...]) -> None:
            assert threading.current_thread().name == "engine"
            found.append(ops)
            done.set()

        run.engine.snapshot(take)
        assert done.wait(WAIT_S)
        assert sum(len(op.keys) for op in found[0]) == 10
        load = run.engine.load()
        assert load.blocks_cached == 11 and load.steps >= 2 and not load.stalled


def test_stop_ends_everything_once() -> None:
    """Some run, some wait, one has no credit; the engine's thread is held until `stop` is under
    way."""
    run = Running()
    begun = threading.Event()

    def held(output: StepOutput) -> None:
        run.listener(output)
        begun.set()
        while not run.engine._stopping:
            time.sleep(0.001)

    run.engine.start(held)
    names = [f"r{i}" for i in range(6)]
    for index, name in enumerate(names):
        credit = 0 if index == 0 else 1 << 20
        run.engine.submit(request(name, tokens(9, index), max_tokens=3000, credit_tokens=credit))
    assert begun.wait(WAIT_S)
    run.engine.stop()
    run.engine.stop()
    for name in names:
        (last,) = run.listener.lasts(name)
        assert last.finish is Finish.CANCELLED and isinstance(last.error, Cancelled)
    assert not any(t.name == "engine" for t in threading.enumerate())
    with pytest.raises(Cancelled):
        run.engine.submit(request("late", tokens(3)))
    run.engine.cancel("r0")
    assert run.core.memory.available(0) == 2000


def test_stop_without_start_and_from_the_listener() -> None:
    Running().engine.stop()
    run = Running()
    stopped = threading.Event()

    def stopping(output: StepOutput) -> None:
        run.listener(output)
        run.engine.stop()
        stopped.set()

    run.engine.start(stopping)
    run.engine.submit(request("a", tokens(9), max_tokens=100))
    assert stopped.wait(WAIT_S)
    run.engine.stop()
    assert len(run.listener.lasts("a")) == 1


def test_a_failing_step_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with started() as run:
        run.model.fail_at = 3
        run.engine.submit(request("a", tokens(9)))
        run.listener.wait_last("a")
        assert isinstance(run.listener.lasts("a")[0].error, InternalError)
        run.engine.submit(request("b", tokens(9)))
        run.listener.wait_last("b")
        assert run.listener.lasts("b")[0].error is None and not run.engine.load().stalled


def test_a_device_that_fails_every_step_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with started() as run:
        run.model.broken = True
        kinds = []
        for name in "abcd":
            run.engine.submit(request(name, tokens(9)))
            run.listener.wait_last(name)
            kinds.append(type(run.listener.lasts(name)[0].error))
        assert kinds == [InternalError, InternalError, NoReplica, NoReplica]
        assert run.engine.load().stalled and len(run.model.plans) == 3


def test_a_failed_engine_says_so_though_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    with started() as run:

        def broken(request_id: str) -> None:
            raise AssertionError("a broken invariant")

        run.core.cancel = broken  # type: ignore[method-assign]
        run.engine.cancel("nobody")
        run.listener.wait(lambda: run.listener.stalled)


def test_a_failing_loop_ends_everything_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with started() as run:
        run.engine.submit(request("a", tokens(9), credit_tokens=2))
        run.engine.submit(request("b", tokens(9, 1), credit_tokens=2))
        run.listener.wait(lambda: len(run.listener.output("b")) == 2)

        def broken() -> None:
            raise AssertionError("a broken invariant")

        run.core.step = broken  # type: ignore[method-assign]
        run.engine.grant("a", 1)
        run.listener.wait_last("a", "b")
        for name in ("a", "b"):
            (last,) = run.listener.lasts(name)
            assert isinstance(last.error, NoReplica)  # routers move such a stream
        assert run.engine.load().stalled
        run.engine.submit(request("after", tokens(3)))
        run.listener.wait_last("after")
        assert isinstance(run.listener.lasts("after")[0].error, NoReplica)
    assert "failed" in caplog.text


def test_a_failing_listener_is_a_failing_loop(caplog: pytest.LogCaptureFixture) -> None:
    with started() as run:
        run.engine.submit(request("a", tokens(9), credit_tokens=1))
        run.listener.wait(lambda: bool(run.listener.output("a")))
        run.listener.fail = True
        run.engine.submit(request("b", tokens(9)))
        run.listener.wait_last("a", "b")
        assert run.engine.load().stalled
        assert len(run.listener.lasts("a")) == len(run.listener.lasts("b")) == 1


def test_a_reset_of_the_cache_says_what_went_before_it_answers() -> None:
    with started() as run:
        run.engine.submit(request("a", tokens(40), max_tokens=4))
        run.listener.wait_last("a")
        said: list[tuple[Forgotten, int]] = []
        answered = threading.Event()
        removed: list[CacheOp] = []
        listen = run.engine._on_step

        def heard(output: StepOutput) -> None:
            removed.extend(op for op in output.cache_ops if op.kind is CacheOpKind.REMOVED)
            listen(output)

        def done(forgotten: Forgotten) -> None:
            said.append((forgotten, sum(len(op.keys) for op in removed)))
            answered.set()

        run.engine._on_step = heard
        run.engine.forget_cache(done)
        assert answered.wait(WAIT_S)
        ((forgotten, keys),) = said
        assert forgotten.blocks >= keys >= 40 // BLOCK and forgotten.in_use == 0
        assert run.engine.load().blocks_cached == 0


def test_a_reset_says_what_tiers_lost_before_it_answers() -> None:
    rig = TierRig(host=400)
    rig.submit(request("a", tokens(8 * BLOCK), 2))
    rig.run()
    rig.core.memory.cache.clear()
    rig.step()
    held = rig.store.host.stats().blocks
    rig.store.clear(5.0)
    said: list[CacheOp] = []
    before: list[int] = []
    engine = ThreadEngine(rig.core)
    engine._on_step = lambda output: said.extend(output.cache_ops)
    engine.forget_cache(lambda _: before.append(sum(len(op.keys) for op in said)))
    assert engine._serve_once()
    assert {(op.kind, op.tier) for op in said} == {(CacheOpKind.REMOVED, 1)}
    assert before == [held] and held >= 8
    rig.close()
