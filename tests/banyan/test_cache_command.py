"""`banyan cache` on disk tiers and a real server; the launcher's part in the shared tier."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from banyan.cluster import processes, state, tiers
from banyan.cluster.processes import Process
from banyan.cluster.spec import ClusterSpec
from banyan.cluster.state import ClusterRecord
from kvstore.keys import ChainSpec, chain, parent_of_first, root, tokens_u32le
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.nvme import NvmeTier, open_folder
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.segments import slot_bytes_for
from seams.errors import LaunchError

Banyan = Callable[..., subprocess.CompletedProcess[str]]
SIZE = 6000
BLOCKS = 5
REPRESENTATION = "bf16-test"


@pytest.fixture
def banyan(tmp_path: Path) -> Banyan:
    """The command line with a home of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"BANYAN_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
        command = [sys.executable, "-m", "banyan", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)

    return run


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(32 << 20) as running:
        yield running


def blocks() -> tuple[list[BlockName], list[memoryview]]:
    spec = ChainSpec(root("m", "", 4), 4)
    tokens = list(range(4 * BLOCKS))
    keys = chain(spec, tokens)
    parents = [parent_of_first(spec.root), *keys]
    names = [
        BlockName(keys[i], parents[i], tokens_u32le(tokens[4 * i : 4 * i + 4]))
        for i in range(BLOCKS)
    ]
    return names, [memoryview(bytes([i + 1]) * SIZE) for i in range(BLOCKS)]


def fill(directory: Path) -> None:
    tier = NvmeTier(
        directory, 16 << 20, REPRESENTATION, {0: SIZE}, free_space_floor_bytes=0, tended=False
    )
    assert set(tier.store(*blocks(), 10.0)) == {Status.OK}
    tier.close()


def test_a_disk_tier_is_counted_checked_and_cleared(banyan: Banyan, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    fill(disk / "replica-0")
    (disk / "replica-0" / "not-ours").write_text("stays")
    counted = json.loads(banyan("cache", "stats", "--nvme", str(disk), "--json").stdout)
    [found] = counted["disk"]
    assert (found["replica"], found["problem"]) == ("replica-0", "")
    assert found["records"] == BLOCKS and found["representations"] == {REPRESENTATION: BLOCKS}
    assert (found["unknown_files"], found["corrupt"]) == (1, {})
    assert counted["shared"] is None
    shown = banyan("cache", "verify", "--nvme", str(disk))
    assert shown.returncode == 0 and "nothing" in shown.stdout, shown.stderr
    assert banyan("cache", "clear", "--nvme", str(disk)).returncode == 0
    left = {path.name for path in (disk / "replica-0").iterdir()}
    assert left == {"lock", "not-ours"}


def test_every_flipped_record_is_shown_by_cause(banyan: Banyan, tmp_path: Path) -> None:
    fill(tmp_path)
    [segment] = tmp_path.glob("segment-*")
    data = bytearray(segment.read_bytes())
    slot = slot_bytes_for(SIZE)
    data[4096 + 17] ^= 1  # the first slot's payload
    data[slot + 50] ^= 1  # the second's header
    segment.write_bytes(data)
    where = ("--nvme", str(tmp_path))
    checked = json.loads(banyan("cache", "verify", *where, "--json").stdout)["disk"][0]
    assert checked["corrupt"] == {"payload": 1, "header": 1}
    shown = banyan("cache", "verify", *where)
    assert shown.returncode == 0 and "1 header, 1 payload" in shown.stdout


@pytest.mark.parametrize("command", ["verify", "clear"])
def test_a_directory_in_use_is_one_sentence(banyan: Banyan, tmp_path: Path, command: str) -> None:
    for name in ("replica-0", "replica-1"):
        fill(tmp_path / name)
    holder = open_folder(tmp_path / "replica-1")
    done = banyan("cache", command, "--nvme", str(tmp_path))
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and line == (
        "error: replica-1 was left alone: The disk tier's directory is in use by another process."
    )
    assert banyan("cache", "stats", "--nvme", str(tmp_path)).returncode == 0
    holder.close()
    assert list((tmp_path / "replica-1").glob("segment-*"))
    assert bool(list((tmp_path / "replica-0").glob("segment-*"))) == (command == "verify")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nvme", "/no/such"], "/no/such cannot be read: No such file or directory."),
        (["--nvme", "/proc/self"], "There is no disk tier in /proc/self."),
        (["--redis", "redis://:pw@127.0.0.1:1/0"], "A password in --redis can be read by every"),
        (["--redis", "redis://127.0.0.1:1/0"], "the shared cache cannot be read: ConnectionError"),
        ([], "No cluster default is running: start one with `banyan up`."),
        (["--nvme", "/tmp", "--name", "../x"], "A cluster name has letters, digits"),
    ],
)
def test_cache_refuses(banyan: Banyan, arguments: list[str], expected: str) -> None:
    done = banyan("cache", "stats", *arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and (expected in line or "no disk tier" in line), line


def test_the_shared_tier_is_counted_per_cluster(
    banyan: Banyan, server: EmbeddedValkey, tmp_path: Path
) -> None:
    for cluster in ("one", "two"):
        tier = RedisTier(server.url, REPRESENTATION, namespace=cluster)
        assert set(tier.store(*blocks(), 10.0)) == {Status.OK}
        tier.close()
    file = tmp_path / "url"
    file.touch(mode=0o600)
    file.write_text(server.url)
    where = ("--redis", f"@{file}", "--json", "--name")
    counted = json.loads(banyan("cache", "stats", *where, "one").stdout)["shared"]
    assert counted[REPRESENTATION]["blocks"] == BLOCKS
    checked = json.loads(banyan("cache", "verify", *where, "one").stdout)["shared"]
    assert (checked["blocks"], checked["partial"], checked["corrupt"]) == (BLOCKS, 0, {})
    assert json.loads(banyan("cache", "clear", *where, "one").stdout)["shared_keys"] >= BLOCKS
    assert json.loads(banyan("cache", "stats", *where, "one").stdout)["shared"] == {}
    left = json.loads(banyan("cache", "stats", *where, "two").stdout)["shared"]
    assert left[REPRESENTATION]["blocks"] == BLOCKS


# ---- the launcher's side ------------------------------------------------------------------------


def test_a_url_reaches_replicas_by_a_private_file(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.touch(mode=0o600)
    given.write_text("redis://u:very-secret@h:1/0")
    spec = ClusterSpec("fake:full", redis=f"@{given}")
    tiers.check_tiers(spec)
    assert tiers.begin_server(spec, tmp_path, tmp_path) is None
    written = tmp_path / tiers.URL_FILE
    assert written.stat().st_mode & 0o777 == 0o600
    assert written.read_text().strip() == given.read_text()
    assert tiers.redis_reference(spec, tmp_path) == f"@{written}"
    assert tiers.shown_redis(spec) == "redis://h:1/0"
    assert tiers.redis_reference(ClusterSpec("fake:full"), tmp_path) == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_its_owner(tmp_path: Path, number: signal.Signals) -> None:
    spec = ClusterSpec("fake:full", redis="embedded")
    process = tiers.begin_server(spec, tmp_path, tmp_path)
    assert process is not None
    tiers.wait_server(process, tmp_path)
    url = (tmp_path / tiers.URL_FILE).read_text().strip()
    folder = Path(url.partition("@")[2]).parent
    below = psutil.Process(process.pid).children(recursive=True)
    assert folder.is_dir() and below
    os.kill(process.pid, number)
    assert not psutil.wait_procs([psutil.Process(process.pid), *below], timeout=10)[1]
    deadline = time.monotonic() + 5
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_a_server_that_ends_is_noticed(tmp_path: Path) -> None:
    process = tiers.begin_server(ClusterSpec("fake:full", redis="embedded"), tmp_path, tmp_path)
    assert process is not None
    tiers.wait_server(process, tmp_path)
    [server] = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "valkey" in child.name()
    ]
    server.kill()
    owner = psutil.Process(process.pid)
    owner.wait(timeout=20)
    assert "has ended" in Path(process.log).read_text()


@pytest.mark.parametrize("owner_too", [False, True])
def test_a_server_whose_shell_was_killed_does_not_stay(tmp_path: Path, owner_too: bool) -> None:
    """Nothing watches it any more: its owner ends it, or whoever ends the owner's session."""
    process = tiers.begin_server(ClusterSpec("fake:full", redis="embedded"), tmp_path, tmp_path)
    assert process is not None
    tiers.wait_server(process, tmp_path)
    owner = psutil.Process(process.pid)
    below = owner.children(recursive=True)
    [shell] = [child for child in below if "valkey" not in child.name()]
    if owner_too:
        owner.suspend()
    shell.kill()
    if owner_too:
        owner.kill()
        for left in processes.members(process):
            left.kill()
    assert not psutil.wait_procs([owner, *below], timeout=20)[1]


def test_a_server_that_does_not_start_is_one_sentence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("the reason\n")
    gone = Process("cache", 2**22 + 1, 0.0, str(log))
    with pytest.raises(LaunchError, match="did not start: the reason"):
        tiers.wait_server(gone, tmp_path)


def test_the_record_keeps_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path))
    state.prepare("c")
    cache = Process("cache", 7, 1.0, "log")
    record = ClusterRecord("c", "m", "m", redis="embedded", nvme="/d", cache=cache)
    state.save(record)
    assert state.load("c") == record and cache in record.processes()
    written = json.loads((tmp_path / "clusters" / "c" / "cluster.json").read_text())
    for name in ("cache", "redis", "nvme"):  # as an older version wrote it
        del written[name]
    (tmp_path / "clusters" / "c" / "cluster.json").write_text(json.dumps(written))
    loaded = state.load("c")
    assert loaded is not None and (loaded.cache, loaded.redis, loaded.nvme) == (None, "", "")
