"""Two replicas with all tiers: host memory, disk and a Valkey of the cluster's own."""

from __future__ import annotations

import fnmatch
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_cluster import Banyan, logs

from banyan import Client
from banyan.cluster import processes

pytestmark = pytest.mark.timeout(280)
DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
UP = ("up", "--model", "fake:full", "--device", "cpu", "--listen", "127.0.0.1:0", "--replicas", "2")
# FakeModel's blocks are small: a pool of a few hundred, which a few prompts fill.
SMALL_POOL = ("--pool-gib", str(256 * 16 * 16 / 2**30), "--context-tokens", "2048")
BLOCK = 16
PROMPT_BLOCKS = 60


def prompts(count: int) -> list[list[int]]:
    return [
        [(i * 7919 + 31 * at) % 251 for at in range(PROMPT_BLOCKS * BLOCK)] for i in range(count)
    ]


def tiers(banyan: Banyan) -> dict[tuple[str, str], dict[str, Any]]:
    """(replica, tier) -> what the status says of it."""
    said = json.loads(banyan("status", "--json").stdout)
    [seen] = said["seen"].values()
    return {(r["replica"], t["tier"]): t for r in seen["replicas"] for t in r["tiers"]}


def until(check: Callable[[], Any], within_s: float = 30.0) -> Any:
    end = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.2)
    return found


def cache_server(process: dict[str, Any]) -> psutil.Process:
    """The Valkey below the process that owns it."""
    found = psutil.Process(process["pid"]).children(recursive=True)
    [server] = [child for child in found if "valkey" in child.name()]
    return server


def check_socket(server: psutil.Process) -> Path:
    """It listens on the documented unix socket and on no port; returns the socket."""
    assert not [c for c in server.net_connections(kind="inet") if c.status == "LISTEN"]
    bound = {c.laddr for c in server.net_connections(kind="unix") if c.laddr}
    [pattern] = re.findall(r"unix socket `(\S+)`", DOCS.read_text())
    [path] = bound
    assert fnmatch.fnmatch(str(path), pattern)
    assert Path(path).parent.stat().st_mode & 0o077 == 0
    return Path(path)


def serve(address: str) -> None:
    """More prompts than the devices hold, then the first ones again: the same tokens."""
    with Client(address, timeout_s=60) as client:
        asked = prompts(16)
        first = [client.complete(p, max_tokens=4, ignore_eos=True, seed=1) for p in asked]
        again = [client.complete(p, max_tokens=4, ignore_eos=True, seed=1) for p in asked]
    assert [a.token_ids for a in again] == [a.token_ids for a in first]
    assert sum(a.usage.cached_tokens for a in again) > 0


def test_tiers_are_used_shown_and_gone_after_down(
    home: Path, banyan: Banyan, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    options = ["--host-gib", "0.05", "--nvme", str(disk), "--nvme-gib", "0.1"]
    done = banyan(*UP, *SMALL_POOL, *options, "--redis", "embedded", "--json")
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    record = json.loads(done.stdout)
    try:
        assert record["redis"] == "embedded"
        server = cache_server(record["cache"])
        socket = check_socket(server)
        url = (home / "clusters" / "e2e" / "run" / "redis").read_text().strip()
        password = url.removeprefix("unix://:").partition("@")[0]
        assert len(password) > 20
        serve(record["routers"][0]["listen"])
        wanted = {(f"replica-{i}", t) for i in range(2) for t in ("host", "disk", "shared")}
        until(lambda: wanted == set(tiers(banyan)))
        until(lambda: sum(t["hit_tokens"] != "0" for t in tiers(banyan).values()))
        until(lambda: all_stored(tiers(banyan)))
        shown = banyan("status").stdout
        assert "GB/s" in shown and "shared" in shown
        counted = json.loads(banyan("cache", "stats", "--json").stdout)
        assert all("in use" in d["problem"] for d in counted["disk"]) and len(counted["disk"]) == 2
        assert sum(held["blocks"] for held in counted["shared"].values()) > 0
        refused = banyan("cache", "clear", "--nvme", str(disk))
        assert refused.returncode == 1 and "in use" in refused.stderr
        check_restart(banyan, record)
        seen = banyan("status", "--json").stdout + shown + logs(home) + done.stdout
        lines = " ".join(
            " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])
        )
        for text in (seen, lines, (home / "clusters" / "e2e" / "cluster.json").read_text()):
            assert password not in text
        with Client(record["routers"][0]["listen"], timeout_s=60) as client:
            last = [255] * (PROMPT_BLOCKS * BLOCK)  # not evicted: only a stop takes it to disk
            client.complete(last, max_tokens=1, ignore_eos=True)
        on_disk = until(lambda: settled(banyan))
    finally:
        down = banyan("down", "--json")
    assert json.loads(down.stdout)["stopped"] is True, down.stderr
    assert not server.is_running() and not socket.parent.exists()
    check_disk(banyan, disk, on_disk + PROMPT_BLOCKS)


def settled(banyan: Banyan) -> int:
    """Blocks on disk in both replicas once no more are on their way; 0 = not yet."""
    seen = [t for (_, tier), t in tiers(banyan).items() if tier == "disk"]
    time.sleep(1.0)  # longer than a heartbeat takes
    again = [t for (_, tier), t in tiers(banyan).items() if tier == "disk"]
    still = seen == again and not any(t["stores_queued"] for t in again)
    return sum(int(t["blocks"]) for t in again) if still else 0


def replica_state(banyan: Banyan, replica: str) -> dict[str, Any]:
    [seen] = json.loads(banyan("status", "--json").stdout)["seen"].values()
    return next((r for r in seen["replicas"] if r["replica"] == replica), {"epoch": "0"})


def check_restart(banyan: Banyan, record: dict[str, Any]) -> None:
    """A replica that was killed finds its disk tier again."""
    before = replica_state(banyan, "replica-0")
    on_disk = int(tiers(banyan)["replica-0", "disk"]["blocks"])
    assert on_disk
    head = processes.Process(**record["ray"]["head"])
    port = int(before["address"].rpartition(":")[2])
    [victim] = [
        member
        for member in processes.members(head)
        if any(c.status == "LISTEN" and c.laddr.port == port for c in member.net_connections())
    ]
    victim.kill()

    def came_back() -> bool:
        now = replica_state(banyan, "replica-0")
        return int(now["epoch"]) > int(before["epoch"]) and now["state"] == "ready"

    until(came_back, within_s=90)
    assert int(tiers(banyan)["replica-0", "disk"]["blocks"]) >= on_disk


def all_stored(found: dict[tuple[str, str], dict[str, Any]]) -> bool:
    """Whether a lower tier of each kind has got something, and nothing was wrong anywhere."""
    assert not [t for t in found.values() if t["corrupt"] or t["state"] != "ok"]
    kinds = {tier for (_, tier), t in found.items() if int(t["stored_bytes"])}
    return kinds == {"host", "disk", "shared"}


def check_disk(banyan: Banyan, disk: Path, records_min: int) -> None:
    """The disk tiers outlive the cluster, whole, and an operator can empty them."""
    checked = json.loads(banyan("cache", "verify", "--nvme", str(disk), "--json").stdout)
    assert sorted(d["replica"] for d in checked["disk"]) == ["replica-0", "replica-1"]
    assert sum(d["records"] for d in checked["disk"]) >= records_min
    assert not [d for d in checked["disk"] if d["corrupt"] or d["problem"]]
    assert banyan("cache", "clear", "--nvme", str(disk)).returncode == 0
    assert not list(disk.rglob("segment-*"))
