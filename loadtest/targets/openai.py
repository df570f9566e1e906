"""Any endpoint that speaks OpenAI's HTTP: Banyan's own gateway, or a peer measured beside it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from loadtest.targets.base import Ask, Ended, Form, Heard, Piece, as_ids, as_text, of_ids
from loadtest.targets.http1 import Answered, HttpClient
from loadtest.tokens import Counter, EndpointTokens, WordTokens
from seams.errors import (
    BanyanError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NoReplica,
    Overloaded,
    Unauthenticated,
)

PATHS = {Form.CHAT: "/chat/completions", Form.TEXT: "/completions", Form.IDS: "/completions"}
REPLICA = "x-banyan-replica"  # of our gateway: where the answer began
DONE = b"[DONE]"
WORDS_OF = ("content", "reasoning_content", "reasoning")  # of a chat's delta
SENTENCE_CHARACTERS_MAX = 300
ERRORS: dict[int, type[BanyanError]] = {
    400: InvalidRequest, 401: Unauthenticated, 403: Unauthenticated, 404: ModelNotFound,
    408: DeadlineExceeded, 413: InvalidRequest, 415: InvalidRequest, 422: InvalidRequest,
    429: Overloaded, 502: NoReplica, 503: NoReplica, 504: DeadlineExceeded,
}  # fmt: skip
TYPES = {"rate_limit_error": 429, "service_unavailable_error": 503, "invalid_request_error": 400}


class OpenAiTarget:
    """An endpoint by the URL of its API, `http://HOST:PORT/v1`. With `ignore_eos` answers have the
    wanted length; servers that do not know the field may refuse it."""

    def __init__(
        self,
        url: str,
        api_key: str = "",
        *,
        model: str = "",
        form: Form = Form.CHAT,
        ignore_eos: bool = True,
    ) -> None:
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = HttpClient(url, self._key)
        self._root_url = url.rstrip("/").removesuffix("/v1")
        self._model, self._form, self._ignore_eos = model, form, ignore_eos

    async def open(self) -> None:
        """See Target."""
        answer = await self._http.ask("GET", "/models")
        found = await answer.json()
        if answer.status != 200:
            raise _error(answer.status, found)
        try:
            served = [str(entry["id"]) for entry in found["data"]]
        except (LookupError, TypeError):
            raise InvalidRequest("The target's /models is none of OpenAI's.") from None
        if self._model not in served and (self._model or len(served) != 1):
            known = ", ".join(served) or "none"
            raise ModelNotFound(f"Name one of the served models with --model: {known}.")
        self._model = self._model or served[0]

    @property
    def facts(self) -> dict[str, str]:
        """See Target."""
        return {"protocol": "HTTP", "model": self._model, "form": self._form.value}

    def counter(self) -> Counter:
        """See Target."""
        if self._form is Form.IDS:
            return WordTokens()
        return EndpointTokens(self._root_url, self._model, self._key)

    async def ask(self, ask: Ask) -> AsyncGenerator[Heard, None]:
        """See Target."""
        label = {"X-Session-Id": ask.session}
        answer = await self._http.ask("POST", PATHS[self._form], self._body(ask), label)
        try:
            if answer.status != 200:
                raise _error(answer.status, await answer.json())
            usage: dict[str, Any] | None = None
            whole = False
            async with aclosing(answer.events()) as events:
                async for event in events:
                    if event == DONE:
                        whole = True
                        continue  # to the end of the body, so that the connection can be kept
                    chunk = _object(event)
                    usage = chunk.get("usage") or usage
                    if text := self._text(chunk):
                        yield Piece(text)
            yield self._ended(answer, usage if whole else None)
        finally:
            answer.close()

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model, "max_tokens": ask.output_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._form is Form.CHAT:
            body["messages"] = [{"role": m.role, "content": m.content} for m in ask.messages]
        elif self._form is Form.TEXT:
            body["prompt"] = as_text(ask.messages)
        else:
            body |= {"prompt": as_ids(ask.messages), "return_token_ids": True}
        return body

    def _text(self, chunk: dict[str, Any]) -> str:
        """What it brought, "" if nothing."""
        try:
            choices = chunk.get("choices") or [{}]
            if self._form is Form.IDS:
                return of_ids(choices[0].get("token_ids") or ())
            if self._form is Form.TEXT:
                return str(choices[0].get("text") or "")
            delta = choices[0].get("delta") or {}
            return "".join(str(delta.get(name) or "") for name in WORDS_OF)
        except (AttributeError, LookupError, TypeError):
            raise InternalError("The endpoint sent an event that is none of OpenAI's.") from None

    @staticmethod
    def _ended(answer: Answered, usage: dict[str, Any] | None) -> Ended:
        if usage is None:
            raise InternalError("The stream ended without its end mark or its usage.")
        try:
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens")
            return Ended(
                int(usage["prompt_tokens"]), None if cached is None else int(cached),
                int(usage["completion_tokens"]),
                replica=answer.headers.get(REPLICA, ""),
                request_id=answer.headers.get("x-request-id", ""),
            )  # fmt: skip
        except (AttributeError, LookupError, TypeError, ValueError):
            raise InternalError("The endpoint's usage is none of OpenAI's.") from None

    async def aclose(self) -> None:
        """See Target."""
        await self._http.aclose()


def _object(event: bytes) -> dict[str, Any]:
    """A chunk. Raises the error that it stands for."""
    try:
        found = json.loads(event)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InternalError("The endpoint sent an event that is no JSON object.")
    if found.get("error"):
        kind = found["error"].get("type") if isinstance(found["error"], dict) else ""
        raise _error(TYPES.get(str(kind), 500), found)
    return found


def _error(status: int, body: Any) -> BanyanError:
    """The typed error of an HTTP status, with the server's own sentence if it has one."""
    said = body.get("error", body.get("message", "")) if isinstance(body, dict) else ""
    if isinstance(said, dict):
        said = said.get("message", "")
    sentence = " ".join(str(said).split())[:SENTENCE_CHARACTERS_MAX] or "It said no more."
    return ERRORS.get(status, InternalError)(f"HTTP {status}: {sentence}")
