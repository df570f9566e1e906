"""What a router tells Prometheus: metric names, and the text exposition of what it holds.

It knows no socket. Label values are names of routers, replicas, tiers, states, causes and statuses;
never a prompt, a path, a key or a tenant. The text is written here, not by prometheus-client: that
takes 7 ms for one metric of 256 replicas with three tiers, on the loop that carries the streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from banyan.v1 import common_pb2
from router.fleet import DRAINING, READY, SUSPECT
from router.placement import ReplicaLoad
from router.traffic import Histogram, Traffic

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE, COUNTER = "gauge", "counter"
REPLICA_STATES = (READY, SUSPECT, DRAINING)
TIER_STATES = ("ok", "broken", "readonly", "full")


@dataclass(frozen=True)
class Seen:
    """What a router holds at the moment of a scrape. Loads are those of the last heartbeats; only
    `traffic` still changes while the text is written."""

    router: str
    uptime_s: float
    streams_open: int
    index_blocks: int
    replicas: Sequence[ReplicaLoad]
    traffic: Traffic


class Metric(NamedTuple):
    """A field of banyan.v1 Load or TierLoad. Those who have 0 in `unless` have no such sample."""

    name: str
    kind: str  # GAUGE | COUNTER
    field: str
    help: str  # no backslash, no line break
    unless: str = ""


REPLICA_METRICS = (
    Metric("requests_running", GAUGE, "running", "Requests in the batch."),
    Metric("requests_waiting", GAUGE, "waiting", "Requests that wait for their turn."),
    Metric("pool_blocks", GAUGE, "blocks_total", "KV blocks on the device, whatever is in them."),
    Metric("free_blocks", GAUGE, "blocks_free", "Blocks with nothing in them."),
    Metric(
        "cached_blocks",
        GAUGE,
        "blocks_cached",
        "Blocks in the cache that no request holds: they can be evicted.",
    ),
    Metric(
        "queued_prefill_tokens",
        GAUGE,
        "queued_prefill_tokens",
        "Prompt tokens still to be computed.",
    ),
    Metric(
        "step_seconds",
        GAUGE,
        "step_s",
        "A recent decode step, smoothed; absent until measured.",
        unless="step_s",
    ),
    Metric(
        "prefill_seconds_per_token",
        GAUGE,
        "prefill_s_per_token",
        "Recent prefill, smoothed; absent until measured.",
        unless="prefill_s_per_token",
    ),
    Metric("stalled", GAUGE, "stalled", "1 if its steps stand still with work pending."),
    Metric("steps_total", COUNTER, "steps", "Steps of the engine."),
    Metric("prompt_tokens_total", COUNTER, "prompt_tokens", "Prompt tokens of requests taken."),
    Metric(
        "cached_tokens_total",
        COUNTER,
        "cached_tokens",
        "Of the prompt tokens: read from the cache, not computed.",
    ),
    Metric(
        "low_blocks",
        GAUGE,
        "blocks_low",
        "The least that ever was free or evictable.",
    ),
    Metric(
        "kv_token_bytes",
        GAUGE,
        "kv_token_bytes",
        "Bytes of all KV groups in use, per position held; absent while none is.",
        unless="kv_token_bytes",
    ),
    Metric(
        "retention_rounds_total",
        COUNTER,
        "retention_rounds",
        "Times a sequence was pruned.",
    ),
    Metric(
        "retention_dropped_tokens_total",
        COUNTER,
        "retention_dropped_tokens",
        "Tokens whose keys and values were dropped.",
    ),
    Metric(
        "retention_freed_blocks_total",
        COUNTER,
        "retention_freed_blocks",
        "Whole blocks that this made free, of all KV groups.",
    ),
    Metric(
        "retention_moved_bytes_total",
        COUNTER,
        "retention_moved_bytes",
        "Bytes of survivors that were moved for it.",
    ),
    Metric(
        "retention_objects_kept_total",
        COUNTER,
        "retention_objects_kept",
        "Pruned states of sequences that ended, put into the tiers.",
    ),
    Metric(
        "retention_objects_resumed_total",
        COUNTER,
        "retention_objects_resumed",
        "Times a sequence went on from one.",
    ),
    Metric(
        "retention_resumed_tokens_total",
        COUNTER,
        "retention_resumed_tokens",
        "Tokens that were not computed because of it.",
    ),
)
TIER_METRICS = (
    Metric(
        "blocks",
        GAUGE,
        "blocks",
        "Blocks held; absent for a shared tier, where no replica knows.",
        unless="bytes_max",
    ),
    Metric(
        "bytes",
        GAUGE,
        "bytes",
        "Bytes held, as stored; absent for a shared tier, where no replica knows.",
        unless="bytes_max",
    ),
    Metric(
        "logical_bytes",
        GAUGE,
        "logical_bytes",
        "Bytes that the blocks held take on the device; absent for a shared tier.",
        unless="bytes_max",
    ),
    Metric(
        "max_bytes",
        GAUGE,
        "bytes_max",
        "Bytes it may hold; absent where the replica sets no bound.",
        unless="bytes_max",
    ),
    Metric(
        "load_bytes_per_second",
        GAUGE,
        "load_bytes_per_s",
        "Recent loads; absent until measured.",
        unless="load_bytes_per_s",
    ),
    Metric(
        "store_bytes_per_second",
        GAUGE,
        "store_bytes_per_s",
        "Recent stores; absent until measured.",
        unless="store_bytes_per_s",
    ),
    Metric("queued_loads", GAUGE, "loads_queued", "Loads that wait or are under way."),
    Metric("queued_stores", GAUGE, "stores_queued", "Stores that wait or are under way."),
    Metric(
        "hit_tokens_total",
        COUNTER,
        "hit_tokens",
        "Prompt tokens that came from here and were not computed.",
    ),
    Metric("loaded_bytes_total", COUNTER, "loaded_bytes", "Bytes loaded."),
    Metric("stored_bytes_total", COUNTER, "stored_bytes", "Bytes stored."),
    Metric(
        "dropped_total",
        COUNTER,
        "dropped",
        "Loads and stores not made: no room, or the queue was full.",
    ),
    Metric("evicted_total", COUNTER, "evicted", "Blocks given up for others."),
    Metric(
        "failed_total",
        COUNTER,
        "failed",
        "Loads and stores that the disk or the network refused, or that were late.",
    ),
)


def exposition(seen: Seen) -> Iterator[str]:
    """The text, metric by metric, so that its writer can give way in between."""
    yield from _router(seen)
    yield from _replicas(seen)
    yield from _tiers(seen)


def _router(seen: Seen) -> Iterator[str]:
    traffic, own = seen.traffic, _label("{", "router", seen.router)
    for name, kind, value, text in (
        ("uptime_seconds", GAUGE, seen.uptime_s, "Since the router started."),
        ("open_streams", GAUGE, seen.streams_open, "Generate calls in progress."),
        ("index_blocks", GAUGE, seen.index_blocks, "Distinct blocks that the index knows of."),
        ("moves_total", COUNTER, traffic.moves, "Times a stream went on at another replica."),
        ("streamed_tokens_total", COUNTER, traffic.tokens, "Tokens given to clients of Generate."),
    ):
        yield _family(f"banyan_router_{name}", kind, text, [own], [value])
    yield _family(
        "banyan_router_requests_total",
        COUNTER,
        "Generate calls that ended, by gRPC status.",
        [_label(own, "status", status.name) for status in traffic.ended],
        traffic.ended.values(),
    )
    yield _histogram(
        "banyan_router_time_to_first_token_seconds",
        "From a Generate call to its first token.",
        own,
        traffic.first_token_s,
    )
    yield _histogram(
        "banyan_router_request_duration_seconds",
        "From a Generate call to its end, of those that ended with OK.",
        own,
        traffic.duration_s,
    )


def _replicas(seen: Seen) -> Iterator[str]:
    """One that has not reported in this attachment yet has no counters rather than zeros: if it
    was here before, its figures come back, and after a zero they would count twice."""
    router = _label("{", "router", seen.router)
    owns = [_label(router, "replica", replica.replica) for replica in seen.replicas]
    states = [replica.state for replica in seen.replicas]
    yield _one_hot("banyan_replica_state", owns, states, REPLICA_STATES)
    ages = [replica.heartbeat_age_s for replica in seen.replicas]
    name, text = "banyan_replica_heartbeat_age_seconds", "Since its last sign of life."
    yield _family(name, GAUGE, text, owns, ages)
    told = [
        (own, replica.load)
        for own, replica in zip(owns, seen.replicas, strict=True)
        if replica.load is not None
    ]
    yield from _fields(
        "banyan_replica_", REPLICA_METRICS, [own for own, _ in told], [load for _, load in told]
    )


def _tiers(seen: Seen) -> Iterator[str]:
    owns, tiers = [], []
    for own, tier in _named_tiers(seen):
        owns.append(own)
        tiers.append(tier)
    yield _one_hot("banyan_tier_state", owns, [tier.state for tier in tiers], TIER_STATES)
    yield from _fields("banyan_tier_", TIER_METRICS, owns, tiers)
    corrupt = [
        (_label(own, "cause", cause), records)
        for own, tier in zip(owns, tiers, strict=True)
        for cause, records in {c.cause: c.records for c in tier.corrupt}.items()
    ]
    yield _family(
        "banyan_tier_corrupt_records_total",
        COUNTER,
        "Records that were not what they were stored as, by cause: each a miss.",
        [own for own, _ in corrupt],
        [records for _, records in corrupt],
    )


def _named_tiers(seen: Seen) -> Iterator[tuple[str, common_pb2.TierLoad]]:
    """Each tier once, as each cause, whatever a replica says: a series that comes twice would
    spoil the whole scrape."""
    router = _label("{", "router", seen.router)
    for replica in seen.replicas:
        if replica.load is not None:
            own = _label(router, "replica", replica.replica)
            for name, tier in {tier.tier: tier for tier in replica.load.tiers}.items():
                yield _label(own, "tier", name), tier


def _fields(
    prefix: str, metrics: Iterable[Metric], owns: list[str], messages: Sequence[Any]
) -> Iterator[str]:
    """One metric after the other, of all messages."""
    for name, kind, field, text, unless in metrics:
        having, values = owns, list(map(attrgetter(field), messages))
        if unless:
            there = list(map(attrgetter(unless), messages))
            having = [own for own, one in zip(owns, there, strict=True) if one]
            values = [value for value, one in zip(values, there, strict=True) if one]
        yield _family(prefix + name, kind, text, having, values)


def _one_hot(name: str, owns: list[str], states: list[str], known: Sequence[str]) -> str:
    lines = [f"# HELP {name} 1 for the state it is in.\n# TYPE {name} {GAUGE}\n"]
    for state in [*known, *sorted(set(states).difference(known))]:  # of newer replicas
        end = _label("", "state", state) + "} "
        lines += [
            f"{name}{own}{end}{int(state == now)}\n" for own, now in zip(owns, states, strict=True)
        ]
    return "".join(lines)


def _family(
    name: str, kind: str, text: str, owns: Iterable[str], values: Iterable[float | bool]
) -> str:
    """One metric; `owns` are labels without the closing brace."""
    head = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    lines = [f"{name}{own}}} {+value}\n" for own, value in zip(owns, values, strict=True)]
    return head + "".join(lines)  # +True is 1


def _histogram(name: str, text: str, own: str, histogram: Histogram) -> str:
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    counts = list(accumulate(histogram.counts))
    lines = [
        f"{name}_bucket{_label(own, 'le', bound)}}} {count}\n"
        for bound, count in zip(bounds, counts, strict=True)
    ]
    lines += [f"{name}_sum{own}}} {histogram.sum}\n", f"{name}_count{own}}} {counts[-1]}\n"]
    return f"# HELP {name} {text}\n# TYPE {name} histogram\n" + "".join(lines)


def _label(before: str, name: str, value: str) -> str:
    """One label more; the first comes after "{"."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{before}{"" if before == "{" else ","}{name}="{escaped}"'
