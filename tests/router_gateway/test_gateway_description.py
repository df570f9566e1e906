"""The OpenAPI document says what the gateway does: a body is valid by its schema exactly if it is
served, field by field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from router.gateway import fields, requests
from router.gateway.description import description
from router.gateway.problems import Problem
from router.gateway.routes import ROUTES

MESSAGES = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    # with what other fields need
    "Chat": {"messages": MESSAGES, "logprobs": True, "stream": True},
    "Completion": {"prompt": "hi", "stream": True},
    "Tokenize": {"prompt": "hi"},
    "Detokenize": {"tokens": [1]},
}
TABLES = {
    "Chat": fields.CHAT,
    "Completion": fields.COMPLETION,
    "Tokenize": fields.TOKENIZE,
    "Detokenize": fields.DETOKENIZE,
}
# What a schema cannot say, or says of characters where we count bytes.
UNSAID = {"stream", "logprobs", "prompt", "messages", "tokens"}
FIELDS = [(n, f) for n, table in TABLES.items() for f in table if f not in UNSAID]

edges = st.sampled_from(
    [-1001, -101, -100, -1, 0, 1, 20, 21, 64, 65, 1000, 1 << 20, (1 << 20) + 1, 1 << 70]
)
values = st.one_of(
    st.none(),
    st.booleans(),
    edges,
    st.floats(-200, 200).filter(lambda x: x != int(x)),  # 2.0 is an integer to a schema alone
    st.text("ab", max_size=4),
    st.sampled_from(["a" * 256, "a" * 257, "a" * 1025]),
    st.lists(st.integers(-1, 3), max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=3),
    st.sampled_from([["a"] * 16, ["a"] * 17, [1] * 256, [1] * 257]),
    st.dictionaries(st.sampled_from("123"), st.floats(-150, 150), max_size=3),
)


def validator(name: str) -> Draft202012Validator:
    document = description()
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    )


def served(name: str, body: dict[str, Any]) -> bool:
    try:
        if name == "Chat":
            requests.chat(body, {})
        elif name == "Completion":
            requests.completion(body, {})
        elif name == "Tokenize":
            requests.tokenization(body)
        else:
            return "tokens" in fields.read(body, TABLES[name])
    except Problem:
        return False
    return True


@pytest.mark.parametrize(("name", "field"), FIELDS)
@settings(max_examples=30, deadline=None, print_blob=True)
@given(value=values)
def test_a_field_is_valid_exactly_if_it_is_served(name: str, field: str, value: Any) -> None:
    if field == "logit_bias" and isinstance(value, dict):
        value = {key: amount for key, amount in value.items() if abs(amount) <= 100}
    body = BASES[name] | {field: value}
    assert validator(name).is_valid(body) == served(name, body)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("Chat", {}),
        ("Chat", {"messages": []}),
        ("Chat", {"messages": [{"content": "hi"}]}),
        ("Chat", {"messages": [{"role": "user"}]}),
        ("Chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("Chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
        ("Completion", {}),
        ("Completion", {"prompt": []}),
        ("Completion", {"prompt": ["a", "b"]}),
        ("Completion", {"prompt": [1, 2]}),
        ("Completion", {"prompt": [[1], [2]]}),
        ("Completion", {"prompt": [[1], "a"]}),
        ("Completion", {"prompt": ["a"] * 65}),
        ("Tokenize", {}),
        ("Tokenize", {"prompt": "hi", "messages": MESSAGES}),
        ("Tokenize", {"prompt": "hi", "messages": None}),
        ("Tokenize", {"prompt": None, "messages": MESSAGES}),
        ("Tokenize", {"messages": None}),
        ("Detokenize", {"tokens": None}),
        ("Detokenize", {"tokens": []}),
        ("Detokenize", {"tokens": ["a"]}),
    ],
)
def test_prompts(name: str, body: dict[str, Any]) -> None:
    assert validator(name).is_valid(body) == served(name, body)


def test_the_document_names_every_path_and_is_a_schema() -> None:
    document = description()
    described = {path.replace("/{model}", "") for path in document["paths"]}
    assert described == set(ROUTES) - {"/openapi.json", "/reset_prefix_cache"}
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert name in {"Content", "Message", "Error"} | set(TABLES)
