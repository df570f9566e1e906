"""Attach and Events over real gRPC: hello, heartbeats, snapshots, restarts, refusals."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from service_peers import FakeRouter, StartReplica, eventually

from banyan.v1 import common_pb2, internal_pb2
from kvstore.keys import KEY_BYTES, ChainSpec, RootId, chain, root
from seams.limits import check_message
from seams.rng import SeededRng
from worker.engine.core import EngineCore
from worker.models.fake import fake_model
from worker.service import links as links_module
from worker.service import router_link
from worker.service.links import Links, resolve
from worker.service.router_link import Backoff


@pytest.fixture
def second() -> Iterator[FakeRouter]:
    peer = FakeRouter(name="router-1")
    yield peer
    peer.stop()


class RouterView:
    """A router's view of the replica's group 0 from its batches, checked as it goes."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.seq = -1
        self.in_snapshot = False
        self.snapshots = 0
        self.digests = 0

    def apply(self, batch: internal_pb2.EventBatch) -> None:
        check_message(batch)
        if batch.snapshot:
            if not self.in_snapshot:
                self.held, self.in_snapshot = set(), True
            self.seq = batch.seq
            self.in_snapshot = not batch.snapshot_last
            self.snapshots += batch.snapshot_last
        else:
            assert not self.in_snapshot and batch.seq == self.seq + 1
            self.seq = batch.seq
        for op in batch.ops:
            keys = [op.keys[i : i + KEY_BYTES] for i in range(0, len(op.keys), KEY_BYTES)]
            stored = op.kind == internal_pb2.BlockOp.KIND_STORED
            (self.held.update if stored else self.held.difference_update)(keys)
        if batch.digest:
            self.digests += 1
            value = 0
            for key in self.held:
                value ^= int.from_bytes(key, "little")
            assert batch.digest == value.to_bytes(KEY_BYTES, "little")


def view_of(router: FakeRouter, epoch: int) -> RouterView:
    view = RouterView()
    for batch in list(router.batches):
        if batch.epoch == epoch:
            view.apply(batch)
    return view


def truth(core: EngineCore) -> set[bytes]:
    return {key for op in core.snapshot() if op.group == 0 for key in op.keys}


def serve(router: FakeRouter, count: int, tokens: int = 64) -> None:
    stream = router.execute()
    for i in range(count):
        stream.submit(f"r{i}", [(i * 31 + j) % 256 for j in range(tokens)])
    for i in range(count):
        stream.finished(f"r{i}")
    stream.cancel()


# ---- attach -------------------------------------------------------------------------------------


def test_the_hello_is_complete_and_true(router: FakeRouter, start_replica: StartReplica) -> None:
    replica = start_replica(blocks=64, cache_domain="zone", context_tokens=2048)
    hello, spec = router.attached(), fake_model("full").spec
    check_message(hello)
    assert (hello.protocol, hello.replica, hello.epoch) == (1, "replica-0", replica.epoch)
    assert hello.address == replica.address and hello.cache_domain == "zone"
    assert hello.host == socket.gethostname() == hello.node
    (model,) = hello.models
    assert model.root_id == root(spec.fingerprint, "", 16) and model.name == "fake"
    assert (model.context_tokens, model.vocab_tokens) == (2048, 256)
    assert list(model.eos_token_ids) == list(spec.eos_token_ids)
    assert (hello.block_tokens, hello.numeric_class) == (16, spec.numeric_class)
    assert hello.representation == spec.representation.id
    (group,), (device,) = hello.kv_groups, hello.capacities
    assert (group.id, group.kind, group.layers) == (0, "full", len(spec.groups[0].layers))
    assert group.block_bytes == spec.groups[0].block_bytes
    assert (device.tier, device.blocks) == (internal_pb2.TIER_DEVICE, 64)
    priors = hello.priors
    assert 0 < priors.prefill_s_per_token < 1 and 0 < priors.step_s < 1
    assert 0 <= priors.step_s_per_sequence < 1


def test_the_probe_chain_is_what_the_key_function_says(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    start_replica()
    probe = router.attached().probe
    keyed = ChainSpec(RootId(probe.root_id), 16, probe.salt, probe.private_from)
    assert b"".join(chain(keyed, list(probe.token_ids))) == probe.keys
    assert len(probe.keys) == 3 * KEY_BYTES and len(probe.token_ids) % 16
    unsalted = chain(ChainSpec(RootId(probe.root_id), 16), list(probe.token_ids))
    differs = [a != probe.keys[i * 16 : i * 16 + 16] for i, a in enumerate(unsalted)]
    assert differs == [False, True, True]  # a public block, a salted one, one that inherits


def test_heartbeats_keep_coming(router: FakeRouter, start_replica: StartReplica) -> None:
    start_replica(blocks=64)
    serve(router, 2)
    count, started = len(router.beats), time.monotonic()
    eventually(lambda: len(router.beats) >= count + 10)
    assert time.monotonic() - started > 10 * router.heartbeat_ms / 1000 / 2
    load = router.beats[-1].load
    check_message(router.beats[-1])
    assert load.blocks_total == 64 == load.blocks_free + load.blocks_cached
    assert load.steps > 0 and load.step_s > 0 and not load.stalled
    assert not router.beats[-1].draining


def test_a_restarted_router_is_attached_again(
    router: FakeRouter, start_replica: StartReplica, cores: list[EngineCore]
) -> None:
    replica = start_replica()
    serve(router, 4)
    router.stop()
    time.sleep(0.3)
    again = FakeRouter(port=router.port, name="again")
    try:
        started = time.monotonic()
        hello = again.attached()
        assert time.monotonic() - started < 3
        assert hello.epoch == replica.epoch
        eventually(lambda: view_of(again, replica.epoch).snapshots == 1)
        assert view_of(again, replica.epoch).held == truth(cores[0]) != set()
        serve(again, 1)
    finally:
        again.stop()


def test_a_restarted_replica_has_a_larger_epoch(
    router: FakeRouter, start_replica: StartReplica
) -> None:
    first = start_replica()
    router.attached()
    first.stop()
    second = start_replica()
    eventually(lambda: router.hellos[-1].epoch == second.epoch)
    assert second.epoch > first.epoch


def test_every_router_is_served(
    router: FakeRouter, second: FakeRouter, start_replica: StartReplica, cores: list[EngineCore]
) -> None:
    replica = start_replica(routers=(router.address, second.address))
    serve(router, 3)
    serve(second, 5)
    for peer in (router, second):
        eventually(lambda peer=peer: view_of(peer, replica.epoch).held == truth(cores[0]))


def test_a_router_that_does_not_know_the_secret_is_refused(
    second: FakeRouter,
    router: FakeRouter,
    start_replica: StartReplica,
    caplog: pytest.LogCaptureFixture,
) -> None:
    second.secret = b"another" * 8
    with caplog.at_level(logging.INFO):
        start_replica(routers=(second.address, router.address))
        router.attached()
        eventually(lambda: second.attempts)
        time.sleep(0.5)
    assert second.attempts == 1 and not second.hellos  # retried slowly
    said = [r.getMessage() for r in caplog.records if "does not know" in r.getMessage()]
    assert len(said) == 1
    serve(router, 1)


def test_a_refusal_is_logged_once_and_tried_again(
    router: FakeRouter,
    start_replica: StartReplica,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_link, "REFUSED_RETRY_S", 0.1)
    router.refuse = common_pb2.Status(code=9, message="The probe chain differs.")
    with caplog.at_level(logging.INFO):
        replica = start_replica()
        eventually(lambda: router.attempts >= 4)
    said = [r.getMessage() for r in caplog.records if "probe chain" in r.getMessage()]
    assert len(said) == 1
    standing = replica.describe()
    assert (standing["attached"], standing["refusal"]) == (0, "The probe chain differs.")
    router.refuse = None
    serve(router, 1)
    eventually(lambda: replica.describe()["attached"] == 1)
    assert replica.describe()["refusal"] == ""


# ---- events -------------------------------------------------------------------------------------


def test_events_follow_the_cache(
    router: FakeRouter, start_replica: StartReplica, cores: list[EngineCore]
) -> None:
    """With a pool small enough that blocks are evicted while requests run."""
    replica = start_replica(blocks=48)
    for _ in range(3):
        serve(router, 12)
    eventually(lambda: view_of(router, replica.epoch).held == truth(cores[0]) != set())
    kinds = {op.kind for batch in router.batches for op in batch.ops}
    assert kinds == {internal_pb2.BlockOp.KIND_STORED, internal_pb2.BlockOp.KIND_REMOVED}
    assert view_of(router, replica.epoch).snapshots == 1
    assert replica._events._log.digest_repairs == 0


def test_a_snapshot_on_request_while_serving(
    router: FakeRouter, start_replica: StartReplica, cores: list[EngineCore]
) -> None:
    replica = start_replica(blocks=48)
    eventually(lambda: router.events_streams)
    for n in range(1, 4):
        stream = router.execute()
        for i in range(12):
            stream.submit(f"r{i}", [(i * 7 + j + n) % 256 for j in range(48)])
        router.want_snapshot()
        for i in range(12):
            stream.finished(f"r{i}")
        stream.cancel()
        eventually(lambda n=n: view_of(router, replica.epoch).snapshots == 1 + n)
    eventually(lambda: view_of(router, replica.epoch).held == truth(cores[0]))
    assert replica._events._log.digest_repairs == 0


def test_a_large_snapshot_comes_in_bounded_parts(
    router: FakeRouter,
    start_replica: StartReplica,
    cores: list[EngineCore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = start_replica(blocks=512)
    monkeypatch.setattr(replica._events._log, "_part_keys_max", 16)
    serve(router, 20, tokens=320)
    router.batches.clear()
    router.want_snapshot()
    eventually(lambda: any(b.snapshot_last for b in router.batches))
    parts = [b for b in router.batches if b.snapshot]
    assert len(parts) > 10
    assert all(sum(len(op.keys) for op in part.ops) <= 16 * KEY_BYTES for part in parts)
    assert {part.seq for part in parts} == {parts[0].seq}
    assert replica.epoch == parts[0].epoch and truth(cores[0])


def test_the_digest_is_sent_now_and_then(
    router: FakeRouter, start_replica: StartReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.service.events.DIGEST_EVERY_S", 0.1)
    replica = start_replica()
    serve(router, 3)
    eventually(lambda: view_of(router, replica.epoch).digests >= 4)


def test_attach_lives_while_events_are_not_read(
    router: FakeRouter, start_replica: StartReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more events than the transport holds; heartbeats and requests go on."""
    router.read_events = False
    replica = start_replica(blocks=2048)
    router.attached()
    eventually(lambda: router.events_streams)
    log = replica._events._log
    key = bytes(KEY_BYTES)

    def flood() -> None:
        from worker.engine.messages import CacheOp, CacheOpKind

        for _ in range(200):
            replica._events.publish([CacheOp(CacheOpKind.STORED, 1, (key,) * 4096)])

    replica._loop.call_soon_threadsafe(flood)
    count = len(router.beats)
    eventually(lambda: len(router.beats) > count + 10, within_s=5)
    serve(router, 2)
    assert log.seq >= 200 and log.first_kept > 1  # bounded: the oldest are gone
    assert router.events_streams == 1


def test_events_that_break_do_not_break_attach(
    router: FakeRouter, start_replica: StartReplica, cores: list[EngineCore]
) -> None:
    replica = start_replica()
    eventually(lambda: router.events_streams == 1)
    serve(router, 2)
    router.end_events()
    eventually(lambda: router.events_streams == 2)
    router.batches.clear()
    router.want_snapshot()
    eventually(lambda: any(b.snapshot_last for b in router.batches))
    assert len(router.hellos) == 1
    assert replica.epoch == router.batches[0].epoch and truth(cores[0])


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:80", "[::1]:80"])
def test_an_address_stands_for_itself(address: str) -> None:
    assert asyncio.run(resolve(address)) == {address}


def resolving(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    """`resolve` gives these answers, one after the other, the last for ever."""

    async def answer(address: str) -> set[str]:
        value = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(value, OSError):
            raise value
        return set(value)

    monkeypatch.setattr(links_module, "resolve", answer)


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.1", 5)),
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.2", 5)),
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("fd00::1", 5, 0, 0)),
    ]

    async def body(answers: list[Any]) -> set[str]:
        async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
            return answers

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        return await resolve("routers.example:5")

    assert asyncio.run(body(found)) == {"10.0.0.1:5", "10.0.0.2:5"}
    assert asyncio.run(body(found[2:])) == {"[fd00::1]:5"}


def test_links_follow_the_name(
    router: FakeRouter,
    second: FakeRouter,
    start_replica: StartReplica,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that appears is found, one that disappears from the name is kept while it lives,
    and a failed look-up gives up nobody."""
    monkeypatch.setattr(Links.__init__, "__kwdefaults__", {"resolve_every_s": 0.05})
    answers: list[Any] = [OSError("no answer"), {router.address}]
    resolving(monkeypatch, answers)
    replica = start_replica(routers=("routers.example:5",))
    router.attached()
    answers[:] = [OSError("no answer"), {second.address}]
    second.attached()
    serve(router, 1)
    assert replica._links.attached == 2
    router.stop()
    eventually(lambda: set(replica._links._links) == {second.address})
    serve(second, 1)


def test_backoff_doubles_within_bounds() -> None:
    backoff = Backoff(SeededRng(1), first_s=0.1, max_s=1.0)
    waits = [backoff.next_s() for _ in range(8)]
    full = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]
    assert all(whole / 2 <= wait <= whole for wait, whole in zip(waits, full, strict=True))
    assert len(set(waits)) == 8
    backoff.reset()
    assert backoff.next_s() <= 0.1
