"""OpenAI bodies to GenerateRequests: a table of what is meant, and one of what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from banyan.v1 import api_pb2, common_pb2
from router.gateway import fields, requests
from router.gateway.problems import Problem
from seams.limits import LIMITS

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


def sampling(**given: Any) -> common_pb2.Sampling:
    return common_pb2.Sampling(**({"temperature": 1.0, "n": 1} | given))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, {}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_p": 0.5, "top_k": 4, "min_p": 0.25}, {"top_p": 0.5, "top_k": 4, "min_p": 0.25}),
        ({"top_k": -1}, {"top_k": 0}),
        (
            {"presence_penalty": -1, "frequency_penalty": 2},
            {"presence_penalty": -1, "frequency_penalty": 2},
        ),
        ({"repetition_penalty": 1.25}, {"repetition_penalty": 1.25}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 7, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"min_tokens": 2, "max_tokens": 4}, {"min_tokens": 2, "max_tokens": 4}),
        ({"n": 3}, {"n": 3}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -1}, {"seed": (1 << 64) - 1}),
        (
            {"ignore_eos": True, "stop_token_ids": [3, 4]},
            {"ignore_eos": True, "stop_token_ids": [3, 4]},
        ),
        ({"allowed_token_ids": [5]}, {"allowed_token_ids": [5]}),
        (
            {"logit_bias": {"5": -100, "7": 1.5}},
            {
                "logit_bias": [
                    common_pb2.TokenBias(token_id=5, bias=-100),
                    common_pb2.TokenBias(token_id=7, bias=1.5),
                ]
            },
        ),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"temperature": None, "stop": None, "tools": None, "seed": None}, {}),
        (
            {
                "tools": [],
                "response_format": {"type": "text"},
                "store": 5,
                "parallel_tool_calls": "?",
            },
            {},
        ),
    ],
)
def test_a_chat_s_sampling(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    asked = requests.chat(CHAT | body, {})
    assert asked.requests[0].sampling == sampling(**wanted)
    assert asked.requests[0].chat.messages == [api_pb2.ChatMessage(role="user", content="hi")]


def test_a_completion_s_own_defaults() -> None:
    assert requests.completion(TEXT, {}).requests[0].sampling == sampling(max_tokens=16)
    asked = requests.completion(TEXT | {"max_completion_tokens": 4}, {})
    assert asked.requests[0].sampling == sampling(max_tokens=4)
    assert requests.completion(TEXT | {"logprobs": 5}, {}).top == 5
    assert requests.completion(TEXT | {"logprobs": 0}, {}).top == 0


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("hi", [api_pb2.GenerateRequest(text="hi")]),
        (["a", "b"], [api_pb2.GenerateRequest(text="a"), api_pb2.GenerateRequest(text="b")]),
        ([1, 2], [api_pb2.GenerateRequest(tokens=api_pb2.TokenIds(ids=[1, 2]))]),
        (
            [[1], [2, 3]],
            [api_pb2.GenerateRequest(tokens=api_pb2.TokenIds(ids=ids)) for ids in ([1], [2, 3])],
        ),
    ],
)
def test_every_form_of_a_prompt(prompt: Any, wanted: list[api_pb2.GenerateRequest]) -> None:
    found = requests.completion({"prompt": prompt}, {}).requests
    for request in found:
        request.ClearField("sampling")
    assert list(found) == wanted


def test_what_is_not_sampling() -> None:
    body = CHAT | {"model": "m", "stop": "x", "priority": -3, "prompt_cache_key": "k"}
    body |= {"cache_salt": "s", "stream": True, "stream_options": {"include_usage": True, "x": 1}}
    asked = requests.chat(body | {"user": "u"}, {"x-request-id": "r"})
    request = asked.requests[0]
    assert (request.model, list(request.stop), request.priority) == ("m", ["x"], -3)
    assert (request.session, request.label) == ("k", "r")
    assert asked.stream and asked.include_usage and asked.cache_salt == "s"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1 << 70}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"seed": 1 << 64}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": {"x": 1}}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"model": 5}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"priority": 1001}, "priority"),
    ({"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"user": 5}, "user"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"return_token_ids": 1}, "return_token_ids"),
]
REFUSED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "r" * 65, "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
        "messages[0].tool_calls",
    ),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
]
REFUSED_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [[1], [True]]}, "prompt[1]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": [1 << 31]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a"] * 64, "n": 3}, "n times the number of prompts"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
]


def refused(make: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(Problem) as caught:
        make(body, {})
    problem = caught.value
    assert (problem.status, problem.param, problem.type) == (400, param, "invalid_request_error")
    assert problem.message.endswith(".") and problem.retry_after_s is None


@pytest.mark.parametrize(("body", "param"), REFUSED + REFUSED_CHATS)
def test_chats_that_are_refused(body: dict[str, Any], param: str) -> None:
    refused(requests.chat, CHAT | body, param)


@pytest.mark.parametrize(("body", "param"), REFUSED + REFUSED_COMPLETIONS)
def test_completions_that_are_refused(body: dict[str, Any], param: str) -> None:
    refused(requests.completion, TEXT | body, param)


@pytest.mark.parametrize("name", ["x-session-affinity", "x-correlation-id", "x-request-id"])
def test_a_header_that_is_too_long(name: str) -> None:
    refused(lambda body, _: requests.chat(body, {name: "x" * 257}), CHAT, name)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff", b"[" * 5000]
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(Problem) as caught:
        fields.parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_every_field_has_a_limit_and_every_limit_of_the_gateway_a_field() -> None:
    """Rule S4. Two entries bound what is counted, not a field."""
    used = {field.limit for table in fields.TABLES for field in table.values()}
    assert used <= set(LIMITS)
    ours = {name for name in LIMITS if name.startswith("OpenAI.")}
    counted = {"OpenAI.prompts", "OpenAI.choices", "OpenAI.content_parts"}
    assert ours - used == counted


def test_no_field_that_is_read_is_also_refused() -> None:
    assert not set(requests.REFUSED) & (set(fields.CHAT) | set(fields.COMPLETION))
