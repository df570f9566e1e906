"""The shared tier beside bare redis-py with hiredis, on the same embedded server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import redis
from redis.utils import HIREDIS_AVAILABLE

from kvstore.benches.measure import (
    CALL_BLOCKS,
    REPRESENTATION,
    Pair,
    Race,
    chain_names,
    cut,
    load,
    memory,
    overhead_row,
    store,
)
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.redis import TTL_S, RedisTier
from seams.bench import Row

CALLS = 4  # of a pass
SERVER_BYTES = 1 << 30
STALL_S = 10.0  # a busy machine is no broken server here


class RedisBench:
    """CALLS chains of CALL_BLOCKS, stored anew in each pass: what the pass before stored is deleted
    between the two, of ours and of the bare client's."""

    def __init__(self, server: EmbeddedValkey, block_bytes: int) -> None:
        assert HIREDIS_AVAILABLE, "without hiredis the bare client is no limit"
        total = CALLS * CALL_BLOCKS * block_bytes
        self.source = cut(memory(total, 1), block_bytes)
        self.target = cut(memory(total), block_bytes)
        self.values = [bytes(view) for view in self.source]
        self.bare = redis.Redis.from_url(server.url)
        self.tier = RedisTier(server.url, REPRESENTATION, namespace="bench", stall_s=STALL_S)
        self.names = [chain_names(call, CALL_BLOCKS) for call in range(CALLS)]
        self.keys = [b"bare:%d" % at for at in range(CALLS * CALL_BLOCKS)]

    def stores(self, turn: int) -> Iterator[Pair]:
        """One call of ours, as many SETs of the bare client."""
        for names in self.names:
            self.tier.discard(names)
        self.bare.delete(*self.keys)
        for call in range(CALLS):
            names = self.names[call] = chain_names((turn, call), CALL_BLOCKS)
            here = slice(call * CALL_BLOCKS, (call + 1) * CALL_BLOCKS)
            yield Pair(
                partial(store, self.tier, names, self.source[here]),
                partial(self._set, self.keys[here], self.values[here]),
            )

    def loads(self, _: int) -> Iterator[Pair]:
        """One call of ours, as many GETs of the bare client."""
        for call, names in enumerate(self.names):
            here = slice(call * CALL_BLOCKS, (call + 1) * CALL_BLOCKS)
            yield Pair(
                partial(load, self.tier, names, self.target[here]),
                partial(self._get, self.keys[here]),
            )

    def _set(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            assert self.bare.set(key, value, ex=TTL_S)

    def _get(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert self.bare.get(key) is not None

    def close(self) -> None:
        """The server is the caller's."""
        self.tier.close()
        self.bare.close()


def rows(label: str, block_bytes: int, rounds: int) -> list[Row]:
    """Storing and loading in calls of a few blocks, on a server of its own."""
    stored = Race(f"redis_store_{label}", "SET", block_bytes)
    loaded = Race(f"redis_load_{label}", "GET", block_bytes)
    with EmbeddedValkey(SERVER_BYTES) as server:
        bench = RedisBench(server, block_bytes)
        try:
            stored.run(bench.stores, rounds)
            loaded.run(bench.loads, rounds)
        finally:
            bench.close()
    overhead = overhead_row(f"redis_overhead_us_{label}", [stored, loaded])
    return [stored.row(), loaded.row(), overhead]
