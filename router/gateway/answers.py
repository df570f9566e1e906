"""GenerateResponses -> OpenAI answers, in chunks or whole. Knows no socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from banyan.v1 import api_pb2, common_pb2
from router.gateway.logprobs import Spelling, chat_logprobs, completion_logprobs
from router.gateway.problems import Problem
from router.gateway.requests import Asked
from router.text.model import TextModel
from seams.errors import InvalidRequest

ANSWER_TOKENS_MAX = 1 << 17  # of one that is not streamed, logprobs counted as tokens
DONE = b"data: [DONE]\n\n"
REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_STOP_STRING: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}

TextOf = Callable[[str], TextModel | None]
"""The text side of a model by its name."""


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value, inf_nan_mode="null") + b"\n\n"


def usage_of(parts: Sequence[common_pb2.Usage]) -> dict[str, Any]:
    """The counts of all prompts together."""
    prompt = sum(usage.prompt_tokens for usage in parts)
    completion = sum(usage.completion_tokens for usage in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in parts)},
    }


@dataclass
class _Envelope:
    """What surrounds choices: the same in every chunk of an answer."""

    asked: Asked
    text_of: TextOf
    created_unix_s: int
    request_id: str = ""
    model: str = ""
    spelling: Spelling = field(default_factory=lambda: Spelling(None))
    usages: list[common_pb2.Usage] = field(default_factory=list)

    def note(self, response: api_pb2.GenerateResponse) -> None:
        if response.HasField("started") and not self.model:
            self.model = response.started.model
            self.spelling = Spelling(self.text_of(self.model))
        elif response.HasField("finished"):
            self.usages.append(response.finished.usage)

    def around(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        chat = self.asked.chat
        kind = "text_completion"
        if chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": ("chatcmpl-" if chat else "cmpl-") + self.request_id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "choices": choices,
        }


class Chunks:
    """A streamed answer. `accepted` comes before the first `events`."""

    def __init__(self, asked: Asked, text_of: TextOf, created_unix_s: int) -> None:
        self._envelope = _Envelope(asked, text_of, created_unix_s)
        self._offsets: dict[int, int] = {}  # characters of a choice so far, for text_offset

    def accepted(self, request_id: str) -> None:
        """The id that the whole answer bears."""
        self._envelope.request_id = request_id

    def events(self, part: int, response: api_pb2.GenerateResponse) -> bytes:
        """What the client gets for this response of the prompt number `part`; may be nothing."""
        self._envelope.note(response)
        asked = self._envelope.asked
        choices = list(self._choices(part * asked.choices, response))
        if not choices:
            return b""
        around = self._envelope.around(choices, chunk=True)
        return event(around | {"usage": None} if asked.include_usage else around)

    def _choices(self, first: int, response: api_pb2.GenerateResponse) -> Iterator[dict[str, Any]]:
        asked, kind = self._envelope.asked, response.WhichOneof("event")
        if kind == "started" and asked.chat:
            for choice in range(asked.choices):
                delta = {"role": "assistant", "content": ""}
                yield _choice(first + choice, True, delta, None, None)
        elif kind == "delta":
            delta_ = response.delta
            if delta_.text or asked.top is not None or asked.token_ids:
                yield self._piece(first + delta_.choice, delta_)
        elif kind == "choice_finished":
            ended = response.choice_finished
            reason = REASONS.get(ended.reason, "stop")
            text = {"content": ended.text} if ended.text else {}
            content: Any = text if asked.chat else ended.text
            yield _choice(first + ended.choice, asked.chat, content, None, reason)

    def _piece(self, index: int, delta: api_pb2.Delta) -> dict[str, Any]:
        asked, spelling = self._envelope.asked, self._envelope.spelling
        logprobs: dict[str, Any] | None = None
        if asked.top is not None and asked.chat:
            logprobs = chat_logprobs(delta.logprobs, spelling)
        elif asked.top is not None:
            offset = self._offsets.get(index, 0)
            logprobs = completion_logprobs(delta.logprobs, spelling, offset)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        content: Any = {"content": delta.text} if asked.chat else delta.text
        choice = _choice(index, asked.chat, content, logprobs, None)
        return choice | {"token_ids": list(delta.token_ids)} if asked.token_ids else choice

    def last(self) -> bytes:
        """The end of an answer that went well."""
        envelope = self._envelope
        if not envelope.asked.include_usage:
            return DONE
        around = envelope.around([], chunk=True)
        return event(around | {"usage": usage_of(envelope.usages)}) + DONE

    @staticmethod
    def failed(problem: Problem) -> bytes:
        """The end of one that broke."""
        return event(problem.body) + DONE


def _choice(
    index: int, chat: bool, content: Any, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    shape = {"index": index, "delta" if chat else "text": content}
    return shape | {"logprobs": logprobs, "finish_reason": reason}


@dataclass
class _Whole:
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    reason: str = "stop"


class Answer:
    """An answer in one piece."""

    def __init__(self, asked: Asked, text_of: TextOf, created_unix_s: int) -> None:
        self._envelope = _Envelope(asked, text_of, created_unix_s)
        self._wholes = [_Whole() for _ in range(len(asked.requests) * asked.choices)]
        self._size = 0

    def accepted(self, request_id: str) -> None:
        """The id that the answer bears."""
        self._envelope.request_id = request_id

    def add(self, part: int, response: api_pb2.GenerateResponse) -> None:
        """Take a response of the prompt number `part`. Raises InvalidRequest if it is too much."""
        self._envelope.note(response)
        first = part * self._envelope.asked.choices
        if response.HasField("delta"):
            delta = response.delta
            whole = self._wholes[first + delta.choice]
            whole.texts.append(delta.text)
            whole.ids.extend(delta.token_ids)
            whole.logprobs.extend(delta.logprobs)
            per_token = 2 + (self._envelope.asked.top or 0) if delta.logprobs else 1
            self._size += len(delta.token_ids) * per_token
            if self._size > ANSWER_TOKENS_MAX:
                raise InvalidRequest("The answer is too long for one piece; ask for a stream.")
        elif response.HasField("choice_finished"):
            ended = response.choice_finished
            whole = self._wholes[first + ended.choice]
            whole.texts.append(ended.text)
            whole.reason = REASONS.get(ended.reason, "stop")

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        envelope = self._envelope
        choices = [self._choice(index, whole) for index, whole in enumerate(self._wholes)]
        around = envelope.around(choices, chunk=False)
        return around | {"usage": usage_of(envelope.usages)}

    def _choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        asked, spelling, text = self._envelope.asked, self._envelope.spelling, "".join(whole.texts)
        logprobs: dict[str, Any] | None = None
        if asked.top is not None and asked.chat:
            logprobs = chat_logprobs(whole.logprobs, spelling)
        elif asked.top is not None:
            logprobs = completion_logprobs(whole.logprobs, spelling, 0)
        message: Any = {"role": "assistant", "content": text, "refusal": None}
        shape = (
            {"index": index, "message": message} if asked.chat else {"index": index, "text": text}
        )
        choice = shape | {"logprobs": logprobs, "finish_reason": whole.reason}
        return choice | {"token_ids": whole.ids} if asked.token_ids else choice
