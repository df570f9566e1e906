"""RadixCache: which prefixes have KV on this device, to the token. It knows no requests and no
bytes: blocks are numbers of the pools, identity is a ChainSpec and token ids.

A path-compressed radix tree per chain root (radix_node.py). What is worth knowing:

- Nodes are cut to the token. A match that ends inside a node cuts it there: the cut makes use,
  locks and eviction exact to the token, and it is where the request will branch off anyway.
- A node that ends inside a block and the children that begin there each need that block with
  different content after the cut. A parent's tail is pointed at a child's block whenever that
  frees its own, so a branch with n children costs n blocks, not n + 1.
- A leaf that ends on a block edge and is not in use grows in place, so a running request that
  publishes block by block makes one node.
- Eviction takes the least recently used leaf and cuts blocks off its end: a node's blocks all have
  the same age, the last one is the least useful (nobody can use it without the others), and a
  100,000-token leaf is not lost for want of one block.
- "Least recently used" is exact: the order is that of a list of single tokens, each as old as the
  last operation that went through it, deeper ones first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.groups import GroupKind
from kvstore.keys import BlockKey, ChainSpec, RootId, tokens_u32le
from worker.engine.block_pool import BlockPool
from worker.engine.messages import CacheOp, CacheOpKind
from worker.engine.radix_integrity import check_tree
from worker.engine.radix_node import (
    TOKEN_BYTES,
    Node,
    RecencyList,
    common_tokens,
    edge_marks,
    root_node,
    split_node,
)
from worker.engine.radix_ops import OpLog


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
    node: Node = field(repr=False)


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
        self._roots: dict[RootId, Node] = {}
        self._recency = RecencyList()  # every unlocked node but the roots
        self._log = OpLog(len(self._pools))
        self._holds: set[Hold] = set()
        self._version = 0

    # --- finding -----------------------------------------------------------------------------

    def match(self, chain: ChainSpec, tokens: Sequence[int], limit: int) -> Match:
        """The longest prefix of tokens[:limit] whose KV is usable in every group.

        Token ids are compared, never keys. Marks the path as used; may cut a node, which changes
        no block. Valid until the next insert, evict or clear.
        """
        assert chain.block_tokens == self._size
        root = self._roots.get(chain.root)
        end = min(limit, len(tokens))
        if root is None or end <= 0:
            return self._match_at(root or root_node(len(self._pools)), 0, [])
        query = tokens_u32le(tokens[:end])
        path, matched = self._walk(root, query, end, edge_marks(chain, end))
        runs = [[block for n in path for block in n.blocks[g]] for g in range(len(self._pools))]
        matched = self._fit_windows(path, runs, matched)
        while path[-1].start >= matched and path[-1].parent is not None:
            path.pop()
        node = path[-1]
        if matched < node.end:
            node = self._split(node, matched)
        self._touch(node)
        return self._match_at(node, matched, runs)

    def _match_at(self, node: Node, matched: int, runs: list[list[int]]) -> Match:
        assert node.end == matched
        full = matched // self._size
        blocks = [tuple(run[:full]) for run in runs] or [()] * len(self._pools)
        for g, window in self._windows:
            left = min(full, max(0, matched - window) // self._size)
            blocks[g] = (-1,) * left + blocks[g][left:]
        boundary = tuple(node.tail) if matched % self._size else None
        return Match(matched, tuple(blocks), boundary, node, self._version)

    def _walk(
        self, root: Node, query: bytes, end: int, marks: dict[int, bytes]
    ) -> tuple[list[Node], int]:
        """The nodes along query[:end] and how far they match; the last may match in part."""
        path, position, borders = [root], 0, [*sorted(marks), end]
        children = root.children
        while position < end:
            label = query[TOKEN_BYTES * position : TOKEN_BYTES * position + TOKEN_BYTES]
            mark = marks.get(position)
            child = children.get(label if mark is None else mark + label)
            if child is None:
                break
            # A node made by another chain may run past this chain's next mark; we may not.
            stop = min(child.end, borders[bisect_right(borders, position)])
            path.append(child)
            position += common_tokens(query, position, child.tokens, stop - position)
            if position < child.end:
                break
            children = child.children
        return path, position

    def _fit_windows(self, path: list[Node], runs: list[list[int]], matched: int) -> int:
        """The longest match <= matched whose last positions every window group still has."""
        settled = False
        while not settled:
            settled = True
            for g, window in self._windows:
                usable = self._fit_window(path, runs[g], g, window, matched)
                settled = settled and usable == matched
                matched = usable
        return matched

    def _fit_window(
        self, path: list[Node], run: list[int], group: int, window: int, matched: int
    ) -> int:
        size, depth = self._size, len(path) - 1
        while matched > 0:
            last = (matched - 1) // size
            while path[depth].start >= matched:
                depth -= 1
            node = path[depth]  # its block, not a deeper node's copy, has the last position
            if node.block_at(group, last - node.start // size) < 0:
                matched = max(node.start, last * size)
                continue
            first = max(0, matched - window) // size
            hole = next((i for i in range(last - 1, first - 1, -1) if run[i] < 0), None)
            if hole is None:
                return matched
            matched = (hole + 1) * size
        return 0

    # --- holding -----------------------------------------------------------------------------

    def hold(self, match: Match) -> Hold:
        """Retain the match's blocks and boundary for the caller and lock its path.

        The caller releases the blocks and the boundary through the pools, and calls `unlock` once.
        """
        assert match.version == self._version, "the match is no longer valid"
        for g, pool in enumerate(self._pools):
            pool.retain(match.blocks[g])
            if match.boundary is not None:
                pool.retain((match.boundary[g],))
        hold = Hold(match.tokens, match.blocks, match.boundary, match.node)
        self._holds.add(hold)
        for node in _upwards(match.node):
            node.locks += 1
            if node.locks == 1:
                self._recency.remove(node)
                for g, pool in enumerate(self._pools):
                    pool.to_busy(node.references(g))
        return hold

    def unlock(self, hold: Hold) -> None:
        """Let the path be evicted again, as used just now. Block references stay the caller's."""
        self._holds.remove(hold)
        for node in _upwards(hold.node):
            assert node.locks > 0
            node.locks -= 1
            if node.locks == 0:
                self._recency.push(node)
                for g, pool in enumerate(self._pools):
                    pool.to_idle(node.references(g))

    # --- inserting ---------------------------------------------------------------------------

    def insert(
        self,
        chain: ChainSpec,
        tokens: Sequence[int],
        keys: Sequence[BlockKey],
        blocks: Sequence[Sequence[int]],
        valid: int,
        *,
        partial: bool,
    ) -> int:
        """Make the first `valid` tokens, whose KV is computed, findable; returns the blocks of
        group 0 adopted. Marks the path as used.

        `keys` are those of at least the full blocks of tokens[:valid]; `blocks[g][i]` holds the
        positions of block i, from its start, in group g (-1 where a window group has dropped it).
        Retains what it adopts: blocks for tokens not yet known, and window blocks missing so far.
        Without `partial` the block that is not full is left out, as its owner still writes it;
        with it the owner must write none of the blocks any more.
        """
        assert chain.block_tokens == self._size and 0 <= valid <= len(tokens)
        end = valid if partial else valid - valid % self._size
        if end == 0:
            return 0
        assert len(keys) >= end // self._size, "keys are missing"
        query = tokens_u32le(tokens[:end])
        marks = edge_marks(chain, end)
        root = self._roots.setdefault(chain.root, root_node(len(self._pools)))
        path, matched = self._walk(root, query, end, marks)
        self._version += 1
        if matched < path[-1].end:
            path[-1] = self._split(path[-1], matched)
        self._fill_windows(path, blocks)
        node, adopted = path[-1], 0
        for stop in [*(mark for mark in sorted(marks) if mark > matched), end]:
            if matched < stop:
                piece = self._piece(query, matched, stop, keys, blocks)
                node = self._append(node, piece, marks.get(matched))
                adopted += len(piece.references(0))
                matched = stop
        self._touch(node)
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

    def _append(self, node: Node, piece: Node, mark: bytes | None) -> Node:
        """Adopt `piece` below `node`: as its continuation in place, or as a new child."""
        for g, pool in enumerate(self._pools):
            pool.retain_idle(piece.references(g))
            self._log.record(CacheOpKind.STORED, g, piece.keys, piece.blocks[g])
        leaf = not node.children and node.parent is not None
        if leaf and node.locks == 0 and mark is None and not node.tail:
            node.tokens += piece.tokens
            node.end = piece.end
            node.keys += piece.keys
            for run, more in zip(node.blocks, piece.blocks, strict=True):
                run += more
            node.tail = piece.tail
            return node
        piece.label = (mark or b"") + piece.tokens[:TOKEN_BYTES]
        assert piece.label not in node.children
        piece.parent = node
        node.children[piece.label] = piece
        self._recency.push(piece)
        for g in range(len(self._pools)):
            self._share_tail(node, g, piece.first_block(g))
        return piece

    def _fill_windows(self, path: list[Node], blocks: Sequence[Sequence[int]]) -> None:
        """Adopt window blocks that the path's nodes, all covered by the inserter, lack."""
        for g, _ in self._windows:
            for node in path:
                first, run = node.start // self._size, node.blocks[g]
                if -1 in run:
                    holes = [i for i, b in enumerate(run) if b < 0 <= blocks[g][first + i]]
                    for i in holes:
                        run[i] = blocks[g][first + i]
                    found = [run[i] for i in holes]
                    self._retain(node, g, found)
                    self._log.record(CacheOpKind.STORED, g, [node.keys[i] for i in holes], found)
                if node.tail and node.tail[g] < 0:
                    node.tail[g] = blocks[g][node.end // self._size]
                    self._retain(node, g, [node.tail[g]])

    # --- tails shared between a node and its descendants -------------------------------------

    def _split(self, node: Node, at: int) -> Node:
        upper = split_node(node, at, self._size)
        for g, block in enumerate(upper.tail):
            self._retain(upper, g, [block])
        if node.locks == 0:
            self._recency.insert_above(upper, node)
        return upper

    def _share_tail(self, node: Node, group: int, block: int) -> None:
        """Point the tail of `node`, and of ancestors that share it, at a descendant's `block`, if
        that frees the block they have."""
        if not node.tail or block < 0:
            return
        old, floor = node.tail[group], node.end - node.end % self._size
        sharers = []
        for above in _upwards(node):
            if above.end <= floor or above.tail[group] != old:
                break
            sharers.append(above)
        pool = self._pools[group]
        if old < 0 or old == block or pool.references(old) != len(sharers):
            return
        for above in sharers:
            self._retain(above, group, [block])
            above.tail[group] = block
            (pool.release if above.locks else pool.release_idle)([old])

    def _retain(self, node: Node, group: int, blocks: list[int]) -> None:
        pool = self._pools[group]
        (pool.retain if node.locks else pool.retain_idle)(blocks)

    def _touch(self, node: Node) -> None:
        for above in _upwards(node):
            if above.locks:
                break  # and so are all further up: not in the list
            self._recency.touch(above)

    # --- evicting ----------------------------------------------------------------------------

    def evict(self, needed: Sequence[int]) -> bool:
        """Drop the least recently used blocks until pools[g].free >= needed[g] for every g.

        False, and nothing dropped, if all that is unlocked would not be enough.
        """
        wanted = list(zip(self._pools, needed, strict=True))
        if any(pool.free + pool.evictable < count for pool, count in wanted):
            return False
        while (short := max(count - pool.free for pool, count in wanted)) > 0:
            node = self._recency.oldest()
            assert node is not None, "evictable blocks without a node to drop"
            self._drop(node, short)
        return True

    def evictable(self, group: int) -> int:
        """Blocks of a group that eviction could free now, whoever else refers to blocks. O(1)."""
        return self._pools[group].evictable

    def clear(self) -> None:
        """Drop everything unlocked."""
        while (node := self._recency.oldest()) is not None:
            self._drop(node, node.end)

    def _drop(self, leaf: Node, count: int) -> None:
        """Cut the last `count` blocks off an unlocked leaf; all of it if it has no more.

        Each cut frees at most one block of a group, so a caller short of `count` cuts no more
        than it needs.
        """
        assert not leaf.children and leaf.locks == 0
        self._version += 1
        last, first = (leaf.end - 1) // self._size, leaf.start // self._size
        edge = (last + 1 - count) * self._size
        keep = edge // self._size - first if edge > leaf.start else 0
        heads = [leaf.first_block(g) for g in range(len(self._pools))]
        keys = leaf.keys[keep:]
        gone = [leaf.references(g)[keep:] for g in range(len(self._pools))]
        for g, run in enumerate(leaf.blocks):
            self._log.record(CacheOpKind.REMOVED, g, keys, run[keep:])
            del run[keep:]
        for pool, blocks in zip(self._pools, gone, strict=True):
            pool.release_idle(blocks)
        del leaf.keys[keep:]
        leaf.tail = []
        if keep:
            leaf.end = edge
            leaf.tokens = leaf.tokens[: TOKEN_BYTES * (edge - leaf.start)]
            return
        self._recency.remove(leaf)
        self._inherit_tail(leaf.detach(), heads)

    def _inherit_tail(self, parent: Node, heads: list[int]) -> None:
        """A child with first blocks `heads` is gone: share another child's block instead."""
        if not parent.tail or not parent.children:
            return
        sibling = next(iter(parent.children.values()))
        for g, head in enumerate(heads):
            if parent.tail[g] == head:
                self._share_tail(parent, g, sibling.first_block(g))

    # --- reporting ---------------------------------------------------------------------------

    def take_ops(self) -> list[CacheOp]:
        """What was stored and removed since the last call: full blocks, parents stored first."""
        return self._log.take()

    def snapshot(self) -> list[CacheOp]:
        """STORED of all full blocks, parents first. Ops not yet taken are part of it."""
        log = OpLog(len(self._pools))
        for node in self._nodes():
            for g, run in enumerate(node.blocks):
                log.record(CacheOpKind.STORED, g, node.keys, run)
        return log.take()

    def holders(self) -> list[Counter[int]]:
        """Per group: block -> references the cache holds, for conservation checks."""
        counts: list[Counter[int]] = [Counter() for _ in self._pools]
        for node in self._nodes():
            for g, count in enumerate(counts):
                count.update(block for block in node.references(g) if block >= 0)
        return counts

    def check_integrity(self) -> None:
        """Assert everything the tree promises about itself and the pools. O(tokens)."""
        check_tree(
            self._roots,
            self._pools,
            self._size,
            list(self._recency),
            [hold.node for hold in self._holds],
        )

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _upwards(node: Node) -> Iterator[Node]:
    """The node and its ancestors, without the root."""
    above: Node | None = node
    while above is not None and above.parent is not None:
        yield above
        above = above.parent
