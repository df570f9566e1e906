"""Direct streams under tickets, and the tokenizer files, over real gRPC."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from service_peers import SECRET, WAIT_S, FakeRouter, StartReplica, eventually, ticket

from banyan.v1 import api_pb2, common_pb2, internal_pb2, internal_pb2_grpc
from kvstore.keys import tenant_salt
from seams.errors import Overloaded
from seams.textfiles import tokenizer_fingerprint
from worker.models.fake import fake_model
from worker.service.server import CHUNK_BYTES, DIRECT_CREDIT_TOKENS

PROMPT = [5] * 20
BIAS = common_pb2.TokenBias


@pytest.fixture
def replica(start_replica: StartReplica) -> Any:
    return start_replica(blocks=4096)


@pytest.fixture
def stub(replica: Any) -> Iterator[Any]:
    with grpc.insecure_channel(replica.address) as channel:
        yield internal_pb2_grpc.ReplicaStub(channel)


def request(
    sealed: bytes, token_ids: list[int] = PROMPT, max_tokens: int = 8, **sampling: Any
) -> internal_pb2.DirectRequest:
    return internal_pb2.DirectRequest(
        ticket=sealed,
        token_ids=token_ids,
        sampling=common_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True, **sampling),
    )


def test_a_ticketed_client_streams(router: FakeRouter, stub: Any) -> None:
    frames = list(stub.Stream(request(ticket(router.attached(), PROMPT)), timeout=WAIT_S))
    emissions = [e for frame in frames for e in frame.emissions]
    assert {e.request_id for e in emissions} == {"direct"}
    tokens = [token for e in emissions for token in e.token_ids]
    assert tokens == fake_model("full").oracle(PROMPT, 8, ignore_eos=True)
    assert [e.last for e in emissions] == [False] * (len(emissions) - 1) + [True]
    assert emissions[-1].usage.prompt_tokens == len(PROMPT)


def test_more_tokens_than_the_credit_window(router: FakeRouter, stub: Any) -> None:
    count = 4 * DIRECT_CREDIT_TOKENS
    frames = stub.Stream(request(ticket(router.attached(), PROMPT), max_tokens=count))
    assert sum(len(e.token_ids) for frame in frames for e in frame.emissions) == count


def test_choices_outlive_the_credit_window_too(router: FakeRouter, stub: Any) -> None:
    count = 2 * DIRECT_CREDIT_TOKENS
    asked = request(ticket(router.attached(), PROMPT), max_tokens=count, n=3, temperature=1.0)
    frames = stub.Stream(asked)
    assert sum(len(e.token_ids) for frame in frames for e in frame.emissions) == 3 * count


def test_one_ticket_serves_two_streams_at_once(router: FakeRouter, stub: Any) -> None:
    """The request id of a ticket is the client's affair: streams never mix."""
    sealed = ticket(router.attached(), PROMPT)
    one, two = (stub.Stream(request(sealed, max_tokens=100)) for _ in range(2))
    tokens = [
        [t for f in stream for e in f.emissions for t in e.token_ids] for stream in (one, two)
    ]
    assert tokens[0] == tokens[1] == fake_model("full").oracle(PROMPT, 100, ignore_eos=True)


def refusals(hello: internal_pb2.Hello) -> list[tuple[str, internal_pb2.DirectRequest, str]]:
    good = ticket(hello, PROMPT)
    past = time.time_ns() // 1_000_000 - 1
    foreign = ticket(hello, PROMPT, root_id=bytes(32))
    return [
        ("none", request(b""), "UNAUTHENTICATED"),
        ("other secret", request(ticket(hello, PROMPT, b"x" * 32)), "UNAUTHENTICATED"),
        ("changed", request(good[:-1] + bytes([good[-1] ^ 1])), "UNAUTHENTICATED"),
        ("expired", request(ticket(hello, PROMPT, expires_unix_ms=past)), "UNAUTHENTICATED"),
        ("replica", request(ticket(hello, PROMPT, replica="other")), "UNAUTHENTICATED"),
        ("epoch", request(ticket(hello, PROMPT, epoch=hello.epoch - 1)), "UNAUTHENTICATED"),
        ("digest", request(good, [*PROMPT[:-1], 6]), "UNAUTHENTICATED"),
        ("length", request(good, [*PROMPT, 6]), "UNAUTHENTICATED"),
        ("prompt", request(ticket(hello, PROMPT, prompt_tokens=19)), "UNAUTHENTICATED"),
        ("root", request(foreign), "NOT_FOUND"),
        ("seed", request(good, seed=2), "INVALID_ARGUMENT"),
        ("limit", request(good, n=65), "INVALID_ARGUMENT"),
        ("context", request(good, max_tokens=4096), "INVALID_ARGUMENT"),
        ("bias nan", request(good, logit_bias=[BIAS(bias=float("nan"))]), "INVALID_ARGUMENT"),
        ("bias large", request(good, logit_bias=[BIAS(bias=101.0)]), "INVALID_ARGUMENT"),
        ("biases", request(good, logit_bias=[BIAS()] * 1025), "INVALID_ARGUMENT"),
        ("long ticket", request(good + bytes(4096)), "INVALID_ARGUMENT"),
    ]


def test_what_a_ticket_does_not_allow(router: FakeRouter, replica: Any, stub: Any) -> None:
    for name, asked, code in refusals(router.attached()):
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Stream(asked, timeout=WAIT_S))
        assert caught.value.code().name == code, name
        assert caught.value.details().endswith("."), name
    assert replica._dispatcher.running == 0


UNCHOOSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "bias outside": ({"logit_bias": [BIAS(token_id=256)]}, "logit_bias has an id outside"),
    "bias twice": ({"logit_bias": [BIAS(token_id=3)] * 2}, "logit_bias names a token id twice"),
    "allowed outside": ({"allowed_token_ids": [3, 256]}, "allowed_token_ids has an id outside"),
    "nothing allowed": (
        {"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1},
        "min_tokens forbids all of Sampling.allowed_token_ids",
    ),
}


def test_what_the_engine_cannot_choose_harms_no_other_stream(router: FakeRouter, stub: Any) -> None:
    """No router saw these: the engine refuses them, in a frame, while another stream runs."""
    sealed = ticket(router.attached(), PROMPT)
    other = stub.Stream(request(sealed, max_tokens=400), timeout=WAIT_S)
    tokens = [token for e in next(other).emissions for token in e.token_ids]
    for name, (sampling, sentence) in UNCHOOSABLE.items():
        (frame,) = stub.Stream(request(sealed, **sampling), timeout=WAIT_S)
        (emission,) = frame.emissions
        assert emission.last and not emission.token_ids, name
        assert emission.error.error == "InvalidRequest", name
        assert sentence in emission.error.message and emission.error.message.endswith("."), name
    tokens += [token for frame in other for e in frame.emissions for token in e.token_ids]
    assert tokens == fake_model("full").oracle(PROMPT, 400, ignore_eos=True)


def test_refusals_say_their_class_and_when_to_retry(
    router: FakeRouter, replica: Any, stub: Any
) -> None:
    hello = router.attached()
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Stream(request(ticket(hello, PROMPT), max_tokens=4096), timeout=WAIT_S))
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["banyan-error"] == "PromptTooLong" and "retry-after-ms" not in trailing
    replica._dispatcher.refuses = Overloaded("Full.", retry_after_s=0.25)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Stream(request(ticket(hello, PROMPT)), timeout=WAIT_S))
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["banyan-error"] == "Overloaded" and trailing["retry-after-ms"] == "250"


def test_a_direct_and_a_routed_request_of_a_tenant_share(router: FakeRouter, stub: Any) -> None:
    hello, execute = router.attached(), router.execute()
    salt = tenant_salt(SECRET, "alice")
    execute.submit("routed", PROMPT, tenant="alice", salt=salt)
    execute.finished("routed")
    for tenant, cached in (("alice", len(PROMPT) - 1), ("bob", 0)):
        frames = list(stub.Stream(request(ticket(hello, PROMPT, tenant=tenant)), timeout=WAIT_S))
        assert frames[-1].emissions[-1].usage.cached_tokens == cached


def test_cancelling_frees(router: FakeRouter, replica: Any, stub: Any) -> None:
    call = stub.Stream(request(ticket(router.attached(), PROMPT), max_tokens=4000))
    next(call)
    call.cancel()
    eventually(lambda: replica._dispatcher.running == 0, within_s=2)
    eventually(lambda: replica._parts.engine.load().running == 0, within_s=2)


def test_the_calls_deadline_is_the_requests(router: FakeRouter, replica: Any, stub: Any) -> None:
    model = replica._parts.engine._core._model
    plain = model.execute

    def slow(plan: Any) -> Any:
        time.sleep(0.02)
        return plain(plan)

    model.execute = slow
    call = stub.Stream(request(ticket(router.attached(), PROMPT), max_tokens=4000), timeout=0.3)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: replica._parts.engine.load().running == 0, within_s=2)


def test_a_client_that_does_not_read_stops_its_own_stream_only(
    router: FakeRouter, replica: Any, stub: Any
) -> None:
    """Frames in flight are bounded by credit and the transport's window, not by max_tokens."""
    hello = router.attached()
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(replica.address, options=small_window) as channel:
        deaf = internal_pb2_grpc.ReplicaStub(channel)
        asked = request(ticket(hello, PROMPT), max_tokens=4000, logprobs=20)
        calls = [deaf.Stream(asked) for _ in range(4)]
        eventually(lambda: replica._parts.engine.load().running == 4)
        for _ in range(5):
            frames = list(stub.Stream(request(ticket(hello, PROMPT)), timeout=WAIT_S))
            assert frames[-1].emissions[-1].last
        eventually(lambda: not replica._dispatcher.pending)  # all four wait for credit now
        assert replica._dispatcher.running == 4
        streams = [s for s in replica._dispatcher._streams if s._open]
        assert all(len(s._frames) <= DIRECT_CREDIT_TOKENS for s in streams)
        for call in calls:
            call.cancel()
    eventually(lambda: replica._dispatcher.running == 0)


def test_no_direct_streams_while_draining(router: FakeRouter, replica: Any, stub: Any) -> None:
    hello = router.attached()
    assert replica.drain(grace_s=WAIT_S)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Stream(request(ticket(hello, PROMPT)), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- text files and reflection ------------------------------------------------------------------

FILES = {
    "tokenizer.json": bytes(range(256)) * 3000,
    "chat_template.jinja": b"{{ messages }}",
    "special_tokens_map.json": b"",
}


def test_text_files_arrive_whole(router: FakeRouter, start_replica: StartReplica) -> None:
    replica = start_replica(text_files=FILES)
    (model,) = router.attached().models
    assert (
        model.tokenizer_fingerprint == tokenizer_fingerprint(FILES) and model.template_fingerprint
    )
    got: dict[str, bytes] = {}
    closed = []
    with grpc.insecure_channel(replica.address) as channel:
        stub = internal_pb2_grpc.ReplicaStub(channel)
        asked = api_pb2.TextFilesRequest(fingerprint=model.tokenizer_fingerprint)
        session = (("banyan-session", router.token()),)
        for chunk in stub.TextFiles(asked, timeout=WAIT_S, metadata=session):
            assert len(chunk.data) <= CHUNK_BYTES and chunk.name not in closed
            got[chunk.name] = got.get(chunk.name, b"") + chunk.data
            closed += [chunk.name] if chunk.last else []
    assert got == FILES and sorted(closed) == sorted(FILES)
    assert (
        hashlib.sha256(got["tokenizer.json"]).digest()
        == hashlib.sha256(FILES["tokenizer.json"]).digest()
    )


@pytest.mark.parametrize("fingerprint", ["", "00" * 32])
def test_an_unknown_fingerprint_is_not_found(
    stub: Any, router: FakeRouter, fingerprint: str
) -> None:
    router.attached()
    asked = api_pb2.TextFilesRequest(fingerprint=fingerprint)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.TextFiles(asked, timeout=WAIT_S, metadata=(("banyan-session", router.token()),)))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("metadata", [(), (("banyan-session", "00" * 32),)])
def test_text_files_are_for_attached_routers(stub: Any, metadata: Any) -> None:
    asked = api_pb2.TextFilesRequest(fingerprint="00" * 32)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.TextFiles(asked, timeout=WAIT_S, metadata=metadata))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_reflection_names_the_services(replica: Any) -> None:
    with grpc.insecure_channel(replica.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([asked]), timeout=WAIT_S)
    names = {service.name for service in reply.list_services_response.service}
    assert {"banyan.v1.Replica", "grpc.health.v1.Health"} <= names


def test_a_message_over_the_limit_is_refused_by_the_transport(replica: Any, stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Stream(internal_pb2.DirectRequest(ticket=bytes(17 << 20)), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_threads_do_not_pile_up(start_replica: StartReplica) -> None:
    before = threading.active_count()
    start_replica().stop()
    eventually(lambda: threading.active_count() <= before + 1)  # grpc keeps one poller
