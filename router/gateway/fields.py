"""Every field of an OpenAI request that means something here: its type and its limit.

Whatever a body names besides is ignored, as OpenAI's servers do. Knows no field's meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic_core import from_json

from router.gateway.problems import invalid
from seams.errors import InvalidRequest
from seams.limits import check_field

Kind = Callable[[str, Any], Any]
"""Takes a name and a JSON value, returns the value as we use it; raises Problem."""


class Field(NamedTuple):
    """`limit` is an entry of seams/limits.py."""

    kind: Kind
    limit: str


def _wrong(name: str, wanted: str) -> Exception:
    return invalid(f"{name} must be {wanted}.", name, "invalid_type")


def flag(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return value


def integer(name: str, value: Any) -> int:
    """A whole number; JSON's true is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "an integer")
    return value


def top_k(name: str, value: Any) -> int:
    """An integer; below 0 means off, as 0 does to us."""
    return max(0, integer(name, value))


def number(name: str, value: Any) -> float:
    """Any number; its limit refuses what is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _wrong(name, "a number of usual size") from None


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise _wrong(name, "a string")
    return value


def texts(name: str, value: Any) -> list[str]:
    """A string or a list of them."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise _wrong(name, "a string or a list of strings")
    return value


def ids(name: str, value: Any) -> list[int]:
    """Token ids; within 32 bits, which their limit narrows."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:  # true is no id
        raise _wrong(name, "a list of integers")
    return value


def items(name: str, value: Any) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise _wrong(name, "a list")
    return value


def members(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise _wrong(name, "an object")
    return value


def bias(name: str, value: Any) -> dict[int, float]:
    """{"token id": number}."""
    found = {}
    for key, amount in members(name, value).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise _wrong(name, "an object of token ids and numbers")
        found[int(key)] = number(f"{name}.{key}", amount)
    return found


SAMPLING: dict[str, Field] = {
    "temperature": Field(number, "Sampling.temperature"),
    "top_p": Field(number, "Sampling.top_p"),
    "top_k": Field(top_k, "Sampling.top_k"),
    "min_p": Field(number, "Sampling.min_p"),
    "repetition_penalty": Field(number, "Sampling.repetition_penalty"),
    "presence_penalty": Field(number, "Sampling.presence_penalty"),
    "frequency_penalty": Field(number, "Sampling.frequency_penalty"),
    "max_tokens": Field(integer, "Sampling.max_tokens"),
    "max_completion_tokens": Field(integer, "Sampling.max_tokens"),
    "min_tokens": Field(integer, "Sampling.min_tokens"),
    "stop_token_ids": Field(ids, "Sampling.stop_token_ids"),
    "allowed_token_ids": Field(ids, "Sampling.allowed_token_ids"),
    "ignore_eos": Field(flag, "Sampling.ignore_eos"),
    "seed": Field(integer, "OpenAI.seed"),
    "n": Field(integer, "Sampling.n"),
    "logit_bias": Field(bias, "OpenAI.logit_bias"),
    "retention": Field(text, "Sampling.retention"),
}
COMMON: dict[str, Field] = SAMPLING | {
    "model": Field(text, "GenerateRequest.model"),
    "stop": Field(texts, "GenerateRequest.stop"),
    "priority": Field(integer, "GenerateRequest.priority"),
    "prompt_cache_key": Field(text, "GenerateRequest.session"),
    "cache_salt": Field(text, "OpenAI.cache_salt"),
    "user": Field(text, "OpenAI.user"),
    "stream": Field(flag, "OpenAI.flag"),
    "stream_options": Field(members, "OpenAI.members"),
    "return_token_ids": Field(flag, "OpenAI.flag"),
}
CHAT: dict[str, Field] = COMMON | {
    "messages": Field(items, "OpenAI.messages"),
    "logprobs": Field(flag, "OpenAI.flag"),
    "top_logprobs": Field(integer, "Sampling.logprobs"),
}
COMPLETION: dict[str, Field] = COMMON | {
    "logprobs": Field(integer, "Sampling.logprobs"),
}
STREAM_OPTIONS: dict[str, Field] = {"include_usage": Field(flag, "OpenAI.flag")}
MESSAGE: dict[str, Field] = {"role": Field(text, "ChatMessage.role")}
PART: dict[str, Field] = {"type": Field(text, "ChatMessage.role")}
TOKENIZE: dict[str, Field] = {
    "model": Field(text, "GenerateRequest.model"),
    "prompt": Field(text, "GenerateRequest.text"),
    "messages": Field(items, "OpenAI.messages"),
    "add_special_tokens": Field(flag, "OpenAI.flag"),
}
DETOKENIZE: dict[str, Field] = {
    "model": Field(text, "GenerateRequest.model"),
    "tokens": Field(ids, "TokenIds.ids"),
}
TABLES = (CHAT, COMPLETION, STREAM_OPTIONS, MESSAGE, PART, TOKENIZE, DETOKENIZE)


def parse(body: bytes) -> dict[str, Any]:
    """A body's JSON object. Raises Problem; infinities and NaN are refused, or by a limit."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError:
        raise invalid("The body is not JSON.", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The body is not a JSON object.", None, "invalid_json")
    return value


def read(body: Mapping[str, Any], table: Mapping[str, Field], where: str = "") -> dict[str, Any]:
    """The fields of `table` that the body gives, checked; null is as good as absent. `where` goes
    before their names in texts. Raises Problem."""
    given = {}
    for name, field in table.items():
        if (value := body.get(name)) is not None:
            value = field.kind(where + name, value)
            limited(where + name, value, field.limit)
            given[name] = value
    return given


def limited(name: str, value: Any, entry: str) -> None:
    """Raise Problem if the value is over the limit of `entry`."""
    try:
        check_field(name, value, entry)
    except InvalidRequest as error:
        raise invalid(error.message, name) from None
