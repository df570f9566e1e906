"""Messages from outside: what passes the engine may trust, what does not gets one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from banyan.v1 import common_pb2, internal_pb2
from kvstore.keys import tenant_salt, tokens_u32le
from router.tenants import Tenants
from seams.errors import (
    BanyanError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    Unauthenticated,
)
from seams.limits import LIMITS, TOKENS_MAX
from seams.proof import seal, token_digest
from worker.engine.messages import (
    CacheOp,
    CacheOpKind,
    Emission,
    EngineLoad,
    Finish,
    Logprobs,
    RequestUsage,
)
from worker.service import convert
from worker.service.tickets import open_ticket

ROOT = bytes(range(32))
ROOTS = {ROOT: convert.ServedRoot(ROOT, context_tokens=100, vocab_tokens=50)}


def submit(**fields: Any) -> internal_pb2.Submit:
    sampling = common_pb2.Sampling(**({"seed": 3, "max_tokens": 4} | fields.pop("sampling", {})))
    given = {
        "request_id": "a",
        "root_id": ROOT,
        "token_ids": [1, 2, 3],
        "prompt_tokens": 3,
        "sampling": sampling,
        "credit_tokens": 7,
    } | fields
    return internal_pb2.Submit(**given)


def test_every_field_arrives() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 9,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "min_tokens": 2,
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "n": 2,
        "logprobs": 0,
        "logit_bias": [{"token_id": 7, "bias": -2.5}, {"token_id": 3, "bias": 100.0}],
        "allowed_token_ids": [9, 7, 9],
    }
    request = convert.submitted(
        submit(
            sampling=sampling,
            priority=-3,
            tenant="t",
            salt=b"s",
            private_from=16,
            deadline_ms=1500,
            no_cache=True,
        ),
        "1/a",
        ROOTS,
        now_s=10.0,
    )
    assert request.request_id == "1/a" and request.token_ids == (1, 2, 3)
    assert (request.tenant, request.salt, request.private_from) == ("t", b"s", 16)
    assert (request.priority, request.deadline_s, request.no_cache) == (-3, 11.5, True)
    assert request.credit_tokens == 7
    params = request.sampling
    assert (params.seed, params.max_tokens, params.n, params.logprobs) == (3, 4, 2, 0)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 9, 0.125)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, -1.0)
    assert (params.frequency_penalty, params.min_tokens, params.ignore_eos) == (2.0, 2, True)
    assert params.stop_token_ids == frozenset({4, 5})
    assert params.logit_bias == ((7, -2.5), (3, 100.0)) and params.allowed_token_ids == (7, 9)


def test_unset_means_the_named_default() -> None:
    request = convert.submitted(submit(sampling={"max_tokens": 0}), "1/a", ROOTS, 0.0)
    params = request.sampling
    assert (params.top_p, params.repetition_penalty, params.n) == (1.0, 1.0, 1)
    assert params.logprobs is None and params.max_tokens == 97  # up to the context's end
    assert request.deadline_s is None and request.tenant == "default"


REFUSED: list[tuple[dict[str, Any], type[BanyanError], str]] = [
    ({"request_id": ""}, InvalidRequest, "Submit.request_id"),
    ({"request_id": "x" * 257}, InvalidRequest, "Submit.request_id"),
    ({"root_id": bytes(32)}, ModelNotFound, "root"),
    ({"root_id": bytes(33)}, InvalidRequest, "Submit.root_id"),
    ({"token_ids": [], "prompt_tokens": 0}, InvalidRequest, "prompt_tokens"),
    ({"token_ids": []}, InvalidRequest, "prompt_tokens"),
    ({"prompt_tokens": 4}, InvalidRequest, "prompt_tokens"),
    ({"token_ids": [1, 50, 2]}, InvalidRequest, "vocabulary of 50"),
    ({"token_ids": [1, (1 << 32) - 1, 2]}, InvalidRequest, "Submit.token_ids"),
    ({"token_ids": [1] * 100, "prompt_tokens": 100}, PromptTooLong, "context of 100"),
    ({"sampling": {"max_tokens": 98}}, PromptTooLong, "context of 100"),
    ({"sampling": {"n": 65}}, InvalidRequest, "Sampling.n"),
    ({"sampling": {"n": 2}, "prompt_tokens": 2}, InvalidRequest, "several choices"),
    ({"sampling": {"temperature": -1.0}}, InvalidRequest, "Sampling.temperature"),
    ({"sampling": {"temperature": float("nan")}}, InvalidRequest, "Sampling.temperature"),
    ({"sampling": {"top_p": 1.5}}, InvalidRequest, "Sampling.top_p"),
    ({"sampling": {"min_p": float("inf")}}, InvalidRequest, "Sampling.min_p"),
    ({"sampling": {"logprobs": 21}}, InvalidRequest, "Sampling.logprobs"),
    ({"sampling": {"stop_token_ids": [1] * 257}}, InvalidRequest, "Sampling.stop_token_ids"),
    ({"sampling": {"logit_bias": [{}] * 1025}}, InvalidRequest, "Sampling.logit_bias"),
    ({"sampling": {"logit_bias": [{"bias": 100.5}]}}, InvalidRequest, "TokenBias.bias"),
    ({"sampling": {"logit_bias": [{"bias": float("nan")}]}}, InvalidRequest, "TokenBias.bias"),
    ({"sampling": {"logit_bias": [{"token_id": 1 << 31}]}}, InvalidRequest, "TokenBias.token_id"),
    ({"sampling": {"allowed_token_ids": [1] * 65537}}, InvalidRequest, "Sampling.allowed_token_id"),
    ({"priority": 1001}, InvalidRequest, "Submit.priority"),
    ({"tenant": "t" * 257}, InvalidRequest, "Submit.tenant"),
    ({"salt": bytes(65)}, InvalidRequest, "Submit.salt"),
    ({"private_from": TOKENS_MAX + 1}, InvalidRequest, "Submit.private_from"),
    ({"kv_source": "k" * 257}, InvalidRequest, "Submit.kv_source"),
]


@pytest.mark.parametrize(("fields", "error", "says"), REFUSED)
def test_a_bad_submit_is_refused(
    fields: dict[str, Any], error: type[BanyanError], says: str
) -> None:
    with pytest.raises(error) as caught:
        convert.submitted(submit(**fields), "1/a", ROOTS, 0.0)
    assert says in caught.value.message
    assert type(caught.value) is error


def test_a_missing_seed_is_refused() -> None:
    message = submit()
    message.sampling.ClearField("seed")
    with pytest.raises(InvalidRequest, match=r"Sampling\.seed"):
        convert.submitted(message, "1/a", ROOTS, 0.0)


def test_every_bounded_field_of_submit_has_a_refusal_above() -> None:
    """A new field with a bound must be added to REFUSED."""
    named = {says for _, _, says in REFUSED}
    bounded = {
        name
        for name, limit in LIMITS.items()
        if name.startswith("Submit.") and (limit.high or limit.size_max)
    }
    missing = bounded - named - {"Submit.prompt_tokens"}
    assert not missing


def test_emissions_keep_everything() -> None:
    frame = internal_pb2.Frame(step=5)
    emission = Emission(
        "1/a",
        choice=1,
        position=3,
        token_ids=(7, 8),
        logprobs=(Logprobs((7, -0.5), ((7, -0.5), (2, -1.5))), Logprobs((8, -0.25))),
        finish=Finish.LENGTH,
        usage=RequestUsage(10, 4, 6, 2, 1, 3),
        last=True,
    )
    convert.add_emission(frame, emission, "a")
    (sent,) = internal_pb2.Frame.FromString(frame.SerializeToString()).emissions
    assert (sent.request_id, sent.choice, sent.position) == ("a", 1, 3)
    assert list(sent.token_ids) == [7, 8] and sent.last
    assert sent.finish == common_pb2.FINISH_REASON_LENGTH and not sent.HasField("error")
    assert [p.chosen.token_id for p in sent.logprobs] == [7, 8]
    assert [(t.token_id, t.logprob) for t in sent.logprobs[0].top] == [(7, -0.5), (2, -1.5)]
    used = sent.usage
    assert (used.prompt_tokens, used.cached_tokens, used.computed_tokens) == (10, 4, 6)
    assert (used.completion_tokens, used.recomputed_tokens, used.preemptions) == (2, 1, 3)


def test_errors_keep_code_sentence_and_push_back() -> None:
    frame = convert.refused("a", Overloaded("Full.", retry_after_s=0.25), step=9)
    (sent,) = frame.emissions
    assert frame.step == 9 and sent.last and sent.finish == common_pb2.FINISH_REASON_ERROR
    assert (sent.error.code, sent.error.message, sent.error.retry_after_ms) == (8, "Full.", 250)
    assert sent.error.error == "Overloaded"


def test_enum_numbers_agree_with_the_wire() -> None:
    for finish in Finish:
        assert common_pb2.FinishReason.Name(int(finish)) == f"FINISH_REASON_{finish.name}"
    for kind in CacheOpKind:
        assert internal_pb2.BlockOp.Kind.Name(int(kind)) == f"KIND_{kind.name}"


def test_block_ops_are_packed() -> None:
    ops = [
        CacheOp(CacheOpKind.STORED, 1, (b"a" * 16, b"b" * 16)),
        CacheOp(CacheOpKind.REMOVED, 0, ()),
    ]
    packed = convert.block_ops(ops)
    assert packed[0].keys == b"a" * 16 + b"b" * 16 and packed[0].group == 1
    assert packed[1].kind == internal_pb2.BlockOp.KIND_REMOVED


def test_the_warm_up_is_not_counted_as_served() -> None:
    base = EngineLoad(prompt_tokens=100, cached_tokens=10)
    beat = convert.heartbeat(
        EngineLoad(running=2, steps=9, prompt_tokens=150, cached_tokens=30), base, True, False
    )
    assert (beat.load.prompt_tokens, beat.load.cached_tokens) == (50, 20)
    assert beat.load.steps == 9 and beat.draining and not beat.load.stalled


# ---- tickets ------------------------------------------------------------------------------------

SECRET = b"k" * 32
BODY = internal_pb2.TicketBody(
    request_id="d",
    replica="r",
    epoch=5,
    root_id=ROOT,
    token_digest=token_digest(tokens_u32le([1, 2]), 2),
    seed=77,
    tenant="t",
    private_from=16,
    expires_unix_ms=1000,
    prompt_tokens=2,
    priority=1,
)


def opened(body: internal_pb2.TicketBody = BODY, now_ms: int = 999) -> internal_pb2.TicketBody:
    return open_ticket(SECRET, seal(SECRET, body.SerializeToString()), "r", 5, now_ms)


def changed(**fields: Any) -> internal_pb2.TicketBody:
    body = internal_pb2.TicketBody()
    body.CopyFrom(BODY)
    for name, value in fields.items():
        setattr(body, name, value)
    return body


def test_a_good_ticket_decides_what_the_client_must_not() -> None:
    request = convert.ticketed(
        internal_pb2.DirectRequest(token_ids=[1, 2], sampling=common_pb2.Sampling(max_tokens=4)),
        opened(),
        "2/d",
        ROOTS,
        SECRET,
        deadline_s=4.0,
        credit_tokens=32,
    )
    assert (request.tenant, request.salt) == ("t", tenant_salt(SECRET, "t"))
    assert request.private_from == 16
    assert (request.priority, request.sampling.seed, request.credit_tokens) == (1, 77, 32)
    assert request.deadline_s == 4.0 and request.request_id == "2/d"


@pytest.mark.parametrize(
    ("body", "now_ms", "says"),
    [
        (BODY, 1000, "expired"),
        (changed(replica="other"), 0, "another replica"),
        (changed(epoch=4), 0, "another replica"),
    ],
)
def test_tickets_for_another_time_or_place(
    body: internal_pb2.TicketBody, now_ms: int, says: str
) -> None:
    with pytest.raises(Unauthenticated, match=says):
        opened(body, now_ms)


def test_every_changed_byte_of_a_ticket_is_noticed() -> None:
    whole = seal(SECRET, BODY.SerializeToString())
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1
        with pytest.raises(Unauthenticated):
            open_ticket(SECRET, bytes(broken), "r", 5, 0)
    for length in range(len(whole)):
        with pytest.raises(Unauthenticated):
            open_ticket(SECRET, whole[:length], "r", 5, 0)


def test_a_sealed_body_that_is_no_ticket() -> None:
    with pytest.raises(Unauthenticated, match="cannot be read"):
        open_ticket(SECRET, seal(SECRET, b"\xff\xff"), "r", 5, 0)


@pytest.mark.parametrize("token_ids", [[1], [1, 3], [2, 1], [1, 2, 0]])
def test_a_ticket_holds_for_its_tokens_only(token_ids: list[int]) -> None:
    request = internal_pb2.DirectRequest(token_ids=token_ids)
    with pytest.raises(Unauthenticated, match="other tokens"):
        convert.ticketed(request, opened(), "2/d", ROOTS, SECRET, None, 32)


@pytest.mark.parametrize("keys", [{}, {"key": "alice"}])
def test_a_tickets_salt_is_the_one_routers_use(keys: dict[str, str]) -> None:
    """Direct and routed requests of one tenant share what they may, and no ticket tells it."""
    tenant = Tenants(keys, SECRET).identify("Bearer key" if keys else "")
    sealed = opened(changed(tenant=tenant.name))
    sampling = common_pb2.Sampling(max_tokens=4)
    asked = internal_pb2.DirectRequest(token_ids=[1, 2], sampling=sampling)
    request = convert.ticketed(asked, sealed, "2/d", ROOTS, SECRET, None, 32)
    assert (request.tenant, request.salt) == (tenant.name, tenant.salt)
    assert tenant.salt not in sealed.SerializeToString()


def test_a_seed_other_than_the_tickets_is_refused() -> None:
    sampling = common_pb2.Sampling(seed=78)
    request = internal_pb2.DirectRequest(token_ids=[1, 2], sampling=sampling)
    with pytest.raises(InvalidRequest, match=r"Sampling\.seed"):
        convert.ticketed(request, opened(), "2/d", ROOTS, SECRET, None, 32)
