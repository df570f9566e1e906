"""What is refused before any replica sees it, tenants, Pick, Explain, health: over loopback."""

from __future__ import annotations

import time

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from loopback_cluster import Cluster, cluster, prompt, run
from scripted_replica import SECRET, TEXT_FILES, Script

from banyan.v1 import api_pb2, common_pb2, internal_pb2
from kvstore.keys import tenant_salt, tokens_u32le
from router.tenants import Tenants
from seams.errors import Unauthenticated
from seams.limits import LIMITS
from seams.proof import token_digest, unseal
from seams.textfiles import tokenizer_fingerprint

REQUEST = api_pb2.GenerateRequest
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def _bad_requests() -> dict[str, api_pb2.GenerateRequest]:
    ids = api_pb2.TokenIds
    resume = api_pb2.Resume
    return {
        "no prompt": REQUEST(),
        "empty text": REQUEST(text=""),
        "empty ids": REQUEST(tokens=ids()),
        "id outside the vocabulary": REQUEST(tokens=ids(ids=[300])),
        "empty stop string": REQUEST(text="a", stop=[""]),
        "min above max": prompt(max_tokens=3, min_tokens=4),
        "resume of several": REQUEST(
            text="a", sampling=common_pb2.Sampling(n=2), resume=resume(seed=1, token_ids=[1])
        ),
        "another seed": REQUEST(
            text="a", sampling=common_pb2.Sampling(seed=2), resume=resume(seed=1, token_ids=[1])
        ),
        "resumed id outside": REQUEST(text="a", resume=resume(seed=1, token_ids=[300])),
        "resumed more than all": REQUEST(
            text="a",
            sampling=common_pb2.Sampling(max_tokens=1),
            resume=resume(seed=1, token_ids=[1, 2]),
        ),
        "prompt as long as the context": REQUEST(text="x" * 2048),
        "output past the context": prompt("x" * 2040, max_tokens=9),
        "bias outside the vocabulary": prompt(logit_bias=[common_pb2.TokenBias(token_id=300)]),
        "bias given twice": prompt(logit_bias=[common_pb2.TokenBias(token_id=3)] * 2),
        "bias out of bounds": prompt(logit_bias=[common_pb2.TokenBias(token_id=3, bias=101)]),
        "allowed outside the vocabulary": prompt(allowed_token_ids=[3, 300]),
        "not a number": prompt(temperature=float("nan")),
        "infinite": prompt(temperature=float("inf")),
    }


@pytest.mark.parametrize("name", _bad_requests())
def test_malformed_requests_are_refused_before_any_replica(name: str) -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            answer = await c.generate(_bad_requests()[name])
            assert answer.code is INVALID, answer
            assert answer.details.endswith(".") and not answer.started
            if "context" in name:
                assert answer.trailing["banyan-error"] == "PromptTooLong"
            assert not c.replicas[0].submits and not c.core._bookings

    run(scenario())


def _over_limit() -> list[tuple[str, api_pb2.GenerateRequest]]:
    """One request per limit that a client's Generate can pass by a little."""
    cases = []
    for message in (common_pb2.Sampling, api_pb2.GenerateRequest):
        for field in message.DESCRIPTOR.fields:
            name = f"{message.DESCRIPTOR.name}.{field.name}"
            limit = LIMITS[name]
            for bound in ("low", "high", "size_max"):
                request = prompt()
                into = request.sampling if message is common_pb2.Sampling else request
                if _exceed(into, field, getattr(limit, bound), bound):
                    cases.append((f"{name} {bound}", request))
    return cases


def _exceed(into, field: FieldDescriptor, value: float | None, bound: str) -> bool:
    if value is None or field.type == FieldDescriptor.TYPE_MESSAGE:
        return False
    if bound == "size_max":
        size = int(value) + 1
        if field.label == FieldDescriptor.LABEL_REPEATED:
            one = "s" if field.type == FieldDescriptor.TYPE_STRING else 1
            getattr(into, field.name).extend([one] * size)
        else:
            setattr(into, field.name, "x" * size)
        return True
    step = 1 if bound == "high" else -1
    unsigned = field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64)
    if unsigned and bound == "low":
        return False
    setattr(into, field.name, type(getattr(into, field.name))(value + step))
    return True


def test_every_limit_of_a_request_holds() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            cases = _over_limit()
            assert len(cases) > 20
            for name, request in cases:
                answer = await c.generate(request)
                assert answer.code is INVALID, name
                assert name.split()[0].split(".")[1] in answer.details, name
            assert not c.replicas[0].submits

    run(scenario())


def test_an_error_text_never_carries_the_prompt() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            secret = "swordfish"
            request = prompt(secret + "x" * 3000)
            request.label = secret * 40
            assert secret not in (await c.generate(request)).details
            request.label = ""
            assert secret not in (await c.generate(request)).details

    run(scenario())


def test_unknown_and_ambiguous_models() -> None:
    async def scenario() -> None:
        async with cluster(Script(), lease_ms=150) as c:
            request = prompt()
            request.model = "other"
            await c.until(lambda: c.server._clock.now() - c.server._api._started_s > 0.2)
            answer = await c.generate(request)
            assert answer.code is grpc.StatusCode.NOT_FOUND
            assert answer.trailing["banyan-error"] == "ModelNotFound"
            request.model = "scripted"
            assert (await c.generate(request)).code is grpc.StatusCode.OK

    run(scenario())


KEYS = {"key-a": "alice", "key-b": "bob", "key-a2": "alice"}


def test_tenants_come_from_keys_and_have_their_own_salts() -> None:
    async def scenario() -> None:
        async with cluster(Script(), api_keys=KEYS) as c:
            for metadata in ([], [("authorization", "Bearer nope")], [("authorization", "key-a")]):
                answer = await c.generate(prompt(), metadata=metadata)
                assert answer.code is grpc.StatusCode.UNAUTHENTICATED
            for key in KEYS:
                await c.generate(prompt(), metadata=[("authorization", f"bearer {key}")])
            given = [(s.tenant, s.salt) for s in c.replicas[0].submits]
            assert given == [(t, tenant_salt(SECRET, t)) for t in ("alice", "bob", "alice")]
            for call in (
                c.stub.ListModels(api_pb2.ListModelsRequest()),
                c.stub.ClusterState(api_pb2.ClusterStateRequest()),
                c.stub.Explain(api_pb2.ExplainRequest(request=prompt())),
                c.stub.Pick(api_pb2.PickRequest(request=prompt())),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(scenario())


def test_tenants_without_a_cluster() -> None:
    assert Tenants({}, SECRET).identify("").name == "default"
    tenants = Tenants(KEYS, SECRET)
    assert tenants.identify("Bearer key-b").name == "bob"
    for wrong in ("", "Bearer", "Bearer ", "Basic key-a", "Bearer key-a\udcff", "Bearer key-aa"):
        with pytest.raises(Unauthenticated):
            tenants.identify(wrong)


def test_explain_by_id_is_for_the_tenant_who_asked() -> None:
    async def scenario() -> None:
        async with cluster(Script(), Script(), api_keys=KEYS) as c:
            alice = (("authorization", "Bearer key-a"),)
            answer = await c.generate(prompt("z" * 64), metadata=alice)
            asked = api_pb2.ExplainRequest(request_id=answer.started[0].request_id)
            found = (await c.stub.Explain(asked, metadata=alice)).decision
            assert found.replica == answer.started[0].replica and len(found.candidates) == 2
            assert found.reason and found.candidates[0].terms
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await c.stub.Explain(asked, metadata=(("authorization", "Bearer key-b"),))
            assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
            dry = api_pb2.ExplainRequest(request=prompt("z" * 64))
            again = (await c.stub.Explain(dry, metadata=alice)).decision
            assert again.chosen_tokens == 63 and again.replica == found.replica
            assert not c.core._bookings

    run(scenario())


def test_pick_seals_what_the_replica_needs_and_books_for_a_while() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            before_ms = time.time_ns() // 1_000_000
            asked = api_pb2.PickRequest(request=prompt("hello"), ticket_ttl_ms=5000)
            picked = await c.stub.Pick(asked)
            body = internal_pb2.TicketBody.FromString(unseal(SECRET, picked.ticket))
            assert list(picked.token_ids) == list(b"hello")
            assert body.token_digest == token_digest(tokens_u32le(picked.token_ids), 5)
            assert (body.replica, body.epoch) == ("w0", c.replicas[0].epoch)
            assert body.seed == picked.seed and body.request_id == picked.request_id
            assert body.root_id == picked.root_id and body.prompt_tokens == 5
            assert tenant_salt(SECRET, "default") not in picked.ticket
            assert 0 <= body.expires_unix_ms - before_ms - 5000 < 2000
            assert picked.address == c.replicas[0].address and picked.model == "scripted"
            assert picked.decision.replica == "w0"
            assert picked.request_id in c.core._bookings
            await c.quiet()
            decision = c.core.explain(picked.request_id)
            assert not decision.HasField("delivered_tokens"), "nobody has reported it"

    run(scenario())


def test_pick_refuses_stop_strings_and_continues_a_resumed_stream() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            stopped = prompt()
            stopped.stop.append("x")
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await c.stub.Pick(api_pb2.PickRequest(request=stopped))
            assert refusal.value.code() is INVALID
            resumed = prompt("ab", max_tokens=5)
            resumed.resume.seed = 11
            resumed.resume.token_ids.extend([99, 100])
            picked = await c.stub.Pick(api_pb2.PickRequest(request=resumed))
            assert list(picked.token_ids) == [97, 98, 99, 100] and picked.seed == 11
            assert picked.decision.prompt_tokens == 2
            await c.quiet()

    run(scenario())


def test_text_files_are_passed_on() -> None:
    async def scenario() -> None:
        async with cluster(Script()) as c:
            asked = api_pb2.TextFilesRequest(fingerprint=tokenizer_fingerprint(TEXT_FILES))
            files: dict[str, bytes] = {}
            async for chunk in c.stub.TextFiles(asked):
                files[chunk.name] = files.get(chunk.name, b"") + chunk.data
            assert files == TEXT_FILES
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                async for _ in c.stub.TextFiles(api_pb2.TextFilesRequest(fingerprint="no")):
                    pass
            assert refusal.value.code() is grpc.StatusCode.NOT_FOUND

    run(scenario())


async def _health(c: Cluster, service: str, address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service=service)
        return int((await stub.Check(asked)).status)


def test_health_follows_the_replicas() -> None:
    async def scenario() -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        async with cluster() as c:
            for address in (c.server.listen, c.server.internal):
                assert await _health(c, "", address) == serving
                assert await _health(c, "ready", address) != serving
            await c.add("w0")
            await c.until(lambda: c.server._ready)
            assert await _health(c, "ready", c.server.listen) == serving
            await c.replicas[0].die()
            await c.until(lambda: not c.server._ready, 1.0)
            assert await _health(c, "ready", c.server.listen) != serving

    run(scenario())


def test_reflection_lists_the_services() -> None:
    async def scenario() -> None:
        async with cluster() as c:
            for address, service in (
                (c.server.listen, "banyan.v1.Banyan"),
                (c.server.internal, "banyan.v1.Fleet"),
            ):
                async with grpc.aio.insecure_channel(address) as channel:
                    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                    call = stub.ServerReflectionInfo()
                    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                    listed = (await call.read()).list_services_response.service
                    call.cancel()
                    names = {entry.name for entry in listed}
                    assert {service, "grpc.health.v1.Health"} <= names

    run(scenario())


def test_questions_and_failures_crowd_out_no_decision() -> None:
    async def scenario() -> None:
        async with cluster(Script(), decisions_kept=2) as c:
            answers = [await c.generate(prompt(f"{i}")) for i in range(2)]
            for i in range(3):
                await c.stub.Explain(api_pb2.ExplainRequest(request=prompt(f"dry {i}")))
                assert (await c.generate(prompt("a" * 2040, max_tokens=99))).code is INVALID
            for answer in answers:
                asked = api_pb2.ExplainRequest(request_id=answer.started[0].request_id)
                assert (await c.stub.Explain(asked)).decision.replica == "w0"
            await c.generate(prompt("a third"))
            gone = api_pb2.ExplainRequest(request_id=answers[0].started[0].request_id)
            with pytest.raises(grpc.aio.AioRpcError):
                await c.stub.Explain(gone)

    run(scenario())
