"""Policies that know no cache: round robin, and the fewest requests under way."""

from __future__ import annotations

from collections.abc import Sequence

from router.placement import PlaceRequest
from simulate.policies.base import Place
from simulate.policies.seen import Seen, SeenPolicy


class RoundRobin(SeenPolicy):
    """One after the other."""

    exact = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._turn = int(place.rng.random() * 1024)  # routers do not start in step

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        self._turn += 1
        return among[self._turn % len(among)]


class LeastLoaded(SeenPolicy):
    """The fewest requests that this router has under way, equals drawn."""

    exact = False

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        return self.least(among, [seen.in_flight for seen in among])
