"""Which record lies in which slot, and which goes next. It does no IO and no locking.

Eviction takes the least recently used record without children. A record counts as used when it or
anything evicted below it was, so a parent never goes before its child, however the calls were cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace
from struct import Struct

from kvstore.tiers.base import BlockName
from kvstore.tiers.segments import Segment

ID_BYTES = 24
_ID = Struct("<16sII")


def record_id(name: BlockName) -> bytes:
    """24 bytes: what finds a record."""
    return _ID.pack(name.key, name.group, name.rank)


def group_of(identity: bytes) -> int:
    """The KV group of a record."""
    return int(_ID.unpack(identity)[1])


def name_of(identity: bytes, parent: bytes, tokens: bytes) -> BlockName:
    """The name that `record_id` was taken of."""
    key, group, rank = _ID.unpack(identity)
    return BlockName(key, parent, tokens, group, rank)


class Entry:
    """A record that can be found. Where it lies never changes; a rewritten one is a new Entry."""

    __slots__ = ("hinted", "id", "parent", "queued", "segment", "seq", "slot", "tokens", "used")

    def __init__(
        self, name: BlockName, segment: Segment, slot: int, seq: int, *, hinted: bool = False
    ) -> None:
        self.id = record_id(name)
        self.parent = name.parent
        self.tokens = name.tokens
        self.segment = segment
        self.slot = slot
        self.seq = seq
        self.hinted = hinted  # by a snapshot, not seen on the disk since
        self.used = 0
        self.queued = False

    @property
    def name(self) -> BlockName:
        """What it was stored as."""
        return name_of(self.id, self.parent, self.tokens)

    @property
    def parent_id(self) -> bytes:
        """The parent's record id: of the same group and rank."""
        return self.parent + self.id[16:]


class SlotIndex:
    """Record id -> Entry, in an order of use. One heap of leaves per slot size, put right lazily:
    a touch is one assignment, and an old place in the heap is noticed when it comes up.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, int] = {}  # record id, present or not -> children present
        self._leaves: dict[int, list[tuple[int, int, Entry]]] = {}
        self._uses = itertools.count(1)
        self._pushes = itertools.count()
        self.bytes = 0  # of the slots taken
        self._changes: list[tuple[bool, BlockName]] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, identity: bytes) -> Entry | None:
        """The entry of a record. Counts as no use."""
        return self._entries.get(identity)

    def watch(self) -> None:
        """From now on remember what is added and removed, for `drain_changes`."""
        self._changes = self._changes or []

    def drain_changes(self) -> list[tuple[bool, BlockName]]:
        """(added, name) since the last call, in order; nothing unless watched."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def entries(self) -> list[Entry]:
        """All, in no order; the list is the caller's."""
        return list(self._entries.values())

    def holds(self, entry: Entry) -> bool:
        """Whether this very entry can still be found."""
        return self._entries.get(entry.id) is entry

    def touch(self, entry: Entry) -> None:
        """Make it the most recently used."""
        entry.used = next(self._uses)

    def insert(self, entry: Entry) -> None:
        """Add a record that is not there, as just used."""
        assert entry.id not in self._entries
        if self._changes is not None:
            self._changes.append((True, entry.name))
        self._entries[entry.id] = entry
        self.bytes += entry.segment.slot_bytes
        self.touch(entry)
        parent = entry.parent_id
        self._children[parent] = self._children.get(parent, 0) + 1
        if entry.id not in self._children:
            self._push(entry)

    def remove(self, entry: Entry) -> None:
        """Take a record away; its parent counts as used no earlier than it was."""
        assert self.holds(entry)
        if self._changes is not None:
            self._changes.append((False, entry.name))
        del self._entries[entry.id]
        self.bytes -= entry.segment.slot_bytes
        parent_id = entry.parent_id
        self._children[parent_id] -= 1
        parent = self._entries.get(parent_id)
        if parent is not None:
            parent.used = max(parent.used, entry.used)
        if not self._children[parent_id]:
            del self._children[parent_id]
            if parent is not None and not parent.queued:
                self._push(parent)

    def _push(self, entry: Entry) -> None:
        entry.queued = True
        leaves = self._leaves.setdefault(entry.segment.slot_bytes, [])
        heappush(leaves, (entry.used, next(self._pushes), entry))

    def oldest(self, slot_bytes: int, spared: bytes = b"") -> Entry | None:
        """The least recently used leaf in slots of that size, but for the record `spared`."""
        leaves = self._leaves.get(slot_bytes, [])
        while leaves:
            used, _, entry = leaves[0]
            if not self.holds(entry) or entry.id in self._children:
                heappop(leaves)
                entry.queued = False
            elif entry.used > used:
                heapreplace(leaves, (entry.used, next(self._pushes), entry))
            elif entry.id == spared:
                heappop(leaves)
                second = self.oldest(slot_bytes)
                self._push(entry)
                return second
            else:
                return entry
        return None

    def stalest(self, segments: Iterable[Segment]) -> Segment | None:
        """The segment whose records were used least recently on average; an empty one first."""
        uses: dict[Segment, list[int]] = {segment: [] for segment in segments}
        for entry in self._entries.values():
            if entry.segment in uses:
                uses[entry.segment].append(entry.used)
        if not uses:
            return None
        return min(uses, key=lambda segment: sum(uses[segment]) / (len(uses[segment]) or 1))

    def of_segment(self, segment: Segment) -> list[Entry]:
        """The entries that lie in a segment."""
        return [entry for entry in self._entries.values() if entry.segment is segment]

    def check_integrity(self) -> None:
        """Assert that children are counted right and every leaf can come up for eviction."""
        counted: dict[bytes, int] = {}
        for identity, entry in self._entries.items():
            assert entry.id == identity
            counted[entry.parent_id] = counted.get(entry.parent_id, 0) + 1
        assert counted == self._children
        assert self.bytes == sum(e.segment.slot_bytes for e in self._entries.values())
        waiting = {id(item[2]) for leaves in self._leaves.values() for item in leaves}
        for entry in self._entries.values():
            assert entry.queued == (id(entry) in waiting)
            assert entry.queued or entry.id in self._children
        places = [(entry.segment, entry.slot) for entry in self._entries.values()]
        assert len(set(places)) == len(places), "two records in one slot"
