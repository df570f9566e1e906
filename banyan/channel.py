"""How clients reach gRPC servers: channel options, metadata, and statuses turned into errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from banyan.v1 import api_pb2_grpc, internal_pb2_grpc
from seams.channels import CHANNEL_OPTIONS
from seams.errors import BanyanError, NoReplica, from_status
from seams.trailers import ERROR_KEY, RETRY_AFTER_KEY

OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also how long a connection may take to greet
]

Metadata = tuple[tuple[str, str], ...]


def banyan_stub(channel: Any) -> Any:
    """The router's service over a sync or async channel."""
    stub: Any = api_pb2_grpc.BanyanStub  # the generated code is untyped
    return stub(channel)


def replica_stub(channel: Any) -> Any:
    """A replica's service over a sync or async channel."""
    stub: Any = internal_pb2_grpc.ReplicaStub
    return stub(channel)


def metadata(api_key: str | None) -> Metadata:
    """What every call carries."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def addresses(given: str | Sequence[str]) -> list[str]:
    """One or several router addresses, as a list. A comma separates in text."""
    listed = given.split(",") if isinstance(given, str) else list(given)
    found = [address.strip() for address in listed if address.strip()]
    if not found:
        raise NoReplica("No router address was given.")
    return found


def to_error(error: grpc.RpcError) -> BanyanError:
    """The typed error of a failed call, sync or async."""
    known: Any = error  # both kinds have code(), details() and trailing_metadata()
    code, details = known.code(), known.details() or ""
    pairs: Iterable[tuple[str, Any]] = known.trailing_metadata() or ()
    trailing = dict(pairs)
    retry_ms = trailing.get(RETRY_AFTER_KEY)
    retry_after_s = float(retry_ms) / 1000 if retry_ms is not None else None
    if code is grpc.StatusCode.UNAVAILABLE and _is_transport(details):
        return NoReplica("The router cannot be reached.", retry_after_s=retry_after_s)
    number = code.value[0] if code is not None else grpc.StatusCode.INTERNAL.value[0]
    name = str(trailing.get(ERROR_KEY, ""))
    return from_status(number, details or "The call failed.", retry_after_s, name)


def _is_transport(details: str) -> bool:
    """True if gRPC itself wrote the text, which would show addresses and jargon."""
    signs = ("connect", "Socket closed", "recvmsg", "sendmsg", "GOAWAY", "handshake", "keepalive")
    return any(sign.lower() in details.lower() for sign in (*signs, "resolv", "resolution"))
