"""Objects: named things that are no chain of tokens, kept in the tiers and found again. It knows
blocks and bytes; not what they mean, and no request.

An object is a *meta*, bytes of its owner's, and as many blocks of every KV group, of all ranks.
`put` copies it into host memory, from where it sinks as blocks do; `find` looks for objects and
starts bringing up their metas, `bring` their blocks, `load` copies those out. All but `put` and
`load` return at once. Whatever is lost on the way makes it an object that is not there.

The head, the meta's first part, is found by the object's name. The other parts are found by what
the head says of the content, so two objects of one name (two replicas, two branches) are never
mixed. Metas pass no codec; blocks pass the tiers' one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128

from kvstore.fetch import Fetch, Place, Row
from kvstore.groups import GroupKind, KVGroup
from kvstore.objectnames import ObjectName, block_part, head_part, meta_part
from kvstore.tiered import TieredStore
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.host_slots import SLOT_ALIGNMENT

MAGIC = b"BOB\x01"  # the last byte: the layout's version
CONTENT_BYTES = 16
META_BYTES_MAX = 64 << 20
BLOCKS_MAX = 1 << 20
HOST_SHARE_MAX = 0.5  # of host memory that one object may take
DISCARDED_AT_ONCE = 64  # parts, of which each may be megabytes that a server has to free
_HEAD = Struct("<4sII16sI")  # magic, bytes of meta, blocks of a group, content, checksum

Blocks = Sequence[Sequence[Sequence[memoryview]]]
"""[group][block][rank], each as long as a block of its group is on one rank."""


class _Head(NamedTuple):
    """What the first part says."""

    meta_bytes: int
    blocks: int
    content: bytes  # 16, of meta and blocks
    checksum: int  # of the meta
    begun: bytes  # as much of the meta as is in the first part


@dataclass(eq=False)
class Finding:
    """What is known of the objects that were asked for; changed by the calls of Objects that take
    it, all on one thread. Entry i is the i-th name's."""

    names: tuple[ObjectName, ...]
    heads: Fetch
    read: dict[int, _Head] = field(default_factory=dict)
    rests: dict[int, Fetch] = field(default_factory=dict)  # of metas longer than one part
    metas: dict[int, bytes] = field(default_factory=dict)
    blocks: dict[int, Fetch] = field(default_factory=dict)

    def fetches(self) -> list[Fetch]:
        """All that was ever asked of the store for it."""
        return [self.heads, *self.rests.values(), *self.blocks.values()]


class Objects:
    """The objects of one model in one store. Calls are those of the store's own thread, as its
    `fetch` and `demote` are; none raises for what a tier did.
    """

    def __init__(self, store: TieredStore, groups: Sequence[KVGroup], block_tokens: int) -> None:
        """`groups` are the model's, as they lie on the device; see `can_keep`."""
        assert self.can_keep(groups)
        self._store, self._groups, self._block_tokens = store, groups, block_tokens
        self._part_bytes = store.record_bytes(groups[0])

    @staticmethod
    def can_keep(groups: Sequence[KVGroup]) -> bool:
        """Whether objects of such a model can be kept: not with windows, and not in blocks smaller
        than a head."""
        windowless = all(group.kind is not GroupKind.WINDOW for group in groups)
        return windowless and groups[0].block_bytes >= _HEAD.size

    # --- down --------------------------------------------------------------------------------

    def fits(self, meta_bytes: int, blocks: int) -> bool:
        """Whether `put` takes an object of this size: not more than HOST_SHARE_MAX of host memory,
        a meta of META_BYTES_MAX and BLOCKS_MAX blocks of a group."""
        most = HOST_SHARE_MAX * self._store.host.stats().bytes_max
        sized = meta_bytes <= META_BYTES_MAX and blocks <= BLOCKS_MAX
        return sized and self._host_bytes(meta_bytes, blocks) <= most

    def put(self, name: ObjectName, meta: bytes, blocks: Blocks = ()) -> bool:
        """Keep a copy of an object; nothing of the caller's is mutated or needed afterwards.
        `blocks`: equally many of every group, or () for none.

        False if it is not in host memory afterwards: it does not fit, there was no room, or one of
        this name with other content is on its way down this moment. Else that one is replaced,
        here: lower tiers keep what they have until they lose it.
        """
        per_group: Blocks = blocks or [()] * len(self._groups)
        count = len(per_group[0])
        assert len(per_group) == len(self._groups) and {len(b) for b in per_group} == {count}
        if not self.fits(len(meta), count):
            return False
        kept, views = self._parts(name, meta, per_group)
        self._replace(kept[-1], views[-1])
        self._store.demote(kept, views)
        return all(self._store.host.lookup(kept, 0.0))

    def discard(self, name: ObjectName, meta: bytes, blocks: Blocks = ()) -> None:
        """Have every tier forget the head of this name and all parts of this content: the next
        `put` of it writes it anew, and its time to live begins again. Waits for the tiers, so it is
        for tools and not for an engine's thread; best effort, as a tier's `discard` is."""
        names, _ = self._parts(name, meta, blocks or [()] * len(self._groups))
        for tier in (self._store.host, *(queue.tier for queue in self._store.lower.values())):
            for at in range(0, len(names), DISCARDED_AT_ONCE):
                tier.discard(names[at : at + DISCARDED_AT_ONCE])

    def _parts(
        self, name: ObjectName, meta: bytes, blocks: Blocks
    ) -> tuple[list[BlockName], list[memoryview]]:
        """What it consists of, with the bytes of each. The head is last: the least recently used of
        an object, so that no head outlives its blocks."""
        count, content = len(blocks[0]), _content(meta, blocks)
        names = self._block_names(name, content, count)
        flat = [part for group in names for ranks in group for part in ranks]
        views = [view for group in blocks for ranks in group for view in ranks]
        head = _HEAD.pack(MAGIC, len(meta), count, content, _checksum(meta))
        parts = _cut(head + meta, self._part_bytes)
        meta_names = self._meta_names(name, content, len(parts))
        return [*flat, *reversed(meta_names)], [*views, *reversed(parts)]

    def _host_bytes(self, meta_bytes: int, blocks: int) -> int:
        """What an object of this size takes of host memory."""
        slots = [-(-self._store.record_bytes(g) // SLOT_ALIGNMENT) for g in self._groups]
        each = sum(slot * group.ranks for slot, group in zip(slots, self._groups, strict=True))
        parts = -(-(_HEAD.size + meta_bytes) // self._part_bytes)
        return SLOT_ALIGNMENT * (parts * slots[0] + blocks * each)

    def _replace(self, head: BlockName, content: memoryview) -> None:
        """Forget an object of this name in host memory that says other things."""
        there = memoryview(bytearray(self._part_bytes))
        (status,) = self._store.load([head], [there])
        if status is Status.OK and there != content:
            self._store.host.discard([head])

    # --- up ----------------------------------------------------------------------------------

    def find(self, names: Sequence[ObjectName]) -> Finding:
        """Look for objects in all tiers and start bringing up their metas, the last name's first.
        The finding is valid until `cancel`, or until its fetches are too old (FETCH_S_MAX)."""
        assert names
        rows: list[tuple[BlockName, ...]]
        rows = [(head_part(name, self._block_tokens),) for name in names]
        return Finding(tuple(names), self._store.fetch(0, [self._meta_row(rows)]))

    def place(self, finding: Finding, at: int) -> Place:
        """Where the meta of the name `at` is; READY once `meta` gives it."""
        if at in finding.metas:
            return Place.READY
        place = finding.heads.place(0, at)
        if place is not Place.READY:
            return place
        head = finding.read.get(at) or self._read_head(finding, at)
        if head is None:
            return Place.ABSENT
        return self._complete(finding, at, head)

    def meta(self, finding: Finding, at: int) -> bytes | None:
        """The meta of the name `at`; None as long as it is not here, or if there is none. Empty
        after `let_go`."""
        self.place(finding, at)
        return finding.metas.get(at)

    def let_go(self, finding: Finding) -> None:
        """Nobody asks for its metas again, which may be megabytes each: they are not kept."""
        finding.metas = dict.fromkeys(finding.metas, b"")

    def block_count(self, finding: Finding, at: int) -> int:
        """How many blocks of each group an object has whose meta is here."""
        assert at in finding.metas
        return finding.read[at].blocks

    def bring(self, finding: Finding, at: int) -> None:
        """Start bringing up the blocks of an object whose meta is here, once."""
        head = finding.read[at]
        assert at in finding.metas
        if at in finding.blocks or not head.blocks:
            return
        rows = [
            Row(names, group.block_bytes)
            for group, names in zip(
                self._groups,
                self._block_names(finding.names[at], head.content, head.blocks),
                strict=True,
            )
        ]
        finding.blocks[at] = self._store.fetch(0, rows)

    def blocks_place(self, finding: Finding, at: int) -> Place:
        """Where the blocks of a brought object are: of all of them the worst."""
        fetch = finding.blocks.get(at)
        if fetch is None:
            return Place.READY if not finding.read[at].blocks else Place.ABSENT
        return _worst(fetch)

    def wait_s(self, finding: Finding) -> float:
        """In how many seconds all that it waits for will have come; 0 = for nothing."""
        return sum(seconds for coming, seconds in map(self._awaited, finding.fetches()) if coming)

    def _awaited(self, fetch: Fetch) -> tuple[int, float]:
        return (0, 0.0) if fetch.cancelled else self._store.wait_s(fetch, 0)

    @contextmanager
    def pinned(self, finding: Finding, at: int) -> Iterator[None]:
        """Keep the brought blocks that are in host memory from being evicted."""
        with ExitStack() as stack:
            fetch = finding.blocks.get(at)
            if fetch is not None:
                stack.enter_context(self._store.pinned(fetch, 0, fetch.end))
            yield

    def load(self, finding: Finding, at: int, into: Blocks) -> bool:
        """Copy the blocks of a brought object to where they are wanted. False if one of them is
        not in host memory or not whole: what lies in `into` is undefined then."""
        fetch = finding.blocks.get(at)
        if fetch is None:
            return not finding.read[at].blocks
        names = [part for row in fetch.rows for ranks in row.names for part in ranks]
        views = [view for group in into for ranks in group for view in ranks]
        return all(status is Status.OK for status in self._store.load(names, views))

    def cancel(self, finding: Finding) -> None:
        """Nothing of it is wanted any more."""
        for fetch in finding.fetches():
            fetch.cancel()

    # --- the parts ---------------------------------------------------------------------------

    def _meta_row(self, names: list[tuple[BlockName, ...]]) -> Row:
        return Row(names, self._groups[0].block_bytes)

    def _meta_names(self, name: ObjectName, content: bytes, parts: int) -> list[BlockName]:
        size = self._block_tokens
        rest = [meta_part(name, content, number, size) for number in range(1, parts)]
        return [head_part(name, size), *rest]

    def _block_names(
        self, name: ObjectName, content: bytes, count: int
    ) -> list[list[tuple[BlockName, ...]]]:
        """[group][block][rank]"""
        first = [
            block_part(name, content, number, 0, 0, self._block_tokens) for number in range(count)
        ]
        return [
            [
                tuple(part._replace(group=group.id, rank=rank) for rank in range(group.ranks))
                for part in first
            ]
            for group in self._groups
        ]

    def _read_head(self, finding: Finding, at: int) -> _Head | None:
        """The head that host memory has of the name `at`; if it is none, or one of an object that
        could never be here whole, there is no object: its parts would only push out each other."""
        (name,) = finding.heads.rows[0].names[at]
        view = memoryview(bytearray(self._part_bytes))
        (status,) = self._store.load([name], [view])
        head = _parsed(bytes(view)) if status is Status.OK else None
        room = self._store.host.stats().bytes_max
        if head is None or self._host_bytes(head.meta_bytes, head.blocks) > room:
            finding.heads.places[0][at] = Place.ABSENT
            return None
        finding.read[at] = head
        return head

    def _complete(self, finding: Finding, at: int, head: _Head) -> Place:
        """What the head began: the rest of the meta, which may be on its way."""
        begun = head.begun[: head.meta_bytes]
        rest = head.meta_bytes - len(begun)
        if rest > 0:
            fetch = finding.rests.get(at)
            if fetch is None:
                parts = 1 + -(-rest // self._part_bytes)
                names = self._meta_names(finding.names[at], head.content, parts)[1:]
                row = self._meta_row([(name,) for name in names])
                fetch = finding.rests[at] = self._store.fetch(0, [row])
            place = _worst(fetch)
            if place is not Place.READY:
                return place
            begun += self._loaded(fetch)[:rest]
        if len(begun) != head.meta_bytes or _checksum(begun) != head.checksum:
            finding.heads.places[0][at] = Place.ABSENT
            return Place.ABSENT
        finding.metas[at] = begun
        return Place.READY

    def _loaded(self, fetch: Fetch) -> bytes:
        """The parts of a meta one behind the other; nothing if one is not there any more."""
        names = [part for ranks in fetch.rows[0].names for part in ranks]
        whole = memoryview(bytearray(len(names) * self._part_bytes))
        views = [whole[at : at + self._part_bytes] for at in range(0, len(whole), self._part_bytes)]
        statuses = self._store.load(names, views)
        return bytes(whole) if all(status is Status.OK for status in statuses) else b""


def _worst(fetch: Fetch) -> Place:
    """Of all blocks of a fetch."""
    if fetch.cancelled:
        return Place.ABSENT
    return Place(min(min(places) for places in fetch.places))


def _content(meta: bytes, blocks: Blocks) -> bytes:
    """16 bytes of an object's meta and blocks: equal only for equal ones, short of malice, which
    the object's name keeps out."""
    summed = xxh3_128()
    for group in blocks:
        for ranks in group:
            for view in ranks:
                summed.update(view)
    return hashlib.sha256(summed.digest() + meta).digest()[:CONTENT_BYTES]


def _checksum(meta: bytes) -> int:
    return xxh3_64_intdigest(meta) & 0xFFFFFFFF


def _cut(content: bytes, part_bytes: int) -> list[memoryview]:
    """Parts of equal length, the last one filled up with zeros."""
    count = -(-len(content) // part_bytes)
    whole = memoryview(content.ljust(count * part_bytes, b"\0"))
    return [whole[at : at + part_bytes] for at in range(0, len(whole), part_bytes)]


def _parsed(part: bytes) -> _Head | None:
    """The head in a first part; None if it is none."""
    magic, meta_bytes, blocks, content, checksum = _HEAD.unpack_from(part)
    if magic != MAGIC or meta_bytes > META_BYTES_MAX or blocks > BLOCKS_MAX:
        return None
    return _Head(meta_bytes, blocks, content, checksum, part[_HEAD.size :])
