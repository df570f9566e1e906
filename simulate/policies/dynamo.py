"""Dynamo's KV router, as its cost function is described: blocks of prompt and of decode, added.

argmin of scale * max(active prefill + prompt - credit, 0) + decode blocks, where the active prefill
is what this router's requests without a first token had missing when they were placed, credit is
what the replica holds, and decode blocks are those its running requests occupy, shared ones once.
With prediction, what was routed somewhere counts as held there for a while (a side index with a
TTL); without, only events count.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.placement import PlaceRequest
from simulate.policies.seen import Seen, SeenPolicy

PREFILL_SCALE = 1.0
PREDICTED_S = 120.0  # the TTL of its approximate entries


class Dynamo(SeenPolicy):
    """Events alone."""

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        return self.least(among, [self._cost(seen, request, held[seen.name]) for seen in among])

    def _cost(self, seen: Seen, request: PlaceRequest, held: int) -> float:
        prefill = max(seen.prefill_tokens + request.tokens - held, 0) / seen.block_tokens
        new = sum(key not in seen.blocks for key in request.keys)
        return PREFILL_SCALE * prefill + len(seen.blocks) + new


class DynamoPredicting(Dynamo):
    """Events and predictions."""

    predicts_s = PREDICTED_S
