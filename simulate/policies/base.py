"""The contract of a policy: one router's knowledge and decisions, and nothing else.

What a policy hears is what a router of Banyan hears: hellos, heartbeats and block events of
replicas, late by the network's delay; the life of the requests it placed itself. Of other routers'
requests it learns through the replicas alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from banyan.v1 import internal_pb2
from router.placement import Observed, PlaceRequest
from seams.clock import Clock
from seams.rng import Rng


class Policy(Protocol):
    """Picks the replica for each request of one router. Synchronous; every call returns at once."""

    def attach(self, hello: internal_pb2.Hello) -> None:
        """A replica came, or came back in a newer epoch."""
        ...

    def events(self, batch: internal_pb2.EventBatch) -> bool:
        """Block events; True = ask the replica for a snapshot."""
        ...

    def heartbeat(self, replica: str, epoch: int, beat: internal_pb2.Heartbeat) -> None:
        """A replica's load."""
        ...

    def lost(self, replica: str, epoch: int) -> None:
        """Its connection broke."""
        ...

    def tick(self) -> None:
        """Called a few times a second."""
        ...

    def place(self, request: PlaceRequest) -> str:
        """The replica's name. Raises NoReplica. Booked until `finished` or `failed`."""
        ...

    def first_token(self, request_id: str) -> None:
        """Its prefill is over."""
        ...

    def finished(self, request_id: str, cached_tokens: int, observed: Observed) -> None:
        """It ended well, after so many tokens from the replica's cache."""
        ...

    def failed(self, request_id: str) -> None:
        """It ended otherwise."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a policy lives: its clock and its chance."""

    clock: Clock
    rng: Rng


MakePolicy = Callable[[Place], Policy]
