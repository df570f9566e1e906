"""Between the error tree and gRPC: how a call or a stream ends with an error."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from banyan.v1 import common_pb2
from seams.errors import BanyanError
from seams.trailers import retry_after_ms, trailing

CODES = {code.value[0]: code for code in grpc.StatusCode}
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from the published stubs
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: BanyanError) -> NoReturn:
    """End the call with a typed status. Always raises."""
    await context.abort(CODES[int(error.status)], error.message, trailing(error))


def as_status(error: BanyanError) -> common_pb2.Status:
    """The error as a message, for streams that end with one."""
    wait_ms = retry_after_ms(error) or 0
    return common_pb2.Status(
        code=int(error.status),
        message=error.message,
        retry_after_ms=wait_ms,
        error=type(error).__name__,
    )


def metadata_of(context: Context, key: str) -> str:
    """The first text value of a metadata key, "" without one."""
    for name, value in context.invocation_metadata() or ():
        if name == key and isinstance(value, str):
            return value
    return ""
