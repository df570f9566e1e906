"""Which replica holds which block: one flat table of bitmasks, matched along a prompt's chain.

It knows keys, slots and tiers; not replicas' names, the order of events, load, or any token.

A block is indexed by a 60-bit prefix of its key: a false match is only a hint that costs a
recomputation, and the table is a third smaller than with the 16 bytes (bench: bytes per block).
Its value holds five bits for every slot (a slot is one view of one replica): on device, in host
memory, on disk, in the shared tier, booked. The bits are exact, not cumulative, because a removal
from the device says nothing about the copy in host memory; the cumulative sets that are closed
under prefixes (device, device or host, device or host or disk) are derived when matching, once per
distinct value. "Booked" (a request placed there will bring it) counts as on the device.

Values are interned: a few distinct ones serve millions of blocks. The table is cut into shards so
that neither a dict's growth nor the sweep after a lost replica stops the router for long.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DEVICE, HOST, DISK, SHARED, BOOKED = range(5)  # the first four are banyan.v1.Tier's numbers
LANES = 5
_NEAR = 1 << DEVICE | 1 << HOST | 1 << DISK | 1 << BOOKED
_SLOT = (1 << LANES) - 1

PREFIX_BITS = 60
GROUPS_MAX = 16
_PREFIX = (1 << PREFIX_BITS) - 1
SHARDS = 256
_SHARD = SHARDS - 1
_INTERNED_MAX = 1 << 16
_RETIRED_MAX = 64


class Depths(NamedTuple):
    """Blocks of a chain that one slot holds, from its start, with each tier added in turn."""

    device: int
    host: int
    disk: int


_NOTHING = Depths(0, 0, 0)


def prefix(key: bytes, group: int = 0) -> int:
    """The table's name for the block `key` of a KV group."""
    return int.from_bytes(key[:8], sys.byteorder) & _PREFIX | group << PREFIX_BITS


def prefixes(packed: bytes, group: int = 0) -> list[int]:
    """The same for keys packed 16 bytes each; len(packed) must be a multiple of 16."""
    words = memoryview(packed).cast("Q")[::2].tolist()
    if group:
        tag = group << PREFIX_BITS
        return [word & _PREFIX | tag for word in words]
    return [word & _PREFIX for word in words]


class _Change(dict[int, int]):
    """Memo: a block's mask -> its mask after setting `on` and clearing `off`, interned."""

    def __init__(self, on: int, off: int, interned: dict[int, int]) -> None:
        super().__init__()
        self._on, self._keep, self._interned = on, ~off, interned

    def __missing__(self, mask: int) -> int:
        if len(self) >= _INTERNED_MAX:
            self.clear()
        changed = mask & self._keep | self._on
        self[mask] = changed = self._interned.setdefault(changed, changed)
        return changed


class _Cumulative(dict[int, int]):
    """Memo: a block's mask -> per live slot: near; near or host; near, host or disk."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0  # lane 0 of every live slot

    def __missing__(self, mask: int) -> int:
        if len(self) >= _INTERNED_MAX:
            self.clear()
        device = (mask >> DEVICE | mask >> BOOKED) & self.live
        host = device | mask >> HOST & self.live
        disk = host | mask >> DISK & self.live
        self[mask] = together = device | host << 1 | disk << 2
        return together


class PrefixIndex:
    """The table. Slots are made by `allocate`, seen by `match` while live, reused once swept."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._interned: dict[int, int] = {}
        self._changes: dict[tuple[int, int], _Change] = {}
        self._cumulative = _Cumulative()
        self._free: list[int] = []
        self._slots = 0
        self._retired: list[int] = []  # still in some masks
        self._sweeping: list[int] = []  # being cleared, shard by shard
        self._swept_shards = 0
        self._stored: Counter[int] = Counter()  # slot -> blocks of group 0 on the device
        self._digests: Counter[int] = Counter()  # slot -> xor of their prefixes
        self.shared_seen = False  # whether anybody ever reported a block on the shared tier

    # ---- Slots ----

    def allocate(self) -> int:
        """A slot that holds nothing and is not live yet."""
        if len(self._retired) + len(self._sweeping) > _RETIRED_MAX:
            self.sweep(SHARDS)
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def set_live(self, slot: int, live: bool) -> None:
        """Let `match` see the slot, or hide it."""
        bit = 1 << slot * LANES
        current = self._cumulative.live
        self._cumulative.live = current | bit if live else current & ~bit
        self._cumulative.clear()

    def retire(self, slot: int) -> None:
        """Its holder is gone: hidden at once; the bits go with the next sweeps, O(1) here."""
        self.set_live(slot, False)
        self._retired.append(slot)
        del self._stored[slot], self._digests[slot]

    def sweep(self, shards: int) -> None:
        """Clear the retired slots out of up to `shards` more shards of the table."""
        for _ in range(shards):
            if not self._sweeping:
                if not self._retired:
                    return
                self._sweeping, self._retired, self._swept_shards = self._retired, [], 0
            self._sweep_shard()

    def _sweep_shard(self) -> None:
        keep = ~sum(_SLOT << slot * LANES for slot in self._sweeping)
        shard, intern = self._shards[self._swept_shards], self._interned.setdefault
        kept = ((key, mask & keep) for key, mask in shard.items())
        self._shards[self._swept_shards] = {k: intern(mask, mask) for k, mask in kept if mask}
        self._swept_shards += 1
        if self._swept_shards == SHARDS:
            self._free += self._sweeping
            self._sweeping = []
            self._forget_changes()

    def _forget_changes(self) -> None:
        self._changes.clear()
        self._interned.clear()

    # ---- Blocks ----

    def _change(self, on: int, off: int) -> _Change:
        if len(self._interned) > _INTERNED_MAX:
            self._forget_changes()
        change = self._changes.get((on, off))
        if change is None:
            change = self._changes[on, off] = _Change(on, off, self._interned)
        return change

    def store(self, slot: int, tier: int, keys: Sequence[int]) -> None:
        """`slot` holds blocks `keys` (all of one group) in `tier` too."""
        base = slot * LANES
        bit = 1 << base + tier
        change = self._change(bit, 1 << base + BOOKED if tier == DEVICE else 0)
        shards, digest, added = self._shards, 0, 0
        for key in keys:
            shard = shards[key & _SHARD]
            mask = shard.get(key, 0)
            if not mask & bit:
                shard[key] = change[mask]
                digest ^= key
                added += 1
        self.shared_seen |= tier == SHARED
        if tier == DEVICE:
            self._account(slot, keys, digest, added)

    def remove(self, slot: int, tier: int, keys: Sequence[int]) -> None:
        """`slot` no longer holds blocks `keys` (all of one group) in `tier`, nor books them."""
        base = slot * LANES
        off = 1 << base + tier
        counted = off if tier == DEVICE else 0
        if tier != SHARED:
            off |= 1 << base + BOOKED
        self._clear(slot, keys, off, counted)

    def move(self, slot: int, tier: int, keys: Sequence[int]) -> None:
        """The blocks left the slot's other local tiers for `tier`."""
        base = slot * LANES
        self.store(slot, tier, keys)
        off = _NEAR & ~(1 << tier)
        self._clear(slot, keys, off << base, 1 << base if tier != DEVICE else 0)

    def book(self, slot: int, keys: Iterable[int]) -> None:
        """Mark those of the blocks that are not on the slot's device as about to be there.

        For the chain to stay closed under prefixes, a start of it must be on the device or booked.
        """
        base = slot * LANES
        there = (1 << DEVICE | 1 << BOOKED) << base
        change, shards = self._change(1 << base + BOOKED, 0), self._shards
        for key in keys:
            shard = shards[key & _SHARD]
            mask = shard.get(key, 0)
            if not mask & there:
                shard[key] = change[mask]

    def unbook(self, slot: int, keys: Iterable[int]) -> None:
        """Undo `book` for blocks that no event has confirmed since."""
        self._clear(slot, keys, 1 << slot * LANES + BOOKED, 0)

    def _clear(self, slot: int, keys: Iterable[int], off: int, counted: int) -> None:
        change, shards, digest, removed, key = self._change(0, off), self._shards, 0, 0, 0
        for key in keys:
            shard = shards[key & _SHARD]
            mask = shard.get(key, 0)
            if mask & off:
                left = change[mask]
                if left:
                    shard[key] = left
                else:
                    del shard[key]
                if mask & counted:
                    digest ^= key
                    removed += 1
        if removed:
            self._account(slot, (key,), digest, -removed)

    def _account(self, slot: int, keys: Sequence[int], digest: int, added: int) -> None:
        if added and not keys[0] >> PREFIX_BITS:  # group 0 only
            self._stored[slot] += added
            self._digests[slot] ^= digest

    # ---- Questions ----

    def __len__(self) -> int:
        """Distinct blocks in the table, of all groups and slots."""
        return sum(map(len, self._shards))

    def stored(self, slot: int) -> int:
        """Blocks of group 0 that the slot has on the device, booked ones apart."""
        return self._stored[slot]

    def digest(self, slot: int) -> int:
        """Xor of those blocks' prefixes: what `prefix` makes of the xor of their keys."""
        return self._digests[slot]

    def on_device(self, slot: int, key: int) -> bool:
        """Whether the slot has the block on the device; booked ones do not count."""
        return bool(self._shards[key & _SHARD].get(key, 0) >> slot * LANES + DEVICE & 1)

    def match(self, keys: Sequence[bytes]) -> dict[int, Depths]:
        """Per live slot that holds a start of the chain: how much of it, with each tier added.

        Bisects: along a chain the cumulative masks only lose bits, so a range with the same mask at
        both ends is done. O(log n) probes for every depth at which some slot stops.
        """
        depths: dict[int, Depths] = {}
        for depth, lost in self._drops(keys):
            while lost:
                slot = ((lost & -lost).bit_length() - 1) // LANES
                lanes = lost >> slot * LANES & _SLOT
                lost ^= lanes << slot * LANES
                device, host, disk = depths.get(slot, _NOTHING)
                depths[slot] = Depths(
                    depth if lanes & 1 else device,
                    depth if lanes & 2 else host,
                    depth if lanes & 4 else disk,
                )
        return depths

    def _drops(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """(depth, bits that do not go deeper), ascending; a hole repeats its bits further on."""
        drops: list[tuple[int, int]] = []
        first = self._mask_at(keys[0]) if keys else 0
        if not first:
            return drops
        shards, cumulative, order = self._shards, self._cumulative, sys.byteorder
        ranges = [(0, first, len(keys), 0)]  # bits at position low, fewer at high
        while ranges:
            low, at_low, high, at_high = ranges.pop()
            while high - low > 1:
                middle = (low + high) // 2
                name = int.from_bytes(keys[middle][:8], order) & _PREFIX
                at_middle = cumulative[shards[name & _SHARD].get(name, 0)] & at_low
                if at_middle == at_low:
                    low = middle
                    continue
                if at_middle != at_high:
                    ranges.append((middle, at_middle, high, at_high))
                high, at_high = middle, at_middle
            drops.append((high, at_low & ~at_high))
        return drops

    def _mask_at(self, key: bytes) -> int:
        name = prefix(key)
        return self._cumulative[self._shards[name & _SHARD].get(name, 0)]

    def usable_depth(
        self, keys: Sequence[bytes], slot: int, depth: int, group: int, blocks: int
    ) -> int:
        """The deepest end <= `depth` before which the slot holds the last `blocks` of `group`.

        Membership, from the end backwards: a window group is not closed under prefixes.
        """
        near, run, end = _NEAR << slot * LANES, 0, depth
        for position in range(depth - 1, -1, -1):
            if run == blocks:
                break
            name = prefix(keys[position], group)
            if self._shards[name & _SHARD].get(name, 0) & near:
                run += 1
            else:
                run, end = 0, position
        return end

    def shared_depth(self, keys: Sequence[bytes], depth: int, slots: Iterable[int]) -> int:
        """How far from `depth` on the shared tier, as `slots` reported it, continues the chain."""
        wanted = sum(1 << slot * LANES + SHARED for slot in slots)
        for position in range(depth, len(keys)):
            name = prefix(keys[position])
            if not self._shards[name & _SHARD].get(name, 0) & wanted:
                return position
        return len(keys)

    def held(self, slot: int) -> dict[int, int]:
        """Every block of the slot -> its lanes. Scans the table: for tests and integrity only."""
        base = slot * LANES
        return {
            key: lanes
            for shard in self._shards
            for key, mask in shard.items()
            if (lanes := mask >> base & _SLOT)
        }

    def check_integrity(self) -> None:
        """Assert the table's own laws; a scan."""
        out = set(self._free)
        hidden = out | set(self._retired) | set(self._sweeping)
        live = self._cumulative.live
        assert not any(live >> slot * LANES & 1 for slot in hidden), "a retired slot is live"
        for number, shard in enumerate(self._shards):
            for key, mask in shard.items():
                assert mask and key & _SHARD == number, "an empty mask, or a key in a foreign shard"
                assert mask < 1 << self._slots * LANES, "a bit of no slot"
        for slot in range(self._slots):
            held = self.held(slot)
            assert not (slot in out and held), "a free slot holds blocks"
            if slot not in hidden:
                device = [k for k, lanes in held.items() if lanes & 1 and not k >> PREFIX_BITS]
                digest = 0
                for key in device:
                    digest ^= key
                assert len(device) == self.stored(slot), "device blocks miscounted"
                assert digest == self.digest(slot), "digest differs from the blocks"
                both = 1 << BOOKED | 1 << DEVICE
                assert not any(v & both == both for v in held.values()), "stored and booked"
