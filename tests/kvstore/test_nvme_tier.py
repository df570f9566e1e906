"""NvmeTier: the suite of every tier, and what only a directory on a disk has."""

from __future__ import annotations

import random
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from disk_blocks import (
    REPRESENTATION,
    SIZES,
    SOON,
    block_bytes,
    block_name,
    capacity_bytes,
    open_tier,
)
from tier_contract import TierContract, TierFactory

from kvstore.record import HEADER_BYTES
from kvstore.tiers import nvme_offline, nvme_snapshot
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.nvme import SNAPSHOT_S, NvmeTier
from kvstore.tiers.nvme_index import record_id
from kvstore.tiers.nvme_snapshot import Listed, ListedSegment
from kvstore.tiers.segments import parse_name
from seams.blockdevice import MemoryBlockDevice
from seams.blockfolder import MemoryBlockFolder
from seams.clock import VirtualClock
from seams.errors import LaunchError


class DiskFactory(TierFactory):
    persistent = True
    verifies = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places = 0

    def fresh(self, capacity_blocks: int = 64, representation: str = "bf16-a") -> NvmeTier:
        shutil.rmtree(self.root / str(self.places), ignore_errors=True)
        self.places += 1
        self.capacity_bytes = capacity_bytes(capacity_blocks, dict(self.sizes))
        return self.reopen(representation)

    def reopen(self, representation: str = "bf16-a") -> NvmeTier:
        self.tier = NvmeTier(
            self.root / str(self.places),
            self.capacity_bytes,
            representation,
            self.sizes,
            free_space_floor_bytes=0,
        )
        return self.tier

    def damage(self, name: BlockName) -> None:
        entry = self.tier._index.get(record_id(name))
        assert entry is not None
        with (self.root / str(self.places) / entry.segment.name).open("r+b") as file:
            at = entry.segment.offset(entry.slot) + HEADER_BYTES + 77
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def factory(tmp_path: Path) -> Iterator[DiskFactory]:
    made = DiskFactory(tmp_path)
    yield made
    made.close()


class TestDiskContract(TierContract):
    pass


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def store(tier: NvmeTier, numbers: Sequence[int]) -> list[Status]:
    names = [block_name(number) for number in numbers]
    return tier.store(names, [memoryview(block_bytes(n)) for n in numbers], SOON)


def load(tier: NvmeTier, numbers: Sequence[int]) -> list[Status]:
    """Every OK is held to the byte."""
    into = [bytearray(SIZES[block_name(number).group]) for number in numbers]
    names = [block_name(number) for number in numbers]
    statuses = tier.load(names, [memoryview(view) for view in into], SOON)
    for number, view, status in zip(numbers, into, statuses, strict=True):
        assert status is not Status.OK or view == block_bytes(number), f"wrong bytes for {number}"
    return statuses


def taken_bytes(directory: Path) -> int:
    """Of the directory and all in it: lengths or blocks on the disk, whichever is more."""
    total = 0
    for path in (directory, *directory.iterdir()):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        length = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
        total += max(length, 512 * found.st_blocks)
    return total


# ---- a directory


def test_a_second_tier_on_a_directory_is_refused(directory: Path) -> None:
    tier = open_tier(directory)
    with pytest.raises(LaunchError, match="in use by another process") as refused:
        open_tier(directory)
    assert str(directory) not in refused.value.message
    store(tier, [0])
    tier.close()
    again = open_tier(directory)
    assert load(again, [0]) == [Status.OK]
    again.close()


def test_what_cannot_be_used_is_a_launch_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be used: File exists"):
        open_tier(tmp_path / "file")
    with pytest.raises(LaunchError, match="too small for one block"):
        NvmeTier(tmp_path / "d", 8192, REPRESENTATION, SIZES)


def test_only_ours_is_touched_and_all_is_private(directory: Path) -> None:
    open_tier(directory).close()
    (directory / "notes.txt").write_bytes(b"x" * 100_000)
    (directory / "segment-000000-bad").write_bytes(b"x")
    tier = open_tier(directory, blocks=8)
    store(tier, range(32))
    tier.snapshot()
    assert tier.unknown_files == 2
    assert taken_bytes(directory) <= capacity_bytes(8, SIZES)
    tier.close()
    assert (directory / "notes.txt").read_bytes() == b"x" * 100_000
    assert directory.stat().st_mode & 0o777 == 0o700
    foreign = {"notes.txt", "segment-000000-bad"}
    modes = {p.stat().st_mode & 0o777 for p in directory.iterdir() if p.name not in foreign}
    assert modes == {0o600}


@pytest.mark.parametrize("blocks", [1, 7, 40])
def test_the_cap_is_the_directorys(directory: Path, blocks: int) -> None:
    """Whatever happens, watched while it happens: nothing in the directory exceeds the cap."""
    rng = random.Random(blocks)
    done, most = threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            most.append(taken_bytes(directory))

    directory.mkdir(mode=0o700)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(6):
            tier = open_tier(directory, blocks)
            for _ in range(12):
                first = 8 * rng.randrange(16)
                store(tier, range(first, first + 8))
                match rng.randrange(6):
                    case 0:
                        tier.snapshot()
                    case 1:
                        tier.clear()
            tier.check_integrity()
            tier.close()
    finally:
        done.set()
        watcher.join()
    assert 0 < max(most) <= capacity_bytes(blocks, SIZES)


def test_a_lower_cap_shrinks_and_keeps_what_was_used_last(directory: Path) -> None:
    tier = open_tier(directory, blocks=14)
    chains = [range(0, 4), range(8, 12), range(16, 20)]
    for chain in chains:
        assert store(tier, chain) == [Status.OK] * 4
    load(tier, chains[0])
    tier.close()
    tier = open_tier(directory, blocks=8)
    assert taken_bytes(directory) <= capacity_bytes(8, SIZES)
    assert load(tier, chains[0]) == [Status.OK] * 4
    assert load(tier, chains[2]) == [Status.OK] * 4
    assert load(tier, chains[1]) == [Status.MISS] * 4
    tier.close()


def test_the_floor_is_held(directory: Path) -> None:
    folder = MemoryBlockFolder(free_bytes=1 << 20)
    tier = open_tier(directory, 64, folder=folder, free_space_floor_bytes=(1 << 20) - 200_000)
    statuses = store(tier, range(8))
    assert statuses.count(Status.OK) == 6 and folder.free_bytes() >= (1 << 20) - 200_000
    assert load(tier, range(8)) == statuses[:6] + [Status.MISS] * 2
    folder._free_bytes -= 100_000  # somebody else's
    while folder.free_bytes() < (1 << 20) - 200_000:
        before = tier.stats().blocks
        tier.tend()
        assert tier.stats().blocks < before
    tier.tend()
    assert tier.stats().blocks > 0
    tier.check_integrity()


def test_no_room_above_the_floor_at_all(directory: Path) -> None:
    folder = MemoryBlockFolder(free_bytes=1 << 20)
    clock = VirtualClock()
    tier = open_tier(directory, folder=folder, free_space_floor_bytes=1 << 20, clock=clock)
    assert store(tier, [0, 1]) == [Status.DROPPED] * 2
    assert tier.stats().state == "full" and tier.stats().dropped == 2
    folder._free_bytes += 1 << 20
    assert store(tier, [0]) == [Status.DROPPED], "asked again only after a while"
    clock.advance(1.0)
    assert store(tier, [0]) == [Status.OK]
    assert tier.stats().state == "ok"


def test_each_size_gets_room_in_a_full_tier(directory: Path) -> None:
    """Group 1 comes when group 0 has taken everything."""
    tier = open_tier(directory, blocks=40)
    for first in (0, 8, 16, 24, 40, 48):
        store(tier, range(first, first + 8))
    assert store(tier, range(32, 40)) == [Status.OK] * 8
    assert load(tier, range(32, 40)) == [Status.OK] * 8
    assert load(tier, range(48, 56)).count(Status.OK) > 0
    tier.check_integrity()
    tier.close()


# ---- a restart


def names_on_disk(directory: Path) -> list[str]:
    return [p.name for p in directory.iterdir() if not parse_name(p.name)]


def abandon(tier: NvmeTier) -> None:
    """As a crash does: nothing is written any more, the lock goes."""
    tier._folder.close()


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_crash_loses_nothing_that_was_written(directory: Path, snapshot: bool) -> None:
    tier = open_tier(directory)
    store(tier, range(8))
    if snapshot:
        tier.snapshot()
    store(tier, range(8, 16))
    tier.discard([block_name(7)])
    abandon(tier)
    tier = open_tier(directory)
    assert load(tier, range(16)) == [Status.OK] * 7 + [Status.MISS] + [Status.OK] * 8
    assert tier.verify() == (15, Counter())
    tier.check_integrity()
    tier.close()
    assert sorted(names_on_disk(directory)) == ["index-closed", "lock"]


def test_a_crash_after_a_proper_end_is_a_crash(directory: Path) -> None:
    """The snapshot of that end is not complete any more."""
    tier = open_tier(directory, blocks=8)
    store(tier, range(8))
    tier.close()
    tier = open_tier(directory, blocks=8)
    assert store(tier, range(8, 12)) == [Status.OK] * 4  # in the slots of 4..7
    abandon(tier)
    tier = open_tier(directory, blocks=8)
    assert load(tier, range(12)) == [Status.OK] * 4 + [Status.MISS] * 4 + [Status.OK] * 4
    tier.close()


def test_the_order_of_use_outlives_a_restart(directory: Path) -> None:
    tier = open_tier(directory, blocks=8)
    store(tier, range(4))
    store(tier, range(8, 12))
    load(tier, range(4))
    tier.close()
    tier = open_tier(directory, blocks=8)
    store(tier, range(16, 20))
    assert load(tier, range(4)) == [Status.OK] * 4
    assert load(tier, range(8, 12)) == [Status.MISS] * 4
    tier.close()


def test_no_time_to_scan_is_a_hint_and_not_damage(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old snapshot alone: what was overwritten since is a plain miss."""
    tier = open_tier(directory, blocks=8)
    store(tier, range(8))
    tier.snapshot()
    store(tier, range(8, 12))  # in the slots of 4..7
    abandon(tier)
    monkeypatch.setattr("kvstore.tiers.nvme_start.Start._scan", lambda *_: {})
    tier = open_tier(directory, blocks=8)
    assert load(tier, range(8)) == [Status.OK] * 4 + [Status.MISS] * 4
    assert tier.stats().corrupt == Counter()
    tier.check_integrity()
    tier.close()


def test_two_records_of_one_block_are_one(directory: Path) -> None:
    """A crash can leave a record that was evicted and the one stored again."""
    tier = open_tier(directory, blocks=4)
    store(tier, [0, 8, 16, 24])
    first = tier._index.get(record_id(block_name(0)))
    assert first is not None
    with tier._lock:
        tier._supply.drop(first)
        spare = tier._supply.space.take(first.segment.slot_bytes, 1)  # its old slot: not reused
    assert spare == [(first.segment, first.slot)]
    store(tier, [0])  # evicts 8
    abandon(tier)
    tier = open_tier(directory, blocks=4)
    assert tier.stats().blocks == 3
    assert load(tier, [0, 8, 16, 24]) == [Status.OK, Status.MISS, Status.OK, Status.OK]
    tier.check_integrity()
    tier.close()


@pytest.mark.parametrize("ending", ["close", "crash"])
def test_records_of_another_representation_make_room(directory: Path, ending: str) -> None:
    tier = open_tier(directory)
    store(tier, range(16))
    tier.close() if ending == "close" else abandon(tier)
    capacity = capacity_bytes(48, SIZES)
    other = NvmeTier(directory, capacity, "fp8-other", SIZES, free_space_floor_bytes=0)
    assert other.stats().blocks == 0
    assert load(other, range(16)) == [Status.MISS] * 16
    other.check_integrity()
    other.close()


def test_a_tier_of_other_sizes_takes_the_room(directory: Path) -> None:
    tier = open_tier(directory)
    store(tier, range(16))
    tier.close()
    other = NvmeTier(directory, 1 << 20, "fp8", {0: 12288}, free_space_floor_bytes=0)
    assert other.stats().blocks == 0
    assert load(other, []) == []
    other.close()


def test_snapshots_come_by_themselves_when_something_changed(directory: Path) -> None:
    clock = VirtualClock()
    tier = open_tier(directory, clock=clock)
    clock.advance(SNAPSHOT_S)
    tier.tend()
    assert "index" not in names_on_disk(directory)
    store(tier, [0])
    tier.tend()
    assert "index" in names_on_disk(directory)
    tier.close()


def test_clear_is_for_ever(directory: Path) -> None:
    tier = open_tier(directory)
    store(tier, range(8))
    tier.snapshot()
    tier.clear()
    abandon(tier)
    assert names_on_disk(directory) == ["lock"]
    tier = open_tier(directory)
    assert load(tier, range(8)) == [Status.MISS] * 8
    tier.close()


# ---- slots in use


class Gate:
    """Holds the first operation of a kind until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        true = getattr(MemoryBlockDevice, operation)

        def gated(device: MemoryBlockDevice, *args: object) -> object:
            if not self.reached.is_set():
                self.reached.set()
                assert self.open.wait(SOON)
            return true(device, *args)

        monkeypatch.setattr(MemoryBlockDevice, operation, gated)


def test_a_slot_being_read_is_not_reused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(directory, blocks=2, folder=MemoryBlockFolder())
    store(tier, [0, 8])
    gate = Gate(monkeypatch, "readv")
    loaded: list[Status] = []
    reader = threading.Thread(target=lambda: loaded.extend(load(tier, [0])))
    reader.start()
    assert gate.reached.wait(SOON)
    assert tier.lookup([block_name(0)], SOON) == [True], "no lock is held"
    read_from = tier._index.get(record_id(block_name(0)))
    assert store(tier, [16]) == [Status.OK]  # in the slot of 8
    assert store(tier, [24]) == [Status.OK]  # 0 is older but being read: in the slot of 16
    written_to = tier._index.get(record_id(block_name(24)))
    assert read_from is not None and written_to is not None
    assert (read_from.segment, read_from.slot) != (written_to.segment, written_to.slot)
    assert tier.lookup([block_name(n) for n in (0, 8, 16, 24)], SOON) == [False] * 3 + [True]
    gate.open.set()
    reader.join()
    assert loaded == [Status.OK]
    assert store(tier, [40]) == [Status.OK]
    assert load(tier, [24, 40]) == [Status.OK] * 2
    tier.check_integrity()


def test_discarded_while_it_is_read_is_a_miss(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discarding writes over the header on the disk; that is no damage."""
    tier = open_tier(directory, folder=MemoryBlockFolder())
    store(tier, [0, 8])
    gate = Gate(monkeypatch, "readv")
    loaded: list[Status] = []
    reader = threading.Thread(target=lambda: loaded.extend(load(tier, [0, 8])))
    reader.start()
    assert gate.reached.wait(SOON)
    tier.discard([block_name(0)])
    gate.open.set()
    reader.join()
    assert loaded == [Status.MISS, Status.OK]
    assert tier.stats().corrupt == Counter()
    tier.check_integrity()


@pytest.mark.parametrize("ending", ["clear", "close"])
def test_what_is_being_written_is_not_found_and_not_lost_track_of(
    directory: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    folder = MemoryBlockFolder()
    tier = open_tier(directory, blocks=2, folder=folder)
    gate = Gate(monkeypatch, "writev")
    stored: list[Status] = []
    writer = threading.Thread(target=lambda: stored.extend(store(tier, [0])))
    writer.start()
    assert gate.reached.wait(SOON)
    assert tier.lookup([block_name(0)], SOON) == [False]
    if ending == "clear":
        tier.clear()
        assert folder.devices == {}
    else:
        closing = threading.Thread(target=tier.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive(), "a file must not be closed under a write"
    gate.open.set()
    writer.join()
    assert stored == [Status.DROPPED]
    if ending == "clear":
        tier.check_integrity()
        assert store(tier, [0, 8]) == [Status.OK] * 2
    else:
        closing.join(SOON)
    tier.close()


# ---- without a replica


def test_a_directory_is_inspected_under_its_lock(directory: Path) -> None:
    tier = open_tier(directory)
    store(tier, range(16))
    for call in (nvme_offline.contents, nvme_offline.verify, nvme_offline.clear):
        with pytest.raises(LaunchError, match="in use"):
            call(directory)
    entry = tier._index.get(record_id(block_name(3)))
    assert entry is not None
    tier.close()
    assert nvme_offline.verify(directory) == (16, Counter())
    with (directory / entry.segment.name).open("r+b") as file:
        file.seek(entry.segment.offset(entry.slot) + HEADER_BYTES)
        file.write(bytes(8))
    assert nvme_offline.verify(directory) == (16, Counter(payload=1))
    (directory / "notes.txt").write_text("mine")
    found = nvme_offline.contents(directory)
    assert found.records == 16 and found.representations == {REPRESENTATION: 16}
    assert found.unknown_files == 1 and found.bytes >= 16 * SIZES[0]
    assert nvme_offline.clear(directory) > 16 * SIZES[0]
    assert sorted(p.name for p in directory.iterdir()) == ["lock", "notes.txt"]
    with pytest.raises(LaunchError, match="no such directory"):
        nvme_offline.verify(directory / "elsewhere")


# ---- the snapshot's form


def test_a_snapshot_is_believed_as_a_whole_or_not_at_all() -> None:
    segments = [ListedSegment(0, 28672, 3), ListedSegment(7, 12288, 1)]
    entries = [
        Listed(0, 2, 9, b"i" * 24, b"p" * 16, b"t" * 8),
        Listed(7, 0, 3, b"j" * 24, b"q" * 16, b"u" * 8),
    ]
    content = nvme_snapshot.encode(REPRESENTATION, segments, entries, 9, 1 << 20)
    assert nvme_snapshot.decode(content, REPRESENTATION) == (tuple(segments), tuple(entries), 9)
    assert nvme_snapshot.decode(content, "other") is None
    assert len(content) <= nvme_snapshot.snapshot_bytes_max(2, 2)
    for at in range(len(content)):
        flipped = content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]
        assert nvme_snapshot.decode(flipped, REPRESENTATION) is None
        assert nvme_snapshot.decode(content[:at], REPRESENTATION) is None
    rng = random.Random(5)
    for _ in range(2000):
        assert nvme_snapshot.decode(rng.randbytes(rng.randrange(200)), REPRESENTATION) is None
    huge = nvme_snapshot._FIXED.pack(b"BanyanIX", 1, 0, 2**32 - 1, 8, 2**63, 1) + bytes(8)
    assert nvme_snapshot.decode(huge, "") is None


def test_a_snapshot_that_does_not_fit_is_the_newest_part() -> None:
    segments = [ListedSegment(0, 28672, 9)]
    rows = [Listed(0, i, i, bytes([i]) * 24, bytes(16), bytes(64)) for i in range(9)]
    whole = nvme_snapshot.encode(REPRESENTATION, segments, rows, 9, 1 << 20)
    cut = nvme_snapshot.encode(REPRESENTATION, segments, rows, 9, len(whole) - 1)
    assert nvme_snapshot.decode(cut, REPRESENTATION) == ((), tuple(rows[1:]), 9)
    odd = [rows[0]._replace(tokens=b""), *rows[1:]]
    content = nvme_snapshot.encode(REPRESENTATION, segments, odd, 9, 1 << 20)
    assert nvme_snapshot.decode(content, REPRESENTATION) == ((), tuple(rows[1:]), 9)
    for limit in range(len(whole)):
        assert len(nvme_snapshot.encode(REPRESENTATION, segments, rows, 9, limit)) <= max(limit, 71)


@pytest.mark.parametrize("ending", ["close", "crash"])
def test_names_outlive_a_restart(directory: Path, ending: str) -> None:
    tier = open_tier(directory)
    store(tier, range(40))
    expected = {block_name(number) for number in range(40)}
    assert set(tier.names()) == expected
    tier.close() if ending == "close" else abandon(tier)
    tier = open_tier(directory)
    assert set(tier.names()) == expected
    tier.close()


def test_a_snapshot_without_segments_leaves_the_rest_to_the_headers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(directory)
    store(tier, range(40))
    monkeypatch.setattr(tier, "_snapshot_bytes_max", 1000)
    tier.close()
    assert 0 < (directory / "index-closed").stat().st_size <= 1000
    tier = open_tier(directory)
    assert load(tier, range(40)) == [Status.OK] * 40
    tier.close()


def test_a_snapshot_that_lies_is_only_a_hint(directory: Path) -> None:
    """Sound form, wrong content: slots that do not exist, of other sizes, of other records."""
    tier = open_tier(directory)
    store(tier, range(4))
    rows = [
        Listed(e.segment.number, e.slot, e.seq, e.id, e.parent, e.tokens)
        for e in tier._index.entries()
    ]
    tier.close()
    lies = [
        rows[0]._replace(id=rows[1].id), rows[1]._replace(id=rows[0].id), rows[2],
        rows[2]._replace(id=rows[0].id[:16] + bytes([1]) + rows[0].id[17:]),
        rows[3]._replace(slot=10**6), rows[3]._replace(segment=10**6),
    ]  # fmt: skip
    segments = [
        ListedSegment(s.number, s.slot_bytes, s.slots) for s in tier._supply.space.segments.values()
    ]
    (directory / "index-closed").write_bytes(
        nvme_snapshot.encode(REPRESENTATION, segments, lies, 99, 1 << 20)
    )
    tier = open_tier(directory)
    expected = [Status.CORRUPT, Status.CORRUPT, Status.OK, Status.MISS]
    assert load(tier, range(4)) == expected
    assert tier.stats().corrupt == Counter(key=2)
    tier.check_integrity()
    tier.close()


def test_a_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    """What it holds is still served, and lost with the process: an operator must hear of it."""
    tier = NvmeTier(
        tmp_path / "disk", 4 << 20, "r", {0: 4096}, free_space_floor_bytes=0, tended=False
    )
    tier.tend()
    assert tier.stats().state == "ok"
    shutil.rmtree(tmp_path / "disk")
    tier.tend()
    assert tier.stats().state == "broken"
    tier.close()
