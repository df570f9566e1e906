"""llm-d's scheduler, as its two ways to pick are described.

The scorer adds 3 * prefix + 2 * queue + 2 * kv, each from 0 to 1: the share of the prompt that is
held, how short the replica's queue is among all, how much of its memory is free. The filter (since
2026-07) keeps the replicas that hold at least 0.8 of the prompt, unless their time to first token
is 18 s worse than the best of all, and takes whoever has the fewest tokens in flight.
Queues and memory are what replicas report; tokens in flight are the router's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.placement import PlaceRequest
from simulate.policies.seen import Seen, SeenPolicy

PREFIX, QUEUE, KV = 3.0, 2.0, 2.0
KEEP_SHARE = 0.8
WORSE_S_MAX = 18.0


class LlmdScorer(SeenPolicy):
    """Weighted scores."""

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        queues = [seen.load.waiting for seen in among]
        longest, spread = max(queues), max(queues) - min(queues)
        scores = [
            PREFIX * held[seen.name] / request.tokens
            + QUEUE * ((longest - queue) / spread if spread else 1.0)
            + KV * (1.0 - seen.used_share)
            for seen, queue in zip(among, queues, strict=True)
        ]
        return self.least(among, [-score for score in scores])


class LlmdFilter(SeenPolicy):
    """Holders first."""

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        first_s = {seen.name: self._first_s(seen, request, held[seen.name]) for seen in among}
        limit_s = min(first_s.values()) + WORSE_S_MAX
        kept = [
            seen
            for seen in among
            if held[seen.name] >= KEEP_SHARE * request.tokens and first_s[seen.name] <= limit_s
        ]
        kept = kept or list(among)
        return self.least(kept, [seen.in_flight_tokens for seen in kept])

    @staticmethod
    def _first_s(seen: Seen, request: PlaceRequest, held: int) -> float:
        queued = max(seen.load.queued_prefill_tokens, seen.prefill_tokens)
        return (queued + request.tokens - held) * seen.prefill_s_per_token
