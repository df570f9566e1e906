"""Problem: an error as OpenAI's clients expect it. Knows no request and no socket."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from seams.errors import (
    BanyanError,
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NoReplica,
    OutOfBlocks,
    Overloaded,
    PromptTooLong,
    ReplicaLost,
    RequestNotFound,
    Unauthenticated,
)
from seams.trailers import RETRY_AFTER_S, retry_after_ms

INVALID = "invalid_request_error"
SERVER = "server_error"


@dataclass(eq=False)
class Problem(Exception):
    """Ends one HTTP request. `retry_after_s` None: a retry would not help."""

    status: int
    message: str
    type: str = INVALID
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    allow: str = ""  # 405: the method that this path takes

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        named = {"message": self.message, "type": self.type}
        return {"error": named | {"param": self.param, "code": self.code}}

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What goes with it."""
        lines = [("allow", self.allow)] if self.allow else []
        if self.retry_after_s is not None:
            lines.append(("retry-after", str(max(1, round(self.retry_after_s)))))
        return lines


# The first that an error is an instance of: HTTP status, type, code.
KINDS: tuple[tuple[type[BanyanError], int, str, str | None], ...] = (
    (PromptTooLong, 400, INVALID, "context_length_exceeded"),
    (InvalidRequest, 400, INVALID, None),
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (Forbidden, 403, "permission_error", "admin_key_required"),
    (ModelNotFound, 404, INVALID, "model_not_found"),
    (RequestNotFound, 404, INVALID, "request_not_found"),
    (OutOfBlocks, 400, INVALID, "out_of_blocks"),  # a retry would not fit either
    (Overloaded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (NoReplica, 503, "service_unavailable_error", "no_replica"),
    (ReplicaLost, 503, "service_unavailable_error", "replica_lost"),
    (Cancelled, 503, "service_unavailable_error", "cancelled"),
    (DeadlineExceeded, 504, SERVER, "deadline_exceeded"),
    (BanyanError, 500, SERVER, None),
)
RETRIED = (429, 503)
_FIELD = re.compile(r"\b(?:Sampling|GenerateRequest|TokenBias|TokenIds|Chat|ChatMessage)\.(\w+)")
_PARAMS = {"tokens": "prompt", "ids": "prompt", "text": "prompt", "session": "prompt_cache_key"}


def problem_of(error: BanyanError) -> Problem:
    """The error in HTTP's words; fields carry the names that HTTP clients know them by."""
    status, kind, code = next(
        (status, kind, code) for leaf, status, kind, code in KINDS if isinstance(error, leaf)
    )
    named = _FIELD.search(error.message)
    param = _PARAMS.get(named[1], named[1]) if named and status == 400 else None
    message = _FIELD.sub(lambda found: _PARAMS.get(found[1], found[1]), error.message)
    wait_ms = retry_after_ms(error)
    wait_s = RETRY_AFTER_S if wait_ms is None else wait_ms / 1000
    return Problem(status, message, kind, code, param, wait_s if status in RETRIED else None)


def invalid(message: str, param: str | None = None, code: str | None = None) -> Problem:
    """400: the request is wrong, and the sentence says where."""
    return Problem(400, message, INVALID, code, param)
