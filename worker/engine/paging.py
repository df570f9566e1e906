"""Block tables: gives sequences their blocks and takes them back. It decides nothing.

Growth on demand, copy on write, sharing with the radix cache, windows that pass. It knows no
requests' order and no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from kvstore.keys import extend
from worker.engine.block_pool import BlockPool
from worker.engine.plan import BlockCopy
from worker.engine.radix import Hold, Match, RadixCache
from worker.engine.request import Sequence
from worker.engine.retention.base import Ints


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_tokens)


def _changed(sequence: Sequence, at: int) -> None:
    """Entries of its tables from `at` on differ from what was planned."""
    sequence.stale_from = min(sequence.stale_from, at)


class PagedMemory:
    """Pools and cache as sequences see them. `cache` is None where caching is off."""

    def __init__(self, pools: Seq[BlockPool], cache: RadixCache | None, block_tokens: int) -> None:
        self.pools = pools
        self.cache = cache
        self.block_tokens = block_tokens
        windows = [pool.group.window_tokens for pool in pools]
        self._windows = [(g, window) for g, window in enumerate(windows) if window]
        self._sinks = [pool.group.sink_blocks(block_tokens) for pool in pools]
        # Per group: references that only wait for a copy, which runs before anybody writes.
        self._sources: list[Counter[int]] = [Counter() for _ in pools]

    @property
    def windowed(self) -> bool:
        """Whether any group lets blocks go that a window has passed."""
        return bool(self._windows)

    def available(self, group: int) -> int:
        """Blocks that are free or that eviction can free."""
        pool = self.pools[group]
        return pool.free + (self.cache.evictable(group) if self.cache else 0)

    def token_bytes(self) -> float:
        """Bytes of all groups' blocks in use, per position that those of group 0 have; 0 = none."""
        used = [pool.total - pool.free for pool in self.pools]
        sizes = [pool.group.block_bytes * pool.group.ranks for pool in self.pools]
        held = sum(count * size for count, size in zip(used, sizes, strict=True))
        return held / (used[0] * self.block_tokens) if used[0] else 0.0

    def fits_alone(self, tokens: int) -> bool:
        """Whether a sequence of so many computed tokens can exist in empty pools."""
        return all(self.blocks_held(g, tokens) <= p.total for g, p in enumerate(self.pools))

    def blocks_held(self, group: int, tokens: int) -> int:
        """Blocks of a group that a sequence of so many tokens occupies, a window's at its worst."""
        blocks = blocks_for(tokens, self.block_tokens)
        window = self.pools[group].group.window_tokens
        if not window:
            return blocks
        return min(blocks, self._sinks[group] + blocks_for(window - 1, self.block_tokens) + 1)

    def held_alone(self, sequence: Sequence, group: int) -> int:
        """Blocks of a group that a sequence holds, those left out that another one held before."""
        table = sequence.tables[group]
        if self.pools[group].group.window_tokens:  # what it passed leads the table, but for sinks
            sinks = min(len(table), self._sinks[group])
            return sinks + len(table) - bisect_left(table, 0, sinks)
        return len(table) - sequence.shared

    def match(self, sequence: Sequence) -> Match | None:
        """What the cache has of its tokens, the last one left out. Holds nothing."""
        if self.cache is None or not sequence.request.cacheable:
            return None
        limit = min(len(sequence.tokens) - 1, sequence.plain)
        return self.cache.match(sequence.request.chain, sequence.tokens, limit)

    def matched(self, sequence: Sequence) -> int:
        """How many of its tokens a match would have. Mutates nothing, not even the order of use."""
        if self.cache is None or not sequence.request.cacheable:
            return 0
        tokens = sequence.tokens
        limit = min(len(tokens) - 1, sequence.plain)
        return self.cache.matched(sequence.request.chain, tokens, limit)

    def attach(self, sequence: Sequence, match: Match | None) -> None:
        """Give a sequence without blocks the whole blocks of a match, by reference. To be followed
        by `attach_boundary`, or by `detach`."""
        assert sequence.computed == 0 and not any(sequence.tables)
        sequence.shared = 0
        if match is None or match.tokens == 0:
            return
        assert self.cache is not None
        evictable = self.pools[0].evictable
        sequence.hold = self.cache.hold(match)
        newly_busy = evictable - self.pools[0].evictable
        sequence.tables = [list(blocks) for blocks in match.blocks]
        sequence.stale_from = sequence.writable_to = 0
        sequence.shared = max(0, len(match.blocks[0]) - newly_busy)
        sequence.computed = match.tokens // self.block_tokens * self.block_tokens

    def attach_boundary(self, sequence: Sequence) -> None:
        """After `attach`: an own block for the boundary, if one can be had, as a pending copy."""
        hold = sequence.hold
        if hold is None or hold.boundary is None:
            return
        if not self._reserve([1] * len(self.pools)):
            self._release_boundary(hold)
            if self.has_hole(sequence):
                self.release(sequence, keep=False)
                sequence.shared = 0
            return
        offset = hold.tokens % self.block_tokens
        for g, source in enumerate(hold.boundary):
            assert source >= 0, "a boundary lies in an absent block"
            (target,) = self._allocate(g, 1)
            sequence.tables[g].append(target)
            self._copy(sequence, BlockCopy(g, source, target, offset))
        _changed(sequence, hold.tokens // self.block_tokens)
        sequence.computed = hold.tokens

    def has_hole(self, sequence: Sequence) -> bool:
        """Whether a position its next token would see is in no block: a match's windows reach back
        from its end, so the match without its boundary may lack what lies before them."""
        for pool, table, sinks in zip(self.pools, sequence.tables, self._sinks, strict=True):
            window = pool.group.window_tokens
            first = max(0, sequence.computed - window + 1) // self.block_tokens if window else 0
            if any(block < 0 for part in (table[:sinks], table[first:]) for block in part):
                return True
        return False

    def detach(self, sequence: Sequence) -> None:
        """Undo `attach`."""
        if sequence.hold is not None:
            self._release_boundary(sequence.hold)
        self.release(sequence, keep=False)

    def _release_boundary(self, hold: Hold) -> None:
        if hold.boundary is not None:
            for pool, source in zip(self.pools, hold.boundary, strict=True):
                pool.release([source])

    def grow(self, sequence: Sequence, want: int) -> int:
        """Blocks for the next `want` tokens, or for fewer if not all can be had; how many it got.

        A block to be written that anybody else holds becomes a pending copy. All or nothing: after
        0 the tables are as before, but for windows that passed.
        """
        if self._windows:
            self._pass_windows(sequence)
        stored = sequence.computed - sequence.dropped
        at, offset = divmod(stored, self.block_tokens)
        shared = offset > 0 and any(self._is_shared(sequence, g) for g in range(len(self.pools)))
        room = len(sequence.tables[0]) * self.block_tokens - stored
        if want <= room and not shared:
            self._note_writable(sequence)
            return want
        if not self._reserve(self._needs(sequence, want)):
            want = min(want, self._room(sequence))
            if want < 1 or not self._reserve(self._needs(sequence, want)):
                return 0
        _changed(sequence, at)
        for g, table in enumerate(sequence.tables):
            if shared and self._is_shared(sequence, g):
                source = table[at]
                (table[at],) = self._allocate(g, 1)
                self._copy(sequence, BlockCopy(g, source, table[at], offset))
            blocks = blocks_for(stored + want, self.block_tokens)
            table.extend(self._allocate(g, blocks - len(table)))
        self._note_writable(sequence)
        return want

    def room_for(self, sequence: Sequence, blocks: int) -> int:
        """How many more blocks of every group it could be given, at most `blocks`."""
        return max(0, min(blocks, *(self.available(g) for g in range(len(self.pools)))))

    def open_blocks(self, sequence: Sequence, stop: int, firsts: Seq[int]) -> bool:
        """Own blocks behind what is computed, which ends on a block edge, for content that comes
        from elsewhere: up to block `stop`, in group g only sinks and from firsts[g] on, -1 between.
        False, and nothing changed, if they are not to be had. To be followed by `close_blocks`.
        """
        at, offset = divmod(sequence.computed, self.block_tokens)
        assert offset == 0 and all(len(table) == at for table in sequence.tables)
        sinks = [max(at, min(s, first)) for s, first in zip(self._sinks, firsts, strict=True)]
        between = [first - edge for first, edge in zip(firsts, sinks, strict=True)]
        if not self._reserve([stop - at - absent for absent in between]):
            return False
        _changed(sequence, at)
        for g, table in enumerate(sequence.tables):
            table.extend(self._allocate(g, sinks[g] - at))
            table.extend([-1] * between[g])
            table.extend(self._allocate(g, stop - firsts[g]))
        return True

    def close_blocks(self, sequence: Sequence, firsts: Seq[int]) -> None:
        """After `open_blocks`, with `computed` where the content ends: give back the rest, and, if
        all came, what no row can see from here on: blocks of a group between its sinks and
        firsts[g]."""
        self.trim(sequence)
        for g, first in enumerate(firsts):
            if self.pools[g].group.window_tokens:
                table, sinks = sequence.tables[g], self._sinks[g]
                passed = [block for block in table[sinks:first] if block >= 0]
                if passed and first < len(table):
                    _changed(sequence, 0)
                    table[sinks:first] = [-1] * (first - sinks)
                    self.pools[g].release(passed)
        sequence.writable_to = 0

    def skip_boundary(self, sequence: Sequence) -> None:
        """Instead of `attach_boundary`: the whole block comes from elsewhere."""
        if sequence.hold is not None:
            self._release_boundary(sequence.hold)

    def grow_spare(self, sequence: Sequence, want: int) -> int:
        """After a `grow`: room for `want` tokens, or for as many as fit into its last block and
        blocks that are free now; nothing is evicted. To be followed by `trim` where not all of them
        come to be computed."""
        size, known = self.block_tokens, len(sequence.tables[0])
        spare = min(pool.free for pool in self.pools)
        want = min(want, (known + spare) * size - sequence.computed)
        more = blocks_for(sequence.computed + want, size) - known
        if more > 0:
            _changed(sequence, known)
            for g, table in enumerate(sequence.tables):
                table.extend(self._allocate(g, more))
        return want

    def _note_writable(self, sequence: Sequence) -> None:
        """It has blocks of its own from here to its tables' end; until then, or until a window
        passes a block, the scheduler need not ask again (Sequence.writable_to)."""
        size = self.block_tokens
        end = len(sequence.tables[0]) * size + sequence.dropped
        if sequence.retained is not None:
            end = min(end, sequence.retained.limit + sequence.dropped)
        for _, window in self._windows:
            end = min(end, sequence.computed + size - (sequence.computed - window + 1) % size)
        sequence.writable_to = end

    def _is_shared(self, sequence: Sequence, group: int) -> bool:
        """Whether the next write goes into a block that somebody else holds too."""
        at, offset = divmod(sequence.stored, self.block_tokens)
        if offset == 0:
            return False
        block = sequence.tables[group][at]
        return self.pools[group].references(block) - self._sources[group].get(block, 0) > 1

    def _copy(self, sequence: Sequence, copy: BlockCopy) -> None:
        """A copy that the sequence's next step makes; it holds the source until then."""
        sequence.copies.append(copy)
        self._sources[copy.group][copy.source] += 1

    def _needs(self, sequence: Sequence, count: int) -> list[int]:
        blocks = blocks_for(sequence.computed - sequence.dropped + count, self.block_tokens)
        return [
            blocks - len(table) + self._is_shared(sequence, g)
            for g, table in enumerate(sequence.tables)
        ]

    def _room(self, sequence: Sequence) -> int:
        """Tokens that the blocks to be had have room for; < 1 if none."""
        return min(
            (len(table) + self.available(g) - self._is_shared(sequence, g)) * self.block_tokens
            - sequence.stored
            if self.available(g) >= self._is_shared(sequence, g)
            else 0
            for g, table in enumerate(sequence.tables)
        )

    def _reserve(self, needs: list[int]) -> bool:
        for pool, need in zip(self.pools, needs, strict=True):
            if pool.free < need:
                break
        else:
            return True
        return self.cache is not None and self.cache.evict(needs)

    def _allocate(self, group: int, count: int) -> list[int]:
        blocks = self.pools[group].allocate(count)
        assert blocks is not None, "blocks were reserved but are not there"
        return blocks

    def _pass_windows(self, sequence: Sequence) -> None:
        """Let go of blocks that no row from here on can see."""
        for g, window in self._windows:
            table, passed, sinks = sequence.tables[g], [], self._sinks[g]
            at = (sequence.computed - window + 1) // self.block_tokens - 1
            while at >= sinks and table[at] >= 0:
                passed.append(table[at])
                table[at] = -1
                at -= 1
            if passed:
                _changed(sequence, at + 1)
                self.pools[g].release(passed)

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks of a `grow` whose step did not happen, or of tokens that were not
        accepted; a pending copy stays so."""
        count = blocks_for(sequence.stored, self.block_tokens)
        if count == len(sequence.tables[0]):
            return
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table[count:])
            del table[count:]
        _changed(sequence, count)
        sequence.writable_to = 0

    def settle(self, sequence: Sequence) -> None:
        """Its pending copies were executed."""
        for copy in sequence.copies:
            self.pools[copy.group].release([copy.source])
            self._sources[copy.group][copy.source] -= 1
        sequence.copies.clear()

    def share(self, sequence: Sequence) -> None:
        """Offer its whole computed blocks to the cache, and hold the cached ones instead of its
        own, so that siblings find them and doubles computed at the same time end here."""
        assert not sequence.copies
        if self.cache is None or not sequence.request.cacheable:
            return
        self._insert(sequence, min(sequence.computed, sequence.plain), partial=False)
        self._hold_cached(sequence)

    def _insert(self, sequence: Sequence, valid: int, *, partial: bool) -> None:
        assert self.cache is not None and valid <= sequence.computed
        chain, keys, tokens = sequence.request.chain, sequence.keys, sequence.tokens[:valid]
        keys.extend(extend(chain, keys, tokens))
        full = valid // self.block_tokens
        count = blocks_for(valid, self.block_tokens) if partial else full
        blocks = [table[:count] for table in sequence.tables]
        hold = sequence.hold
        self.cache.insert(chain, tokens, keys[:full], blocks, valid, partial=partial, hold=hold)

    def _hold_cached(self, sequence: Sequence) -> None:
        """Swap its whole blocks for the cache's, and lock their path."""
        assert self.cache is not None
        plain = min(sequence.computed, sequence.plain)
        whole = plain // self.block_tokens * self.block_tokens
        match = self.cache.match(sequence.request.chain, sequence.tokens, whole)
        hold = self.cache.hold(match)
        _changed(sequence, 0)
        for g, pool in enumerate(self.pools):
            table, surplus = sequence.tables[g], []
            for at, cached in enumerate(match.blocks[g]):
                if table[at] >= 0 and cached >= 0:
                    surplus.append(table[at])
                    table[at] = cached
                else:
                    surplus.append(cached)
            if match.boundary is not None:
                surplus.append(match.boundary[g])
            pool.release(surplus)
        self.unlock(sequence)
        sequence.hold = hold

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of the parent's blocks; the first of them to write copies the boundary."""
        assert not parent.copies and not any(child.tables)
        child.tables = [list(table) for table in parent.tables]
        child.computed, child.dropped = parent.computed, parent.dropped
        child.retained = None if parent.retained is None else parent.retained.fork()
        child.keys = list(parent.keys)
        child.shared = parent.stored // self.block_tokens
        child.stale_from = child.writable_to = parent.writable_to = 0
        for pool, table in zip(self.pools, child.tables, strict=True):
            pool.retain(table)
        if self.cache is not None and child.request.cacheable:
            self._hold_cached(child)

    def unlock(self, sequence: Sequence) -> None:
        """Let the cache evict its path; the references to its blocks stay."""
        if sequence.hold is not None:
            assert self.cache is not None
            self.cache.unlock(sequence.hold)
            sequence.hold = None

    def forget_cached(self, sequence: Sequence) -> bool:
        """Last resort for `sequence`, alone in the pools: drop all that is cached, its own path
        too, which may hold a window's passed blocks or force a copy. False if nothing was."""
        if self.cache is None or not any(self.cache.holders()):
            return False
        self.unlock(sequence)
        self.cache.clear()
        return True

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take all blocks back. `keep` offers what was computed to the cache; a boundary whose
        copy was not executed yet is not part of that."""
        valid = sequence.computed
        if sequence.retained is not None and sequence.retained.begun:
            valid = min(valid, sequence.plain)
        if sequence.copies:
            valid -= valid % self.block_tokens
        self.unlock(sequence)
        if keep and valid and self.cache is not None and sequence.request.cacheable:
            self._insert(sequence, valid, partial=True)
        self.settle(sequence)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table)
        sequence.tables = [[] for _ in self.pools]
        sequence.stale_from = sequence.writable_to = 0
        sequence.computed = sequence.dropped = 0
        if sequence.retained is not None:
            sequence.retained.restart(sequence.request.spec.prompt_tokens)

    # --- compaction --------------------------------------------------------------------------

    def take(self, count: int) -> list[list[int]] | None:
        """`count` blocks of every group, with one reference each, evicting for them; None, and
        nothing taken, if they are not to be had."""
        if not self._reserve([count] * len(self.pools)):
            return None
        return [self._allocate(g, count) for g in range(len(self.pools))]

    def replace_tables(self, sequence: Sequence, tables: list[list[int]], order: Ints) -> None:
        """The sequence's tables are these from here on, made of its blocks and of taken ones: entry
        i is what entry order[i] was, if that is not negative. The rest is given back."""
        same = int((order == np.arange(len(order))).cumprod().sum())
        _changed(sequence, same)
        if sequence.hold is not None and same * self.block_tokens < sequence.hold.tokens:
            self.unlock(sequence)  # it does without a part of the path
        kept = set(order.tolist())
        left = [entry for entry in range(len(sequence.tables[0])) if entry not in kept]
        for pool, before in zip(self.pools, sequence.tables, strict=True):
            pool.release([before[entry] for entry in left])
        sequence.shared = sum(0 <= entry < sequence.shared for entry in kept)
        sequence.tables = tables
        sequence.writable_to = 0

    # --- conservation ------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert, per group: free + held by the cache alone + held by sequences = total, every
        block's references are its holders, the tree is whole. O(blocks)."""
        held: list[Counter[int]] = [Counter() for _ in self.pools]
        for sequence in sequences:
            for g, table in enumerate(sequence.tables):
                sinks, rest = table[: self._sinks[g]], table[self._sinks[g] :]
                there = [block for block in rest if block >= 0]
                held[g].update(sinks + there)
                assert min(sinks, default=0) >= 0, "a sink's block is gone"
                assert rest[len(rest) - len(there) :] == there, "a hole inside a block table"
            for copy in sequence.copies:
                held[copy.group][copy.source] += 1
            self._check_retained(sequence)
        if self.cache is not None:
            self.cache.check_integrity()
        cached = self.cache.holders() if self.cache else [Counter[int]() for _ in self.pools]
        for pool, ours, theirs in zip(self.pools, held, cached, strict=True):
            pool.check_integrity(ours + theirs)
            cached_only = sum(1 for block in theirs if block not in ours)
            assert pool.free + cached_only + len(ours) == pool.total, "blocks leaked"

    def _check_retained(self, sequence: Sequence) -> None:
        """Assert that slots and positions of a pruned sequence agree, and that what may hold other
        than the plain chain's values is its own."""
        retained = sequence.retained
        if retained is None or not sequence.dropped:
            assert sequence.dropped == 0 and (retained is None or retained.positions is None)
            return
        positions = retained.positions_of(sequence.computed, sequence.stored)
        assert sequence.stored <= retained.limit and positions.shape[1] == sequence.stored
        ordered = np.sort(positions, axis=1)
        assert (ordered[:, 1:] > ordered[:, :-1]).all(), "a token is in two slots"
        assert ordered.min() >= 0 and ordered.max() < sequence.computed
        assert (positions[:, : retained.fixed] == np.arange(retained.fixed)).all()
        assert (positions[:, : retained.plain] == np.arange(retained.plain)).all()
        if retained.policy.quota.suffix and not retained.resumed:  # choices share what it resumed
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                own = table[blocks_for(retained.fixed, self.block_tokens) :]
                assert all(pool.references(block) == 1 for block in own), "pruned blocks are shared"
