"""Rows 11 and 12 as an engine sees them: a server or a disk in trouble while requests run costs
nobody an answer. Every output is the oracle's, usage adds up, every block comes back.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from engine_rig import request, tokens
from redis_proxy import Mode, Proxy
from test_tiers_engine import TierRig, evict_all

from kvstore.fetch import Level
from kvstore.record import HEADER_BYTES
from kvstore.tiered import TieredStore
from kvstore.tiers.base import Tier
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.nvme_index import record_id
from kvstore.tiers.queue import TierQueue
from kvstore.tiers.redis import RedisTier
from seams.blockdevice import BlockDevice
from seams.blockfolder import BlockFolder, FileBlockFolder
from worker.engine.core import EngineCore
from worker.models.fake import fake_model

TOKEN_S = 0.002  # what computing a token is said to cost: a well tier is always waited for
HOST_SLOTS = 24  # blocks; a prompt here has up to 22
DISK_BYTES = 4 << 20
SHAPES = ("full", "window")
MODEL = fake_model("window", context_tokens=512, block_tokens=4).spec  # blocks as in "full"
SIZES = {group.id: group.block_bytes for group in MODEL.groups}


class FaultRig(TierRig):
    """An engine over a small pool, a host tier of a few slots and one real tier below."""

    def __init__(self, tier: Tier, draw: random.Random, shape: str | None = None) -> None:
        super().__init__(shape or draw.choice(SHAPES), host=1, blocks=40, step_tokens_max=64)
        assert self.model.spec.representation == MODEL.representation
        self.host.close()
        self.host = HostTier(SIZES, HOST_SLOTS * 4096, dirty_max_share=1.0, prefault=False)
        self.store = TieredStore(self.host, [TierQueue(tier, threads=2)])
        self.model._pools = []
        self.core = EngineCore(self.model, self.config, self.clock, tiers=self.store)
        self.price(TOKEN_S)
        self.draw = draw
        self.stems = [tokens(draw.randrange(20, 60), i) for i in range(4)]

    def turn(self, prompts: int) -> None:
        """So many requests, some beside others, of prefixes that come again and again."""
        for _ in range(prompts):
            tail = tokens(self.draw.randrange(1, 25), 100 + self.draw.randrange(4))
            name = f"r{len(self.requests)}"
            self.submit(request(name, self.draw.choice(self.stems) + tail, 3))
            self.step(self.draw.randrange(4))
        self.run(100_000)

    def check(self) -> None:
        """All ended well, exactly, and everything is reclaimable; what was checked is forgotten."""
        self.assert_exact()
        for name in self.requests:
            last, usage = self.last(name), self.usage(name)
            assert last.error is None, name
            assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        began = time.monotonic()
        while not self.reclaimable():
            assert time.monotonic() - began < 5.0, "blocks are still held"
            time.sleep(0.001)
        assert self.core._tiers.faults == 0

    def forget(self) -> None:
        """What is left is what the lower tier has."""
        self.core.memory.cache.clear()
        self.store.flush(10.0)
        self.host.clear()

    def from_below(self, level: Level, salt: int) -> int:
        """Blocks that come from the lower tier if a prompt is asked for again."""
        before, prompt = self.store.loaded_blocks[level], tokens(64, 1000 + salt)
        for _ in range(2):
            self.submit(request(f"r{len(self.requests)}", prompt, 2))
            self.run(100_000)
            evict_all(self, 3)
            self.store.flush(2.0)
            self.host.clear()
        return self.store.loaded_blocks[level] - before

    def until_from_below(self, level: Level) -> None:
        """The lower tier is of use (again)."""
        began, salt = time.monotonic(), len(self.requests)
        while not self.from_below(level, salt):
            assert time.monotonic() - began < 60.0, "of no use any more"
            time.sleep(0.1)
            salt += 1


@pytest.fixture
def draw() -> random.Random:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return random.Random(seed)


# -- the shared tier -------------------------------------------------------------------------------


class Shared:
    """A server, a proxy before it, and the ways in which they fail; each is a context."""

    def __init__(self, server: EmbeddedValkey, proxy: Proxy, draw: random.Random) -> None:
        self.server, self.proxy, self.draw = server, proxy, draw
        self.password = server.url.split(":")[2].split("@")[0]
        self.client = redis.Redis.from_url(server.url)
        self.last = bytearray()

    @contextmanager
    def mode(self, mode: Mode) -> Iterator[None]:
        self.proxy.mode = mode
        yield
        self.proxy.mode = Mode.PASS

    @contextmanager
    def reset(self) -> Iterator[None]:
        """In the middle of a record: one is about 200 bytes."""
        self.proxy.reset_bytes = 500
        with self.mode(Mode.RESET):
            yield

    @contextmanager
    def killed(self) -> Iterator[None]:
        """By force, with everything in it; an empty one takes its place later."""
        os.kill(self.client.info("server")["process_id"], signal.SIGKILL)
        yield
        second = EmbeddedValkey(32 << 20)
        with redis.Redis.from_url(second.url) as client:
            client.config_set("requirepass", self.password)
        self.proxy.upstream = second.socket_path
        self.server.close()
        self.server = second

    @contextmanager
    def stopped(self) -> Iterator[None]:
        process = self.client.info("server")["process_id"]
        os.kill(process, signal.SIGSTOP)
        yield
        os.kill(process, signal.SIGCONT)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Takes no store; what is there can be read."""
        self.client.config_set("maxmemory-policy", "noeviction")
        self.client.config_set("maxmemory", 1)
        yield
        self.client.config_set("maxmemory", 32 << 20)

    @contextmanager
    def readonly(self) -> Iterator[None]:
        self.client.config_set("replica-serve-stale-data", "yes")
        self.client.replicaof("127.0.0.1", "1")
        yield
        self.client.replicaof("NO", "ONE")

    def spoil(self, kind: str) -> None:
        """Change every value."""
        for key in sorted(self.client.keys()):
            value = bytearray(self.client.get(key))
            match kind:
                case "payload":
                    at = len(value) - 1 - self.draw.randrange(SIZES[0])
                    value[at] ^= 1 << self.draw.randrange(8)
                case "header":
                    value[self.draw.randrange(len(value) - SIZES[0])] ^= 1 << self.draw.randrange(8)
                case "cut":
                    value = value[: self.draw.randrange(len(value))]
                case "another":
                    value = self.last or value[::-1]
                    self.last = bytearray(self.client.get(key))
                case "type":
                    self.client.delete(key)
                    self.client.rpush(key, b"x")
                    continue
            self.client.set(key, bytes(value))

    def close(self) -> None:
        self.client.close()
        self.proxy.close()
        self.server.close()


@pytest.fixture
def shared(draw: random.Random) -> Iterator[Shared]:
    server = EmbeddedValkey(32 << 20)
    made = Shared(server, Proxy(server.socket_path), draw)
    yield made
    made.close()


def shared_tier(shared: Shared) -> RedisTier:
    url = shared.proxy.url(shared.password)
    return RedisTier(url, MODEL.representation.id, namespace="faults")


FAULTS: dict[str, Callable[[Shared], object]] = {
    "killed": Shared.killed,
    "stopped": Shared.stopped,
    "frozen": lambda shared: shared.mode(Mode.FROZEN),
    "down": lambda shared: shared.mode(Mode.DOWN),
    "late": lambda shared: shared.mode(Mode.LATE),
    "drip": lambda shared: shared.mode(Mode.DRIP),
    "reset": Shared.reset,
    "full": Shared.full,
    "readonly": Shared.readonly,
}


def trouble(tier: RedisTier) -> int:
    """Blocks that it could not give or keep."""
    stats = tier.stats()
    return stats.failed + stats.dropped + stats.corrupt.total()


@pytest.mark.parametrize("kind", FAULTS)
def test_a_server_in_trouble(kind: str, shared: Shared, draw: random.Random) -> None:
    tier = shared_tier(shared)
    rig = FaultRig(tier, draw)
    rig.turn(12)
    rig.until_from_below(Level.SHARED)
    rig.turn(6)
    # Not only between requests: some are under way when it begins and when it ends.
    rig.submit(request("before", rig.stems[0] + tokens(9, 7), 40))
    rig.step(3)
    before = trouble(tier)
    with FAULTS[kind](shared):
        began = time.monotonic()
        rig.turn(20)
        while trouble(tier) == before and kind != "drip":
            rig.host.clear()
            rig.turn(4)
            assert time.monotonic() - began < 60.0, "not felt"
        rig.submit(request("during", rig.stems[1] + tokens(9, 8), 40))
        rig.step(3)
    rig.turn(6)
    rig.check()
    rig.until_from_below(Level.SHARED)
    rig.check()
    rig.close()


def test_no_server_at_the_start(shared: Shared, draw: random.Random) -> None:
    with shared.mode(Mode.DOWN):
        rig = FaultRig(shared_tier(shared), draw)
        rig.turn(12)
        rig.check()
        assert not rig.store.loaded_blocks[Level.SHARED]
    rig.until_from_below(Level.SHARED)
    rig.check()
    rig.close()


@pytest.mark.parametrize("kind", ["payload", "header", "cut", "another", "type"])
def test_a_server_of_wrong_values(kind: str, shared: Shared, draw: random.Random) -> None:
    """Every value is another one, again and again, while requests run that want it."""
    tier = shared_tier(shared)
    rig = FaultRig(tier, draw)
    for _ in range(6):
        rig.turn(6)
        assert rig.store.flush(10.0)
        rig.forget()
        shared.spoil(kind)
        rig.turn(3)
        shared.client.flushall()
    rig.check()
    assert tier.stats().corrupt.total() + tier.stats().failed > 5
    rig.until_from_below(Level.SHARED)
    rig.check()
    rig.close()


# -- the disk --------------------------------------------------------------------------------------


class Trouble:
    """Counts disk calls once `armed`; the `at`-th, or every one from it on, goes wrong."""

    def __init__(self, kind: str, at: int, lasting: bool) -> None:
        self.kind, self.at, self.lasting = kind, at, lasting
        self.armed, self.calls = False, 0
        self._lock = threading.Lock()

    def strikes(self) -> bool:
        """Whether this call is cut short; raises what the kind raises, or takes a second."""
        with self._lock:
            self.calls += self.armed
            due = self.calls == self.at or (self.calls > self.at and self.lasting)
        if not due or not self.armed:
            return False
        if self.kind == "stall":
            time.sleep(1.0)
            return False
        if self.kind == "short":
            return True
        number = getattr(errno, self.kind)
        raise OSError(number, os.strerror(number))


class TroubledDevice:
    """Reads that end early, and writes of which only the first half arrives."""

    def __init__(self, device: BlockDevice, trouble: Trouble) -> None:
        self.device, self.trouble = device, trouble

    def __getattr__(self, name: str) -> object:
        return getattr(self.device, name)

    def readv(self, offset: int, into: Sequence[memoryview]) -> int:
        if self.trouble.strikes():
            got = self.device.readv(offset, into)
            for view in into[len(into) // 2 :]:
                view.cast("B")[:] = b"\xee" * view.nbytes
            return min(got, sum(view.nbytes for view in into[: len(into) // 2]))
        return self.device.readv(offset, into)

    def writev(self, offset: int, parts: Sequence[memoryview]) -> None:
        if self.trouble.strikes():
            parts = parts[: len(parts) // 2]
        if parts:
            self.device.writev(offset, parts)


class TroubledFolder:
    """Every method is a disk call."""

    def __init__(self, folder: BlockFolder, trouble: Trouble) -> None:
        self.folder, self.trouble = folder, trouble

    @property
    def memory_alignment(self) -> int:
        return self.folder.memory_alignment

    def __getattr__(self, name: str) -> Callable[..., object]:
        true = getattr(self.folder, name)

        def call(*args: object) -> object:
            self.trouble.strikes()
            result = true(*args)
            opened = name in ("create", "open")
            return TroubledDevice(result, self.trouble) if opened else result

        return call


def disk_tier(directory: Path, trouble: Trouble | None = None) -> NvmeTier:
    folder: BlockFolder = FileBlockFolder(directory)
    if trouble is not None:
        folder = TroubledFolder(folder, trouble)  # type: ignore[assignment]
    return NvmeTier(
        directory, DISK_BYTES, MODEL.representation.id, SIZES,
        free_space_floor_bytes=0, folder=folder,
    )  # fmt: skip


def taken_bytes(directory: Path) -> int:
    taken = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # it has just been removed
            taken += 512 * path.stat().st_blocks
    return taken


def disk_run(directory: Path, trouble: Trouble, draw: random.Random) -> int:
    """Requests while the disk fails; returns the disk calls that they made."""
    rig = FaultRig(disk_tier(directory, trouble), draw)
    trouble.armed = True
    rig.turn(10)
    rig.store.flush(0.2)
    rig.host.clear()
    rig.turn(10)
    assert taken_bytes(directory) <= DISK_BYTES, "over the cap"
    trouble.armed = False
    rig.check()
    rig.close()
    return trouble.calls


KINDS = ["EIO", "ENOSPC", "EROFS", "short", "stall"]


CASES = [(kind, False) for kind in KINDS] + [(kind, True) for kind in KINDS if kind != "stall"]


@pytest.mark.parametrize(("kind", "lasting"), CASES)
def test_the_nth_disk_call_fails(
    tmp_path: Path, kind: str, lasting: bool, draw: random.Random
) -> None:
    for turn, at in enumerate([1, 2, 3, draw.randrange(4, 40), draw.randrange(4, 40)]):
        print(f"call {at}")
        calls = disk_run(tmp_path / str(turn), Trouble(kind, at, lasting), draw)
        assert calls >= at, "it never came to that call"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_disk_call_fails_once(tmp_path: Path, kind: str) -> None:
    """All N that a run makes, of one and the same chance."""
    calls = disk_run(tmp_path / "none", Trouble(kind, 0, False), random.Random(5))
    print(f"{calls} calls")
    came = 0
    for at in range(1, calls // 2):  # how many calls there are depends on threads, too
        directory = tmp_path / str(at)
        came += disk_run(directory, Trouble(kind, at, False), random.Random(5)) >= at
        shutil.rmtree(directory)
    print(f"{came} of the first {calls // 2} failed")
    assert came > calls // 4


def test_a_directory_wiped_under_requests(tmp_path: Path, draw: random.Random) -> None:
    directory = tmp_path / "disk"
    rig = FaultRig(disk_tier(directory), draw)
    rig.turn(10)
    rig.until_from_below(Level.DISK)
    rig.submit(request("before", rig.stems[0] + tokens(9, 7), 40))
    rig.step(3)
    shutil.rmtree(directory)
    rig.turn(20)
    rig.check()
    rig.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", ["payload", "header", "anywhere"])
def test_bits_flipped_between_two_runs(
    tmp_path: Path, where: str, shape: str, draw: random.Random
) -> None:
    """One in every record on the disk."""
    directory = tmp_path / "disk"
    tier = disk_tier(directory)
    first = FaultRig(tier, draw, shape)
    first.turn(20)
    first.check()
    first.forget()
    entries = [tier._index.get(record_id(name)) for name in tier.names()]
    first.core.close(5.0)
    for entry in entries:
        assert entry is not None
        starts = {"payload": HEADER_BYTES, "header": 0, "anywhere": 0}
        ends = {"payload": HEADER_BYTES + SIZES[0], "header": 100, "anywhere": HEADER_BYTES}
        at = entry.segment.offset(entry.slot) + draw.randrange(starts[where], ends[where])
        with (directory / entry.segment.name).open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    tier = disk_tier(directory)
    second = FaultRig(tier, draw, shape)
    second.stems = first.stems
    second.turn(20)
    second.check()
    assert where == "anywhere" or tier.stats().corrupt.total() > 0
    second.until_from_below(Level.DISK)
    second.check()
    second.close()
