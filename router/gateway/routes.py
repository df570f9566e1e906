"""Gateway: what each path does, in terms of the router's Api. It keeps nothing between requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, unquote

import h11

from banyan.v1 import api_pb2
from router.gateway import fields, requests
from router.gateway.answers import Answer, Chunks
from router.gateway.description import description
from router.gateway.exchange import Exchange, Head
from router.gateway.problems import INVALID, Problem, invalid, problem_of
from router.gateway.requests import Asked
from router.placement import ModelEntry
from router.service.api import Api
from router.text.model import TextModel
from seams.errors import BanyanError

MODELS = "/v1/models"
RESET_TIERS = "reset_external"  # as vLLM calls it
FLAGS = {"true": True, "1": True, "false": False, "0": False}
REPLICA = "x-banyan-replica"  # the header that names who answered
DECODE_IDS = 4096  # more are decoded beside the loop
THREAD_BYTES = 64 * 1024  # larger bodies are read beside the loop, one at a time

T = TypeVar("T")

Route = Callable[["Gateway", Exchange, Head], Awaitable[None]]


class Gateway:
    """Serves requests that arrived by HTTP. `ready` tells whether any replica can serve."""

    def __init__(self, api: Api, ready: Callable[[], bool]) -> None:
        self._api = api
        self._ready = ready
        self._began_unix_s = int(time.time())
        self._large = asyncio.Semaphore(1)

    async def serve(self, exchange: Exchange, head: Head) -> None:
        """One request. Raises Problem or BanyanError before the answer has begun."""
        one_model = ("GET", Gateway._model) if head.path.startswith(f"{MODELS}/") else None
        found: tuple[str, Route] | None = ROUTES.get(head.path, one_model)
        if found is None:
            raise Problem(404, "There is nothing at this path.", INVALID, "unknown_url")
        method, route = found
        if head.method != method and (head.method, method) != ("HEAD", "GET"):
            message, code = f"This path takes {method}.", "method_not_allowed"
            raise Problem(405, message, INVALID, code, allow=method)
        if method == "GET":
            await exchange.body()
        await route(self, exchange, head)

    def _known_caller(self, head: Head) -> None:
        self._api.identify(head.headers.get("authorization", ""))

    async def _posted(
        self, exchange: Exchange, head: Head, meant: Callable[[dict[str, Any]], T]
    ) -> T:
        """What the JSON body of a caller who may call means. A web page of another origin cannot
        send this content type unasked, so none reaches a cluster on its reader's loopback."""
        self._known_caller(head)
        kind = head.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = "The content type must be application/json."
            raise Problem(415, message, INVALID, "unsupported_media_type")
        body = await exchange.body()
        if len(body) <= THREAD_BYTES:
            return meant(fields.parse(body))
        async with self._large:
            return await asyncio.to_thread(lambda: meant(fields.parse(body)))

    # ---- generation ------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange, head: Head) -> None:
        asked = await self._posted(exchange, head, lambda body: requests.chat(body, head.headers))
        await self._generate(exchange, head, asked)

    async def _completion(self, exchange: Exchange, head: Head) -> None:
        asked = await self._posted(
            exchange, head, lambda body: requests.completion(body, head.headers)
        )
        await self._generate(exchange, head, asked)

    async def _generate(self, exchange: Exchange, head: Head, asked: Asked) -> None:
        if asked.stream:
            await self._streamed(exchange, head, asked)
        else:
            await self._whole(exchange, head, asked)

    async def _whole(self, exchange: Exchange, head: Head, asked: Asked) -> None:
        answer = Answer(asked, self._api.text_of, int(time.time()))

        async def write(part: int, response: api_pb2.GenerateResponse) -> None:
            answer.add(part, response)

        parts = _Parts(self._api, asked, head.headers, answer.accepted, write)
        await parts.run()
        await exchange.answer(200, answer.body(), parts.headers)

    async def _streamed(self, exchange: Exchange, head: Head, asked: Asked) -> None:
        chunks = Chunks(asked, self._api.text_of, int(time.time()))

        async def write(part: int, response: api_pb2.GenerateResponse) -> None:
            if events := chunks.events(part, response):
                await send(events)

        async def send(events: bytes) -> None:
            if not exchange.begun:
                exchange.stream(parts.headers)
            await exchange.send(events)

        parts = _Parts(self._api, asked, head.headers, chunks.accepted, write)
        try:
            await parts.run()
        except BanyanError as error:
            if not exchange.begun:
                raise
            await send(chunks.failed(problem_of(error)))
        else:
            await send(chunks.last())
        await exchange.end()

    # ---- questions -------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange, head: Head) -> None:
        self._known_caller(head)
        entries = [self._shown(entry) for _, entry in sorted(self._api.models().items())]
        await exchange.answer(200, {"object": "list", "data": entries})

    async def _model(self, exchange: Exchange, head: Head) -> None:
        self._known_caller(head)
        name = unquote(head.path.removeprefix(f"{MODELS}/"))
        entry = self._api.models().get(name)
        if entry is None:
            raise Problem(404, "No replica serves this model.", INVALID, "model_not_found", "model")
        await exchange.answer(200, self._shown(entry))

    def _shown(self, entry: ModelEntry) -> dict[str, Any]:
        served = entry.served
        return {
            "id": served.name,
            "object": "model",
            "created": self._began_unix_s,
            "owned_by": "banyan",
            "max_model_len": served.context_tokens,
        }

    async def _tokenize(self, exchange: Exchange, head: Head) -> None:
        request = await self._posted(exchange, head, requests.tokenization)
        ids, served = await self._api.tokens(request)
        context_tokens = served.entry.served.context_tokens
        answer = {"count": len(ids), "max_model_len": context_tokens, "tokens": ids}
        await exchange.answer(200, answer)

    async def _detokenize(self, exchange: Exchange, head: Head) -> None:
        given = await self._posted(
            exchange, head, lambda body: fields.read(body, fields.DETOKENIZE)
        )
        if "tokens" not in given:
            raise invalid("tokens is missing.", "tokens")
        ids, model = given["tokens"], given.get("model", "")
        _, served = await self._api.tokens(_nothing(model))
        if ids and max(ids) >= served.entry.served.vocab_tokens:
            raise invalid("tokens has an id outside the model's vocabulary.", "tokens")
        if served.text is None:
            raise invalid("This model has no tokenizer.", "model")
        await exchange.answer(200, {"prompt": await _decoded(served.text, ids)})

    async def _health(self, exchange: Exchange, head: Head) -> None:
        ready = self._ready()
        await exchange.answer(200 if ready else 503, {"status": "ok" if ready else "not ready"})

    async def _description(self, exchange: Exchange, head: Head) -> None:
        await exchange.answer(200, description())

    async def _reset(self, exchange: Exchange, head: Head) -> None:
        self._api.check_admin(head.headers.get("authorization", ""))
        await exchange.body()
        reset = await self._api.reset_cache(tiers=_flag(head.query, RESET_TIERS))
        replicas = [
            {
                "replica": one.replica,
                "blocks": one.blocks,
                "blocks_in_use": one.blocks_in_use,
                "tier_blocks": one.tier_blocks,
            }
            for one in reset.replicas
        ]
        await exchange.answer(200, {"object": "prefix_cache_reset", "replicas": replicas})


ROUTES: dict[str, tuple[str, Route]] = {
    "/v1/chat/completions": ("POST", Gateway._chat),
    "/v1/completions": ("POST", Gateway._completion),
    MODELS: ("GET", Gateway._models),
    "/tokenize": ("POST", Gateway._tokenize),
    "/detokenize": ("POST", Gateway._detokenize),
    "/health": ("GET", Gateway._health),
    "/openapi.json": ("GET", Gateway._description),
    "/reset_prefix_cache": ("POST", Gateway._reset),
}


def _nothing(model: str) -> api_pb2.GenerateRequest:
    """A prompt without tokens, to learn about its model."""
    return api_pb2.GenerateRequest(model=model, tokens=api_pb2.TokenIds())


def _flag(query: str, name: str) -> bool:
    """A flag of the query string, off without it. Raises Problem."""
    given = parse_qs(query, keep_blank_values=True).get(name, ["false"])[-1].lower()
    if given not in FLAGS:
        raise invalid(f"{name} must be true or false.", name)
    return FLAGS[given]


async def _decoded(text: TextModel, ids: list[int]) -> str:
    if len(ids) <= DECODE_IDS:
        return text.decode(ids)
    return await asyncio.to_thread(text.decode, ids)


class _Parts:
    """The prompts of one request, served side by side: each is a call of the Api. None is placed
    before all are known to be whole, so that what is wrong with one is an HTTP status."""

    def __init__(
        self,
        api: Api,
        asked: Asked,
        headers: Mapping[str, str],
        accepted: Callable[[str], None],
        write: Callable[[int, api_pb2.GenerateResponse], Awaitable[None]],
    ) -> None:
        self._api = api
        self._asked = asked
        self.authorization = headers.get("authorization", "")
        self._accepted = accepted
        self.write = write
        self.request_id = ""  # of the first prompt; the answer's
        self.replica = ""  # of the prompt that began first, where it began
        self._waiting = len(asked.requests)
        self._all_whole = asyncio.Event()

    async def run(self) -> None:
        """Serve all of them to their end. Raises the first error."""
        calls = [_HttpCall(self, part, self._asked) for part in range(len(self._asked.requests))]
        if len(calls) == 1:
            await self._api.generate(self._asked.requests[0], calls[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for request, call in zip(self._asked.requests, calls, strict=True):
                    group.create_task(self._api.generate(request, call))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What the answer says beside its body, once one prompt has begun."""
        return [("x-request-id", self.request_id), (REPLICA, quote(self.replica))]

    async def whole(self, part: int, request_id: str) -> None:
        """This part can be placed; returns once all can."""
        if part == 0:
            self.request_id = request_id
            self._accepted(request_id)
        self._waiting -= 1
        if not self._waiting:
            self._all_whole.set()
        await self._all_whole.wait()


class _HttpCall:
    """A Call (router/service/calls.py) of one prompt."""

    remaining_s = None

    def __init__(self, parts: _Parts, part: int, asked: Asked) -> None:
        self._parts = parts
        self._part = part
        self.authorization = parts.authorization
        self.cache_salt = asked.cache_salt
        self.siblings = len(asked.requests)

    async def accepted(self, request_id: str) -> None:
        """See Call."""
        await self._parts.whole(self._part, request_id)

    async def write(self, response: api_pb2.GenerateResponse) -> None:
        """See Call."""
        if not self._parts.replica and response.HasField("started"):
            self._parts.replica = response.started.replica
        try:
            await self._parts.write(self._part, response)
        except (OSError, TimeoutError, h11.ProtocolError):
            raise asyncio.CancelledError from None  # the client is gone, or reads nothing
