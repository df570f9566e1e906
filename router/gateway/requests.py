"""OpenAI request bodies -> GenerateRequests. Knows no socket, no model and no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from banyan.v1 import api_pb2, common_pb2
from router.gateway import fields
from router.gateway.problems import invalid

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens, of completions only
SEED_MASK = (1 << 64) - 1
SESSION_HEADERS = ("x-session-affinity", "x-session-id", "x-correlation-id")
LABEL_HEADER = "x-request-id"

Harmless = Callable[[Any], bool]

# Fields that would change the answer and that we cannot honour: with any value but a harmless one
# the request is refused, because an answer that leaves them out would be another one.
REFUSED: dict[str, Harmless] = {
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "audio": lambda value: False,
    "suffix": lambda value: value == "",
    "echo": lambda value: value is False,
    "best_of": lambda value: type(value) is int and value == 1,
    "prompt_logprobs": lambda value: value is False,
    "prompt_embeds": lambda value: False,
    "use_beam_search": lambda value: value is False,
    "structured_outputs": lambda value: value == {},
    "guided_json": lambda value: False,
    "guided_regex": lambda value: False,
    "guided_choice": lambda value: False,
    "guided_grammar": lambda value: False,
}
_RENAMED = ("max_tokens", "max_completion_tokens", "logit_bias", "seed")


@dataclass(frozen=True)
class Asked:
    """What one HTTP request asks for: one GenerateRequest per prompt, and the answer's form.

    `top` is None without logprobs. `cache_salt` is "" where none was given.
    """

    requests: tuple[api_pb2.GenerateRequest, ...]
    chat: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    top: int | None
    cache_salt: str

    @property
    def choices(self) -> int:
        """Of each prompt."""
        return max(1, self.requests[0].sampling.n)


def chat(body: Mapping[str, Any], headers: Mapping[str, str]) -> Asked:
    """POST /v1/chat/completions. Raises Problem."""
    given = fields.read(body, fields.CHAT)
    _refuse(body)
    messages = messages_of(given.get("messages"))
    top = given.get("top_logprobs")
    if top is not None and not given.get("logprobs"):
        raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
    logprobs = (top or 0) if given.get("logprobs") else None
    prompt = api_pb2.GenerateRequest(chat=api_pb2.Chat(messages=messages))
    return _asked(given, headers, [prompt], chat=True, logprobs=logprobs)


def completion(body: Mapping[str, Any], headers: Mapping[str, str]) -> Asked:
    """POST /v1/completions. Raises Problem."""
    given = fields.read(body, fields.COMPLETION)
    _refuse(body)
    given.setdefault("max_tokens", COMPLETION_TOKENS)
    prompts = _prompts(body.get("prompt"))
    return _asked(given, headers, prompts, chat=False, logprobs=given.get("logprobs"))


def tokenization(body: Mapping[str, Any]) -> api_pb2.GenerateRequest:
    """POST /tokenize: the request whose prompt is to be tokenized. Raises Problem."""
    given = fields.read(body, fields.TOKENIZE)
    if given.get("add_special_tokens") is False:
        raise invalid(
            "add_special_tokens is always true here: prompts are tokenized as they are served.",
            "add_special_tokens",
        )
    if ("prompt" in given) == ("messages" in given):
        raise invalid("Give either prompt or messages.", "prompt")
    request = api_pb2.GenerateRequest(model=given.get("model", ""))
    if "prompt" in given:
        request.text = given["prompt"]
    else:
        request.chat.messages.extend(messages_of(given["messages"]))
    return request


def messages_of(given: list[Any] | None) -> list[api_pb2.ChatMessage]:
    """Chat messages with text contents. Raises Problem."""
    if not given:
        raise invalid("messages must have at least one message.", "messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(given)]


def _message(name: str, given: Any) -> api_pb2.ChatMessage:
    message = fields.members(name, given)
    role = fields.read(message, fields.MESSAGE, f"{name}.").get("role")
    if not role:
        raise invalid(f"{name}.role is missing.", f"{name}.role")
    for refused in ("tool_calls", "function_call"):
        if message.get(refused):
            raise invalid(f"{name}.{refused} is not supported.", f"{name}.{refused}")
    content = _content(f"{name}.content", message.get("content"))
    fields.limited(f"{name}.content", content, "ChatMessage.content")
    return api_pb2.ChatMessage(role=role, content=content)


def _content(name: str, given: Any) -> str:
    """A string, or text parts that follow each other."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid(f"{name} must be a string or a list of parts.", name, "invalid_type")
    fields.limited(name, given, "OpenAI.content_parts")
    return "".join(_part(f"{name}[{i}]", part) for i, part in enumerate(given))


def _part(name: str, given: Any) -> str:
    part = fields.members(name, given)
    if fields.read(part, fields.PART, f"{name}.").get("type") != "text":
        raise invalid(f"{name}.type must be text: no other content is served.", f"{name}.type")
    return fields.text(f"{name}.text", part.get("text"))


def _prompts(given: Any) -> list[api_pb2.GenerateRequest]:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(given, str):
        return [_text_prompt("prompt", given)]
    if not isinstance(given, list) or not given:
        wanted = "a string, a list of strings, token ids, or a list of lists of them"
        raise invalid(f"prompt must be {wanted}.", "prompt", "invalid_type")
    if type(given[0]) is int:
        return [_token_prompt("prompt", given)]
    fields.limited("prompt", given, "OpenAI.prompts")
    if isinstance(given[0], str):
        return [_text_prompt(f"prompt[{i}]", entry) for i, entry in enumerate(given)]
    return [_token_prompt(f"prompt[{i}]", entry) for i, entry in enumerate(given)]


def _text_prompt(name: str, given: Any) -> api_pb2.GenerateRequest:
    text = fields.text(name, given)
    fields.limited(name, text, "GenerateRequest.text")
    return api_pb2.GenerateRequest(text=text)


def _token_prompt(name: str, given: Any) -> api_pb2.GenerateRequest:
    ids = fields.ids(name, given)
    fields.limited(name, ids, "TokenIds.ids")
    return api_pb2.GenerateRequest(tokens=api_pb2.TokenIds(ids=ids))


def _refuse(body: Mapping[str, Any]) -> None:
    for name, harmless in REFUSED.items():
        value = body.get(name)
        if value is not None and not harmless(value):
            raise invalid(f"{name} is not supported here.", name, "unsupported_parameter")


def _asked(
    given: dict[str, Any],
    headers: Mapping[str, str],
    prompts: list[api_pb2.GenerateRequest],
    *,
    chat: bool,
    logprobs: int | None,
) -> Asked:
    sampling = _sampling(given, logprobs)
    fields.limited("n times the number of prompts", sampling.n * len(prompts), "OpenAI.choices")
    for prompt in prompts:
        prompt.model = given.get("model", "")
        prompt.sampling.CopyFrom(sampling)
        prompt.stop.extend(given.get("stop", ()))
        prompt.priority = given.get("priority", 0)
        prompt.session = given.get("prompt_cache_key") or _session(headers)
        prompt.label = headers.get(LABEL_HEADER, "")
        fields.limited(LABEL_HEADER, prompt.label, "GenerateRequest.label")
    salt = given.get("cache_salt")
    if salt == "":
        raise invalid("cache_salt must not be empty.", "cache_salt")
    stream = given.get("stream", False)
    options = given.get("stream_options")
    if options is not None and not stream:
        raise invalid("stream_options needs stream to be true.", "stream_options")
    usage = fields.read(options or {}, fields.STREAM_OPTIONS, "stream_options.")
    return Asked(
        requests=tuple(prompts),
        chat=chat,
        stream=stream,
        include_usage=usage.get("include_usage", False),
        token_ids=given.get("return_token_ids", False),
        top=logprobs,
        cache_salt=salt or "",
    )


def _session(headers: Mapping[str, str]) -> str:
    for name in SESSION_HEADERS:
        if label := headers.get(name):
            fields.limited(name, label, "GenerateRequest.session")
            return label
    return ""


def _sampling(given: Mapping[str, Any], logprobs: int | None) -> common_pb2.Sampling:
    """OpenAI's defaults where ours differ: temperature 1, n 1. What 0 means to us and not to
    OpenAI is refused: max_tokens, top_p, n."""
    chosen = {name: given[name] for name in fields.SAMPLING if name in given}
    for name in ("max_tokens", "max_completion_tokens", "top_p", "n"):
        if chosen.get(name) == 0:
            raise invalid(f"{name} must be more than 0.", name)
    tokens = chosen.get("max_completion_tokens", chosen.get("max_tokens", 0))
    plain = {name: value for name, value in chosen.items() if name not in _RENAMED}
    sampling = common_pb2.Sampling(**({"temperature": 1.0, "n": 1} | plain))
    sampling.max_tokens = tokens
    if "seed" in chosen:
        sampling.seed = chosen["seed"] & SEED_MASK
    if logprobs is not None:
        sampling.logprobs = logprobs
    for token, amount in chosen.get("logit_bias", {}).items():
        fields.limited("logit_bias", token, "TokenBias.token_id")
        fields.limited(f"logit_bias.{token}", amount, "TokenBias.bias")
        sampling.logit_bias.add(token_id=token, bias=amount)
    return sampling
