"""Blocks that booked requests will bring to the device, so that a burst of siblings stays there.

It knows chains, slots and expiry times; the index shows what it books as if it were there already.
Events confirm a block by storing it; what is not confirmed goes when its request fails, when it
expires, or when the replica reports that a block before it left the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.index import BOOKED, PREFIX_BITS, PrefixIndex


@dataclass
class _Booked:
    """One request: `keys` of group 0 follow `parent` in its chain; `others` are of other groups."""

    slot: int
    parent: int | None  # the last block that was there already, None at the chain's start
    keys: list[int]
    others: list[int]
    expires_s: float


@dataclass
class _Slot:
    requests: dict[str, _Booked] = field(default_factory=dict)
    holders: Counter[int] = field(default_factory=Counter)  # block -> requests that book it
    parents: Counter[int] = field(default_factory=Counter)


class Provisional:
    """All provisional entries of one index, by request and by slot."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._slots: dict[int, _Slot] = {}
        self._requests: dict[str, _Booked] = {}

    def __len__(self) -> int:
        """Requests that still have an entry."""
        return len(self._requests)

    def book(
        self,
        request_id: str,
        slot: int,
        chain: Sequence[int],
        others: Sequence[int],
        expires_s: float,
    ) -> None:
        """Enter what `slot` will hold once the request is computed there.

        `chain` names all blocks of group 0 from the start; those on the device are left alone.
        """
        assert request_id not in self._requests, "booked twice"
        first = self._first_missing(slot, chain)
        parent = chain[first - 1] if first else None
        keys, more = list(chain[first:]), list(others)
        if not keys and not more:
            return
        booked = _Booked(slot, parent, keys, more, expires_s)
        entry = self._slots.setdefault(slot, _Slot())
        entry.requests[request_id] = self._requests[request_id] = booked
        entry.holders.update(keys)
        entry.holders.update(more)
        if parent is not None:
            entry.parents[parent] += 1
        self._index.book(slot, keys)
        self._index.book(slot, more)

    def _first_missing(self, slot: int, chain: Sequence[int]) -> int:
        """Blocks of the chain that are on the device; they are a start of it."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if self._index.on_device(slot, chain[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def expire_at(self, request_id: str, expires_s: float) -> None:
        """Set when the request's entries go; unknown ids are ignored."""
        booked = self._requests.get(request_id)
        if booked is not None:
            booked.expires_s = expires_s

    def drop(self, request_id: str) -> None:
        """Forget what the request booked, save what events confirmed or others book too."""
        booked = self._requests.pop(request_id, None)
        if booked is None:
            return
        entry = self._slots[booked.slot]
        del entry.requests[request_id]
        if booked.parent is not None:
            _decrement(entry.parents, (booked.parent,))
        self._release(entry, booked.slot, booked.keys)
        self._release(entry, booked.slot, booked.others)
        if not entry.requests:
            del self._slots[booked.slot]

    def _release(self, entry: _Slot, slot: int, keys: Sequence[int]) -> None:
        self._index.unbook(slot, _decrement(entry.holders, keys))

    def expire(self, now_s: float) -> int:
        """Drop what is due; returns how many requests' entries went."""
        due = [name for name, booked in self._requests.items() if booked.expires_s <= now_s]
        for name in due:
            self.drop(name)
        return len(due)

    def removed(self, slot: int, keys: Sequence[int]) -> None:
        """`keys` of group 0 left the device: what was booked to follow one of them goes too.

        Without this a chain would have a hole, and the index bisects chains.
        """
        entry = self._slots.get(slot)
        if entry is None or keys[0] >> PREFIX_BITS:
            return
        gone = {key for key in keys if key in entry.holders or key in entry.parents}
        if not gone:
            return
        for name, booked in list(entry.requests.items()):
            if booked.parent in gone:
                self._cut(entry, name, booked, 0)
            else:
                at = next((i for i, key in enumerate(booked.keys) if key in gone), None)
                if at is not None:
                    self._cut(entry, name, booked, at)

    def _cut(self, entry: _Slot, name: str, booked: _Booked, at: int) -> None:
        tail, booked.keys = booked.keys[at:], booked.keys[:at]
        self._release(entry, booked.slot, tail)
        if not booked.keys:
            self.drop(name)

    def rebase(self, slot: int, new_slot: int) -> None:
        """A snapshot replaced the view `slot` of a replica by `new_slot`: enter the rest there.

        Chains whose parent the new view lacks go.
        """
        entry = self._slots.pop(slot, None)
        if entry is None:
            return
        for name, booked in entry.requests.items():
            del self._requests[name]
            if booked.parent is None or self._index.on_device(new_slot, booked.parent):
                before = [] if booked.parent is None else [booked.parent]
                chain = before + booked.keys
                self.book(name, new_slot, chain, booked.others, booked.expires_s)

    def forget(self, slot: int) -> None:
        """The slot's replica is gone."""
        entry = self._slots.pop(slot, None)
        for name in entry.requests if entry is not None else ():
            del self._requests[name]

    def check_integrity(self) -> None:
        """Assert that counts agree with the requests and that the index shows what is booked."""
        for slot, entry in self._slots.items():
            holders: Counter[int] = Counter()
            for name, booked in entry.requests.items():
                assert self._requests[name] is booked and booked.slot == slot
                holders.update(booked.keys)
                holders.update(booked.others)
            assert holders == entry.holders, "bookings miscounted"
            shown = {k for k, lanes in self._index.held(slot).items() if lanes >> BOOKED & 1}
            assert shown <= set(holders), "a booked block without a request"


def _decrement(counts: Counter[int], keys: Sequence[int]) -> list[int]:
    """Count each key down; returns those that reached zero, which are deleted."""
    zero = []
    for key in keys:
        left = counts[key] - 1
        if left:
            counts[key] = left
        else:
            del counts[key]
            zero.append(key)
    return zero
