"""BlockPool: reference counts and the free list of one KV group's blocks; it knows no bytes.

A reference is *busy* (a request's, or the radix cache's where it must keep the block) or *idle*
(the cache's where it could drop the block now). A block whose references are all idle is evictable,
and the pool counts those as they change, so that "how much could eviction free" is one attribute
whoever holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvstore.groups import KVGroup


class BlockPool:
    """The blocks 0 .. total-1 of one group. Entries of -1 (a block a window has left) are skipped.

    `on_free(group.id, blocks)` is called with every batch of blocks that became free, before any of
    them can be allocated again.
    """

    def __init__(
        self,
        group: KVGroup,
        blocks: int,
        on_free: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        assert blocks >= 0
        self.group = group
        self.total = blocks
        self._free = list(range(blocks - 1, -1, -1))  # a stack: the last freed is reused first
        self._references = [0] * blocks
        self._idle = [0] * blocks  # of _references
        self._evictable = 0
        self.low = blocks  # the least that ever was free or evictable, after an allocation
        self._on_free = on_free

    @property
    def free(self) -> int:
        """Blocks that `allocate` could hand out now. O(1)."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Blocks with idle references only: free once the cache drops them. O(1)."""
        return self._evictable

    def allocate(self, count: int) -> list[int] | None:
        """`count` free blocks with one busy reference each; None, and nothing taken, if fewer."""
        assert count >= 0
        left = len(self._free) - count
        if left < 0:
            return None
        taken = self._free[left:]
        del self._free[left:]
        taken.reverse()
        for block in taken:
            self._references[block] = 1
        if left + self._evictable < self.low:
            self.low = left + self._evictable
        return taken

    def is_evictable(self, block: int) -> bool:
        """Whether `block` has idle references only."""
        return 0 < self._references[block] == self._idle[block]

    def references(self, block: int) -> int:
        """How many references, busy and idle, `block` has; 0 = free."""
        return self._references[block]

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a busy reference to each; none may be free."""
        references, idle = self._references, self._idle
        for block in blocks:
            if block < 0:
                continue
            count = references[block]
            assert count > 0, "retained a free block"
            if count == idle[block]:
                self._evictable -= 1
            references[block] = count + 1

    def release(self, blocks: Iterable[int]) -> int:
        """Take one busy reference from each; returns how many blocks became free."""
        references, idle = self._references, self._idle
        freed = []
        for block in blocks:
            if block < 0:
                continue
            count = references[block] - 1
            assert count >= idle[block], "released a block without a busy reference"
            references[block] = count
            if count == 0:
                freed.append(block)
            elif count == idle[block]:
                self._evictable += 1
        return self._give_back(freed)

    def retain_idle(self, blocks: Iterable[int]) -> None:
        """Add an idle reference to each; none may be free."""
        references, idle = self._references, self._idle
        for block in blocks:
            if block < 0:
                continue
            assert references[block] > 0, "retained a free block"
            references[block] += 1
            idle[block] += 1

    def release_idle(self, blocks: Iterable[int]) -> int:
        """Take one idle reference from each; returns how many blocks became free."""
        references, idle = self._references, self._idle
        freed = []
        for block in blocks:
            if block < 0:
                continue
            assert idle[block] > 0, "released a block without an idle reference"
            idle[block] -= 1
            references[block] -= 1
            if references[block] == 0:
                self._evictable -= 1
                freed.append(block)
        return self._give_back(freed)

    def to_busy(self, blocks: Iterable[int]) -> None:
        """Turn one idle reference of each into a busy one."""
        references, idle = self._references, self._idle
        for block in blocks:
            if block < 0:
                continue
            count = idle[block]
            assert count > 0, "no idle reference to turn busy"
            if count == references[block]:
                self._evictable -= 1
            idle[block] = count - 1

    def to_idle(self, blocks: Iterable[int]) -> None:
        """Turn one busy reference of each into an idle one."""
        references, idle = self._references, self._idle
        for block in blocks:
            if block < 0:
                continue
            count = idle[block] + 1
            assert count <= references[block], "no busy reference to turn idle"
            if count == references[block]:
                self._evictable += 1
            idle[block] = count

    def _give_back(self, freed: list[int]) -> int:
        if freed:
            if self._on_free is not None:
                self._on_free(self.group.id, freed)
            self._free.extend(freed)
        return len(freed)

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Assert that every block has exactly `holders[block]` references (absent = 0) and that
        the free list and the evictable count agree. O(total)."""
        assert all(block < self.total for block in holders), "a holder names a foreign block"
        for block, count in enumerate(self._references):
            expected = holders.get(block, 0)
            assert count == expected, f"block {block}: {count} references, {expected} holders"
            assert 0 <= self._idle[block] <= count, f"block {block}: more idle than references"
        unreferenced = {b for b, count in enumerate(self._references) if count == 0}
        assert len(self._free) == len(unreferenced), "the free list has the wrong length"
        assert set(self._free) == unreferenced, "the free list names a block in use"
        idle_only = sum(
            1 for n, idle in zip(self._references, self._idle, strict=True) if n and n == idle
        )
        assert idle_only == self._evictable, "the evictable count is wrong"
