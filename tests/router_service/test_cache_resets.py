"""POST /reset_prefix_cache and ResetCache: every replica is asked, and the admin key alone may."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from http_calls import call
from loopback_cluster import Cluster, cluster, run
from scripted_replica import SECRET, Script

from banyan.client import AsyncClient
from banyan.v1 import api_pb2
from router.tenants import Tenants
from seams.errors import Forbidden, Unauthenticated
from seams.proof import admin_key

PATH = "/reset_prefix_cache"
ADMIN = {"Authorization": f"Bearer {admin_key(SECRET)}"}
KEYS = {"key-a": "tenant-a", "key-b": "tenant-b"}


class Resets:
    """A script's answer, and what was asked of it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.tiers: list[bool] = []

    def __call__(self, request: api_pb2.ResetCacheRequest) -> api_pb2.ReplicaReset:
        self.tiers.append(request.tiers)
        below = 7 * request.tiers
        return api_pb2.ReplicaReset(blocks=self.blocks, blocks_in_use=1, tier_blocks=below)


def at(running: Cluster) -> str:
    return running.server.http


def test_every_replica_is_asked_and_told_apart() -> None:
    async def scenario() -> None:
        first, second = Resets(5), Resets(9)
        scripts = Script(resets=first), Script(resets=second)
        async with cluster(*scripts, http="127.0.0.1:0", api_keys=KEYS) as running:
            found = await call(at(running), "POST", PATH, None, ADMIN)
            assert found.status == 200
            assert found.json == {
                "object": "prefix_cache_reset",
                "replicas": [
                    {"replica": "w0", "blocks": 5, "blocks_in_use": 1, "tier_blocks": 0},
                    {"replica": "w1", "blocks": 9, "blocks_in_use": 1, "tier_blocks": 0},
                ],
            }
            for said in ("true", "1", "True", "false", "0"):
                reply = await call(at(running), "POST", f"{PATH}?reset_external={said}", {}, ADMIN)
                assert reply.status == 200
            assert first.tiers == second.tiers == [False, True, True, True, False, False]
            wrong = await call(at(running), "POST", f"{PATH}?reset_external=all", None, ADMIN)
            assert wrong.status == 400 and wrong.error["param"] == "reset_external"
            async with AsyncClient(running.server.listen, admin_key(SECRET)) as client:
                replicas = (await client.reset_cache(tiers=True)).replicas
                assert [(r.replica, r.tier_blocks) for r in replicas] == [("w0", 7), ("w1", 7)]

    run(scenario())


@pytest.mark.parametrize("keys", [KEYS, {}], ids=["keys", "no keys"])
def test_no_tenant_may(keys: dict[str, str]) -> None:
    async def scenario() -> None:
        resets = Resets(5)
        async with cluster(Script(resets=resets), http="127.0.0.1:0", api_keys=keys) as running:
            wanted = {"": 401, "Bearer key-c": 401, "Bearer key-a": 403 if keys else 401}
            wanted |= {admin_key(SECRET): 401, f"Basic {admin_key(SECRET)}": 401}
            wanted |= {f"Bearer {admin_key(b'another')}": 401}
            for given, status in wanted.items():
                reply = await call(at(running), "POST", PATH, None, {"Authorization": given})
                assert reply.status == status, given
                code = "admin_key_required" if status == 403 else "invalid_api_key"
                assert reply.error["code"] == code
            assert (await call(at(running), "GET", PATH, None, ADMIN)).status == 405
            for key, kind in (("key-a", Forbidden if keys else Unauthenticated), (None, None)):
                async with AsyncClient(running.server.listen, key, 5.0) as client:
                    with pytest.raises(kind or Unauthenticated):
                        await client.reset_cache()
            assert not resets.tiers
            if keys:  # it is no tenant's key
                models = await call(at(running), "GET", "/v1/models", None, ADMIN)
                assert models.status == 401

    run(scenario())


def test_a_replica_that_does_not_answer_is_named() -> None:
    async def scenario() -> None:
        resets = Resets(5)
        scripts = Script(resets=resets), Script()
        async with cluster(*scripts, http="127.0.0.1:0") as running:
            reply = await call(at(running), "POST", PATH, None, ADMIN)
            assert reply.status == 503 and reply.headers["retry-after"]
            said = reply.error["message"]
            assert said == "1 of 2 replicas have reset their cache; w1 did not."
            assert resets.tiers == [False], "the others were asked all the same"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await running.stub.ResetCache(
                    api_pb2.ResetCacheRequest(),
                    metadata=(("authorization", ADMIN["Authorization"]),),
                )
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with cluster(http="127.0.0.1:0") as running:
            reply = await call(at(running), "POST", PATH, None, ADMIN)
            assert reply.status == 503 and reply.error["message"] == "No replica is attached."

    run(scenario())


def test_the_admin_key_is_the_secrets_and_nobodys_tenant() -> None:
    tenants = Tenants(KEYS, SECRET)
    tenants.check_admin(ADMIN["Authorization"])
    assert admin_key(SECRET) != admin_key(SECRET[::-1])
    with pytest.raises(Unauthenticated):
        tenants.identify(ADMIN["Authorization"])
    with pytest.raises(Forbidden):
        tenants.check_admin("Bearer key-b")
