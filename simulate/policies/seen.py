"""What every re-written policy keeps: replicas it sees, what it sent there, and what they hold.

Blocks come from the same events and are kept in the same index as ours, so that policies differ in
how they decide and not in how well they are implemented. A policy says in `predicts` for how long
it believes in blocks that a request it placed will bring; 0 = it waits for the events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from banyan.v1 import internal_pb2
from router.events import BlockStream
from router.index import PrefixIndex, prefixes
from router.placement import Observed, PlaceRequest
from router.provisional import Provisional
from seams.errors import NoReplica
from simulate.policies.base import Place


@dataclass(eq=False)
class Seen:
    """One replica as this router sees it. Token counts are of the router's own requests."""

    name: str
    epoch: int
    block_tokens: int
    stream: BlockStream
    priors: internal_pb2.Priors
    load: internal_pb2.Load = field(default_factory=internal_pb2.Load)
    in_flight: int = 0
    in_flight_tokens: int = 0
    prefill_tokens: int = 0  # missing when they were placed, of those without a first token
    blocks: Counter[bytes] = field(default_factory=Counter)  # of what runs: shared ones count once

    @property
    def prefill_s_per_token(self) -> float:
        """As it reports, else as it claimed."""
        return self.load.prefill_s_per_token or self.priors.prefill_s_per_token

    @property
    def used_share(self) -> float:
        """Of its blocks, those that running requests hold."""
        total = self.load.blocks_total
        return 1 - (self.load.blocks_free + self.load.blocks_cached) / total if total else 0.0


@dataclass
class _Booked:
    request: PlaceRequest
    seen: Seen
    missing: int
    prefilling: bool = True


class SeenPolicy(ABC):
    """A policy that decides from `Seen`; who derives from it writes `choose`."""

    predicts_s = 0.0
    exact = True  # whether it listens to block events

    def __init__(self, place: Place) -> None:
        self.clock, self.rng = place.clock, place.rng
        self.replicas: dict[str, Seen] = {}
        self.index = PrefixIndex()
        self._provisional = Provisional(self.index)
        self._booked: dict[str, _Booked] = {}

    @abstractmethod
    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """One of `among`; `held` are the prompt's tokens that each replica has on its device, or
        will, by name."""

    # --- the contract ------------------------------------------------------------------------

    def attach(self, hello: internal_pb2.Hello) -> None:
        """See Policy."""
        self._forget(hello.replica)
        stream = BlockStream(self.index, self._provisional)
        self.replicas[hello.replica] = Seen(
            hello.replica, hello.epoch, hello.block_tokens, stream, hello.priors
        )

    def events(self, batch: internal_pb2.EventBatch) -> bool:
        """See Policy."""
        seen = self.replicas.get(batch.replica)
        if not self.exact or seen is None or seen.epoch != batch.epoch:
            return False
        return seen.stream.receive(batch, self.clock.now())

    def heartbeat(self, replica: str, epoch: int, beat: internal_pb2.Heartbeat) -> None:
        """See Policy."""
        seen = self.replicas.get(replica)
        if seen is not None and seen.epoch == epoch:
            seen.load = beat.load

    def lost(self, replica: str, epoch: int) -> None:
        """See Policy. Whoever is lost is forgotten at once."""
        seen = self.replicas.get(replica)
        if seen is not None and seen.epoch == epoch:
            self._forget(replica)

    def _forget(self, replica: str) -> None:
        seen = self.replicas.pop(replica, None)
        if seen is not None:
            seen.stream.close()

    def tick(self) -> None:
        """See Policy."""
        self._provisional.expire(self.clock.now())
        self.index.sweep(16)

    def place(self, request: PlaceRequest) -> str:
        """See Policy."""
        among = [seen for name, seen in self.replicas.items() if name not in request.excluded]
        if not among:
            raise NoReplica("No replica can serve now.")
        held = self._held(request, among)
        seen = self.choose(request, held, among)
        self._book(request, seen, request.tokens - held[seen.name])
        return seen.name

    def first_token(self, request_id: str) -> None:
        """See Policy."""
        booked = self._booked.get(request_id)
        if booked is not None and booked.prefilling:
            booked.prefilling = False
            booked.seen.prefill_tokens -= booked.missing

    def finished(self, request_id: str, cached_tokens: int, observed: Observed) -> None:
        """See Policy."""
        self._release(request_id)

    def failed(self, request_id: str) -> None:
        """See Policy."""
        self._release(request_id)
        self._provisional.drop(request_id)

    # --- bookkeeping -------------------------------------------------------------------------

    def _held(self, request: PlaceRequest, among: Sequence[Seen]) -> dict[str, int]:
        depths = self.index.match(request.keys) if self.exact else {}
        held = {}
        for seen in among:
            depth = depths.get(seen.stream.slot)
            blocks = depth.device if depth is not None else 0
            held[seen.name] = min(blocks * seen.block_tokens, request.tokens - 1)
        return held

    def _book(self, request: PlaceRequest, seen: Seen, missing: int) -> None:
        assert request.request_id not in self._booked
        self._booked[request.request_id] = _Booked(request, seen, missing)
        seen.in_flight += 1
        seen.in_flight_tokens += request.tokens
        seen.prefill_tokens += missing
        seen.blocks.update(request.keys)
        if self.predicts_s and request.keys:
            names = prefixes(b"".join(request.keys))
            expires_s = self.clock.now() + self.predicts_s
            self._provisional.book(request.request_id, seen.stream.slot, names, (), expires_s)

    def _release(self, request_id: str) -> None:
        self.first_token(request_id)
        booked = self._booked.pop(request_id, None)
        if booked is None:
            return
        seen, request = booked.seen, booked.request
        seen.in_flight -= 1
        seen.in_flight_tokens -= request.tokens
        seen.blocks.subtract(request.keys)
        for key in request.keys:
            if not seen.blocks[key]:
                del seen.blocks[key]

    def least(self, among: Iterable[Seen], scores: Iterable[float]) -> Seen:
        """Of the lowest score, equals drawn."""
        pairs = list(zip(scores, among, strict=True))
        best = min(score for score, _ in pairs)
        equal = [seen for score, seen in pairs if score == best]
        return equal[int(self.rng.random() * len(equal))]
