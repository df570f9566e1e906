"""Call: who asked for a stream and where its responses go, whatever protocol the caller speaks."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from banyan.v1 import api_pb2
from router.service.logs import note
from router.service.status import Context, metadata_of


class Call(Protocol):
    """One call of Api.generate. Attributes do not change while it runs."""

    @property
    def authorization(self) -> str:
        """As in HTTP's header of that name, "" without one."""
        ...

    @property
    def remaining_s(self) -> float | None:
        """How long the caller will wait; None = as long as it takes."""
        ...

    @property
    def cache_salt(self) -> str:
        """Keeps this caller's prefixes apart from others of its own tenant; "" = it does not."""
        ...

    @property
    def siblings(self) -> int:
        """Streams that go to the same client in the same breath, this one included: they share
        what one client may have waiting."""
        ...

    async def accepted(self, request_id: str) -> None:
        """The request is whole and will be placed once this returns."""
        ...

    async def write(self, response: api_pb2.GenerateResponse) -> None:
        """Give this to the client; returns when it has room for more. Raises CancelledError if the
        client is gone."""
        ...


class GrpcCall:
    """A Call that arrived by gRPC."""

    cache_salt = ""
    siblings = 1

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def authorization(self) -> str:
        """See Call."""
        return metadata_of(self._context, "authorization")

    @property
    def remaining_s(self) -> float | None:
        """See Call."""
        return self._context.time_remaining()

    async def accepted(self, request_id: str) -> None:
        """See Call. A traceparent goes back, and to the log beside our own id."""
        traceparent = metadata_of(self._context, "traceparent")[:256]
        if traceparent:
            note(logging.DEBUG, "traced", request_id=request_id, traceparent=traceparent)
            await self._context.send_initial_metadata((("traceparent", traceparent),))

    async def write(self, response: api_pb2.GenerateResponse) -> None:
        """See Call."""
        try:
            await self._context.write(response)
        except Exception:  # the library has no public class for it: the client is gone
            raise asyncio.CancelledError from None
