"""A replica's tiers: opened as configured, and what routers are told of them.

Serving needs none of them, so one that is not to be had is a warning and the replica goes on
without it; only what is asked for in vain of this machine's own memory refuses the start. It knows
no block and no request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from banyan.v1 import common_pb2, internal_pb2
from kernels.codecs.cold import TurboCold
from kernels.cold import ColdCodec, Fp8Cold
from kvstore.fetch import LEVELS
from kvstore.groups import Representation
from kvstore.tiered import TieredStore
from kvstore.tiers.base import BlockName, TierStats
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.queue import LookupJob, TierQueue
from kvstore.tiers.redis import RedisTier
from seams.errors import LaunchError
from seams.urls import read_url
from worker.config import ReplicaConfig
from worker.models.base import ModelSpec
from worker.models.memory import available_bytes

GIB = 1 << 30
TURBOQUANT4 = "turboquant4"
STAGING_GIB = 0.25  # host memory through which lower tiers are reached where none was asked for
DISK_THREADS = 2
SHARED_THREADS = 2
CALLS_AT_START = 3  # failures in a row that open the breaker
RATE_MAX = 1e15  # seams/limits.py
_NAMES = {level: name for name, level in LEVELS.items()}
_PROBE = BlockName(b"probe".ljust(16, b"\0"), bytes(16), b"")

log = logging.getLogger(__name__)


def open_tiers(
    config: ReplicaConfig, spec: ModelSpec, reserved_bytes: int = 0
) -> TieredStore | None:
    """The tiers that `config` asks for and that can be had; None if that is none.

    `reserved_bytes` of host memory are about to be taken by others (pools). Raises LaunchError if
    host memory does not suffice, not even for one block, or if the URL is none.
    """
    if not (config.host_gib or config.nvme or config.redis):
        return None
    codecs = cold_codecs(config, spec)
    spec = _written(spec, codecs)
    sizes = {group.id: group.block_bytes for group in spec.groups}
    host_bytes = int((config.host_gib or STAGING_GIB) * GIB)
    _check_memory(host_bytes, reserved_bytes, spec)
    lower: list[TierQueue] = []
    try:
        lower += _disk(config, spec, sizes)
        lower += _shared(config, spec)
        if not (lower or config.host_gib):
            return None
        return TieredStore(_host(sizes, host_bytes, write_back=bool(lower)), lower, codecs)
    except BaseException:
        for queue in lower:
            queue.close()
        raise


def cold_codecs(config: ReplicaConfig, spec: ModelSpec) -> dict[int, ColdCodec]:
    """By KV group; none without --cold-codec. Raises LaunchError where a request's bits depend on
    nothing else, so must not on where its blocks have been, and for a model whose blocks nobody may
    look into."""
    if config.cold_codec == "none":
        return {}
    if _is_exact(spec):
        raise LaunchError(
            f"The cold codec {config.cold_codec} rounds, and this replica computes exactly: "
            "--compute torch does not."
        )
    vectors = config.cold_codec == TURBOQUANT4  # it must find them; FP8 takes a head's page as one
    if not spec.layouts or (vectors and spec.representation.layout != Representation.layout):
        raise LaunchError(f"The cold codec {config.cold_codec} cannot read this model's blocks.")
    return {
        group.id: TurboCold(layout) if vectors else Fp8Cold(layout)
        for group, layout in zip(spec.groups, spec.layouts, strict=True)
    }


def _is_exact(spec: ModelSpec) -> bool:
    return "-invariant-" in spec.numeric_class


def _written(spec: ModelSpec, codecs: Mapping[int, ColdCodec]) -> ModelSpec:
    """The model as the tiers see it: its blocks as they are written there. Where a request's bits
    depend on nothing else, they must not depend on another arithmetic's blocks either: records of
    an invariant numeric class are its own."""
    numerics = spec.numeric_class if _is_exact(spec) else ""
    written = replace(spec.representation, numerics=numerics)
    if not codecs:
        return replace(spec, representation=written)
    groups = tuple(replace(g, block_bytes=codecs[g.id].encoded_bytes) for g in spec.groups)
    codec = next(iter(codecs.values())).name
    return replace(spec, groups=groups, representation=replace(written, codec=codec))


def served_spec(config: ReplicaConfig, spec: ModelSpec) -> ModelSpec:
    """The model as routers are told of it: with a cold codec its answers are of another kind."""
    if config.cold_codec == "none":
        return spec
    return replace(spec, numeric_class=f"{spec.numeric_class}-cold-{config.cold_codec}")


def _check_memory(host_bytes: int, reserved_bytes: int, spec: ModelSpec) -> None:
    block_bytes = sum(-(-g.block_bytes // 4096) * 4096 * g.ranks for g in spec.groups)
    if host_bytes < block_bytes:
        raise LaunchError(
            f"One block takes {block_bytes / 2**20:.2f} MiB and host_gib allows "
            f"{host_bytes / 2**20:.2f} MiB."
        )
    left = available_bytes(torch.device("cpu")) - reserved_bytes
    if host_bytes > left:
        raise LaunchError(
            f"host_gib asks for {host_bytes / GIB:.2f} GiB of host memory and "
            f"{max(0, left) / GIB:.2f} GiB are left."
        )


def _host(sizes: Mapping[int, int], capacity_bytes: int, *, write_back: bool) -> HostTier:
    try:
        return HostTier(sizes, capacity_bytes, write_back=write_back)
    except OSError:
        raise LaunchError("The host tier's memory cannot be had.") from None


def _disk(config: ReplicaConfig, spec: ModelSpec, sizes: Mapping[int, int]) -> list[TierQueue]:
    if not config.nvme:
        return []
    folder = Path(config.nvme) / config.replica
    try:
        tier = NvmeTier(folder, int(config.nvme_gib * GIB), spec.representation.id, sizes)
    except LaunchError as error:
        log.warning("%s goes on without its disk tier: %s", config.replica, error.message)
        return []
    return [TierQueue(tier, threads=DISK_THREADS)]


def _shared(config: ReplicaConfig, spec: ModelSpec) -> list[TierQueue]:
    """Its server may be down now: the breaker finds out when it is back."""
    if not config.redis:
        return []
    tier = RedisTier(
        read_url(config.redis),
        spec.representation.id,
        namespace=config.namespace,
        ttl_s=config.redis_ttl_s,
        threads=SHARED_THREADS,
    )
    queue = TierQueue(tier, threads=SHARED_THREADS)
    _call(queue, config.replica, CALLS_AT_START)
    return [queue]


def _call(queue: TierQueue, replica: str, calls: int) -> None:
    """Call the server now, so that the breaker of one that is down opens before a request waits."""

    def answered(names: list[BlockName], found: list[bool]) -> None:
        if queue.tier.stats().state == "broken":
            log.warning("%s goes on without the shared tier until its server answers", replica)
        elif calls > 1:
            _call(queue, replica, calls - 1)

    queue.lookup(LookupJob([_PROBE], answered))


# ---- what routers are told --------------------------------------------------------------------


def capacities(
    store: TieredStore | None, config: ReplicaConfig, spec: ModelSpec
) -> list[internal_pb2.TierCapacity]:
    """Per tier, how many blocks of all groups, as they are written there, it holds at most (0: not
    ours to say) and how fast they come from there (0: not measured yet)."""
    if store is None:
        return []
    groups = _written(spec, cold_codecs(config, spec)).groups
    block_bytes = sum(group.block_bytes * group.ranks for group in groups)
    return [
        internal_pb2.TierCapacity(
            tier=int(level),  # type: ignore[arg-type]
            blocks=stats.bytes_max // block_bytes,
            bytes_per_s=_load_rate(stats, store.lower.get(level)),
        )
        for level, stats in store.stats().items()
    ]


def tier_loads(store: TieredStore | None, spec: ModelSpec) -> list[common_pb2.TierLoad]:
    """Per tier, totals over all tenants since the start and what is held now."""
    if store is None:
        return []
    block_bytes = device_block_bytes(spec)
    return [
        tier_load(
            _NAMES[level],
            stats,
            store.lower.get(level),
            hit_tokens=store.loaded_blocks[level] * spec.block_tokens,
            block_bytes=block_bytes,
        )
        for level, stats in store.stats().items()
    ]


def device_block_bytes(spec: ModelSpec) -> float:
    """What one of a tier's blocks, of one group and rank, takes on the device: the mean, since no
    tier counts its blocks by group. Exact for a model with one KV group."""
    ranks = sum(group.ranks for group in spec.groups)
    return sum(group.block_bytes * group.ranks for group in spec.groups) / ranks


def tier_load(
    name: str, stats: TierStats, queue: TierQueue | None, *, hit_tokens: int, block_bytes: float
) -> common_pb2.TierLoad:
    """One tier's figures, the drops of the queue before it (None: there is none) among them.
    `block_bytes` is what a block takes on the device."""
    loads, stores = queue.depth() if queue is not None else (0, 0)
    dropped = queue.dropped_loads + queue.dropped_stores if queue is not None else 0
    return common_pb2.TierLoad(
        tier=name,
        state=stats.state,
        blocks=stats.blocks,
        bytes=stats.bytes,
        bytes_max=stats.bytes_max,
        logical_bytes=round(stats.blocks * block_bytes),
        hit_tokens=hit_tokens,
        hit_blocks=stats.hits,
        loaded_bytes=stats.loaded_bytes,
        stored_bytes=stats.stored_bytes,
        load_bytes_per_s=_load_rate(stats, queue),
        store_bytes_per_s=_rate(stats.stored_bytes, stats.store_s),
        dropped=stats.dropped + dropped,
        evicted=stats.evicted,
        failed=stats.failed,
        corrupt=[
            common_pb2.CorruptCount(cause=cause, records=count)
            for cause, count in sorted(stats.corrupt.items())
        ],
        loads_queued=loads,
        stores_queued=stores,
    )


def _load_rate(stats: TierStats, queue: TierQueue | None) -> float:
    """Recent where there is a queue, which measures it; else over all loads. 0 = none yet."""
    if queue is not None and stats.loaded_bytes:
        return min(queue.bytes_per_s, RATE_MAX)
    return _rate(stats.loaded_bytes, stats.load_s)


def _rate(size: int, seconds: float) -> float:
    return min(size / seconds, RATE_MAX) if seconds > 0 else 0.0
