"""A fake router and replicas over FakeModel, all on loopback, each test its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_peers import SECRET, FakeRouter, StartReplica

from kvstore.tiered import TieredStore
from seams.clock import SystemClock
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.engine.thread import ThreadEngine
from worker.models.fake import fake_model
from worker.service.replica import Replica, ReplicaParts


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET.hex())
    path.chmod(0o600)
    return path


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    peer = FakeRouter()
    yield peer
    peer.stop()


@pytest.fixture
def cores() -> list[EngineCore]:
    """The engines of the replicas a test has started, in order; touch them when they are idle."""
    return []


def parts(
    blocks: int,
    text_files: dict[str, bytes],
    cores: list[EngineCore],
    tiers: TieredStore | None = None,
) -> ReplicaParts:
    model, clock = fake_model("full"), SystemClock()
    limits = EngineConfig(blocks=(blocks,), poison_freed=True)
    cores.append(EngineCore(model, limits, clock, tiers=tiers))
    engine = ThreadEngine(cores[-1])
    return ReplicaParts(engine, model.spec, (blocks,), text_files, clock, tiers)


@pytest.fixture
def start_replica(
    secret_file: Path, router: FakeRouter, cores: list[EngineCore]
) -> Iterator[StartReplica]:
    started: list[Replica] = []

    def start(
        *,
        blocks: int = 256,
        text_files: dict[str, bytes] | None = None,
        on_failure: Callable[[], None] | None = None,
        tiers: TieredStore | None = None,
        **fields: Any,
    ) -> Replica:
        given = {
            "replica": "replica-0",
            "model": "fake:full",
            "served_name": "fake",
            "routers": (router.address,),
            "secret_file": str(secret_file),
            "threads": 1,
        } | fields
        made = parts(blocks, text_files or {}, cores, tiers)
        replica = Replica(ReplicaConfig(**given), made, SECRET, on_failure)
        replica.start()
        started.append(replica)
        return replica

    yield start
    for replica in started:
        replica.stop()
