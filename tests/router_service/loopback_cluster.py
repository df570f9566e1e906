"""A router and scripted replicas in one event loop, and a client of them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from scripted_replica import SECRET, Script, ScriptedReplica

from banyan.v1 import api_pb2, api_pb2_grpc, common_pb2
from router.config import RouterConfig
from router.core import RouterCore
from router.service.server import RouterServer
from seams.clock import SystemClock
from seams.rng import SystemRng

CONFIG = RouterConfig(
    router="r0",
    secret_file="",
    heartbeat_ms=50,
    lease_ms=600,
    queue_wait_s_max=2.0,
)


@dataclass
class Answer:
    """All that one Generate call gave."""

    started: list[api_pb2.Started] = field(default_factory=list)
    deltas: list[api_pb2.Delta] = field(default_factory=list)
    choices: list[api_pb2.ChoiceFinished] = field(default_factory=list)
    finished: list[api_pb2.Finished] = field(default_factory=list)
    code: grpc.StatusCode | None = None
    details: str = ""
    trailing: dict[str, str] = field(default_factory=dict)
    initial: dict[str, str] = field(default_factory=dict)

    def ids(self, choice: int = 0) -> list[int]:
        """Token ids of a choice; asserts that none is missing or doubled."""
        found: list[int] = []
        mine = [delta for delta in self.deltas if delta.choice == choice]
        for delta in mine:
            assert delta.position == mine[0].position + len(found), "a gap or a duplicate"
            found += delta.token_ids
        return found

    def text(self, choice: int = 0) -> str:
        parts = [d.text for d in self.deltas if d.choice == choice]
        return "".join(parts) + "".join(c.text for c in self.choices if c.choice == choice)

    @property
    def usage(self) -> common_pb2.Usage:
        return self.finished[0].usage

    def check_one_end(self) -> None:
        """Exactly one terminal: Finished and OK, or an error and no Finished."""
        if self.code is grpc.StatusCode.OK:
            assert len(self.started) == 1 and len(self.finished) == 1
            usage = self.usage
            assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
            assert sorted(c.choice for c in self.choices) == list(range(len(self.choices)))
        else:
            assert not self.finished


@dataclass
class Cluster:
    server: RouterServer
    core: RouterCore
    channel: grpc.aio.Channel
    replicas: list[ScriptedReplica]

    @property
    def stub(self) -> api_pb2_grpc.BanyanStub:
        return api_pb2_grpc.BanyanStub(self.channel)

    async def add(self, name: str, script: Script | None = None) -> ScriptedReplica:
        replica = ScriptedReplica(name, script)
        await replica.start(self.server.internal)
        await asyncio.wait_for(replica.attached.wait(), 5)
        self.replicas.append(replica)
        return replica

    async def generate(
        self,
        request: api_pb2.GenerateRequest,
        timeout_s: float | None = 20.0,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Answer:
        answer = Answer()
        call = self.stub.Generate(request, timeout=timeout_s, metadata=tuple(metadata))
        try:
            async for response in call:
                self.note(answer, response)
        except grpc.aio.AioRpcError:
            pass
        answer.code = await call.code()
        answer.details = await call.details() or ""
        answer.trailing = {k: str(v) for k, v in await call.trailing_metadata() or ()}
        answer.initial = {k: str(v) for k, v in await call.initial_metadata() or ()}
        answer.check_one_end()
        return answer

    @staticmethod
    def note(answer: Answer, response: api_pb2.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        into: dict[str, list[Any]] = {
            "started": answer.started,
            "delta": answer.deltas,
            "choice_finished": answer.choices,
            "finished": answer.finished,
        }
        assert not answer.finished, "something after Finished"
        into[kind].append(getattr(response, kind))

    @staticmethod
    async def until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
        """Wait for something that has to happen soon."""
        end_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end_s, "it did not happen in time"
            await asyncio.sleep(0.01)

    async def quiet(self) -> None:
        """Wait until nothing is booked, then let the core check itself."""
        for _ in range(200):
            if not self.core._bookings and not self.server._api._relays:
                break
            await asyncio.sleep(0.01)
        assert not self.core._bookings and not self.server._api._relays
        self.core.check_integrity()


@asynccontextmanager
async def cluster(
    *scripts: Script, config: RouterConfig = CONFIG, **changes: Any
) -> AsyncIterator[Cluster]:
    """A router and one replica per script, attached. Everything is stopped on the way out."""
    clock, rng = SystemClock(), SystemRng()
    config = dataclasses.replace(config, **changes)
    core = RouterCore(
        clock, rng, lease_s=config.lease_ms / 1000, decisions_kept=config.decisions_kept
    )
    server = RouterServer(config, SECRET, core, clock, rng)
    await server.start()
    channel = grpc.aio.insecure_channel(
        server.listen, options=[("grpc.use_local_subchannel_pool", 1)]
    )
    running = Cluster(server, core, channel, [])
    try:
        for index, script in enumerate(scripts):
            await running.add(f"w{index}", script)
        yield running
    finally:
        await channel.close()
        for replica in running.replicas:
            await replica.die()
        await server.stop(0.0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run one scenario to its end."""
    asyncio.run(asyncio.wait_for(scenario, 60))


def prompt(text: str = "hello", **sampling: Any) -> api_pb2.GenerateRequest:
    """A text request."""
    sampling.setdefault("max_tokens", 8)
    return api_pb2.GenerateRequest(text=text, sampling=common_pb2.Sampling(**sampling))
