"""ResetCache of a replica, over gRPC: who may, what goes, and that routers hear of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from service_peers import ExecuteStream, FakeRouter, StartReplica, eventually

from banyan.v1 import api_pb2, internal_pb2, internal_pb2_grpc
from kvstore.tiers.base import TierStats
from seams.errors import NoReplica
from worker.config import ReplicaConfig
from worker.models.fake import fake_model
from worker.service import tiers
from worker.service.settings import parse_config

PROMPT = list(range(1, 201))
SPEC = fake_model("full").spec


def reset(address: str, token: str, **fields: Any) -> api_pb2.ReplicaReset:
    with grpc.insecure_channel(address) as channel:
        stub = internal_pb2_grpc.ReplicaStub(channel)
        answer: api_pb2.ReplicaReset = stub.ResetCache(
            api_pb2.ResetCacheRequest(**fields), metadata=(("banyan-session", token),), timeout=20
        )
        return answer


def cached(stream: ExecuteStream, request_id: str) -> int:
    stream.submit(request_id, PROMPT)
    return int(stream.finished(request_id)[-1].usage.cached_tokens)


def held(router: FakeRouter) -> set[bytes]:
    """What the events so far come to, on the device."""
    keys: set[bytes] = set()
    for batch in list(router.batches):
        if batch.snapshot:
            keys.clear()
        for op in batch.ops:
            cut = {op.keys[at : at + 16] for at in range(0, len(op.keys), 16)}
            stored = op.kind == internal_pb2.BlockOp.KIND_STORED
            if op.tier == internal_pb2.TIER_DEVICE:
                (keys.update if stored else keys.difference_update)(cut)
    return keys


def test_the_cache_is_empty_afterwards_and_routers_know(
    start_replica: StartReplica, router: FakeRouter
) -> None:
    start_replica()
    hello, stream = router.attached(), router.execute()
    assert (cached(stream, "a"), cached(stream, "b")) == (0, len(PROMPT) - 1)
    eventually(lambda: len(held(router)) >= len(PROMPT) // 16)
    stream.submit("runs", PROMPT, sampling={"max_tokens": 40}, credit_tokens=2)
    eventually(lambda: stream.emissions("runs"))
    found = reset(hello.address, router.token())
    assert found.replica == "replica-0"
    assert found.blocks >= len(PROMPT) // 16 and 0 < found.blocks_in_use <= found.blocks
    eventually(lambda: not held(router))
    stream.send(credit=internal_pb2.Credit(request_id="runs", tokens=1000))
    assert len(stream.tokens("runs")) == 40
    assert cached(stream, "c") == 0
    again = reset(hello.address, router.token())
    assert again.blocks > 0 and again.blocks_in_use == 0
    stream.cancel()


def test_only_an_attached_router_may(start_replica: StartReplica, router: FakeRouter) -> None:
    start_replica()
    address = router.attached().address
    with pytest.raises(grpc.RpcError) as refused:
        reset(address, "none")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def config(**fields: Any) -> ReplicaConfig:
    given = {"replica": "replica-0", "model": "fake:full", "served_name": "fake",
             "routers": ("127.0.0.1:1",), "secret_file": "unused", "host_gib": 0.01}  # fmt: skip
    return parse_config(given | fields)


def test_tiers_are_cleared_when_asked(
    start_replica: StartReplica, router: FakeRouter, tmp_path: Path
) -> None:
    store = tiers.open_tiers(config(nvme=str(tmp_path), nvme_gib=0.05), SPEC)
    assert store is not None
    start_replica(blocks=20, tiers=store)
    address, stream = router.attached().address, router.execute()
    assert cached(stream, "a") == 0
    stream.submit("other", [7] * 300)  # pushes the first out of the device
    stream.tokens("other")
    assert store.flush(10.0) and all(stats.blocks > 0 for stats in store.stats().values())
    assert reset(address, router.token()).tier_blocks == 0
    assert cached(stream, "b") > 0, "tiers have it still"
    stream.submit("other2", [8] * 300)
    stream.tokens("other2")
    found = reset(address, router.token(), tiers=True)
    assert found.tier_blocks > 0 and not any(s.blocks for s in store.stats().values())
    assert cached(stream, "c") == 0
    stream.cancel()


def test_nothing_goes_round_a_reset_by_way_of_a_tier(
    start_replica: StartReplica, router: FakeRouter, tmp_path: Path, monkeypatch: Any
) -> None:
    store = tiers.open_tiers(config(nvme=str(tmp_path), nvme_gib=0.05), SPEC)
    assert store is not None
    start_replica(blocks=20, tiers=store)
    address, stream = router.attached().address, router.execute()

    def push_out(name: str, token: int) -> None:
        stream.submit(name, [token] * 300)
        stream.tokens(name)
        assert store.flush(10.0)

    assert cached(stream, "a") == 0
    push_out("b", 7)
    (disk,) = [queue.tier for queue in store.lower.values()]
    clear, meanwhile = disk.clear, []

    def busy() -> None:
        meanwhile.append(cached(stream, "c"))  # it would come up from the disk,
        clear()
        push_out("d", 8)  # and go down again now that the disk is empty

    monkeypatch.setattr(disk, "clear", busy)
    assert reset(address, router.token(), tiers=True).tier_blocks > 0
    assert meanwhile == [0] and not any(stats.blocks for stats in store.stats().values())
    assert cached(stream, "e") == 0
    push_out("f", 9)
    assert all(stats.blocks > 0 for stats in store.stats().values()), "else it goes down"
    assert cached(stream, "g") > 0, "and comes up"
    stream.cancel()


def test_a_tier_that_does_not_answer_is_an_error(
    start_replica: StartReplica, router: FakeRouter, tmp_path: Path, monkeypatch: Any
) -> None:
    store = tiers.open_tiers(config(nvme=str(tmp_path), nvme_gib=0.05), SPEC)
    assert store is not None
    start_replica(blocks=20, tiers=store)
    address = router.attached().address
    (queue,) = store.lower.values()
    monkeypatch.setattr(queue.tier, "stats", lambda: TierStats(state="broken"))
    with pytest.raises(NoReplica, match="disk tier does not answer"):
        store.clear(1.0)
    with pytest.raises(grpc.RpcError) as refused:
        reset(address, router.token(), tiers=True)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reset(address, router.token()).blocks == 0
    monkeypatch.undo()
    stream = router.execute()
    assert cached(stream, "a") == 0
    stream.submit("b", [7] * 300)
    stream.tokens("b")
    assert store.host.stats().blocks > 0, "blocks go down again after a reset that failed"
    stream.cancel()
