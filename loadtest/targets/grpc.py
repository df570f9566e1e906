"""Banyan over gRPC, through the client that users have: its retries and moves are measured too."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from banyan.channel import banyan_stub
from banyan.client import AsyncClient
from banyan.events import ChoiceFinished, Delta, Finished, Resumed, Started
from banyan.routers import Deadline
from banyan.wire import Options, Prompt
from loadtest.targets.base import (
    OPEN_S_MAX,
    Ask,
    Ended,
    Form,
    Heard,
    Piece,
    as_ids,
    as_text,
    of_ids,
)
from loadtest.tokens import Counter, ModelTokens, WordTokens
from seams.errors import InternalError, ModelNotFound


class GrpcTarget:
    """A cluster through its routers. `form` CHAT becomes IDS where the model has no text."""

    def __init__(
        self,
        addresses: str,
        api_key: str = "",
        *,
        model: str = "",
        form: Form = Form.CHAT,
        ignore_eos: bool = True,
        no_cache: bool = False,
    ) -> None:
        self._client = AsyncClient(addresses, api_key or None)
        self._model, self._form = model, form
        self._ignore_eos, self._no_cache = ignore_eos, no_cache
        self._counter: Counter = WordTokens()

    async def open(self) -> None:
        """See Target."""
        client, deadline = self._client, Deadline(OPEN_S_MAX)
        served = [model.name for model in await client.list_models()]
        if self._model not in served and (self._model or len(served) != 1):
            known = ", ".join(served) or "none"
            raise ModelNotFound(f"Name one of the served models with --model: {known}.")
        self._model = self._model or served[0]
        stub = banyan_stub(client.channel(client.routers.current))
        text = await client.text_model(self._model, stub, deadline)
        if text is None:
            self._form = Form.IDS
        else:
            self._counter = ModelTokens(text)

    @property
    def facts(self) -> dict[str, str]:
        """See Target."""
        cache = "off" if self._no_cache else "on"
        return {"protocol": "gRPC", "model": self._model, "form": self._form.value, "cache": cache}

    def counter(self) -> Counter:
        """See Target."""
        return self._counter

    async def ask(self, ask: Ask) -> AsyncGenerator[Heard, None]:
        """See Target."""
        options = Options(
            model=self._model, max_tokens=ask.output_tokens, temperature=0.0,
            ignore_eos=self._ignore_eos, session=ask.session, no_cache=self._no_cache,
        )  # fmt: skip
        replica, request_id, rest, moves = "", "", "", 0
        async with aclosing(self._client.generate(self._prompt(ask), **options)) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    ids = self._form is Form.IDS
                    yield Piece(of_ids(event.token_ids) if ids else event.text)
                elif isinstance(event, ChoiceFinished):
                    rest = event.text
                elif isinstance(event, Started):
                    replica, request_id = event.replica, event.request_id
                elif isinstance(event, Resumed):
                    replica, moves = event.replica, moves + 1
                elif isinstance(event, Finished):
                    usage = event.usage
                    yield Ended(
                        usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens,
                        event.decision.replica if event.decision else replica,
                        request_id, moves + usage.moves, rest,
                    )  # fmt: skip
                    return
        raise InternalError("The stream ended without its usage.")

    def _prompt(self, ask: Ask) -> Prompt:
        if self._form is Form.IDS:
            return as_ids(ask.messages)
        if self._form is Form.TEXT:
            return as_text(ask.messages)
        return [{"role": role, "content": content} for role, content in ask.messages]

    async def aclose(self) -> None:
        """See Target."""
        await self._client.aclose()
