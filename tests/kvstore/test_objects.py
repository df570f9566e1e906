"""Objects in tiers: what comes back is what was put, to the byte, or nothing; whatever is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kernels.codecs.cold import TurboCold
from kernels.cold import ColdCodec
from kernels.layout import PageLayout
from kvstore.fetch import Level, Place
from kvstore.groups import GroupKind, KVGroup
from kvstore.keys import tokens_u32le
from kvstore.objectnames import ObjectName, head_part, is_meta, is_part, object_name
from kvstore.objects import Finding, Objects
from kvstore.tiered import TieredStore
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.queue import TierQueue
from kvstore.tiers.redis import RedisTier

BLOCK = 16
SOON = 20.0
GROUPS = (
    KVGroup(0, GroupKind.FULL, (0, 1), 24576, ranks=2),
    KVGroup(1, GroupKind.LATENT, (2,), 5000),
)
LAYOUT = PageLayout(layers=2, kv_heads=2, block_tokens=BLOCK, qk_dim=64, v_dim=64, dtype="bf16")
CODED = (KVGroup(0, GroupKind.FULL, (0, 1), LAYOUT.block_bytes),)
NAME = object_name("test", b"a")


def content(count: int, seed: int = 0, groups: Sequence[KVGroup] = GROUPS) -> list:
    """[group][block][rank]"""
    chance = random.Random(seed)
    return [
        [
            [memoryview(chance.randbytes(g.block_bytes)) for _ in range(g.ranks)]
            for _ in range(count)
        ]
        for g in groups
    ]


def empty(count: int, groups: Sequence[KVGroup] = GROUPS) -> list:
    return [
        [[memoryview(bytearray(g.block_bytes)) for _ in range(g.ranks)] for _ in range(count)]
        for g in groups
    ]


class Kept:
    """A store and its objects."""

    def __init__(
        self,
        lower: Sequence[TierQueue] = (),
        groups: Sequence[KVGroup] = GROUPS,
        codecs: dict[int, ColdCodec] | None = None,
        host_bytes: int = 8 << 20,
    ) -> None:
        codecs = codecs or {}
        sizes = {
            g.id: codecs[g.id].encoded_bytes if g.id in codecs else g.block_bytes for g in groups
        }
        self.host = HostTier(sizes, host_bytes, verify=True, prefault=False)
        self.store = TieredStore(self.host, lower, codecs)
        self.objects = Objects(self.store, groups, BLOCK)
        self.groups = groups

    def found(self, *names: ObjectName) -> Finding:
        """All metas that there are are here."""
        finding = self.objects.find(names)
        end = time.monotonic() + SOON
        while any(
            self.objects.place(finding, at) in (Place.ASKED, Place.COMING)
            for at in range(len(names))
        ):
            assert time.monotonic() < end
            time.sleep(0.001)
        return finding

    def read(self, name: ObjectName) -> tuple[bytes, list] | None:
        """The whole object."""
        finding = self.found(name)
        meta = self.objects.meta(finding, 0)
        if meta is None:
            return None
        self.objects.bring(finding, 0)
        end = time.monotonic() + SOON
        while self.objects.blocks_place(finding, 0) in (Place.ASKED, Place.COMING):
            assert time.monotonic() < end
            time.sleep(0.001)
        into = empty(self.objects.block_count(finding, 0), self.groups)
        with self.objects.pinned(finding, 0):
            return (meta, into) if self.objects.load(finding, 0, into) else None

    def sunk(self) -> None:
        """Only the lower tiers have anything."""
        assert self.store.flush(SOON)
        self.host.clear()

    def close(self) -> None:
        assert self.store.flush(SOON)
        self.host.check_integrity()
        assert not any(slot.pins for slot in self.host._table._slots.values())
        self.store.close()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(256 << 20) as running:
        yield running


class Lower:
    """Opens the lower tier of a kind, again and again in one place."""

    def __init__(self, kind: str, folder: Path, server: EmbeddedValkey) -> None:
        self.kind, self.folder, self.server = kind, folder, server

    def __call__(self, representation: str = "bf16-a", sizes: dict[int, int] | None = None) -> list:
        sizes = sizes or {g.id: g.block_bytes for g in GROUPS}
        if self.kind == "host":
            return []
        if self.kind == "disk":
            tier = NvmeTier(self.folder, 64 << 20, representation, sizes, free_space_floor_bytes=0)
            return [TierQueue(tier, threads=1)]
        place = f"objects{abs(hash(str(self.folder))) % 1_000_000}"
        shared = RedisTier(self.server.url, representation, namespace=place, stall_s=30.0)
        return [TierQueue(shared, threads=1)]


@pytest.fixture(params=["host", "disk", "shared"])
def lower(request: pytest.FixtureRequest, tmp_path: Path, server: EmbeddedValkey) -> Lower:
    return Lower(request.param, tmp_path / "disk", server)


@pytest.mark.parametrize("meta_bytes", [0, 5, 24544, 24545, 100_000])
def test_what_was_put_comes_back_to_the_byte(lower: Lower, meta_bytes: int) -> None:
    kept = Kept(lower())
    meta, blocks = random.Random(1).randbytes(meta_bytes), content(5)
    assert kept.objects.put(NAME, meta, blocks)
    if lower.kind != "host":
        kept.sunk()
    assert kept.read(NAME) == (meta, blocks)
    assert kept.read(object_name("test", b"b")) is None
    kept.close()


def test_an_object_may_have_no_blocks(lower: Lower) -> None:
    kept = Kept(lower())
    assert kept.objects.put(NAME, b"a set of names")
    if lower.kind != "host":
        kept.sunk()
    assert kept.read(NAME) == (b"a set of names", [[], []])
    kept.close()


def test_objects_outlive_their_process_below_host_memory(lower: Lower) -> None:
    """After a proper end, and after none: found again by another process, or by nobody of another
    representation."""
    if lower.kind == "host":
        return
    meta, blocks = b"meta" * 9000, content(4)
    kept = Kept(lower())
    assert kept.objects.put(NAME, meta, blocks)
    kept.sunk()
    kept.close()
    foreign = Kept(lower("bf16-other"))
    assert foreign.read(NAME) is None
    foreign.close()
    if lower.kind == "disk":  # records of another representation make room
        again = Kept(lower("bf16-other"))
        assert again.objects.put(NAME, meta, blocks)
        again.sunk()
        again.close()
        again = Kept(lower("bf16-other"))
    else:
        again = Kept(lower())
    assert again.read(NAME) == (meta, blocks)
    again.close()


def test_the_codec_is_for_blocks_and_not_for_metas(lower: Lower) -> None:
    codec = TurboCold(LAYOUT)
    sizes = {0: codec.encoded_bytes}
    kept = Kept(lower("turboquant", sizes), CODED, {0: codec})
    torch.manual_seed(3)
    numbers = torch.randn(3, LAYOUT.block_bytes // 2).to(torch.bfloat16)
    block_bytes = [bytearray(row.view(torch.uint8).numpy().tobytes()) for row in numbers]
    blocks = [[[memoryview(block)] for block in block_bytes]]
    meta = random.Random(2).randbytes(3 * codec.encoded_bytes + 11)
    assert kept.objects.put(NAME, meta, blocks)
    if lower.kind != "host":
        kept.sunk()
    found = kept.read(NAME)
    assert found is not None and found[0] == meta
    for block, (came,) in zip(block_bytes, found[1][0], strict=True):
        encoded, decoded = bytearray(codec.encoded_bytes), bytearray(len(block))
        codec.encode(memoryview(block), memoryview(encoded))
        codec.decode(memoryview(encoded), memoryview(decoded))
        assert came == decoded and came != block
    assert kept.objects.put(NAME, meta, found[1]), "once decoded, the same object"
    assert kept.read(NAME) == found
    kept.close()


def parts(kept: Kept) -> list[BlockName]:
    return [name for name in kept.host.names() if is_part(name)]


def test_an_object_that_lost_any_part_is_none() -> None:
    kept = Kept()
    meta, blocks = b"m" * 60_000, content(3)
    assert kept.objects.put(NAME, meta, blocks)
    names = parts(kept)
    assert len(names) == 3 + 3 * 3 and sum(map(is_meta, names)) == 3
    for name in names:
        kept.host.discard([name])
        assert kept.read(NAME) is None
        assert kept.objects.put(NAME, meta, blocks)
        assert kept.read(NAME) == (meta, blocks)
    kept.close()


def test_what_is_no_head_is_no_object() -> None:
    kept = Kept()
    assert kept.objects.put(NAME, b"meta", content(1))
    (head,) = [name for name in parts(kept) if name == head_part(NAME, BLOCK)]
    there = memoryview(bytearray(GROUPS[0].block_bytes))
    assert kept.store.load([head], [there]) == [Status.OK]
    for at, value in [(0, 0), (3, 9), (4, 200), (8, 200), (12, 1), (28, 1), (32, 1)]:
        broken = bytearray(there)
        broken[at] ^= value or 0xFF
        kept.host.discard([head])
        kept.store.demote([head], [memoryview(broken)])
        assert kept.read(NAME) is None, f"byte {at}"
        assert kept.objects.put(NAME, b"meta", content(1)), "it cannot be replaced"
    kept.close()


def test_two_objects_of_one_name_are_never_mixed(lower: Lower) -> None:
    """The later one wins in host memory; below it, whichever was there first, whole."""
    kept = Kept(lower())
    first, second = (b"first", content(3, 1)), (b"second", content(3, 2))
    assert kept.objects.put(NAME, *first)
    assert kept.store.flush(SOON)
    assert kept.objects.put(NAME, *second)
    assert kept.read(NAME) == second
    assert kept.store.flush(SOON)
    assert kept.objects.put(NAME, b"second", content(3, 3)), "the same meta, other blocks"
    assert kept.read(NAME) == (b"second", content(3, 3))
    if lower.kind != "host":
        kept.sunk()
        assert kept.read(NAME) == first
    kept.close()


def test_no_router_hears_of_an_object(lower: Lower) -> None:
    kept = Kept(lower())
    chain = [
        BlockName(bytes([i]) * 16, bytes(16), tokens_u32le(range(i, i + BLOCK)), 0, 0)
        for i in range(1, 4)
    ]
    views = [memoryview(bytes(GROUPS[0].block_bytes)) for _ in chain]
    assert kept.objects.put(NAME, b"meta", content(6))
    assert not kept.store.has_ops()
    kept.store.demote(chain, views)
    assert kept.store.flush(SOON)
    told = {key for op in kept.store.take_ops() for key in op.keys}
    assert told == {name.key for name in chain}
    snapshot = [op for op in kept.store.snapshot() if op.level is Level.HOST]
    assert {key for op in snapshot for key in op.keys} == told
    kept.host.clear()
    assert {key for op in kept.store.take_ops() for key in op.keys} == told
    kept.close()


def test_an_object_too_large_for_host_memory_is_refused() -> None:
    kept = Kept(host_bytes=1 << 20)
    small, large = content(2), content(9)
    assert kept.objects.put(NAME, b"small", small)
    assert not kept.objects.put(object_name("test", b"large"), b"large", large)
    assert kept.read(NAME) == (b"small", small)
    kept.close()


def test_an_object_that_could_never_be_whole_pushes_nothing_out(tmp_path: Path) -> None:
    """A replica with more host memory left it on the disk."""
    sizes = {g.id: g.block_bytes for g in GROUPS}

    def over(host_bytes: int) -> Kept:
        disk = NvmeTier(tmp_path, 64 << 20, "bf16-a", sizes, free_space_floor_bytes=0)
        return Kept([TierQueue(disk, threads=1)], host_bytes=host_bytes)

    kept, mine = over(8 << 20), object_name("test", b"mine")
    assert kept.objects.put(NAME, b"large", content(40))
    kept.sunk()
    kept.close()
    kept = over(1 << 20)
    assert kept.objects.put(mine, b"small", content(2))
    assert kept.store.flush(SOON)
    assert kept.objects.place(kept.found(NAME), 0) is Place.ABSENT
    assert kept.read(NAME) is None
    assert kept.host.stats().evicted == 0 and kept.read(mine) == (b"small", content(2))
    kept.close()


def test_an_object_over_a_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setattr("kvstore.objects.META_BYTES_MAX", 1000)
    monkeypatch.setattr("kvstore.objects.BLOCKS_MAX", 2)
    assert kept.objects.fits(1000, 2) and kept.objects.put(NAME, b"m" * 1000, content(2))
    for meta, count in ((b"m" * 1001, 2), (b"m" * 1000, 3)):
        assert not kept.objects.fits(len(meta), count)
        assert not kept.objects.put(NAME, meta, content(count))
    kept.close()


def test_what_was_discarded_is_written_anew(lower: Lower) -> None:
    """In every tier, and in place of another content of that name."""
    kept = Kept(lower())
    first, second = (b"first" * 9000, content(3, 1)), (b"second", content(3, 2))
    for put in (first, second, second):
        kept.objects.discard(NAME, *put)
        assert kept.read(NAME) is None
        assert kept.objects.put(NAME, *put)
        if lower.kind != "host":
            kept.sunk()
        assert kept.read(NAME) == put
    kept.close()


def test_the_last_of_many_comes_first() -> None:
    """Of all that are asked for, those that there are, and from the end."""
    kept = Kept()
    names = [object_name("test", b"%d" % i) for i in range(40)]
    for i in (3, 17, 31):
        assert kept.objects.put(names[i], b"%d" % i, content(1, i))
    finding = kept.found(*names)
    here = [at for at in range(40) if kept.objects.meta(finding, at) is not None]
    assert here == [3, 17, 31]
    assert kept.objects.wait_s(finding) == 0.0
    kept.objects.cancel(finding)
    assert kept.objects.place(kept.objects.find(names), 30) is Place.ABSENT
    kept.close()


def test_names_are_of_all_fields_in_their_places() -> None:
    names = {
        object_name("a", b"bc"),
        object_name("ab", b"c"),
        object_name("a", b"b", b"c"),
        object_name("a", b"c", b"b"),
        object_name("a", b"bc", b""),
    }
    assert len(names) == 5


def rounds(count: int, seed: int, folder: Path) -> None:
    """Objects put, replaced and found while a small host tier evicts and a disk tier loses: what is
    found was put under that name, whole."""
    chance = random.Random(seed)
    disk = NvmeTier(
        folder, 8 << 20, "bf16-a", {g.id: g.block_bytes for g in GROUPS}, free_space_floor_bytes=0
    )
    kept = Kept([TierQueue(disk, threads=1)], host_bytes=2 << 20)
    names = [object_name("test", b"%d" % i) for i in range(6)]
    put: dict[ObjectName, list[tuple[bytes, list]]] = {name: [] for name in names}
    found = 0
    for i in range(count):
        name = chance.choice(names)
        match chance.randrange(6):
            case 0 | 1:
                given = (chance.randbytes(chance.choice([3, 30_000])), content(4, seed + i))
                kept.objects.put(name, *given)
                put[name].append(given)
            case 2:
                held = kept.host.names()
                kept.host.discard(chance.sample(held, len(held) // 4))
            case 3:
                held = disk.names()
                disk.discard(chance.sample(held, len(held) // 8))
            case _:
                came = kept.read(name)
                assert came is None or came in put[name]
                found += came is not None
    print(f"seed {seed}: {found} found")
    assert found > count // 50
    assert kept.store.flush(SOON)
    kept.close()


def test_objects_under_loss(tmp_path: Path) -> None:
    rounds(150, 7, tmp_path / "disk")


@pytest.mark.soak
def test_objects_under_loss_full(tmp_path: Path) -> None:
    for seed in range(1000, 1020):
        rounds(1000, seed, tmp_path / f"disk{seed}")
