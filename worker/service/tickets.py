"""Tickets of direct clients: opened and checked against this replica. Pure."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from banyan.v1 import internal_pb2
from seams.errors import Unauthenticated
from seams.proof import unseal


def open_ticket(
    secret: bytes, ticket: bytes, replica: str, epoch: int, now_unix_ms: int
) -> internal_pb2.TicketBody:
    """The body of a ticket for this replica and epoch. Raises Unauthenticated.

    Expiry is by the wall clock, since router and replica share no other; a ticket is short-lived
    and its tokens are sealed, so a clock that is off costs a retry, not a secret.
    """
    try:
        body = internal_pb2.TicketBody.FromString(unseal(secret, ticket))
    except DecodeError:
        raise Unauthenticated("The ticket cannot be read.") from None
    if body.replica != replica or body.epoch != epoch:
        raise Unauthenticated("The ticket was issued for another replica.")
    if body.expires_unix_ms <= now_unix_ms:
        raise Unauthenticated("The ticket has expired.")
    return body
