"""The gateway described in OpenAPI 3.1, at /openapi.json: made from the tables that requests are
checked by, so it cannot say less or more than they do. Knows no socket and no model."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from router.gateway import fields
from router.gateway.fields import Field, Kind
from seams.limits import LIMITS, Limit

VERSION = "1"  # of what is described, as in banyan.v1

Schema = dict[str, Any]

TEXT_PARTS = {"$ref": "#/components/schemas/Content"}
TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TYPES: dict[Kind, Schema] = {
    fields.flag: {"type": "boolean"},
    fields.integer: {"type": "integer"},
    fields.top_k: {"type": "integer"},
    fields.number: {"type": "number"},
    fields.text: {"type": "string"},
    fields.texts: {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    fields.ids: {"type": "array", "items": {"type": "integer"}},
    fields.items: {"type": "array"},
    fields.members: {"type": "object"},
    fields.bias: {"type": "object", "additionalProperties": {"type": "number"}},
}
_SIZES = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}
_MORE_THAN_0 = ("max_tokens", "max_completion_tokens", "top_p", "n")
_ERRORS = {
    "400": "A field is wrong; `param` names it.",
    "401": "No tenant has this key.",
    "404": "No replica serves this model.",
    "408": "The body did not arrive in time.",
    "411": "The body's length is not known.",
    "413": "The body is too large.",
    "415": "The content type is not application/json.",
    "429": "Too much at once; Retry-After says when to try again.",
    "499": "The request was cancelled.",
    "503": "No replica can serve now.",
    "504": "The deadline passed.",
}


def schema_of(name: str, field: Field) -> Schema:
    """One field's type and limits; sizes of strings are bytes in truth and characters here."""
    schema = deepcopy(_TYPES[field.kind])
    limit = LIMITS[field.limit]
    for variant in schema.get("anyOf", [schema]):
        variant.update(_bounds(variant, limit))
    if name in _MORE_THAN_0:
        del schema["minimum"]
        schema["exclusiveMinimum"] = 0
    if field.kind is fields.top_k:
        del schema["minimum"]
    if name == "cache_salt":
        schema["minLength"] = 1
    return {"const": True} if name == "add_special_tokens" else schema


def _or_null(schema: Schema) -> Schema:
    """Null is as good as absent."""
    return {"anyOf": [*schema.pop("anyOf", [schema]), {"type": "null"}]}


def _bounds(schema: Schema, limit: Limit) -> Schema:
    if schema["type"] == "string" and limit.each is not None:
        limit = limit.each  # one instead of a list
    found: Schema = {}
    if limit.low is not None:
        found["minimum"] = limit.low
    if limit.high is not None:
        found["maximum"] = limit.high
    if limit.size_max is not None:
        found[_SIZES[schema["type"]]] = limit.size_max
    if schema["type"] == "array" and limit.each is not None and "items" in schema:
        found["items"] = schema["items"] | _bounds(schema["items"], limit.each)
    return found


def _body(table: Mapping[str, Field], own: Schema, required: list[str]) -> Schema:
    """A JSON object of a table's fields, `own` over them; what else it names is ignored."""
    properties = {name: _or_null(schema_of(name, field)) for name, field in table.items()}
    return {"type": "object", "properties": properties | own, "required": required}


def _message() -> Schema:
    own: Schema = {
        "role": {
            "type": "string",
            "minLength": 1,
            "maxLength": LIMITS["ChatMessage.role"].size_max,
        },
        "content": {"anyOf": [{"type": "string"}, TEXT_PARTS]},
    }
    return {"type": "object", "properties": own, "required": ["role", "content"]}


def _content() -> Schema:
    part: Schema = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return {"type": "array", "items": part, "maxItems": LIMITS["OpenAI.content_parts"].size_max}


def _prompt() -> Schema:
    most = LIMITS["OpenAI.prompts"].size_max
    text: Schema = {"type": "string"}
    lists = [
        {"type": "array", "items": one, "minItems": 1, "maxItems": most} for one in (text, TOKENS)
    ]
    return {"anyOf": [text, TOKENS, *lists]}


def _tokenize(messages: Schema) -> Schema:
    """Either a prompt or messages."""
    one = [
        {"properties": {name: {"type": kind}}, "required": [name]}
        for name, kind in (("prompt", "string"), ("messages", "array"))
    ]
    return _body(fields.TOKENIZE, {"messages": _or_null(messages)}, []) | {"oneOf": one}


def _schemas() -> dict[str, Schema]:
    messages: Schema = {
        "type": "array",
        "items": {"$ref": "#/components/schemas/Message"},
        "minItems": 1,
        "maxItems": LIMITS["OpenAI.messages"].size_max,
    }
    tokens = schema_of("tokens", fields.DETOKENIZE["tokens"])
    error: Schema = {
        "type": "object",
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        },
        "required": ["message", "type", "param", "code"],
    }
    return {
        "Content": _content(),
        "Message": _message(),
        "Chat": _body(fields.CHAT, {"messages": messages}, ["messages"]),
        "Completion": _body(fields.COMPLETION, {"prompt": _prompt()}, ["prompt"]),
        "Tokenize": _tokenize(messages),
        "Detokenize": _body(fields.DETOKENIZE, {"tokens": tokens}, ["tokens"]),
        "Error": {"type": "object", "properties": {"error": error}, "required": ["error"]},
    }


def _answers(description: str, *media: str) -> Schema:
    """200 and every error that a path may answer with."""
    content: Schema = {name: {} for name in media or ("application/json",)}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    return {"200": {"description": description, "content": content}} | errors


def _posted(name: str, description: str, *media: str) -> Schema:
    schema = {"$ref": f"#/components/schemas/{name}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"requestBody": body, "responses": _answers(description, *media)}}


def _got(description: str, *parameters: Schema) -> Schema:
    return {"get": {"parameters": list(parameters), "responses": _answers(description)}}


@cache
def description() -> dict[str, Any]:
    """The whole document. Constant; not to be changed."""
    streams = ("application/json", "text/event-stream")
    model: Schema = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Banyan", "version": VERSION},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": _posted(
                "Chat", "The answer, or a stream of its parts.", *streams
            ),
            "/v1/completions": _posted(
                "Completion", "The answer, or a stream of its parts.", *streams
            ),
            "/v1/models": _got("The models that replicas serve."),
            "/v1/models/{model}": _got("One of them.", model),
            "/tokenize": _posted("Tokenize", "The prompt as token ids."),
            "/detokenize": _posted("Detokenize", "Token ids as text."),
            "/health": _got("Whether any replica can serve."),
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
