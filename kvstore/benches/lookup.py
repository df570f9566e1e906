"""What asking a tier for a chain of 128 blocks takes, and how often a remote one is asked."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import redis

from kvstore.benches.measure import REPRESENTATION, SOON_S, chain_names, cost, memory, store
from kvstore.benches.nvme import capacity_bytes
from kvstore.benches.shared import SERVER_BYTES, STALL_S
from kvstore.tiers.base import Tier
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.redis import RedisTier
from seams.bench import Row, alternate, median

BLOCKS = 128
CHAINS = 16  # held by the tier
BLOCK_BYTES = 4096
CALLS = 20  # of a round


def _fill(tier: Tier) -> None:
    block = memory(BLOCK_BYTES, 1)
    for chain in range(CHAINS):
        store(tier, chain_names(chain, BLOCKS), [block] * BLOCKS)


def _cpu_row(name: str, tier: Tier, rounds: int) -> Row:
    """Microseconds of CPU; of a tier that asks nobody."""
    _fill(tier)
    taken_us = []
    for call in range(rounds * CALLS):
        names = chain_names(call % CHAINS, BLOCKS)
        taken_us.append(cost(partial(tier.lookup, names, SOON_S)).cpu_s * 1e6)
    tier.close()
    return Row(name, median(taken_us), "us", len(taken_us))


def host_rows(rounds: int) -> list[Row]:
    """Of the host tier."""
    tier = HostTier({0: BLOCK_BYTES}, 2 * CHAINS * BLOCKS * BLOCK_BYTES)
    return [_cpu_row("lookup_128_host_us", tier, rounds)]


def nvme_rows(rounds: int, directory: Path) -> list[Row]:
    """Of the disk tier, whose index is in memory."""
    capacity = capacity_bytes(2 * CHAINS * BLOCKS, BLOCK_BYTES)
    with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=directory) as made:
        tier = NvmeTier(
            Path(made), capacity, REPRESENTATION, {0: BLOCK_BYTES}, free_space_floor_bytes=0
        )
        return [_cpu_row("lookup_128_nvme_us", tier, rounds)]


class _Asking:
    """A shared tier and a bare client on one server, both asked for the same number of keys."""

    def __init__(self, server: EmbeddedValkey) -> None:
        self.bare = redis.Redis.from_url(server.url)
        self.tier = RedisTier(server.url, REPRESENTATION, namespace="bench", stall_s=STALL_S)
        _fill(self.tier)
        self._asked = 0

    def ours(self) -> float:
        """Microseconds that pass, the middle of CALLS."""
        taken = []
        for _ in range(CALLS):
            self._asked += 1
            names = chain_names(self._asked % CHAINS, BLOCKS)
            taken.append(cost(partial(self.tier.lookup, names, SOON_S)).wall_s * 1e6)
        return median(taken)

    def piped(self) -> float:
        """The same of one pipeline of EXISTS."""
        taken = []
        for _ in range(CALLS):
            pipe = self.bare.pipeline(transaction=False)
            for at in range(BLOCKS):
                pipe.exists(b"banyan:bench:%032d:%d" % (at, self._asked))
            taken.append(cost(pipe.execute).wall_s * 1e6)
        return median(taken)

    def round_trips(self) -> float:
        """Times that the server read something because of one lookup; the two questions about that
        are one read more."""
        before = self._reads()
        self.tier.lookup(chain_names(0, BLOCKS), SOON_S)
        return self._reads() - before - 1

    def _reads(self) -> int:
        return int(self.bare.info("stats")["total_reads_processed"])


def redis_rows(rounds: int) -> list[Row]:
    """Of the shared tier, on a server of its own."""
    with EmbeddedValkey(SERVER_BYTES) as server:
        asking = _Asking(server)
        taken = alternate({"ours": asking.ours, "piped": asking.piped}, rounds)
        trips = median([asking.round_trips() for _ in range(CALLS)])
        asking.tier.close()
        asking.bare.close()
    ours_us, piped_us = median(taken["ours"]), median(taken["piped"])
    return [
        Row("lookup_128_redis_us", ours_us, "us", rounds * CALLS, "EXISTS in a pipeline", piped_us),
        Row("lookup_128_redis_round_trips", trips, "round trips", CALLS),
    ]
