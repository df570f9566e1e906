"""What crosses the seam between the router's service and its synchronous core (router/core.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from banyan.v1 import api_pb2, common_pb2, internal_pb2
from kvstore.keys import BlockKey, RootId


@dataclass(frozen=True)
class PlaceRequest:
    """One request to place. `keys` are the chain of its tokens' full blocks; `tokens` counts the
    prompt plus what a moved stream has emitted. `excluded` replicas are out (they just failed)."""

    request_id: str
    model: str
    root_id: RootId
    tokens: int
    keys: Sequence[BlockKey]
    max_tokens: int = 0
    choices: int = 1
    session: str = ""
    tenant: str = "default"
    no_cache: bool = False
    excluded: frozenset[str] = frozenset()
    numeric_class: str = ""  # of the replica a moved stream comes from: preferred, "" = any


@dataclass(frozen=True)
class Placement:
    """Where a request goes. Booked until `finished` or `failed` is called with its request id."""

    request_id: str
    replica: str
    epoch: int
    address: str
    left_numeric_class: bool  # a moved stream had to change numeric class
    decision: common_pb2.Decision


@dataclass(frozen=True)
class Observed:
    """What a finished request taught about its replica. Seconds; 0 tokens = nothing learnt.
    `decode_tokens` are those of one choice after its first, the mean where there are several."""

    computed_tokens: int = 0
    prefill_s: float = 0.0  # submit to first token
    decode_tokens: int = 0
    decode_s: float = 0.0  # first token to last


@dataclass(frozen=True)
class ModelEntry:
    """A served model as the ready replicas agree on it."""

    served: internal_pb2.ServedModel
    block_tokens: int
    replicas: tuple[str, ...] = field(default=())


class ReplicaLoad(NamedTuple):
    """A replica as it reported itself last. `load` is None until it has in this attachment, and is
    not to be changed."""

    replica: str
    state: str  # ready | suspect | draining
    heartbeat_age_s: float
    load: internal_pb2.Load | None


class Core(Protocol):
    """The router's knowledge and decisions: plain synchronous code, one thread, a Clock and an Rng.

    States of a replica: ready -> suspect (its Attach broke) -> gone (lease over), or draining.
    """

    def attach(self, hello: internal_pb2.Hello) -> list[str]:
        """A replica proved itself and said hello. Returns names of replicas' older epochs now void.

        Raises Incompatible on any parity difference (protocol, probe chain, roots, block size).
        """
        ...

    def heartbeat(self, replica: str, epoch: int, beat: internal_pb2.Heartbeat) -> None:
        """Load and liveness. Ignored for another epoch than the attached one."""
        ...

    def link_lost(self, replica: str, epoch: int) -> None:
        """Its Attach stream ended: suspect at once, no new request while others can serve."""
        ...

    def tick(self) -> list[tuple[str, int]]:
        """Expire leases and provisional entries; returns (replica, epoch) that are now gone."""
        ...

    def events(self, batch: internal_pb2.EventBatch) -> bool:
        """Apply block events; True = ask this replica for a snapshot (gap, new epoch, digest)."""
        ...

    def place(self, request: PlaceRequest) -> Placement:
        """Pick a replica by predicted cost and book it there. Raises NoReplica."""
        ...

    def preview(self, request: PlaceRequest) -> common_pb2.Decision:
        """The decision `place` would take, without booking. Raises NoReplica."""
        ...

    def first_token(self, request_id: str) -> None:
        """Its prefill is done: the booked prefill no longer counts."""
        ...

    def finished(self, request_id: str, delivered_tokens: int | None, observed: Observed) -> None:
        """It ended well; provisional entries stay until events confirm or a TTL drops them.
        `delivered_tokens` is None where the replica's usage is not known.
        """
        ...

    def failed(self, request_id: str) -> None:
        """It ended otherwise: booking and unconfirmed provisional entries are dropped."""
        ...

    def explain(self, request_id: str) -> common_pb2.Decision | None:
        """The recorded decision, None once it is no longer kept."""
        ...

    def models(self) -> dict[str, ModelEntry]:
        """Served models by name."""
        ...

    def state(self) -> list[api_pb2.ReplicaState]:
        """Replica states for ClusterState."""
        ...

    def loads(self) -> list[ReplicaLoad]:
        """What every replica reported last, without copying it."""
        ...

    def event_counts(self) -> dict[str, int]:
        """Totals of all event streams since the start: gaps, snapshots, digest_mismatches, ..."""
        ...

    @property
    def index_blocks(self) -> int:
        """Distinct blocks the index knows of."""
        ...
