"""RadixCache: which prefixes have KV on this device, to the token. It knows no requests and no
bytes: blocks are numbers of the pools, identity is a ChainSpec and token ids.

A path-compressed radix tree per chain root (radix_node.py). What is worth knowing:

- Nodes are cut to the token. A match that ends inside a node cuts it there: the cut makes use,
  locks and eviction exact to the token, and it is where the request will branch off anyway.
- A node that ends inside a block and the children that begin there each need that block with
  different content after the cut. A parent's tail is pointed at a child's block whenever that
  frees its own, so a branch with n children costs n blocks, not n + 1.
- A leaf that ends on a block edge and that nobody but the inserter uses grows in place, so a
  running request that publishes block by block makes one node.
- Eviction takes the least recently used leaf and cuts blocks off its end: a node's blocks all have
  the same age, the last one is the least useful (nobody can use it without the others), and a
  100,000-token leaf is not lost for want of one block.
- A window group that is short gives up blocks in the middle of nodes before any leaf goes: else a
  long generation that publishes as it runs would lose its newest blocks for the sake of old ones.
- "Least recently used" is exact: the order is that of a list of single tokens, each as old as the
  last operation that went through it, deeper ones first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.groups import GroupKind
from kvstore.keys import BlockKey, ChainSpec, tokens_u32le
from worker.engine.block_pool import BlockPool
from worker.engine.messages import CacheOp, CacheOpKind
from worker.engine.radix_integrity import check_tree
from worker.engine.radix_node import TOKEN_BYTES, Node, edge_marks, root_node
from worker.engine.radix_ops import OpLog
from worker.engine.radix_tree import Leaving, RadixTree
from worker.engine.radix_window import fit_window


@dataclass(frozen=True)
class Match:
    """The longest usable prefix. Valid until the next insert, evict or clear; holds nothing."""

    tokens: int  # matched to the token, after every group's constraint, <= limit
    blocks: tuple[tuple[int, ...], ...]  # [G][tokens // block_tokens]; -1 = left by the window
    boundary: tuple[int, ...] | None  # [G] block whose first tokens % block_tokens positions match
    node: Node = field(repr=False, compare=False)  # ends at `tokens`
    version: int = field(repr=False, compare=False)  # of the tree it was made from


@dataclass(frozen=True, eq=False)
class Hold:
    """A held match: busy references to its blocks and boundary, and a lock on its path."""

    tokens: int
    blocks: tuple[tuple[int, ...], ...]
    boundary: tuple[int, ...] | None


class RadixCache:
    """Finds and keeps prefixes in the blocks of `pools` (one per KV group, group 0 first)."""

    def __init__(self, pools: Sequence[BlockPool], block_tokens: int) -> None:
        assert pools and block_tokens > 0
        assert all(pool.group.kind is not GroupKind.STATE for pool in pools), "not per position"
        self._pools = tuple(pools)
        self._size = block_tokens
        self._windows = tuple(
            (g, pool.group.window_tokens)
            for g, pool in enumerate(pools)
            if pool.group.kind is GroupKind.WINDOW
        )
        self._tree = RadixTree(self._pools, block_tokens)
        self._holds: dict[Hold, Node] = {}  # -> the node it locks

    def on_leaving(self, leaving: Leaving) -> None:
        """`leaving` is told of full blocks before the cache lets go of them, whatever the reason;
        their bytes are whole and nobody writes them."""
        self._tree.leaving = leaving

    def match(self, chain: ChainSpec, tokens: Sequence[int], limit: int) -> Match:
        """The longest prefix of tokens[:limit] whose KV is usable in every group.

        Token ids are compared, never keys. Marks the path as used; may cut a node, which changes
        no block. Valid until the next insert, evict or clear.
        """
        assert chain.block_tokens == self._size
        root = self._tree.roots.get(chain.root)
        end = min(limit, len(tokens))
        if root is None or end <= 0:
            return self._match_at(root or root_node(len(self._pools)), 0, [])
        query = tokens_u32le(tokens[:end])
        path, matched = self._tree.walk(root, query, end, edge_marks(chain, end))
        runs = self._runs(path)
        matched = self._fit_windows(path, runs, matched)
        while path[-1].start >= matched and path[-1].parent is not None:
            path.pop()
        node = path[-1]
        if matched < node.end:
            node = self._tree.split(node, matched)
        self._tree.touch(node)
        return self._match_at(node, matched, runs)

    def matched(self, chain: ChainSpec, tokens: Sequence[int], limit: int) -> int:
        """How many of tokens[:limit] `match` would give. Mutates nothing."""
        root = self._tree.roots.get(chain.root)
        end = min(limit, len(tokens))
        if root is None or end <= 0:
            return 0
        query = tokens_u32le(tokens[:end])
        path, matched = self._tree.walk(root, query, end, edge_marks(chain, end))
        return self._fit_windows(path, self._runs(path), matched) if self._windows else matched

    def _runs(self, path: list[Node]) -> list[list[int]]:
        return [[block for n in path for block in n.blocks[g]] for g in range(len(self._pools))]

    def _match_at(self, node: Node, matched: int, runs: list[list[int]]) -> Match:
        assert node.end == matched
        full = matched // self._size
        blocks = [tuple(run[:full]) for run in runs] or [()] * len(self._pools)
        for g, window in self._windows:
            left = min(full, max(0, matched - window + 1) // self._size)
            kept = min(left, self._pools[g].group.sink_blocks(self._size))
            blocks[g] = blocks[g][:kept] + (-1,) * (left - kept) + blocks[g][left:]
        boundary = tuple(node.tail) if matched % self._size else None
        return Match(matched, tuple(blocks), boundary, node, self._tree.version)

    def _fit_windows(self, path: list[Node], runs: list[list[int]], matched: int) -> int:
        """The longest match <= matched whose last positions every window group still has."""
        settled = False
        while not settled:
            settled = True
            for g, _ in self._windows:
                group = self._pools[g].group
                usable = fit_window(path, runs[g], group, matched, self._size)
                settled = settled and usable == matched
                matched = usable
        return matched

    def hold(self, match: Match) -> Hold:
        """Retain the match's blocks and boundary for the caller and lock its path.

        The caller releases the blocks and the boundary through the pools, and calls `unlock` once.
        """
        assert match.version == self._tree.version, "the match is no longer valid"
        for g, pool in enumerate(self._pools):
            pool.retain(match.blocks[g])
            if match.boundary is not None:
                pool.retain((match.boundary[g],))
        hold = Hold(match.tokens, match.blocks, match.boundary)
        self._holds[hold] = match.node
        self._tree.lock(match.node)
        return hold

    def unlock(self, hold: Hold) -> None:
        """Let the path be evicted again, as used just now. Block references stay the caller's."""
        self._tree.unlock(self._holds.pop(hold))

    def insert(
        self,
        chain: ChainSpec,
        tokens: Sequence[int],
        keys: Sequence[BlockKey],
        blocks: Sequence[Sequence[int]],
        valid: int,
        *,
        partial: bool,
        hold: Hold | None = None,
    ) -> int:
        """Make the first `valid` tokens, whose KV is computed, findable; returns the blocks of
        group 0 adopted. Marks the path as used.

        `keys` are those of at least the full blocks of tokens[:valid]; `blocks[g][i]` holds the
        positions of block i, from its start, in group g (-1 where a window group has dropped it).
        Retains what it adopts: blocks for tokens not yet known, and window blocks missing so far.
        Without `partial` the block that is not full is left out, as its owner still writes it;
        with it the owner must write none of the blocks any more. `hold`, if given, is of a prefix
        of the same tokens; its lock moves on to the end of what is findable now.
        """
        assert chain.block_tokens == self._size and 0 <= valid <= len(tokens)
        end = valid if partial else valid - valid % self._size
        if end == 0:
            return 0
        assert len(keys) >= end // self._size, "keys are missing"
        query = tokens_u32le(tokens[:end])
        marks = edge_marks(chain, end)
        path, matched = self._tree.walk(self._tree.root(chain.root), query, end, marks)
        if matched < path[-1].end:
            path[-1] = self._tree.split(path[-1], matched)
        for g, _ in self._windows:
            for covered in path:
                self._tree.fill(covered, g, blocks[g])
        node, adopted, own = path[-1], 0, self._holds[hold] if hold else None
        for stop in [*(mark for mark in sorted(marks) if mark > matched), end]:
            if matched < stop:
                piece = self._piece(query, matched, stop, keys, blocks)
                node = self._tree.append(node, piece, marks.get(matched), own)
                adopted += len(piece.references(0))
                matched = stop
        self._tree.touch(node)
        if hold is not None and own is not None and own.end < node.end:
            self._tree.lock(node)
            self._tree.unlock(own)
            self._holds[hold] = node
        return adopted

    def _piece(
        self,
        query: bytes,
        start: int,
        stop: int,
        keys: Sequence[BlockKey],
        blocks: Sequence[Sequence[int]],
    ) -> Node:
        """A node for tokens start .. stop-1, not yet in the tree and holding nothing."""
        first, full = start // self._size, stop // self._size
        tokens = query[TOKEN_BYTES * start : TOKEN_BYTES * stop]
        runs = [list(row[first:full]) for row in blocks]
        tail = [row[full] for row in blocks] if stop % self._size else []
        node = Node(None, b"", start, tokens, list(keys[first:full]), runs, tail)
        for g, pool in enumerate(self._pools):
            assert len(runs[g]) == full - first, "blocks are missing"
            if pool.group.kind is not GroupKind.WINDOW:
                assert all(b >= 0 for b in node.references(g)), "only windows drop blocks"
        return node

    def evict(self, needed: Sequence[int]) -> bool:
        """Drop the least recently used blocks until pools[g].free >= needed[g] for every g.

        False, and nothing dropped, if all that may be would not be enough. A window group that
        alone is short first loses blocks inside nodes (radix_window.py), locked or not; what only
        locked nodes have at their ends goes last.
        """
        wanted = list(zip(self._pools, needed, strict=True))
        if any(pool.free + pool.evictable < count for pool, count in wanted):
            return False
        windows = [g for g, _ in self._windows]
        self._drop_leaves([pair for g, pair in enumerate(wanted) if g not in windows])
        for g in windows:
            self._tree.strip_interior(g, needed[g] - self._pools[g].free)
        self._drop_leaves(wanted)
        for g in windows:
            self._tree.strip_everywhere(g, needed[g] - self._pools[g].free)
        assert all(pool.free >= count for pool, count in wanted), "evictable blocks were not"
        return True

    def _drop_leaves(self, wanted: Sequence[tuple[BlockPool, int]]) -> None:
        while any(count > pool.free for pool, count in wanted):
            node = self._tree.recency.oldest()
            if node is None:
                return
            self._tree.drop(node, self._tree.cut_for(node, wanted))

    def evictable(self, group: int) -> int:
        """Blocks of a group that eviction could free now, whoever else refers to blocks. O(1)."""
        return self._pools[group].evictable

    def clear(self) -> None:
        """Drop every unlocked node."""
        while (node := self._tree.recency.oldest()) is not None:
            self._tree.drop(node, node.end)

    def forget(self) -> None:
        """`clear`, but `leaving` is told nothing: nobody is to keep a copy."""
        leaving, self._tree.leaving = self._tree.leaving, None
        try:
            self.clear()
        finally:
            self._tree.leaving = leaving

    def take_ops(self) -> list[CacheOp]:
        """What was stored and removed since the last call: full blocks, parents stored first."""
        return self._tree.log.take()

    def snapshot(self) -> list[CacheOp]:
        """STORED of all full blocks, parents first. Ops not yet taken are part of it."""
        log = OpLog(len(self._pools))
        for node in self._tree.nodes():
            for g, run in enumerate(node.blocks):
                log.record(CacheOpKind.STORED, g, node.keys, run)
        return log.take()

    def holders(self) -> list[Counter[int]]:
        """Per group: block -> references the cache holds, for conservation checks."""
        counts: list[Counter[int]] = [Counter() for _ in self._pools]
        for node in self._tree.nodes():
            for g, count in enumerate(counts):
                count.update(block for block in node.references(g) if block >= 0)
        return counts

    def check_integrity(self) -> None:
        """Assert everything the tree promises about itself and the pools. O(tokens)."""
        check_tree(self._tree, self._size, list(self._holds.values()))
