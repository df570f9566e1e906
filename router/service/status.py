"""Between the error tree and gRPC: codes, sentences, and when to retry."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from banyan.v1 import common_pb2
from seams.errors import BanyanError, NoReplica, Overloaded

CODES = {code.value[0]: code for code in grpc.StatusCode}
RETRY_AFTER_KEY = "retry-after-ms"
PUSHBACK_KEY = "grpc-retry-pushback-ms"  # gRPC's own retries (proposal A6) honour it
ERROR_KEY = "banyan-error"  # the error's class: several share one code
RETRY_AFTER_S = 1.0  # where a retry makes sense and nothing better is known

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from the published stubs
Context = grpc.aio.ServicerContext[Any, Any]


def retry_after_ms(error: BanyanError) -> int | None:
    """When a retry makes sense; None if it does not."""
    if error.retry_after_s is not None:
        return max(1, int(error.retry_after_s * 1000))
    return int(RETRY_AFTER_S * 1000) if isinstance(error, NoReplica | Overloaded) else None


def trailing(error: BanyanError) -> tuple[tuple[str, str], ...]:
    """The metadata that goes with an error."""
    pairs = [(ERROR_KEY, type(error).__name__)]
    wait_ms = retry_after_ms(error)
    if wait_ms is not None:
        pairs += [(RETRY_AFTER_KEY, str(wait_ms)), (PUSHBACK_KEY, str(wait_ms))]
    return tuple(pairs)


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
