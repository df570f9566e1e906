"""Rule S4: every field of every request message has a limit, and the limits bite."""

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from banyan.v1 import api_pb2, common_pb2, internal_pb2
from seams.errors import InvalidRequest
from seams.limits import LIMITS, check_message

REQUESTS = (
    api_pb2.GenerateRequest,
    api_pb2.PickRequest,
    api_pb2.ListModelsRequest,
    api_pb2.ClusterStateRequest,
    api_pb2.ExplainRequest,
    api_pb2.TextFilesRequest,
    api_pb2.ResetCacheRequest,
    internal_pb2.AttachUp,
    internal_pb2.EventBatch,
    internal_pb2.ExecuteUp,
    internal_pb2.DirectRequest,
)


def reachable(
    descriptor: Descriptor, seen: dict[str, FieldDescriptor]
) -> dict[str, FieldDescriptor]:
    for field in descriptor.fields:
        name = f"{descriptor.name}.{field.name}"
        if name not in seen:
            seen[name] = field
            if field.message_type is not None:
                reachable(field.message_type, seen)
    return seen


def fields() -> dict[str, FieldDescriptor]:
    seen: dict[str, FieldDescriptor] = {}
    for request in REQUESTS:
        reachable(request.DESCRIPTOR, seen)
    return seen


# Those of the HTTP gateway stand for no message (tests/router_gateway/test_gateway_requests.py).
MESSAGES = sorted(name for name in LIMITS if not name.startswith("OpenAI."))


def test_every_request_field_has_a_limit_and_no_limit_is_stale() -> None:
    assert set(fields()) == set(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_sized_fields_are_sized_and_messages_are_walked(name: str) -> None:
    field, limit = fields()[name], LIMITS[name]
    if field.message_type is not None:
        assert limit.recurse or (limit.each is not None and limit.each.recurse)
    elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        assert limit.size_max is not None
    elif field.is_repeated if hasattr(field, "is_repeated") else field.label == 3:
        assert limit.size_max is not None
        assert limit.each is not None
    elif field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        assert limit.low is not None
        assert limit.high is not None


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.Sampling(temperature=-1), "Sampling.temperature"),
        (common_pb2.Sampling(temperature=float("nan")), "Sampling.temperature"),
        (common_pb2.Sampling(presence_penalty=float("inf")), "Sampling.presence_penalty"),
        (common_pb2.Sampling(n=65), "Sampling.n"),
        (common_pb2.Sampling(stop_token_ids=[1] * 257), "Sampling.stop_token_ids"),
        (api_pb2.GenerateRequest(label="x" * 257), "GenerateRequest.label"),
        (api_pb2.GenerateRequest(stop=["é" * 600]), "GenerateRequest.stop"),
        (api_pb2.GenerateRequest(sampling=common_pb2.Sampling(top_p=2)), "Sampling.top_p"),
        (api_pb2.TokenIds(ids=[2**31]), "TokenIds.ids"),
        (api_pb2.Chat(messages=[api_pb2.ChatMessage(role="r" * 65)]), "ChatMessage.role"),
    ],
)
def test_a_field_over_its_limit_is_named(message: object, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        check_message(message)


def test_good_messages_pass() -> None:
    chat = api_pb2.Chat(messages=[api_pb2.ChatMessage(role="user", content="hello")])
    check_message(api_pb2.GenerateRequest(chat=chat, sampling=common_pb2.Sampling(temperature=1)))
    check_message(api_pb2.GenerateRequest(tokens=api_pb2.TokenIds(ids=[0, 5, 49151])))
