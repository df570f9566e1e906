"""`banyan up | down | status`: the launcher, shown."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from datetime import datetime
from typing import Any

from google.protobuf.json_format import MessageToDict

from banyan.cli import output
from banyan.client import Client
from banyan.cluster import launch, state, stop
from banyan.cluster.problems import problems
from banyan.cluster.spec import ClusterSpec
from banyan.cluster.state import ClusterRecord, RouterRecord
from banyan.v1 import api_pb2
from seams.errors import BanyanError
from worker.service.advice import pruning_warning


def up(spec: ClusterSpec, *, json_output: bool) -> None:
    """Start a cluster, showing what it waits for."""
    if warning := pruning_warning(spec.kv_codec, spec.retention):
        print(f"warning: {warning}", file=sys.stderr)
    began = time.monotonic()
    with output.stages(quiet=json_output) as report:
        record = launch.up(spec, report)
    took_s = time.monotonic() - began
    if json_output:
        output.print_json(_public(record) | {"took_s": took_s})
        return
    where = ", ".join(record.addresses)
    count = len(record.replicas)
    output.console.print(
        f"Cluster [bold]{record.name}[/bold] serves {record.served_name} with {count} "
        f"replica{'s' if count > 1 else ''} at {where} (up in {took_s:.1f} s)."
    )
    web = [f"http://{router.http}/v1" for router in record.routers if router.http]
    if web:
        output.console.print(f"OpenAI clients: {', '.join(web)}")
    scraped = [router.metrics for router in record.routers if router.metrics]
    if scraped:
        urls = ", ".join(f"http://{address}/metrics" for address in scraped)
        output.console.print(f"Metrics: {urls}")
    suffix = "" if record.name == state.DEFAULT_NAME else f" --name {record.name}"
    output.console.print(f"Talk to it: banyan chat{suffix}   Stop it: banyan down{suffix}")


def down(name: str, *, drain: bool, json_output: bool) -> None:
    """Stop a cluster."""

    def waiting() -> None:
        output.errors.print(f"Cluster {name} is being started or stopped: waiting for that to end.")

    if json_output:
        stopped = stop.down(name, drain=drain, waiting=waiting)
        output.print_json({"name": name, "stopped": stopped})
        return
    with output.errors.status("stopping") as spinner:
        stopped = stop.down(name, drain=drain, report=spinner.update, waiting=waiting)
    text = f"Cluster {name} is down; nothing of it is left running."
    output.console.print(text if stopped else f"No cluster {name} is running.")


def _public(record: ClusterRecord) -> dict[str, Any]:
    """The record without its secrets."""
    fields = asdict(record)
    del fields["api_key"]
    if fields["ray"]:
        del fields["ray"]["token"]
    return fields


def status(name: str, *, json_output: bool) -> None:
    """Show what every router says, and which processes are missing."""
    record = state.running(name)
    wrong = problems(record)
    seen = {router.name: _ask(router, record.api_key) for router in record.routers}
    best = max((s for s in seen.values() if s), key=lambda s: len(s.replicas), default=None)
    found = {r.replica: r for r in best.replicas} if best else {}
    wrong += _missing_tiers(record, found)
    if json_output:
        routers = {
            name: None
            if found is None
            else MessageToDict(
                found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            for name, found in seen.items()
        }
        output.print_json(_public(record) | {"problems": wrong, "seen": routers})
        return
    output.table(
        f"cluster {name}: {record.served_name}, {record.phase}{' with problems' if wrong else ''}",
        ["router", "address", "state", ">replicas", ">indexed\nblocks", ">open\nstreams"],
        [_router_row(router, seen[router.name]) for router in record.routers],
    )
    columns = ["replica", "state", "started", ">runs\n+waits", ">blocks", ">free"]
    columns += [">cached", ">KiB/\ntok", ">prompt\ntokens", ">from\ncache"]
    rows = [_replica_row(replica, found.get(replica)) for replica in record.replicas]
    output.table("", columns, rows)
    tiers = [row for r in record.replicas if r in found for row in _tier_rows(found[r])]
    if tiers:
        columns = ["replica", "tier", "state", ">MiB (on\ndevice)", ">of", ">blocks"]
        columns += [">hits,\ntokens", ">load\nGB/s", ">store\nGB/s", ">dropped\n+failed", "corrupt"]
        output.table("", columns, tiers)
    for problem in wrong:
        output.console.print(f"[red]problem:[/red] {problem}")


def _ask(router: RouterRecord, api_key: str) -> api_pb2.ClusterStateResponse | None:
    try:
        with Client(router.listen, api_key, timeout_s=2.0) as client:
            return client.cluster_state()
    except BanyanError:
        return None


def _router_row(router: RouterRecord, seen: api_pb2.ClusterStateResponse | None) -> list[Any]:
    if seen is None:
        return [router.name, router.listen, "[red]gone[/red]", "", "", ""]
    counts = [len(seen.replicas), seen.index_blocks, seen.streams_open]
    return [router.name, router.listen, f"up {seen.uptime_s:.0f} s", *counts]


def _missing_tiers(record: ClusterRecord, found: dict[str, api_pb2.ReplicaState]) -> list[str]:
    """One sentence for each tier asked for that a replica goes on without."""
    asked = [name for name, of in (("disk", record.nvme), ("shared", record.redis)) if of]
    broken = {
        "disk": "its directory is gone, or the disk fails",
        "shared": "the server does not answer, or refuses: is the URL, password included, right?",
    }
    return [
        f"{seen.replica} goes on without its {tier.tier} tier: {broken[tier.tier]}."
        for seen in found.values()
        for tier in seen.tiers
        if tier.state == "broken" and tier.tier in asked
    ] + [
        f"{seen.replica} runs without its {name} tier: its log says why."
        for seen in found.values()
        for name in asked
        if seen.blocks_total and name not in {tier.tier for tier in seen.tiers}
    ]


def _tier_rows(seen: api_pb2.ReplicaState) -> list[list[Any]]:
    """A row per tier. What a shared tier holds is not a replica's to say."""
    return [
        [
            seen.replica,
            tier.tier,
            f"[{'green' if tier.state == 'ok' else 'yellow'}]{tier.state}",
            f"{tier.bytes / 2**20:,.1f} ({tier.logical_bytes / 2**20:,.1f})"
            if tier.bytes_max
            else "",
            f"{tier.bytes_max / 2**20:,.0f}" if tier.bytes_max else "",
            tier.blocks if tier.bytes_max else "",
            tier.hit_tokens,
            f"{tier.load_bytes_per_s / 1e9:.2f}" if tier.load_bytes_per_s else "",
            f"{tier.store_bytes_per_s / 1e9:.2f}" if tier.store_bytes_per_s else "",
            f"{tier.dropped}+{tier.failed}",
            ", ".join(f"{c.records} {c.cause}" for c in tier.corrupt) or "none",
        ]
        for tier in seen.tiers
    ]


def _short(number: float) -> str:
    """Three digits at least, and nothing for nothing."""
    if not number:
        return ""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def _replica_row(name: str, seen: api_pb2.ReplicaState | None) -> list[Any]:
    if seen is None:
        return [name, "[red]gone[/red]", *[""] * 8]
    colour = "green" if seen.state == "ready" else "yellow"
    return [
        name,
        f"[{colour}]{seen.state}[/{colour}]",
        datetime.fromtimestamp(seen.epoch / 1e9).strftime("%H:%M:%S"),  # epochs are start times
        f"{seen.running}+{seen.waiting}",
        seen.blocks_total,
        seen.blocks_free,
        seen.blocks_cached,
        _short(seen.kv_token_bytes / 2**10),
        seen.prompt_tokens,
        f"{seen.hit_share:.0%}",
    ]
