"""`make clients`: each third-party client against a live cluster, offline and unmodified, and what
it reports beside what passed on the wire.

A client's figures stand beside those that our load generator's definitions make of the very same
requests (witness.py): those must agree within AGREE. `our bench` is `banyan bench run` with the
same kind of load, after it; it has other texts and another moment, so it is shown and not held.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiperf
import fronts
import guidellm
import malformed
import sglang_bench
from base import Client, Said, Site
from place import HOME, NotRun, call_client, cluster, hub, installed, own_bench
from witness import Witness

from banyan.models import fetch_demo
from loadtest import figures
from loadtest.records import Record, read_run
from seams.bench import Report, Row

AGREE = 0.05
AGREE_MS = 5.0  # a client's clock may start before its connection does
CLIENTS = (aiperf.SYNTHETIC_POOL, aiperf.MOONCAKE, guidellm.POISSON, sglang_bench.SHARED_PREFIX)
WITNESS, OURS = "same requests", "our bench"


def measured(records: Sequence[Record]) -> Said:
    """Records in a client's terms."""
    good = [record for record in records if record.ok]
    found = {name: figures.spread(values) for name, values in figures.latencies(good).items()}
    ttft, tpot = found["ttft"], found["tpot"]
    if ttft is None or tpot is None:
        raise NotRun("No streamed generation was answered.")
    failed = len(records) - len(good)
    share = figures.cached_share(good)
    return Said(len(good), failed, ttft.mean_s * 1e3, tpot.mean_s * 1e3, share)


async def witnessed(programs: Path, client: Client, site: Site) -> tuple[Said, Said]:
    """What the client says, and what passed on the wire. Raises NotRun."""
    parts = urlsplit(site.url)
    async with Witness(parts.hostname or "", parts.port or 0) as witness:
        seen = Site(witness.url, site.model, site.tokenizer, site.folder)
        await asyncio.to_thread(call_client, programs, client.command(seen), seen)
        try:
            said = client.read(site.folder)
        except (LookupError, OSError, ValueError) as error:
            raise NotRun(f"Its report cannot be read: {error!r:.200}.") from None
        if statuses := witness.refused():
            raise NotRun(f"Requests were refused with {sorted(set(statuses))}.")
        return said, measured(witness.records()[-said.requests :])


def rows(name: str, said: Said, wire: Said, ours: Said | None, against: str = WITNESS) -> list[Row]:
    """One per figure that the client reports."""
    shown = [
        ("ttft_mean", "ms", said.ttft_ms, wire.ttft_ms, ours and ours.ttft_ms),
        ("tpot_mean", "ms", said.tpot_ms, wire.tpot_ms, ours and ours.tpot_ms),
        ("cached_share", "of prompt tokens", said.cached_share, wire.cached_share,
         ours and ours.cached_share),
    ]  # fmt: skip
    return [
        Row(f"{name} {figure}", value, unit, said.requests, against, other,
            {} if beside is None else {OURS: beside})
        for figure, unit, value, other, beside in shown
        if value is not None
    ]  # fmt: skip


def disagreements(found: Sequence[Row]) -> list[str]:
    """Sentences about figures that differ by more than AGREE and, if times, AGREE_MS."""
    return [
        f"{row.name}: {row.value:.4g} {row.unit}, on the wire {row.against_value:.4g}."
        for row in found
        if row.against_value is not None
        and abs(row.value - row.against_value) > AGREE * abs(row.against_value)
        and not (row.unit == "ms" and abs(row.value - row.against_value) <= AGREE_MS)
    ]


def run_client(client: Client, url: str, model: Path, report: Report) -> list[str]:
    """Adds its rows; what went wrong, in sentences."""
    site = Site(url, model.name, model, fresh(client.name))
    try:
        programs = installed(client.venv, client.installs)
        said, wire = asyncio.run(witnessed(programs, client, site))
        ours = bench(url, client.ours, site)
    except NotRun as error:
        return [f"{client.name}: {error}"]
    found = rows(client.name, said, wire, ours)
    for row in found:
        report.add(row)
    failed = [f"{client.name}: {said.failed} of its requests failed."] if said.failed else []
    if said.cached_share is None:
        print(f"{client.name} reports no cached tokens of an OpenAI endpoint.")
    return failed + disagreements(found)


def bench(url: str, load: Sequence[str], site: Site) -> Said:
    """Our own load generator over HTTP. Its texts are drawn by the folder's name, so that no other
    run has left them in a cache. Raises NotRun."""
    seed = zlib.crc32(site.folder.name.encode())
    chosen = ("--seed", str(seed), "--tokenizer", str(site.tokenizer), "--model", site.model)
    return measured(read_run(own_bench(url, (*load, *chosen), site.folder)).records)


def run_front(front: fronts.Front, urls: Sequence[str], model: Path, report: Report) -> list[str]:
    """Another's router before our gateways: all that our load generator asks for through it must
    arrive, and cached tokens with it."""
    site = Site(urls[0], model.name, model, fresh(front.name))
    try:
        programs = installed(front.venv, front.installs)
        with fronts.running(front, programs, urls, site.folder) as url:
            through = bench(url, fronts.LOAD, site)
        direct = bench(urls[0], fronts.LOAD, replace(site, folder=fresh(f"{front.name} direct")))
    except NotRun as error:
        return [f"{front.name}: {error}"]
    for row in rows(front.name, through, direct, None, "gateway directly"):
        report.add(row)
    failed = [f"{front.name}: {through.failed} requests failed."] if through.failed else []
    return failed if through.cached_share else [*failed, f"{front.name}: no cached tokens arrived."]


def run_malformed(bodies: int, seed: int, report: Report) -> list[str]:
    """Schemathesis, which needs no cluster of processes."""
    try:
        programs = installed("schemathesis", (malformed.REQUIREMENTS,))
    except NotRun as error:
        return [f"schemathesis: {error}"]
    found = asyncio.run(malformed.run(programs / "python", fresh("schemathesis"), bodies, seed))
    print(f"schemathesis, seed {seed}: {found.requests} requests, answered {found.statuses}")
    report.add(Row("schemathesis 5xx", found.server_errors, "answers", found.bodies))
    report.add(Row("schemathesis findings", len(found.failures), "failures", found.bodies))
    return list(found.failures)


def fresh(name: str) -> Path:
    """An empty folder for what a client writes."""
    folder = HOME / "runs" / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    """The command."""
    options = argparse.ArgumentParser(description="Third-party clients against a live cluster.")
    names = [client.name for client in CLIENTS] + [front.name for front in fronts.FRONTS]
    options.add_argument("--only", action="append", choices=[*names, "schemathesis"])
    options.add_argument("--url", action="append", help="of running gateways")
    options.add_argument("--bodies", type=int, default=10_000, help="of schemathesis")
    options.add_argument("--seed", type=int, default=1, help="of schemathesis")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    wanted = given.only or [*names, "schemathesis"]
    report, wrong = Report(), list[str]()
    if "schemathesis" in wanted:
        wrong += run_malformed(given.bodies, given.seed, report)
    if set(wanted) & set(names):
        if given.url:
            wrong += _live(given.url, wanted, report)
        else:
            try:
                with cluster() as urls:
                    wrong += _live(urls, wanted, report)
            except NotRun as error:
                wrong.append(f"The cluster: {error}")
    report.show(given.json)
    print("\n".join(wrong))
    return 1 if wrong else 0


def _live(urls: list[str], wanted: Sequence[str], report: Report) -> list[str]:
    model, wrong = fetch_demo(), list[str]()
    hub(model)
    for client in CLIENTS:
        if client.name in wanted:
            wrong += run_client(client, urls[0], model, report)
    for front in fronts.FRONTS:
        if front.name in wanted:
            wrong += run_front(front, urls, model, report)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
