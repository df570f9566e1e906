"""sglang-router and SMG, as their cache-aware policies are described.

Both send everything to whoever has the fewest requests while those differ by more than 64 and by
more than half. Otherwise sglang-router follows an approximate tree of what it sent where: to the
longest match if that covers more than 0.3 of the prompt, else to the replica with the smallest
tree. The tree knows nothing of evictions; it is cut to its size by age. SMG in event mode follows
exact events: the most blocks wins, then the lower load, then the smaller tree; with no match, the
lowest load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.placement import PlaceRequest
from simulate.policies.base import Place
from simulate.policies.seen import Seen, SeenPolicy

GAP_MAX = 64
RATIO_MAX = 1.5
MATCH_MIN = 0.3
TREE_TOKENS_MAX = 1 << 24  # 2^26 characters, at four a token
EVICT_EVERY_S = 120.0


def out_of_balance(among: Sequence[Seen]) -> bool:
    """The gate over the whole fleet."""
    loads = [seen.in_flight for seen in among]
    return max(loads) - min(loads) > GAP_MAX and max(loads) > RATIO_MAX * min(loads)


class Sglang(SeenPolicy):
    """sglang-router 0.3.2."""

    exact = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._trees: dict[str, OrderedDict[bytes, None]] = {}  # blocks, the oldest use first
        self._evicted_s = 0.0

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        if out_of_balance(among):
            return self.least(among, [seen.in_flight for seen in among])
        matched = [self._matched(seen, request) for seen in among]
        if max(matched) > MATCH_MIN * request.tokens:
            return self.least(among, [-tokens for tokens in matched])
        return self.least(among, [len(self._tree(seen)) for seen in among])

    def place(self, request: PlaceRequest) -> str:
        """See Policy. What was sent is in the tree from now on."""
        name = super().place(request)
        tree = self._tree(self.replicas[name])
        for key in reversed(request.keys):  # a leaf is older than its parents
            tree[key] = None
            tree.move_to_end(key)
        return name

    def tick(self) -> None:
        """See Policy. Cuts the trees, every two minutes."""
        super().tick()
        if self.clock.now() - self._evicted_s < EVICT_EVERY_S:
            return
        self._evicted_s = self.clock.now()
        for seen in self.replicas.values():
            tree = self._tree(seen)
            while len(tree) * seen.block_tokens > TREE_TOKENS_MAX:
                tree.popitem(last=False)

    def lost(self, replica: str, epoch: int) -> None:
        """See Policy."""
        super().lost(replica, epoch)
        self._trees.pop(replica, None)

    def _tree(self, seen: Seen) -> OrderedDict[bytes, None]:
        return self._trees.setdefault(seen.name, OrderedDict())

    def _matched(self, seen: Seen, request: PlaceRequest) -> int:
        tree, blocks = self._tree(seen), 0
        while blocks < len(request.keys) and request.keys[blocks] in tree:
            blocks += 1
        return blocks * seen.block_tokens


class SmgEvents(SeenPolicy):
    """SMG 1.13 with gRPC workers that send events."""

    def choose(self, request: PlaceRequest, held: dict[str, int], among: Sequence[Seen]) -> Seen:
        """See SeenPolicy."""
        most = max(held[seen.name] for seen in among)
        if most == 0 or out_of_balance(among):
            return self.least(among, [seen.in_flight for seen in among])
        best = [seen for seen in among if held[seen.name] == most]
        fewest = min(seen.in_flight for seen in best)
        best = [seen for seen in best if seen.in_flight == fewest]
        return self.least(best, [self.index.stored(seen.stream.slot) for seen in best])
