"""`banyan cache stats | verify | clear | reset | key`: disk tiers and the shared one, shown to an
operator; and what a running cluster is to forget."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from banyan.cli import output
from banyan.cli.talk import Target
from banyan.client import Client
from banyan.cluster import disk_tier, state
from banyan.cluster.tiers import URL_FILE, refuse_password
from kvstore.tiers import nvme_offline, redis_admin
from kvstore.tiers.nvme_offline import Contents
from seams.errors import LaunchError
from seams.proof import admin_key, read_secret
from seams.urls import FILE_MARK, read_url

T = TypeVar("T")
RESET_S_MAX = 80.0  # more than a router waits for a replica


@dataclass(frozen=True)
class Places:
    """Which tiers are meant: directories of disk tiers, and a server with the cluster's name."""

    directories: tuple[Path, ...]
    url: str
    namespace: str


def places(nvme: str, redis: str, name: str) -> Places:
    """What was named, else what the cluster that runs here uses. Raises LaunchError."""
    refuse_password(redis)
    if not (nvme or redis):
        record = state.running(name)
        nvme = record.nvme
        redis = f"{FILE_MARK}{state.folder(name) / 'run' / URL_FILE}" if record.redis else ""
        if not (nvme or redis):
            raise LaunchError(f"Cluster {name} has no disk tier and no shared one.")
    try:
        found = disk_tier.directories(Path(nvme).expanduser()) if nvme else []
    except LaunchError:
        if not redis:  # else the shared tier is still worth a look
            raise
        found = []
    state.folder(name)  # the name is none of ours if this raises
    return Places(tuple(found), read_url(redis), name)


def stats(where: Places, *, json_output: bool) -> None:
    """What lies there, without reading blocks."""
    disks = disk_tier.each(where.directories, nvme_offline.contents)
    shared = redis_admin.survey(where.url, where.namespace) if where.url else None
    if json_output:
        held = None if shared is None else {name: h._asdict() for name, h in shared.items()}
        output.print_json({"disk": [_as_json(disk) for disk in disks], "shared": held})
        return
    rows: list[list[Any]] = []
    for disk in disks:
        size = "" if disk.found is None else f"{disk.found.bytes / 2**20:,.1f}"
        rows.append([f"disk, {disk.replica}", disk.problem, "", size])
        held_here = {} if disk.found is None else disk.found.representations
        rows += [["", representation, count, ""] for representation, count in held_here.items()]
    for representation, found in (shared or {}).items():
        rows.append(["shared", representation, found.blocks, f"{found.bytes / 2**20:,.1f}"])
    if shared is not None and not shared:
        rows.append(["shared", "nothing of this cluster", "", ""])
    output.table("", ["tier", "holds", ">blocks", ">MiB"], rows)


def verify(where: Places, *, json_output: bool) -> None:
    """Read and check everything. Raises LaunchError for a directory in use, after the others."""
    read_all = partial(nvme_offline.contents, payloads=True)
    disks = disk_tier.each(where.directories, read_all)
    shared = redis_admin.verify(where.url, where.namespace) if where.url else None
    if json_output:
        checked = None if shared is None else shared._asdict()
        output.print_json({"disk": [_as_json(disk) for disk in disks], "shared": checked})
    else:
        rows = [_verified_row(disk) for disk in disks]
        if shared is not None:
            partly = f"{shared.partial} evicted in part" if shared.partial else ""
            said = ", ".join(filter(None, [_causes(shared.corrupt), partly]))
            rows.append(["shared", shared.blocks, said or "nothing"])
        output.table("", ["tier", ">right", "wrong"], rows)
    _refuse(disks)


def clear(where: Places, *, json_output: bool) -> None:
    """Remove everything. Raises LaunchError for a directory in use, after the others."""
    disks = disk_tier.each(where.directories, nvme_offline.clear)
    keys = redis_admin.clear(where.url, where.namespace) if where.url else None
    if json_output:
        freed = {disk.replica: disk.found for disk in disks}
        output.print_json({"disk_bytes": freed, "shared_keys": keys})
    else:
        for disk in disks:
            said = disk.problem or f"{(disk.found or 0) / 2**20:,.1f} MiB given back"
            output.console.print(f"disk, {disk.replica}: {said}")
        if keys is not None:
            output.console.print(f"shared: {keys} keys removed")
    _refuse(disks)


def admin_key_of(name: str, secret_file: str) -> str:
    """The admin key of the cluster that was started here under this name, or whose secret is in the
    file. Raises LaunchError."""
    path = Path(secret_file).expanduser() if secret_file else state.folder(name) / "secret"
    return admin_key(read_secret(path))


def reset(target: Target, secret_file: str, *, tiers: bool, json_output: bool) -> None:
    """Let all replicas forget what their devices hold, and with `tiers` what lies below. Raises
    BanyanError if one did not."""
    addresses, _ = target.resolve()
    with Client(addresses, admin_key_of(target.name, secret_file), RESET_S_MAX) as client:
        replicas = client.reset_cache(tiers=tiers).replicas
    found = [(r.replica, r.blocks, r.blocks_in_use, r.tier_blocks) for r in replicas]
    heads = ("replica", "blocks", "blocks_in_use", "tier_blocks")
    if json_output:
        output.print_json({"replicas": [dict(zip(heads, one, strict=True)) for one in found]})
        return
    columns = ["replica", ">blocks", ">in use, not kept", ">tiers' blocks"]
    output.table("", columns, [list(one) for one in found])


def _refuse(disks: list[disk_tier.Of[T]]) -> None:
    """The directories that were left alone, as the command's error."""
    left = [disk for disk in disks if disk.problem]
    if left:
        names = ", ".join(disk.replica for disk in left)
        raise LaunchError(
            f"{names} {'was' if len(left) == 1 else 'were'} left alone: {left[0].problem}"
        )


def _verified_row(disk: disk_tier.Of[Contents]) -> list[Any]:
    found = disk.found
    if found is None:
        return [f"disk, {disk.replica}", "", disk.problem]
    right = found.records - found.corrupt.total()
    return [f"disk, {disk.replica}", right, _causes(found.corrupt) or "nothing"]


def _causes(corrupt: Counter[str]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(corrupt.items()))


def _as_json(disk: disk_tier.Of[Contents]) -> dict[str, Any]:
    found = {} if disk.found is None else disk.found._asdict()
    return {"replica": disk.replica, "problem": disk.problem} | found
