"""The structure under the radix cache: nodes, their references into the pools, their order of use.

It knows no requests and not what keys mean. Every method leaves references, locks,
order and the op log agreeing with each other (radix_integrity.py says exactly how).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.groups import GroupKind
from kvstore.keys import RootId
from kvstore.tiers.base import BlockName
from worker.engine.block_pool import BlockPool
from worker.engine.messages import CacheOpKind
from worker.engine.radix_node import (
    TOKEN_BYTES,
    Node,
    RecencyList,
    block_name,
    common_tokens,
    root_node,
    split_node,
)
from worker.engine.radix_ops import OpLog
from worker.engine.radix_window import InteriorBlocks, strip_node

Leaving = Callable[[list[tuple[BlockName, int]]], None]
"""Told of full blocks (name on rank 0, number in the pool) before the tree lets go of them."""


class RadixTree:
    """One tree per chain root over the same pools.

    A node's references are idle while it is unlocked, busy while it is locked. Those to a window
    group's blocks are always idle: whoever locks a path holds the window blocks it needs itself,
    and the ones its window has passed must not be pinned by its own lock.
    """

    def __init__(self, pools: Sequence[BlockPool], block_tokens: int) -> None:
        self.pools = tuple(pools)
        self.leaving: Leaving | None = None
        self.roots: dict[RootId, Node] = {}
        self.recency = RecencyList()  # every unlocked node but the roots
        self.log = OpLog(len(self.pools))
        self.version = 0  # changes whenever an earlier match may have become wrong
        self._size = block_tokens
        self.interior = {  # of each window group; nodes locked or not
            g: InteriorBlocks(pool, g, block_tokens)
            for g, pool in enumerate(self.pools)
            if pool.group.kind is GroupKind.WINDOW
        }
        self._lockable = [(g, pool) for g, pool in enumerate(self.pools) if g not in self.interior]

    def root(self, root_id: RootId) -> Node:
        """The root node, made if it is not there."""
        return self.roots.setdefault(root_id, root_node(len(self.pools), root_id))

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [node for root in self.roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def walk(
        self, root: Node, query: bytes, end: int, marks: dict[int, bytes]
    ) -> tuple[list[Node], int]:
        """The nodes along the first `end` tokens of `query`, the root first, and how many tokens
        match. The last node may match in part. Mutates nothing."""
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

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` at token `at`; returns the upper half, `node` stays the lower one.

        The caller touches the path of the upper half, which is not listed before that.
        """
        upper = split_node(node, at, self._size)
        for g, block in enumerate(upper.tail):
            self._retain(upper, g, [block])
        return upper

    def append(self, node: Node, piece: Node, mark: bytes | None, own: Node | None) -> Node:
        """Adopt `piece` (holding nothing yet) below `node`: as its continuation in place if that
        is a leaf, ends on a block edge and is locked by nobody but the inserter (once, if it is
        `own`); else as a child. Returns where the piece is.

        The caller touches the path afterwards, as after `split`.
        """
        self.version += 1
        groups = range(len(self.pools))
        leaf = not node.children and node.parent is not None
        in_place = leaf and mark is None and not node.tail and node.locks == (node is own)
        target = node if in_place else piece
        for g in groups:
            self._retain(target, g, piece.references(g))
            self.log.record(CacheOpKind.STORED, g, piece.keys, piece.blocks[g])
        if in_place:
            node.extend(piece)
            return node
        piece.attach(node, (mark or b"") + piece.tokens[:TOKEN_BYTES])
        for g in groups:
            self._share_tail(node, g, piece.first_block(g))
        return piece

    def fill(self, node: Node, group: int, blocks: Sequence[int]) -> None:
        """Adopt blocks[i] (of block index i of the node's path) where `node` has none."""
        first, run = node.start // self._size, node.blocks[group]
        if -1 in run:
            holes = [i for i, block in enumerate(run) if block < 0 <= blocks[first + i]]
            for i in holes:
                run[i] = blocks[first + i]
            found = [run[i] for i in holes]
            self._retain(node, group, found)
            self.log.record(CacheOpKind.STORED, group, [node.keys[i] for i in holes], found)
        if node.tail and node.tail[group] < 0:
            node.tail[group] = blocks[node.end // self._size]
            self._retain(node, group, [node.tail[group]])

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors from being dropped."""
        for above in upwards(node):
            above.locks += 1
            if above.locks == 1:
                self.recency.remove(above)
                for g, pool in self._lockable:
                    pool.to_busy(above.references(g))

    def unlock(self, node: Node) -> None:
        """Undo one lock; nodes without any become the newest."""
        for above in upwards(node):
            assert above.locks > 0
            above.locks -= 1
            if above.locks == 0:
                self.recency.push(above)
                for g, pool in self._lockable:
                    pool.to_idle(above.references(g))

    def touch(self, node: Node) -> None:
        """Make `node` and its ancestors the newest."""
        for above in upwards(node):
            if above.locks == 0:
                self.recency.push(above)
            for interior in self.interior.values():
                interior.note(above)

    def strip_interior(self, group: int, count: int) -> None:
        """Free up to `count` blocks of a window group inside nodes, none of another group. Tiers
        do not get what only repeats group 0: it would be the most of all that they hold."""
        repeated = self.pools[group].group.repeats(self.pools[0].group)
        leave = _in_silence if repeated else self.leave
        if count > 0 and self.interior[group].strip(count, self.log, leave):
            self.version += 1

    def strip_everywhere(self, group: int, count: int) -> None:
        """Free up to `count` blocks of a window group, wherever only nodes refer to them, sinks
        last. Looks at every node: a last resort."""
        pool = self.pools[group]
        for spared in sorted({pool.group.sink_blocks(self._size), 0}, reverse=True):
            nodes = self.nodes()
            while count > 0 and (node := next(nodes, None)) is not None:
                first = spared - node.start // self._size
                count -= strip_node(node, first, count, pool, self.log, self.leave)
                self.version += 1

    def leave(self, node: Node, group: int, at: Iterable[int]) -> None:
        """Say that the node is about to let go of full blocks `at` of a group, parents first."""
        if self.leaving is None:
            return
        run, size = node.blocks[group], self._size
        going = [(block_name(node, i, group, size), run[i]) for i in sorted(at) if run[i] >= 0]
        if going:
            self.leaving(going)

    def cut_for(self, leaf: Node, wanted: Sequence[tuple[BlockPool, int]]) -> int:
        """How many of an unlocked leaf's last blocks `drop` has to cut until every pool has as many
        free blocks as are wanted of it, one at least; all, if these are not enough. Absent and
        shared blocks free nothing, so that it may be many for the sake of one."""
        most, needed = 1, (leaf.end - 1) // self._size + 1 - leaf.start // self._size
        for pool, count in wanted:
            run, short, cut = leaf.references(pool.group.id), count - pool.free, 0
            while short > 0 and cut < needed:
                cut += 1
                block = run[-cut]
                short -= block >= 0 and pool.references(block) == 1
            most = max(most, cut)
        return most

    def drop(self, leaf: Node, count: int) -> None:
        """Cut the last `count` blocks off an unlocked leaf; all of it if it has no more."""
        assert not leaf.children and leaf.locks == 0 and count > 0
        self.version += 1
        edge = ((leaf.end - 1) // self._size + 1 - count) * self._size
        keep = max(0, edge // self._size - leaf.start // self._size)
        heads = [leaf.first_block(g) for g in range(len(self.pools))]
        for g, run in enumerate(leaf.blocks):
            self.leave(leaf, g, range(keep, len(run)))
        keys, gone = leaf.cut(keep, edge)
        for g, (pool, blocks) in enumerate(zip(self.pools, gone, strict=True)):
            self.log.record(CacheOpKind.REMOVED, g, keys, blocks[: len(keys)])
            pool.release_idle(blocks)
        if keep == 0:
            self.recency.remove(leaf)
            for interior in self.interior.values():
                interior.forget(leaf)
            self._inherit_tail(leaf.detach(), heads)

    def _inherit_tail(self, parent: Node, heads: list[int]) -> None:
        """A child with first blocks `heads` is gone: share another child's block instead."""
        if not parent.tail or not parent.children:
            return
        sibling = next(iter(parent.children.values()))
        for g, head in enumerate(heads):
            if parent.tail[g] == head:
                self._share_tail(parent, g, sibling.first_block(g))

    def _share_tail(self, node: Node, group: int, block: int) -> None:
        """Point the tail of `node`, and of ancestors that share it, at a descendant's `block`, if
        that frees the block they have."""
        if not node.tail or block < 0:
            return
        old, floor = node.tail[group], node.end - node.end % self._size
        sharers = []
        for above in upwards(node):
            if above.end <= floor or above.tail[group] != old:
                break
            sharers.append(above)
        pool = self.pools[group]
        if old < 0 or old == block or pool.references(old) != len(sharers):
            return
        for above in sharers:
            self._retain(above, group, [block])
            above.tail[group] = block
            busy = above.locks and group not in self.interior
            (pool.release if busy else pool.release_idle)([old])

    def _retain(self, node: Node, group: int, blocks: list[int]) -> None:
        pool = self.pools[group]
        busy = node.locks and group not in self.interior
        (pool.retain if busy else pool.retain_idle)(blocks)


def _in_silence(node: Node, group: int, at: Iterable[int]) -> None:
    """Blocks are let go that nobody is told of."""


def upwards(node: Node) -> Iterator[Node]:
    """The node and its ancestors, without the root."""
    above: Node | None = node
    while above is not None and above.parent is not None:
        yield above
        above = above.parent
