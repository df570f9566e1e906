"""The exposition: what Prometheus' own parser reads from it, and what it must never say."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_replica import ScriptedReplica

from banyan.v1 import api_pb2, common_pb2, internal_pb2
from router.core import RouterCore
from router.metrics import REPLICA_METRICS, TIER_METRICS, Seen, exposition
from router.placement import ReplicaLoad
from router.traffic import Histogram, Passage, Traffic
from seams.clock import VirtualClock
from seams.errors import Overloaded, StatusCode
from seams.rng import SeededRng

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
TierLoad, CorruptCount = common_pb2.TierLoad, common_pb2.CorruptCount
DISK = TierLoad(
    tier="disk", state="full", blocks=7, bytes=700, bytes_max=1000, logical_bytes=1400,
    hit_tokens=48, hit_blocks=3, loaded_bytes=300, stored_bytes=800, load_bytes_per_s=1.5e9,
    store_bytes_per_s=2.5e8, dropped=4, evicted=5, failed=6, loads_queued=2, stores_queued=9,
    corrupt=[CorruptCount(cause="checksum", records=3), CorruptCount(cause="length", records=0)],
)  # fmt: skip
LOAD = internal_pb2.Load(
    running=3, waiting=2, blocks_total=100, blocks_free=10, blocks_cached=60, steps=1234,
    queued_prefill_tokens=77, step_s=0.0125, prefill_s_per_token=2e-5, prompt_tokens=2**53 - 1,
    cached_tokens=500, stalled=True, tiers=[DISK], kv_token_bytes=46080.5,
)  # fmt: skip

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def seen(*replicas: ReplicaLoad, traffic: Traffic | None = None) -> Seen:
    return Seen("r0", 12.5, 4, 4096, replicas, traffic or Traffic())


def attached(load: internal_pb2.Load | None, name: str = "w0", state: str = "ready") -> ReplicaLoad:
    return ReplicaLoad(name, state, 0.25, load)


def parsed(of: Seen) -> Samples:
    """Every sample by name and sorted labels; asserts what Prometheus would refuse."""
    text, found = "".join(exposition(of)), Counter[Any]()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            found[key] += 1
            samples[key] = sample.value
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert sample.labels["router"] == "r0"
    assert set(found.values()) == {1}, "a series came twice"
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    return samples


def of(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted({"router": "r0", **labels}.items()))))


def test_every_figure_of_a_replica_arrives() -> None:
    samples = parsed(seen(attached(LOAD)))
    for metric in REPLICA_METRICS:
        value = of(samples, f"banyan_replica_{metric.name}", replica="w0")
        assert value == getattr(LOAD, metric.field), metric
    for metric in TIER_METRICS:
        value = of(samples, f"banyan_tier_{metric.name}", replica="w0", tier="disk")
        assert value == getattr(DISK, metric.field), metric
    told = {field.name for field in internal_pb2.Load.DESCRIPTOR.fields}
    assert told == {metric.field for metric in REPLICA_METRICS} | {"tiers"}
    told = {field.name for field in TierLoad.DESCRIPTOR.fields}
    told -= {"tier", "state", "corrupt", "hit_blocks"}
    assert told == {metric.field for metric in TIER_METRICS}
    for cause, count in (("checksum", 3), ("length", 0)):
        name = "banyan_tier_corrupt_records_total"
        assert of(samples, name, replica="w0", tier="disk", cause=cause) == count
    assert of(samples, "banyan_replica_heartbeat_age_seconds", replica="w0") == 0.25
    assert of(samples, "banyan_router_index_blocks") == 4096
    assert of(samples, "banyan_router_open_streams") == 4
    assert of(samples, "banyan_router_uptime_seconds") == 12.5


def test_states_are_one_hot() -> None:
    disk = TierLoad(tier="disk", state="of a later version")
    load = internal_pb2.Load(tiers=[TierLoad(tier="host", state="broken"), disk])
    samples = parsed(seen(attached(load, state="suspect"), attached(LOAD, "w1", "draining")))
    for name, labels, state in (
        ("banyan_replica_state", {"replica": "w0"}, "suspect"),
        ("banyan_replica_state", {"replica": "w1"}, "draining"),
        ("banyan_tier_state", {"replica": "w0", "tier": "host"}, "broken"),
        ("banyan_tier_state", {"replica": "w0", "tier": "disk"}, "of a later version"),
        ("banyan_tier_state", {"replica": "w1", "tier": "disk"}, "full"),
    ):
        hot = {
            dict(key)["state"]: value
            for (found, key), value in samples.items()
            if found == name and labels.items() <= dict(key).items()
        }
        assert len(hot) >= 3
        assert {each: value for each, value in hot.items() if value} == {state: 1.0}


def test_what_is_not_known_is_absent_and_not_zero() -> None:
    shared = TierLoad(tier="shared", state="ok", hit_tokens=5)
    samples = parsed(seen(attached(internal_pb2.Load(blocks_total=1, tiers=[shared]))))
    names = {name for name, _ in samples}
    assert not names & {
        "banyan_replica_step_seconds", "banyan_replica_prefill_seconds_per_token",
        "banyan_tier_blocks", "banyan_tier_bytes", "banyan_tier_max_bytes",
        "banyan_tier_logical_bytes",
        "banyan_tier_load_bytes_per_second", "banyan_tier_store_bytes_per_second",
    }  # fmt: skip
    assert of(samples, "banyan_tier_hit_tokens_total", replica="w0", tier="shared") == 5
    assert of(samples, "banyan_replica_free_blocks", replica="w0") == 0


def test_names_of_any_kind_and_repeated_tiers_leave_the_scrape_whole() -> None:
    odd = 'a"b\\n\\\n}{,= \u00fc'
    twice = [CorruptCount(cause=odd, records=1), CorruptCount(cause=odd, records=2)]
    tiers = [TierLoad(tier=odd, state=odd, dropped=n, corrupt=twice) for n in (1, 2)]
    samples = parsed(seen(attached(internal_pb2.Load(tiers=tiers), odd)))
    assert of(samples, "banyan_tier_dropped_total", replica=odd, tier=odd) == 2
    name = "banyan_tier_corrupt_records_total"
    assert of(samples, name, replica=odd, tier=odd, cause=odd) == 2


def test_nothing_attached_is_a_scrape_too() -> None:
    samples = parsed(seen())
    assert {name for name, _ in samples if not name.startswith("banyan_router_")} == set()


def test_the_documented_names_are_the_ones_told() -> None:
    section = DOCS.read_text().split("\n## Metrics\n", 1)[1].split("\n## ", 1)[0]
    documented, prefix = set(), ""
    for line in section.splitlines():
        cell = line.split("|")[1] if line.startswith("|") else ""
        if heading := re.search(r"`(banyan_\w+_)\.\.\.`", cell):
            prefix = heading[1]
        elif prefix:
            documented |= {prefix + name for name in re.findall(r"`(\w+)`", cell)}
    text = "".join(exposition(seen(attached(LOAD))))
    told = re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)
    assert sorted(documented) == sorted(told)


def test_histograms_are_cumulative() -> None:
    traffic = Traffic(first_token_s=Histogram([0.1, 1.0]))
    for value in (0.1, 0.05, 0.5, 7.0):
        traffic.first_token_s.observe(value)
    samples = parsed(seen(traffic=traffic))
    name = "banyan_router_time_to_first_token_seconds"
    counts = [of(samples, f"{name}_bucket", le=bound) for bound in ("0.1", "1.0", "+Inf")]
    assert counts == [2, 3, 4]
    assert of(samples, f"{name}_count") == 4
    assert math.isclose(of(samples, f"{name}_sum") or 0, 7.65)


def test_a_call_is_counted_once_however_it_ends() -> None:
    clock, traffic = VirtualClock(), Traffic()
    delta = api_pb2.GenerateResponse(delta=api_pb2.Delta(token_ids=[1, 2, 3]))
    with Passage(traffic, clock) as passage:
        passage.deliver(api_pb2.GenerateResponse(started=api_pb2.Started()))
        for _ in range(3):
            passage.placed()
        clock.advance(0.3)
        passage.deliver(delta)
        clock.advance(2.0)
        passage.deliver(delta)
    with pytest.raises(Overloaded), Passage(traffic, clock):
        raise Overloaded("full")
    with pytest.raises(KeyError), Passage(traffic, clock):
        raise KeyError("a bug")
    ended = {status.name: count for status, count in traffic.ended.items() if count}
    assert ended == {"OK": 1, "RESOURCE_EXHAUSTED": 1, "INTERNAL": 1}
    assert set(traffic.ended) == set(StatusCode)
    assert (traffic.moves, traffic.tokens) == (2, 6)
    assert math.isclose(traffic.first_token_s.sum, 0.3) and sum(traffic.first_token_s.counts) == 1
    assert math.isclose(traffic.duration_s.sum, 2.3) and sum(traffic.duration_s.counts) == 1


def test_counters_do_not_pass_through_zero_when_a_replica_attaches_again() -> None:
    """Its lease ran out while only the link was down: it lives, and so do its counters."""
    clock, hello = VirtualClock(), ScriptedReplica("w0").hello()
    core = RouterCore(clock, SeededRng(1), lease_s=5.0, decisions_kept=8)
    core.attach(hello)
    series = "banyan_replica_steps_total"
    assert of(parsed(seen(*core.loads())), series, replica="w0") is None
    core.heartbeat("w0", hello.epoch, internal_pb2.Heartbeat(load=LOAD))
    assert of(parsed(seen(*core.loads())), series, replica="w0") == 1234
    clock.advance(100.0)
    core.tick()
    assert core.loads() == []
    core.attach(hello)
    samples = parsed(seen(*core.loads()))
    assert of(samples, series, replica="w0") is None
    assert of(samples, "banyan_replica_state", replica="w0", state="ready") == 1
