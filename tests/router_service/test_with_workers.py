"""Router and real workers (FakeModel) as processes: SIGKILL in the middle of streams.

Scenario 6 of the reliability rules at the size of CI. FakeModel's next token is a hash of its KV,
so any lost, doubled or wrongly recomputed token changes everything after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from loopback_cluster import Answer, Cluster
from test_router_process import QUIET, start, wait_ready, write_config

from banyan.v1 import api_pb2, api_pb2_grpc, common_pb2

STREAMS = 16
TOKENS = 48
NAMES = ("w0", "w1")


@dataclass
class Processes:
    folder: Path
    router: dict[str, Any]
    workers: dict[str, subprocess.Popen[bytes]]

    def start_worker(self, name: str, model: str = "fake:full") -> None:
        config = self.folder / f"{name}.json"
        config.write_text(
            json.dumps(
                {
                    "replica": name,
                    "model": model,
                    "served_name": "fake",
                    "routers": [self.router["internal"]],
                    "secret_file": str(self.folder / "secret"),
                    "device": "cpu",
                    "threads": 1,
                }
            )
        )
        with (self.folder / f"{name}.log").open("ab") as log:
            self.workers[name] = subprocess.Popen(
                [sys.executable, "-m", "worker", "--config", str(config)],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def kill(self, name: str) -> None:
        self.workers[name].send_signal(signal.SIGKILL)
        self.workers[name].wait()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("cluster")
    router = start(
        write_config(folder, lease_ms=3000, heartbeat_ms=200, queue_wait_s_max=60.0), *QUIET
    )
    running = Processes(folder, wait_ready(folder, router), {})
    for name in NAMES:
        running.start_worker(name)
    yield running
    for worker in running.workers.values():
        worker.send_signal(signal.SIGTERM)
    router.send_signal(signal.SIGTERM)
    router.communicate(timeout=30)
    for worker in running.workers.values():
        worker.wait(30)


async def ready(stub: api_pb2_grpc.BanyanStub, count: int) -> None:
    end_s = time.monotonic() + 60
    while True:
        replicas = (await stub.ClusterState(api_pb2.ClusterStateRequest())).replicas
        if sum(r.state == "ready" for r in replicas) == count:
            return
        assert time.monotonic() < end_s, "the replicas did not come up"
        await asyncio.sleep(0.1)


def request(i: int, choices: int = 1) -> api_pb2.GenerateRequest:
    """Greedy and seeded streams alternate."""
    sampling = common_pb2.Sampling(
        max_tokens=TOKENS, seed=i, n=choices, temperature=float(i % 2), ignore_eos=True
    )
    ids = [(i * 31 + at * 7) % 250 for at in range(40 + i)]
    return api_pb2.GenerateRequest(tokens=api_pb2.TokenIds(ids=ids), sampling=sampling)


async def generate(
    stub: api_pb2_grpc.BanyanStub, wanted: api_pb2.GenerateRequest, seen: list[Answer]
) -> Answer:
    answer = Answer()
    seen.append(answer)
    call = stub.Generate(wanted, timeout=60)
    try:
        async for response in call:
            Cluster.note(answer, response)
    except grpc.aio.AioRpcError as error:
        answer.details = error.details() or ""
    answer.code = await call.code()
    answer.check_one_end()
    return answer


async def all_streams(
    stub: api_pb2_grpc.BanyanStub, running: Processes | None = None, at: int = 0, choices: int = 1
) -> tuple[list[Answer], str]:
    """Run the streams at once; kill a replica when some stream of it has come to token `at`."""
    seen: list[Answer] = []
    calls = [asyncio.create_task(generate(stub, request(i, choices), seen)) for i in range(STREAMS)]
    victim = ""
    while running is not None and not victim:
        await asyncio.sleep(0.001)
        there = [a for a in seen if a.started and sum(len(d.token_ids) for d in a.deltas) >= at]
        if there:
            victim = there[0].started[0].replica
            running.kill(victim)
    return list(await asyncio.gather(*calls)), victim


def test_sigkill_at_several_token_indices_is_invisible(processes: Processes) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(processes.router["listen"]) as channel:
            stub = api_pb2_grpc.BanyanStub(channel)
            await ready(stub, 2)
            truth = [a.ids() for a in (await all_streams(stub))[0]]
            assert all(len(ids) == TOKENS for ids in truth)
            for at in (0, TOKENS // 2, TOKENS - 2):
                moves = 0
                for _ in range(5):  # on a busy machine all may have ended before the kill
                    answers, victim = await all_streams(stub, processes, at)
                    processes.start_worker(victim)
                    for i, answer in enumerate(answers):
                        assert answer.code is grpc.StatusCode.OK, (at, i, answer.details)
                        assert answer.ids() == truth[i], (at, i)
                        assert answer.usage.completion_tokens == TOKENS
                    moves += sum(a.usage.moves for a in answers)
                    await ready(stub, 2)
                    if moves or at == TOKENS - 2:
                        break
                assert moves or at == TOKENS - 2

    asyncio.run(scenario())


def test_sigkill_under_several_choices_is_one_typed_error(processes: Processes) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(processes.router["listen"]) as channel:
            stub = api_pb2_grpc.BanyanStub(channel)
            await ready(stub, 2)
            lost = False
            for _ in range(5):  # on a busy machine all may have ended before the kill
                answers, victim = await all_streams(stub, processes, TOKENS // 2, choices=2)
                processes.start_worker(victim)
                codes = {a.code for a in answers if a.started[0].replica == victim}
                assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK}
                others = {a.code for a in answers if a.started[0].replica != victim}
                assert others <= {grpc.StatusCode.OK}
                await ready(stub, 2)
                lost = grpc.StatusCode.UNAVAILABLE in codes
                if lost:
                    break
            assert lost

    asyncio.run(scenario())
