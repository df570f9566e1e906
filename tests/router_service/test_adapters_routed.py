"""Adapters at the router: models of their own, never the default, and each its own keys."""

from __future__ import annotations

import grpc
from loopback_cluster import Cluster, cluster, prompt, run
from scripted_replica import BLOCK_TOKENS, ScriptedReplica

from banyan.v1 import internal_pb2
from kvstore.keys import root


def with_adapters(*names: str) -> ScriptedReplica:
    """A replica that serves "scripted" and, for every name, "scripted:NAME"."""
    replica = ScriptedReplica("w0")

    def add(hello: internal_pb2.Hello) -> None:
        for name in names:
            served = hello.models.add()
            served.CopyFrom(hello.models[0])
            served.name, served.adapter = f"scripted:{name}", name
            served.adapter_fingerprint = f"fingerprint of {name}"
            served.root_id = root("model-fingerprint", served.adapter_fingerprint, BLOCK_TOKENS)

    replica.change_hello = add
    return replica


async def attach(c: Cluster, replica: ScriptedReplica) -> None:
    await replica.start(c.server.internal)
    await replica.attached.wait()
    c.replicas.append(replica)
    assert not replica.refusal


def test_each_adapter_is_asked_for_by_name() -> None:
    async def scenario() -> None:
        async with cluster() as c:
            replica = with_adapters("one", "two")
            await attach(c, replica)
            roots = []
            for name in ("scripted", "scripted:one", "scripted:two", ""):
                request = prompt("the same prompt for every one of them")
                request.model = name
                assert (await c.generate(request)).code is grpc.StatusCode.OK
                roots.append(replica.submits[-1].root_id)
            assert len(set(roots)) == 3 and roots[3] == roots[0]  # the default is the base model

    run(scenario())


def test_an_adapter_nobody_has_is_named() -> None:
    async def scenario() -> None:
        async with cluster(lease_ms=150) as c:
            await attach(c, with_adapters("one"))
            await c.until(lambda: c.server._clock.now() - c.server._api._started_s > 0.2)
            request = prompt()
            request.model = "scripted:three"
            answer = await c.generate(request)
            assert answer.code is grpc.StatusCode.NOT_FOUND
            assert answer.details == "No replica serves a model 'scripted:three'."

    run(scenario())
