"""The one exception tree. Each leaf names its gRPC status; each text is one sentence for the user.

BanyanError
├── InvalidRequest        INVALID_ARGUMENT     a field is missing, malformed or over its limit
│   └── PromptTooLong     INVALID_ARGUMENT     prompt and output do not fit the model's context
├── Unauthenticated       UNAUTHENTICATED      no valid key, ticket or cluster proof
├── Forbidden             PERMISSION_DENIED    a valid key that may not do this
├── ModelNotFound         NOT_FOUND            no replica serves this model
├── RequestNotFound       NOT_FOUND            no such request (any more)
├── Overloaded            RESOURCE_EXHAUSTED   a bounded queue is full; `retry_after_s` says when
├── OutOfBlocks           RESOURCE_EXHAUSTED   the request alone cannot fit the replica's pool
├── NoReplica             UNAVAILABLE          nobody can serve now; retry
├── ReplicaLost           UNAVAILABLE          the replica died and the stream cannot be moved
├── DeadlineExceeded      DEADLINE_EXCEEDED    the caller's time is over
├── Cancelled             CANCELLED            the caller went away or asked for it
├── Incompatible          FAILED_PRECONDITION  router and replica disagree (roots, block size)
├── ModelLoadError        FAILED_PRECONDITION  a model folder is missing, foreign or damaged
├── LaunchError           FAILED_PRECONDITION  a process, port or resource is not to be had
└── InternalError         INTERNAL             our own fault; the request ends, the process lives

Texts never carry a prompt, a path of the server or an address (rule S5); command-line errors about
the user's own paths are the exception.
"""

from __future__ import annotations

from enum import IntEnum


class StatusCode(IntEnum):
    """gRPC's status numbers, so that the core need not import grpc."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class BanyanError(Exception):
    """Root of the tree; never raised itself."""

    status = StatusCode.INTERNAL

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(BanyanError):
    """A field is missing, malformed or over its limit."""

    status = StatusCode.INVALID_ARGUMENT


class PromptTooLong(InvalidRequest):
    """Prompt and output do not fit the model's context."""


class Unauthenticated(BanyanError):
    """No valid key, ticket or cluster proof."""

    status = StatusCode.UNAUTHENTICATED


class Forbidden(BanyanError):
    """A valid key that may not do this."""

    status = StatusCode.PERMISSION_DENIED


class ModelNotFound(BanyanError):
    """No replica serves this model."""

    status = StatusCode.NOT_FOUND


class RequestNotFound(BanyanError):
    """No such request, or no longer."""

    status = StatusCode.NOT_FOUND


class Overloaded(BanyanError):
    """A bounded queue is full."""

    status = StatusCode.RESOURCE_EXHAUSTED


class OutOfBlocks(BanyanError):
    """The request alone cannot fit the replica's pool."""

    status = StatusCode.RESOURCE_EXHAUSTED


class NoReplica(BanyanError):
    """Nobody can serve now."""

    status = StatusCode.UNAVAILABLE


class ReplicaLost(BanyanError):
    """The replica died and the stream cannot be moved."""

    status = StatusCode.UNAVAILABLE


class DeadlineExceeded(BanyanError):
    """The caller's time is over."""

    status = StatusCode.DEADLINE_EXCEEDED


class Cancelled(BanyanError):
    """The caller went away or asked for it."""

    status = StatusCode.CANCELLED


class Incompatible(BanyanError):
    """Router and replica disagree about roots, tokenizer or block size."""

    status = StatusCode.FAILED_PRECONDITION


class ModelLoadError(BanyanError):
    """A model folder is missing, foreign or damaged."""

    status = StatusCode.FAILED_PRECONDITION


class LaunchError(BanyanError):
    """A process, port or resource is not to be had."""

    status = StatusCode.FAILED_PRECONDITION


class InternalError(BanyanError):
    """Our own fault; the request ends, the process lives."""

    status = StatusCode.INTERNAL


def _leaves(cls: type[BanyanError]) -> list[type[BanyanError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _leaves(sub))]


def from_status(
    code: int, message: str, retry_after_s: float | None = None, name: str = ""
) -> BanyanError:
    """The class called `name` if it has this status, else the first of the tree that has;
    InternalError for a status we never send."""
    fitting = [leaf for leaf in _leaves(BanyanError)[1:] if leaf.status == code]
    named = [leaf for leaf in fitting if leaf.__name__ == name]
    leaf = (named or fitting or [InternalError])[0]
    return leaf(message, retry_after_s=retry_after_s)
