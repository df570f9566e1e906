"""Banyan's own policy: the production RouterCore, whole, behind the simulator's contract.

Index, events, provisional entries, bookings, estimates and costs are the router's code. What may
be changed is what the core is told: with `Wrong`, every time it hears is off by a factor, in
hellos, in heartbeats and in what finished requests teach, so that nothing it learns puts it right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from banyan.v1 import internal_pb2
from router.core import RouterCore
from router.placement import Observed, PlaceRequest
from simulate.policies.base import Place

LEASE_S = 5.0
DECISIONS_KEPT = 16


@dataclass(frozen=True)
class Wrong:
    """Factors on the times of prompts and of decode steps."""

    prefill: float = 1.0
    step: float = 1.0


class CostPolicy:
    """A router."""

    def __init__(self, place: Place, wrong: Wrong | None = None) -> None:
        self.core = RouterCore(
            place.clock, place.rng, lease_s=LEASE_S, decisions_kept=DECISIONS_KEPT
        )
        self._wrong = wrong

    def attach(self, hello: internal_pb2.Hello) -> None:
        """See Policy."""
        if self._wrong is not None:
            priors = hello.priors
            priors.prefill_s_per_token *= self._wrong.prefill
            priors.step_s *= self._wrong.step
            priors.step_s_per_sequence *= self._wrong.step
        self.core.attach(hello)

    def events(self, batch: internal_pb2.EventBatch) -> bool:
        """See Policy."""
        return self.core.events(batch)

    def heartbeat(self, replica: str, epoch: int, beat: internal_pb2.Heartbeat) -> None:
        """See Policy."""
        if self._wrong is not None:
            told = internal_pb2.Heartbeat()
            told.CopyFrom(beat)
            told.load.prefill_s_per_token *= self._wrong.prefill
            told.load.step_s *= self._wrong.step
            beat = told
        self.core.heartbeat(replica, epoch, beat)

    def lost(self, replica: str, epoch: int) -> None:
        """See Policy."""
        self.core.link_lost(replica, epoch)

    def tick(self) -> None:
        """See Policy."""
        self.core.tick()

    def place(self, request: PlaceRequest) -> str:
        """See Policy."""
        return self.core.place(request).replica

    def first_token(self, request_id: str) -> None:
        """See Policy."""
        self.core.first_token(request_id)

    def finished(self, request_id: str, cached_tokens: int, observed: Observed) -> None:
        """See Policy."""
        if self._wrong is not None:
            observed = replace(
                observed,
                prefill_s=observed.prefill_s * self._wrong.prefill,
                decode_s=observed.decode_s * self._wrong.step,
            )
        self.core.finished(request_id, cached_tokens, observed)

    def failed(self, request_id: str) -> None:
        """See Policy."""
        self.core.failed(request_id)
