"""SlotTable: which block lies in which slot of the host arena, and which leaves next. It knows no
bytes, no locks and no time: one caller at a time, who holds a lock.

- The arena is cut into chunks, a chunk into slots of one size, because blocks of different KV
  groups differ in size. With one size a chunk is a slot; with several, a size that is short takes
  the chunk of another size's coldest block once that is much colder than its own.
- Only a leaf is evicted: a block without a resident child (one still being filled counts). When a
  leaf goes its parent becomes as new as it was, so a use of a child is one of all its parents and
  a touch costs no walk.
- The order is a heap that is put right when it is read: a touch only writes the slot's stamp.
- A dirty block (no lower tier has it) leaves only where no clean leaf is left, or in its turn once
  dirty blocks fill more than their share: a slow disk must not freeze the newest blocks out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count

from kvstore.tiers.base import BlockName

CHUNK_BYTES = 4 << 20
SLOT_ALIGNMENT = 4096  # so that direct IO can fill a slot in place
STEAL_AGE_RATIO = 2  # a size gives up a chunk once its coldest block is this much older

Ident = tuple[bytes, int, int]  # key, group, rank


EMPTY, FILLING, VALID, DOOMED = range(4)
"""A slot goes EMPTY -> FILLING -> VALID -> EMPTY; DOOMED is forgotten while still in use. Plain
numbers: a lookup compares one per name."""
_NOBODY = BlockName(b"", b"", b"")
_serials = count()


class Slot:
    """A place in the arena and the block in it. `pins` > 0: not to be evicted or overwritten."""

    __slots__ = ("at", "bytes", "chunk", "dirty", "ident", "name", "parent", "pins", "serial",
                 "slab", "stamp", "state", "xxh3")  # fmt: skip

    def __init__(self, at: int, slab: _Slab, chunk: _Chunk) -> None:
        self.at, self.slab, self.chunk = at, slab, chunk
        self.serial = next(_serials)
        self.name = _NOBODY
        self.ident: Ident = (b"", 0, 0)
        self.parent: Ident = (b"", 0, 0)
        self.state, self.pins, self.dirty = EMPTY, 0, False
        self.stamp = 0  # of the last use; larger is newer
        self.bytes = 0  # of the block, <= slab.slot_bytes
        self.xxh3 = 0  # of the content, where the tier verifies


class _Chunk:
    """A run of the arena whose slots have one size."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.slots: list[Slot] = []
        self.used = 0  # slots that are not EMPTY


class _Coldest:
    """Idle slots by age, `dirty` or clean ones, but for the blocks in `parents`. An entry may be
    out of date: whether it fits, and its stamp, are looked at when it comes first. Each slot is in
    it once at most, so it is never longer than the arena. `heap` and `queued` may be looked at, to
    spare a call: calls were most of what a store took."""

    def __init__(self, parents: Container[Ident], *, dirty: bool) -> None:
        self._parents, self._dirty = parents, dirty
        self.heap: list[tuple[int, int, Slot]] = []
        self.queued: set[Slot] = set()  # those in `heap`

    def __contains__(self, slot: Slot) -> bool:
        return slot in self.queued

    def offer(self, slot: Slot) -> None:
        """`slot` fits now."""
        if slot not in self.queued:
            self.queued.add(slot)
            heappush(self.heap, (slot.stamp, slot.serial, slot))

    def first(self) -> Slot | None:
        """The least recently used slot that fits; stays here."""
        heap, dirty, parents = self.heap, self._dirty, self._parents
        while heap:
            stamp, _, slot = heap[0]
            idle = slot.state == VALID and not slot.pins
            if not idle or slot.dirty != dirty or slot.ident in parents:
                heappop(heap)
                self.queued.discard(slot)
            elif stamp != slot.stamp:
                heapreplace(heap, (slot.stamp, slot.serial, slot))
            else:
                return slot
        return None

    def firsts(self, limit: int) -> list[Slot]:
        """Up to `limit` of them, the least recently used first; they stay here."""
        found: list[Slot] = []
        while len(found) < limit and (slot := self.first()) is not None:
            found.append(slot)
            heappop(self.heap)
            self.queued.discard(slot)
        for slot in found:
            self.offer(slot)
        return found


class _Slab:
    """All slots of one size."""

    def __init__(self, slot_bytes: int, parents: Container[Ident]) -> None:
        self.slot_bytes = slot_bytes
        self.empty: list[Slot] = []
        self.unused: set[_Chunk] = set()  # all of whose slots are empty
        self.clean = _Coldest(parents, dirty=False)
        self.dirty = _Coldest(parents, dirty=True)

    def adopt(self, chunk: _Chunk, chunk_bytes: int) -> None:
        """Cut `chunk` into slots of this size, the first ones to be used first."""
        ends = range(self.slot_bytes, chunk_bytes + 1, self.slot_bytes)
        chunk.slots = [Slot(chunk.at + end - self.slot_bytes, self, chunk) for end in ends]
        self.empty.extend(reversed(chunk.slots))
        self.unused.add(chunk)

    def give_up(self, chunk: _Chunk) -> None:
        """Part with `chunk`, of which no slot is used."""
        assert chunk.used == 0
        self.unused.remove(chunk)
        self.empty = [slot for slot in self.empty if slot.chunk is not chunk]


def chunk_size(slot_sizes: Sequence[int], capacity_bytes: int) -> int:
    """Bytes that one size takes at a time: with several sizes about CHUNK_BYTES, less in a small
    arena, and of those near it the one of which no size wastes much."""
    largest = max(slot_sizes)
    if len(slot_sizes) == 1:
        return largest
    aim = min(CHUNK_BYTES, capacity_bytes // (16 * len(slot_sizes)))
    least = max(1, aim // largest)
    sizes = [largest * k for k in range(least, 4 * least + 1)]
    return min(sizes, key=lambda chunk: (max(chunk % slot for slot in slot_sizes) / chunk, chunk))


class SlotTable:
    """The slots of an arena of at most `capacity_bytes`, for blocks of `sizes`: group -> bytes."""

    def __init__(
        self, sizes: Mapping[int, int], capacity_bytes: int, dirty_max_share: float
    ) -> None:
        slot_bytes = {
            group: -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for group, size in sizes.items()
        }
        distinct = sorted(set(slot_bytes.values()))
        self._sizes = dict(sizes)
        self._chunk_bytes = chunk_size(distinct, capacity_bytes)
        chunks = capacity_bytes // self._chunk_bytes
        self.arena_bytes = chunks * self._chunk_bytes
        self._uncut = [_Chunk(i * self._chunk_bytes) for i in reversed(range(chunks))]
        self._slots: dict[Ident, Slot] = {}  # all that are not EMPTY
        self._children: dict[Ident, int] = {}  # a parent, resident or not -> children in _slots
        self._slabs = {size: _Slab(size, self._children) for size in distinct}
        self._slab_of = {group: self._slabs[size] for group, size in slot_bytes.items()}
        self._unsaved = _Coldest((), dirty=True)
        self._tick = 0
        self._dirty_bytes_max = int(dirty_max_share * self.arena_bytes)
        self._changes: list[tuple[bool, BlockName]] = []
        self.held_bytes = 0  # slots in _slots
        self.dirty_bytes = 0
        self.evicted = 0
        self.lost = 0  # of the evicted: dirty ones

    def __len__(self) -> int:
        return len(self._slots)

    # ---- finding

    def present(self, names: Sequence[BlockName]) -> list[bool]:
        """Per name, whether exactly it is VALID. No use."""
        get = self._slots.get
        return [
            (slot := get((name[0], name[3], name[4]))) is not None
            and slot.state == VALID
            and slot.name == name
            for name in names
        ]

    def find(self, name: BlockName) -> Slot | None:
        """The VALID slot of exactly `name`: parent and tokens are compared too."""
        slot = self._slots.get((name.key, name.group, name.rank))
        return slot if slot is not None and slot.state == VALID and slot.name == name else None

    def find_all(self, names: Sequence[BlockName]) -> list[Slot | None]:
        """`find` for each."""
        get = self._slots.get
        return [
            slot
            if (slot := get((name[0], name[3], name[4]))) is not None
            and slot.state == VALID
            and slot.name == name
            else None
            for name in names
        ]

    def find_filling(self, name: BlockName) -> Slot | None:
        """The slot that `take` gave for `name` and that was neither filled nor freed since."""
        slot = self._slots.get(name.slot)
        unfinished = slot is not None and slot.state != VALID and slot.name == name
        return slot if unfinished else None

    def clash(self, name: BlockName) -> str | None:
        """What differs if the key of `name` is that of another VALID block: a record.FAULTS."""
        slot = self._slots.get(name.slot)
        if slot is None or slot.state != VALID or slot.name == name:
            return None
        return "parent" if slot.name.parent != name.parent else "tokens"

    def names(self) -> list[BlockName]:
        """All that are VALID."""
        return [slot.name for slot in self._slots.values() if slot.state == VALID]

    # ---- use

    def touch(self, slots: Sequence[Slot]) -> None:
        """These were used just now; names come parent first, so that a parent ends up newer."""
        tick = self._tick + len(slots)
        self._tick = tick
        for slot in slots:
            slot.stamp = tick
            tick -= 1

    def unpin(self, slot: Slot) -> None:
        """One user less; the last one leaves a DOOMED slot empty."""
        assert slot.pins > 0
        slot.pins -= 1
        if slot.pins == 0:
            if slot.state == DOOMED:
                self._empty(slot)
            else:
                self._offer(slot)

    def unpin_name(self, name: BlockName) -> None:
        """`unpin` by name; nothing if no such slot is pinned (a FILLING one is `finish`ed)."""
        slot = self._slots.get(name.slot)
        if slot is not None and slot.pins and slot.state != FILLING:
            self.unpin(slot)

    # ---- filling

    def take(self, name: BlockName) -> Slot | None:
        """A slot for `name`, FILLING and pinned once; evicts for it. None if its key is there
        already, or if every slot that could make room is in use."""
        key, parent_key, _, group, rank = name
        ident, parent = (key, group, rank), (parent_key, group, rank)
        if ident in self._slots:
            return None
        # Counted before there is room, so that its own parent does not make it.
        self._children[parent] = self._children.get(parent, 0) + 1
        slot = self._room(self._slab_of[group])
        if slot is None:
            self._leave(parent, 0)
            return None
        slot.name, slot.ident, slot.parent, slot.bytes = name, ident, parent, self._sizes[group]
        slot.state, slot.pins, slot.dirty = FILLING, 1, False
        slot.stamp = self._tick
        self._slots[ident] = slot
        return slot

    def finish(self, slot: Slot, ok: bool, *, dirty: bool) -> bool:
        """End the filling of `slot`: VALID, or empty if not `ok` or DOOMED meanwhile. Whether it
        is VALID now."""
        assert slot.pins > 0 and slot.state in (FILLING, DOOMED)
        if ok and slot.state == FILLING:
            slot.state, slot.dirty = VALID, dirty
            self._changes.append((True, slot.name))
            self.dirty_bytes += slot.slab.slot_bytes if dirty else 0
            slot.pins -= 1
            self._offer(slot)
            return True
        slot.state = DOOMED
        self.unpin(slot)
        return False

    # ---- forgetting

    def forget(self, slot: Slot) -> None:
        """Not findable from now on; empty as soon as nobody uses it."""
        if slot.state == VALID:
            self._changes.append((False, slot.name))
            self._saved(slot)
        slot.state = DOOMED
        if slot.pins == 0:
            self._empty(slot)

    def discard(self, names: Iterable[BlockName]) -> None:
        """`forget` those of exactly these names, FILLING ones too."""
        for name in names:
            slot = self._slots.get(name.slot)
            if slot is not None and slot.name == name:
                self.forget(slot)

    def clear(self) -> None:
        """`forget` all."""
        for slot in list(self._slots.values()):
            self.forget(slot)

    def drain_changes(self) -> list[tuple[bool, BlockName]]:
        """(added, name) of what became VALID or ceased to be since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # ---- clean and dirty

    def coldest_dirty(self, limit: int) -> list[BlockName]:
        """Up to `limit` dirty blocks that nobody uses, the least recently used first."""
        return [slot.name for slot in self._unsaved.firsts(limit)]

    def mark_clean(self, name: BlockName) -> None:
        """A lower tier has `name` now. Nothing if it left meanwhile."""
        slot = self.find(name)
        if slot is not None and slot.dirty:
            self._saved(slot)
            self._offer(slot)

    def _saved(self, slot: Slot) -> None:
        self.dirty_bytes -= slot.slab.slot_bytes if slot.dirty else 0
        slot.dirty = False

    # ---- room

    def _offer(self, slot: Slot) -> None:
        """Put `slot` where it belongs, after anything that may have made it fit there."""
        if slot.state != VALID or slot.pins:
            return
        if slot.dirty and slot not in self._unsaved.queued:
            self._unsaved.offer(slot)
        if slot.ident not in self._children:
            (slot.slab.dirty if slot.dirty else slot.slab.clean).offer(slot)

    def _room(self, slab: _Slab) -> Slot | None:
        """A slot in which nothing lies, from the cheapest source there is."""
        several = len(self._slabs) > 1
        if slab.empty or ((self._uncut or several) and self._adopt_unused(slab)):
            return self._occupied(slab.empty.pop())
        coldest = self._coldest(slab)
        if several and self._steal(slab, coldest):
            return self._occupied(slab.empty.pop())
        if coldest is not None:
            self._evict(coldest)
        return coldest

    def _occupied(self, slot: Slot) -> Slot:
        """An empty slot counts as used from now on."""
        slot.slab.unused.discard(slot.chunk)
        slot.chunk.used += 1
        self.held_bytes += slot.slab.slot_bytes
        return slot

    def _adopt_unused(self, slab: _Slab) -> bool:
        """Give `slab` a chunk in which nothing lies."""
        if self._uncut:
            slab.adopt(self._uncut.pop(), self._chunk_bytes)
            return True
        for giver in self._slabs.values():
            if giver is not slab and giver.unused:
                chunk = next(iter(giver.unused))
                giver.give_up(chunk)
                slab.adopt(chunk, self._chunk_bytes)
                return True
        return False

    def _coldest(self, slab: _Slab) -> Slot | None:
        clean = slab.clean.first() if slab.clean.heap else None
        dirty = slab.dirty.first() if slab.dirty.heap else None
        if clean is None or dirty is None:
            return clean or dirty
        in_turn = self.dirty_bytes > self._dirty_bytes_max and dirty.stamp < clean.stamp
        return dirty if in_turn else clean

    def _steal(self, slab: _Slab, coldest: Slot | None) -> bool:
        """Give `slab` a chunk of another size, if that one's coldest block is much older than its
        `coldest`, or there is none. Children of what lies in that chunk may lose their parent."""
        if len(self._slabs) == 1:
            return False
        others = [self._coldest(other) for other in self._slabs.values() if other is not slab]
        victim = min((s for s in others if s is not None), key=lambda s: s.stamp, default=None)
        if victim is None:
            return False
        if coldest is not None:
            age, own_age = self._tick - victim.stamp, self._tick - coldest.stamp
            if age <= STEAL_AGE_RATIO * own_age:
                return False
        chunk = victim.chunk
        if any(slot.pins for slot in chunk.slots):
            return False
        for slot in chunk.slots:
            if slot.state == VALID:
                self._evict(slot)
                self._vacant(slot)
        victim.slab.give_up(chunk)
        slab.adopt(chunk, self._chunk_bytes)
        return True

    def _evict(self, slot: Slot) -> None:
        """Forget an idle slot's block, at once; the slot is the caller's, who counts it as used."""
        assert slot.state == VALID and not slot.pins
        self.evicted += 1
        if slot.dirty:
            self.lost += 1
            self.dirty_bytes -= slot.slab.slot_bytes
            slot.dirty = False
        self._changes.append((False, slot.name))
        slot.state = DOOMED
        del self._slots[slot.ident]
        self._leave(slot.parent, slot.stamp)

    def _empty(self, slot: Slot) -> None:
        assert slot.state == DOOMED and slot.pins == 0 and not slot.dirty
        del self._slots[slot.ident]
        self._vacant(slot)
        self._leave(slot.parent, slot.stamp)

    def _vacant(self, slot: Slot) -> None:
        """The opposite of `_occupied`."""
        slot.state = EMPTY
        slot.slab.empty.append(slot)
        self.held_bytes -= slot.slab.slot_bytes
        slot.chunk.used -= 1
        if slot.chunk.used == 0:
            slot.slab.unused.add(slot.chunk)

    def _leave(self, parent: Ident, stamp: int) -> None:
        """One child of `parent` less, last used at `stamp`."""
        above = self._slots.get(parent)
        if above is not None and above.stamp < stamp:
            above.stamp = stamp
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        if above is not None:
            self._offer(above)

    # ---- for tests

    def check_integrity(self) -> None:
        """Assert that every slot is in one place only and that every count is true. Slow."""
        held = list(self._slots.values())
        empty = [slot for slab in self._slabs.values() for slot in slab.empty]
        chunks = {slot.chunk for slot in (*held, *empty)}
        assert len(set(held) | set(empty)) == len(held) + len(empty), "a slot is in two places"
        assert {s for chunk in chunks for s in chunk.slots} == {*held, *empty}, "a slot is lost"
        starts = sorted(chunk.at for chunk in (*chunks, *self._uncut))
        assert starts == list(range(0, self.arena_bytes, self._chunk_bytes)), "a chunk is lost"
        assert all(slot.state == EMPTY and not slot.pins for slot in empty)
        for chunk in chunks:
            used = sum(slot.state != EMPTY for slot in chunk.slots)
            assert chunk.used == used
            assert (chunk in chunk.slots[0].slab.unused) == (used == 0)
        for ident, slot in self._slots.items():
            assert slot.state != EMPTY and slot.ident == ident == slot.name.slot
            assert slot.slab is self._slab_of[slot.name.group]
            assert slot.pins > 0 or slot.state == VALID, "nobody will ever empty it"
        self._check_counts(held)

    def _check_counts(self, held: list[Slot]) -> None:
        dirty = [slot for slot in held if slot.dirty]
        assert all(slot.state == VALID for slot in dirty)
        assert self.held_bytes == sum(slot.slab.slot_bytes for slot in held) <= self.arena_bytes
        assert self.dirty_bytes == sum(slot.slab.slot_bytes for slot in dirty)
        parents = [(slot.name.parent, slot.name.group, slot.name.rank) for slot in held]
        assert self._children == Counter(parents) == Counter(slot.parent for slot in held)
        for slot in held:
            coldest = slot.slab.dirty if slot.dirty else slot.slab.clean
            idle = slot.state == VALID and not slot.pins
            leaf = slot.ident not in self._children
            assert slot in coldest or not (idle and leaf), "it would stay for ever"
            assert slot in self._unsaved or not (idle and slot.dirty)
