"""The disk tier when the disk, the power or the process fails: never a wrong byte, never an
exception, never a byte over the cap (rows 12, 13 and 14 of the fault scenarios)."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import disk_blocks
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

from kvstore import record
from kvstore.record import HEADER_BYTES
from kvstore.tiers.base import Status
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.nvme_index import record_id
from kvstore.tiers.segments import parse_name
from seams.blockdevice import PAGE_BYTES, BlockDevice, MemoryBlockDevice
from seams.blockfolder import BlockFolder, MemoryBlockFolder
from seams.clock import VirtualClock
from seams.errors import LaunchError

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS = 10
NOWHERE = Path("unused")


def store(tier: NvmeTier, numbers: Sequence[int], deadline_s: float = SOON) -> list[Status]:
    names = [block_name(number) for number in numbers]
    return tier.store(names, [memoryview(block_bytes(n)) for n in numbers], deadline_s)


def load(tier: NvmeTier, numbers: Sequence[int], deadline_s: float = SOON) -> list[Status]:
    """Every OK is held to the byte."""
    into = [bytearray(SIZES[block_name(number).group]) for number in numbers]
    names = [block_name(number) for number in numbers]
    statuses = tier.load(names, [memoryview(view) for view in into], deadline_s)
    for number, view, status in zip(numbers, into, statuses, strict=True):
        assert status is not Status.OK or view == block_bytes(number), f"wrong bytes for {number}"
    return statuses


# ---- the N-th disk call


class Trouble:
    """Counts disk calls; the N-th, or every one from it on, goes wrong in one way."""

    def __init__(self, kind: str, at: int, lasting: bool, clock: VirtualClock) -> None:
        self.kind, self.at, self.lasting, self.clock = kind, at, lasting, clock
        self.calls = 0

    def strikes(self) -> bool:
        """Whether this call is cut short; raises what the kind raises, or takes a second."""
        self.calls += 1
        if self.calls < self.at or (self.calls > self.at and not self.lasting):
            return False
        if self.kind == "stall":
            self.clock.advance(1.0)
            return False
        if self.kind == "short":
            return True
        number = getattr(errno, self.kind)
        raise OSError(number, os.strerror(number))


class TroubledDevice:
    """Reads end early, and writes are lost from some point on without a word."""

    def __init__(self, device: BlockDevice, trouble: Trouble) -> None:
        self.device, self.trouble = device, trouble

    def __getattr__(self, name: str) -> object:
        return getattr(self.device, name)

    def readv(self, offset: int, into: Sequence[memoryview]) -> int:
        if self.trouble.strikes():
            whole = bytearray(sum(map(len, into)) // 2)
            done = count = self.device.readv(offset, [memoryview(whole)])
            for part in into:
                taken = min(len(part), done)
                part[:taken], whole, done = whole[:taken], whole[taken:], done - taken
            return count
        return self.device.readv(offset, into)

    def writev(self, offset: int, parts: Sequence[memoryview]) -> None:
        whole = b"".join(parts)
        self.device.write(offset, whole[: len(whole) // 2] if self.trouble.strikes() else whole)


class TroubledFolder:
    """Every method is a disk call."""

    memory_alignment = 1

    def __init__(self, folder: BlockFolder, trouble: Trouble) -> None:
        self.folder, self.trouble = folder, trouble

    def __getattr__(self, name: str) -> Callable[..., object]:
        true = getattr(self.folder, name)

        def call(*args: object) -> object:
            try:
                short = self.trouble.strikes()
            except OSError:
                if name == "present":
                    return False
                raise
            if short and name == "replace":
                args = (args[0], args[1][: len(args[1]) // 2])
            result = true(*args)
            if short and name == "read":
                return result[: len(result) // 2]
            return TroubledDevice(result, self.trouble) if name in ("create", "open") else result

        return call


class Scene:
    """A tier on a troubled folder in memory, checked after each step."""

    def __init__(self, folder: MemoryBlockFolder, trouble: Trouble) -> None:
        self.folder, self.trouble = folder, trouble
        self.tier: NvmeTier | None = None
        self.open()

    def open(self) -> None:
        """No tier if the directory cannot be used: a replica then starts without it."""
        try:
            troubled = TroubledFolder(self.folder, self.trouble)
            self.tier = open_tier(NOWHERE, BLOCKS, folder=troubled, clock=self.trouble.clock)
        except LaunchError:
            self.tier = None

    def run(self) -> Counter[Status]:
        seen: Counter[Status] = Counter()
        for step in self.steps():
            if self.tier is not None:
                seen.update(step(self.tier) or ())
                self.check(self.tier)
        return seen

    def check(self, tier: NvmeTier) -> None:
        tier._index.check_integrity()
        space = tier._supply.space
        assert not space.pinned
        if not tier._disk.closed:
            space.check_integrity(len(tier._index))
        taken = sum(map(self.folder.footprint_bytes, self.folder.names()))
        assert taken <= capacity_bytes(BLOCKS, SIZES)
        assert tier.stats().state in ("ok", "full", "readonly", "broken")

    def steps(self) -> Iterator[Callable[[NvmeTier], list[Status] | None]]:
        yield lambda tier: store(tier, range(6))
        yield lambda tier: load(tier, range(6))
        yield lambda tier: store(tier, range(8, 14))
        yield lambda tier: tier.snapshot() and None
        yield lambda tier: store(tier, range(32, 36))  # another size: a segment goes for it
        yield lambda tier: load(tier, [*range(16), *range(32, 36)])
        yield lambda tier: tier.discard([block_name(0), block_name(9)])
        yield lambda tier: tier.tend()
        yield lambda tier: store(tier, range(16, 20))
        yield lambda tier: tier.close()
        self.open()
        yield lambda tier: load(tier, [*range(20), *range(32, 36)])
        yield lambda tier: store(tier, range(40, 44))
        self.open()  # after a crash
        yield lambda tier: load(tier, [*range(44)])
        yield lambda tier: tier.verify() and None
        yield lambda tier: tier.clear()
        yield lambda tier: store(tier, range(4))
        yield lambda tier: load(tier, range(4))
        yield lambda tier: tier.close()


KINDS = ("ENOSPC", "EDQUOT", "EIO", "EROFS", "short", "stall")


@pytest.fixture
def long_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five slots instead of one, so that blocks share disk calls."""
    monkeypatch.setattr("kvstore.tiers.segments.SEGMENTS_MAX", 2)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize(
    ("kind", "shared"),
    [*((k, False) for k in KINDS), ("EIO", True), ("ENOSPC", True), ("short", True)],
)
def test_every_disk_call_may_fail(
    kind: str, lasting: bool, shared: bool, request: pytest.FixtureRequest
) -> None:
    """For all N: no exception, no wrong byte, the cap held, every pin and byte accounted for."""
    if shared:
        request.getfixturevalue("long_segments")
    sound = Trouble(kind, 1 << 30, lasting, VirtualClock())
    expected = Scene(MemoryBlockFolder(), sound).run()
    assert expected[Status.OK] > 40 and (sound.calls > 60 if not shared else 30 < sound.calls < 120)
    for at in range(1, sound.calls + 1):
        trouble = Trouble(kind, at, lasting, VirtualClock())
        seen = Scene(MemoryBlockFolder(), trouble).run()
        assert trouble.calls >= at
        if not lasting and kind != "stall" and at > 3:
            assert seen[Status.OK] > 0, f"call {at} ended it all"


@pytest.mark.parametrize(
    ("kind", "status", "state"),
    [
        ("ENOSPC", Status.DROPPED, "full"),
        ("EDQUOT", Status.DROPPED, "full"),
        ("EROFS", Status.DROPPED, "readonly"),
        ("EIO", Status.FAILED, "broken"),
    ],
)
def test_what_a_failing_write_means(kind: str, status: Status, state: str) -> None:
    clock = VirtualClock()
    trouble = Trouble(kind, 1 << 30, True, clock)
    tier = open_tier(
        NOWHERE, BLOCKS, folder=TroubledFolder(MemoryBlockFolder(), trouble), clock=clock
    )
    assert store(tier, [0, 8, 16]) == [Status.OK] * 3
    trouble.at = 0
    tier._supply.growth.failed(OSError(errno.ENOSPC, ""), clock.now())  # no new segment for now
    store(tier, [24, 40, 48])
    assert tier.stats().state == state
    assert store(tier, [24]) == [Status.DROPPED]
    calls = trouble.calls
    assert store(tier, [24, 40, 48]) == [Status.DROPPED] * 3
    assert trouble.calls == calls, "nobody asks before the time has come"
    trouble.at = 1 << 30
    clock.advance(1.0)
    assert store(tier, [24, 40]) == [Status.OK] * 2
    assert tier.stats().state == "ok"
    stats = tier.stats()
    counted = stats.dropped if status is Status.DROPPED else stats.failed
    assert counted > 0
    tier.check_integrity()


def test_a_disk_that_stays_broken_is_asked_less_and_less() -> None:
    clock = VirtualClock()
    trouble = Trouble("EIO", 1 << 30, True, clock)
    tier = open_tier(
        NOWHERE, BLOCKS, folder=TroubledFolder(MemoryBlockFolder(), trouble), clock=clock
    )
    assert store(tier, range(8)) == [Status.OK] * 8
    trouble.at, asked_at = 0, []
    for turn in range(2000):
        before = trouble.calls
        store(tier, [80 + 40 * turn])
        if trouble.calls > before:
            asked_at.append(clock.now())
        clock.advance(0.1)
    assert 8 <= len(asked_at) <= 30
    assert tier.stats().state == "broken" and tier.stats().blocks >= 6, "evicted for nothing"
    assert load(tier, range(4))[1:] == [Status.FAILED] * 3 and tier.stats().blocks >= 5
    trouble.at = 1 << 30
    clock.advance(60.0)
    assert load(tier, range(1, 5)) == [Status.OK] * 4
    assert tier.stats().state == "ok"


def test_an_unreadable_block_is_forgotten() -> None:
    clock = VirtualClock()
    trouble = Trouble("EIO", 1 << 30, False, clock)
    tier = open_tier(
        NOWHERE, BLOCKS, folder=TroubledFolder(MemoryBlockFolder(), trouble), clock=clock
    )
    store(tier, range(3))
    trouble.at = trouble.calls + 2
    assert load(tier, range(3)) == [Status.OK, Status.FAILED, Status.OK]
    assert load(tier, range(3)) == [Status.OK, Status.MISS, Status.OK]
    assert tier.stats().failed == 1 and tier.stats().state == "ok"
    assert store(tier, [1]) == [Status.OK]
    assert load(tier, range(3)) == [Status.OK] * 3


def test_a_stall_ends_the_call_and_not_the_tier() -> None:
    clock = VirtualClock()
    trouble = Trouble("stall", 1 << 30, True, clock)
    tier = open_tier(
        NOWHERE, BLOCKS, folder=TroubledFolder(MemoryBlockFolder(), trouble), clock=clock
    )
    store(tier, range(6))
    trouble.at = 0
    assert load(tier, range(6), 1.5) == [Status.OK] * 2 + [Status.LATE] * 4
    assert store(tier, [8, 16], 0.5)[1] is Status.LATE
    trouble.at = 1 << 30
    assert load(tier, range(6), 1.5) == [Status.OK] * 6
    tier.check_integrity()


# ---- power


def power_cuts(seed: int, cuts: int) -> tuple[int, int]:
    """Work, cut, start again, `cuts` times; returns loads that were OK and that were CORRUPT."""
    rng = random.Random(seed)
    folder = MemoryBlockFolder()
    ok = corrupt = 0
    for _ in range(cuts):
        tier = open_tier(NOWHERE, BLOCKS, folder=folder)
        for _ in range(rng.randrange(1, 8)):
            first = 8 * rng.randrange(6)
            store(tier, range(first, first + rng.randrange(1, 9)))
            match rng.randrange(8):
                case 0:
                    tier.snapshot()
                case 1:
                    tier.discard([block_name(first)])
                case 2:
                    for device in folder.devices.values():
                        device.sync()
        if rng.random() < 0.2:
            tier.close()
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
        for name, device in list(folder.devices.items()):
            device.cut_power(lambda page: rng.random() < share)  # noqa: B023 - used at once
            if rng.random() < 0.05:
                folder.remove(name)
        tier = open_tier(NOWHERE, BLOCKS, folder=folder)
        seen = Counter(load(tier, range(48)))
        ok, corrupt = ok + seen[Status.OK], corrupt + seen[Status.CORRUPT]
        assert tier.stats().corrupt.total() == seen[Status.CORRUPT]
        tier.check_integrity()
    return ok, corrupt


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_a_power_cut_serves_nothing_corrupt(
    seed: int, shared: bool, request: pytest.FixtureRequest
) -> None:
    """Any 4 KiB pages written since the last sync may be lost: torn and half-new records."""
    if shared:
        request.getfixturevalue("long_segments")
    ok, corrupt = power_cuts(seed, 10)
    print(f"seed {seed}: {ok} served, {corrupt} caught")
    assert ok > 20 and corrupt > 0


@pytest.mark.soak
def test_power_cuts_soak() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    ok, corrupt = power_cuts(seed, 1000)
    assert ok > 2000 and corrupt > 100


# ---- kill -9


def kill_writers(directory: Path, seed: int, kills: int) -> int:
    """Start a writer, kill it, look: `kills` times; returns the loads that were OK."""
    rng = random.Random(seed)
    ok = 0
    for number in range(kills):
        command = [sys.executable, disk_blocks.__file__, str(directory), str(seed + number)]
        paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        writer = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
        )
        assert writer.stdout is not None
        with writer, writer.stdout as output:
            assert output.readline() == b"ready\n"
            time.sleep(rng.uniform(0.0, 0.15))
            writer.kill()
        tier = open_tier(directory)
        left = [p.name for p in directory.iterdir() if not parse_name(p.name)]
        assert set(left) <= {"lock", "index", "index-closed"}, "a leftover"
        checked, corrupt = tier.verify()
        seen = Counter(load(tier, range(128)))
        ok += seen[Status.OK]
        assert seen[Status.OK] == checked - corrupt.total() and not seen[Status.CORRUPT]
        tier.check_integrity()
        if rng.random() < 0.3:
            tier.close()
        else:
            tier._folder.close()  # as if it had been killed too, with the index as it was
    return ok


def test_a_killed_writer_leaves_nothing_corrupt(tmp_path: Path) -> None:
    assert kill_writers(tmp_path / "tier", seed=100, kills=20) > 100


@pytest.mark.soak
def test_killed_writers_soak(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    assert kill_writers(tmp_path / "tier", seed, 1000) > 5000


# ---- mutated records


def flip_payload(slot: bytearray, rng: random.Random, size: int) -> None:
    slot[HEADER_BYTES + rng.randrange(size)] ^= 1 << rng.randrange(8)


def flip_header(slot: bytearray, rng: random.Random, size: int) -> None:
    slot[rng.randrange(header_bytes(slot))] ^= 1 << rng.randrange(8)


def header_bytes(slot: bytearray) -> int:
    header = record.decode(bytes(slot[:HEADER_BYTES]))
    assert isinstance(header, record.Header)
    return len(record.encode(header.name, header.representation, b""))


def cut_header(slot: bytearray, rng: random.Random, size: int) -> None:
    at = rng.randrange(header_bytes(slot) - 8)
    slot[at:HEADER_BYTES] = bytes(HEADER_BYTES - at)


def cut_payload(slot: bytearray, rng: random.Random, size: int) -> None:
    at = HEADER_BYTES + rng.randrange(size - 1)
    slot[at : HEADER_BYTES + size] = bytes(HEADER_BYTES + size - at)


def tear(slot: bytearray, rng: random.Random, size: int) -> None:
    page = PAGE_BYTES * rng.randrange(1, -(-size // PAGE_BYTES) + 1)
    slot[page : page + PAGE_BYTES] = rng.randbytes(PAGE_BYTES)


def rewrite(slot: bytearray, **changes: object) -> None:
    """A sound header that says something else, its checksums right."""
    header = record.decode(bytes(slot[:HEADER_BYTES]))
    assert isinstance(header, record.Header)
    payload = bytes(slot[HEADER_BYTES : HEADER_BYTES + header.payload_bytes])
    representation = str(changes.pop("representation", header.representation))
    payload = payload[: len(payload) - int(str(changes.pop("shorter", 0)))]
    name = header.name._replace(**changes)  # type: ignore[arg-type]
    written = record.encode(name, representation, payload, header.seq)
    slot[:HEADER_BYTES] = written.ljust(HEADER_BYTES, b"\0")


def other_model(slot: bytearray, rng: random.Random, size: int) -> None:
    rewrite(slot, representation="fp16-other")


def other_key(slot: bytearray, rng: random.Random, size: int) -> None:
    rewrite(slot, key=rng.randbytes(16))


def other_parent(slot: bytearray, rng: random.Random, size: int) -> None:
    rewrite(slot, parent=rng.randbytes(16))


def other_tokens(slot: bytearray, rng: random.Random, size: int) -> None:
    rewrite(slot, tokens=rng.randbytes(16))


def other_rank(slot: bytearray, rng: random.Random, size: int) -> None:
    rewrite(slot, rank=rng.randrange(1, 8))


def other_length(slot: bytearray, rng: random.Random, size: int) -> None:
    rewrite(slot, shorter=rng.randrange(1, size))


def older_layout(slot: bytearray, rng: random.Random, size: int) -> None:
    slot[8:10] = (0).to_bytes(2, "little")


MUTATIONS: dict[Callable[[bytearray, random.Random, int], None], set[str]] = {
    flip_payload: {"payload"},
    flip_header: {"magic", "version", "header"},
    cut_header: {"magic", "version", "header"},
    cut_payload: {"payload"},
    tear: {"payload"},
    other_model: {"representation"},
    other_key: {"key"},
    other_parent: {"parent"},
    other_tokens: {"tokens"},
    other_rank: {"group"},
    other_length: {"length"},
    older_layout: {"version"},
}


def slot_of(tier: NvmeTier, number: int) -> tuple[MemoryBlockDevice, int, int]:
    entry = tier._index.get(record_id(block_name(number)))
    assert entry is not None
    device = entry.segment.device
    assert isinstance(device, MemoryBlockDevice)
    return device, entry.segment.offset(entry.slot), entry.segment.slot_bytes


def mutate(tier: NvmeTier, rng: random.Random) -> None:
    """Store one block, change what lies on the disk, load: a miss by the right cause."""
    number = rng.randrange(40)
    assert store(tier, [number]) == [Status.OK]
    change = rng.choice(list(MUTATIONS))
    device, offset, slot_bytes = slot_of(tier, number)
    slot = bytearray(slot_bytes)
    device.read_into(offset, memoryview(slot))
    change(slot, rng, SIZES[block_name(number).group])
    device.write(offset, bytes(slot))
    before = tier.stats().corrupt
    assert load(tier, [number]) == [Status.CORRUPT], change.__name__
    (cause,) = (tier.stats().corrupt - before).elements()
    assert cause in MUTATIONS[change], change.__name__
    assert tier.lookup([block_name(number)], SOON) == [False]


def swap(tier: NvmeTier, rng: random.Random) -> None:
    """Two sound records in each other's slots."""
    one, two = rng.sample(range(32), 2)
    assert store(tier, [one]) == store(tier, [two]) == [Status.OK]
    slots = []
    for number in (one, two):
        device, offset, slot_bytes = slot_of(tier, number)
        slot = bytearray(slot_bytes)
        device.read_into(offset, memoryview(slot))
        slots.append((device, offset, bytes(slot)))
    for (device, offset, _), (_, _, slot) in zip(slots, reversed(slots), strict=True):
        device.write(offset, slot)
    before = tier.stats().corrupt
    assert load(tier, [one, two]) == [Status.CORRUPT] * 2
    assert tier.stats().corrupt - before == Counter(key=2)


def mutations(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    tier = open_tier(NOWHERE, 64, folder=MemoryBlockFolder())
    for _ in range(rounds):
        swap(tier, rng) if rng.random() < 0.15 else mutate(tier, rng)
    tier.check_integrity()
    assert store(tier, range(8)) == load(tier, range(8)) == [Status.OK] * 8


def test_mutated_records_are_misses_by_cause() -> None:
    mutations(seed=7, rounds=200)


@pytest.mark.soak
def test_mutated_records_soak() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    mutations(seed, 10_000)


@pytest.mark.parametrize("crashed", [False, True])
def test_mutated_between_two_runs(tmp_path: Path, crashed: bool) -> None:
    """With the index of a proper end, and with headers alone: nothing wrong is served."""
    directory = tmp_path / "tier"
    rng = random.Random(11)
    tier = open_tier(directory)
    numbers = range(40)
    store(tier, numbers)
    places = {n: tier._index.get(record_id(block_name(n))) for n in numbers}
    tier._folder.close() if crashed else tier.close()
    changes = list(MUTATIONS)
    for number, entry in places.items():
        assert entry is not None
        with (directory / entry.segment.name).open("r+b") as file:
            file.seek(entry.segment.offset(entry.slot))
            slot = bytearray(file.read(entry.segment.slot_bytes))
            changes[number % len(changes)](slot, rng, SIZES[block_name(number).group])
            file.seek(entry.segment.offset(entry.slot))
            file.write(slot)
    tier = open_tier(directory)
    statuses = load(tier, numbers)
    assert set(statuses) <= {Status.CORRUPT, Status.MISS}
    assert (Status.MISS in statuses) == crashed
    assert tier.stats().corrupt.total() == statuses.count(Status.CORRUPT) > 0
    tier.check_integrity()
    tier.close()


@pytest.mark.parametrize("crashed", [False, True])
def test_files_cut_short(tmp_path: Path, crashed: bool) -> None:
    directory = tmp_path / "tier"
    rng = random.Random(12)
    tier = open_tier(directory)
    store(tier, range(40))
    tier._folder.close() if crashed else tier.close()
    for path in directory.iterdir():
        if parse_name(path.name):
            os.truncate(path, rng.randrange(path.stat().st_size))
    tier = open_tier(directory)
    statuses = load(tier, range(40))
    assert set(statuses) <= {Status.OK, Status.MISS, Status.CORRUPT}
    store(tier, range(40))
    load(tier, range(40))
    tier.check_integrity()
    tier.close()


def test_a_file_cut_short_under_a_running_tier(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "tier")
    store(tier, range(8))
    for path in (tmp_path / "tier").iterdir():
        if parse_name(path.name):
            os.truncate(path, SIZES[0])
    assert set(load(tier, range(8))) == {Status.CORRUPT}
    assert set(tier.stats().corrupt) <= {"magic", "length", "header"}
    assert REPRESENTATION and store(tier, range(8)) == load(tier, range(8)) == [Status.OK] * 8
    tier.close()
