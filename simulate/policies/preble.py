"""Preble's E2 and GORGO, as they are described, in seconds.

E2 exploits where more of the prompt is cached than missing: the longest holder, the least loaded of
equals. Otherwise it explores: argmin of load (prefill of what this router has under way there,
and a decode step for each), eviction (recomputing what would have to leave) and prefill. GORGO is
argmin of round trip, missing prefill and queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.placement import PlaceRequest
from simulate.policies.seen import Seen, SeenPolicy


class Preble(SeenPolicy):
    """E2: exploit and explore."""

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        most = max(held[seen.name] for seen in among)
        if most > request.tokens - most:
            best = [seen for seen in among if held[seen.name] == most]
            return self.least(best, [self._load_s(seen) for seen in best])
        return self.least(
            among,
            [
                self._load_s(seen)
                + self._eviction_s(seen, request, held[seen.name])
                + (request.tokens - held[seen.name]) * seen.prefill_s_per_token
                for seen in among
            ],
        )

    @staticmethod
    def _load_s(seen: Seen) -> float:
        steps_s = seen.in_flight * (seen.load.step_s or seen.priors.step_s)
        return seen.prefill_tokens * seen.prefill_s_per_token + steps_s

    @staticmethod
    def _eviction_s(seen: Seen, request: PlaceRequest, held: int) -> float:
        missing = -(-(request.tokens - held) // seen.block_tokens)
        short = max(0, missing - seen.load.blocks_free) if seen.load.blocks_total else 0
        return short * seen.block_tokens * seen.prefill_s_per_token * seen.used_share


class Gorgo(SeenPolicy):
    """Round trip + missing prefill + queue; the round trip is the same to all here."""

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        return self.least(
            among,
            [
                (request.tokens - held[seen.name] + seen.prefill_tokens) * seen.prefill_s_per_token
                for seen in among
            ],
        )
