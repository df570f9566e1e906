"""Window groups in the radix tree: where a match may end, and which blocks matches rarely need.

It knows nodes of one group at a time. A window group's block serves only matches that end in it or
less than a window after it; one with sinks serves every longer match too. Inside a long node nobody
has branched off yet, so blocks farther from the node's end than the window (its *interior*, sinks
left out) are the first to go when the group runs short: that takes nothing from matches that end
where earlier ones ended, and no block of another group.
Locks do not matter here: a block that only the cache refers to is needed by no running request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kvstore.groups import KVGroup
from worker.engine.block_pool import BlockPool
from worker.engine.messages import CacheOpKind
from worker.engine.radix_node import Node
from worker.engine.radix_ops import OpLog


def fit_window(
    path: Sequence[Node], run: Sequence[int], group: KVGroup, matched: int, size: int
) -> int:
    """The longest match <= `matched` of which `group` still has the sinks and what the next token
    sees: its window counts itself, so that window_tokens - 1 positions of the match are in it.

    `path` are the matching nodes from the root, `run` the group's full blocks along them, `size`
    the tokens of a block. Walks back from the end; each block is looked at about once.
    """
    depth, sinks = len(path) - 1, group.sink_blocks(size)
    while matched > 0:
        last = (matched - 1) // size
        while path[depth].start >= matched:
            depth -= 1
        node = path[depth]  # its block, not a deeper node's copy, has the last position
        if node.block_at(group.id, last - node.start // size) < 0:
            matched = max(node.start, last * size)
            continue
        first = max(0, matched - group.window_tokens + 1) // size
        seen = chain(range(min(sinks, first)), range(last - 1, first - 1, -1))
        hole = next((i for i in seen if run[i] < 0), None)
        if hole is None:
            return matched
        matched = (hole + 1) * size
    return 0


Leave = Callable[[Node, int, list[int]], None]
"""Told of a node's full blocks of a group before they are let go."""


def strip_node(
    node: Node, first: int, wanted: int, pool: BlockPool, log: OpLog, leave: Leave
) -> int:
    """Let go of blocks of the pool's group in `node` that only nodes refer to, the deepest first
    and none before the node's block `first`, until `wanted` are free; returns how many are. One
    that nodes share is free once all let go."""
    group, first = pool.group.id, max(0, first)
    run, tail, freed = node.blocks[group], node.tail, 0
    if tail and len(run) >= first and tail[group] >= 0 and pool.is_evictable(tail[group]):
        freed += pool.release_idle([tail[group]])
        tail[group] = -1
    for i in range(len(run) - 1, first - 1, -1):
        if freed == wanted:
            break
        if run[i] >= 0 and pool.is_evictable(run[i]):
            leave(node, group, [i])
            log.record(CacheOpKind.REMOVED, group, [node.keys[i]], [run[i]])
            freed += pool.release_idle([run[i]])
            run[i] = -1
    return freed


class InteriorBlocks:
    """Nodes that may have interior blocks of one window group, in order of use."""

    def __init__(self, pool: BlockPool, group: int, block_tokens: int) -> None:
        self._pool = pool
        self._group = group
        self._size = block_tokens
        self._sinks = pool.group.sink_blocks(block_tokens)
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def note(self, node: Node) -> None:
        """`node` was used just now."""
        if self._inside(node):
            self._nodes[node] = None
            self._nodes.move_to_end(node)

    def forget(self, node: Node) -> None:
        """`node` is gone."""
        self._nodes.pop(node, None)

    def strip(self, wanted: int, log: OpLog, leave: Leave) -> int:
        """Free up to `wanted` interior blocks, of the least recently used nodes first, in a node
        the deepest first; returns how many. Blocks that others refer to stay."""
        freed = 0
        while freed < wanted and self._nodes:
            node = next(iter(self._nodes))
            run, taken = node.blocks[self._group], []
            for i in reversed(self._inside(node)):
                if run[i] >= 0 and self._pool.references(run[i]) == 1:
                    taken.append(i)
                    if freed + len(taken) == wanted:
                        break
            else:
                del self._nodes[node]  # until it is used again
            blocks = [run[i] for i in taken]
            leave(node, self._group, taken)
            log.record(CacheOpKind.REMOVED, self._group, [node.keys[i] for i in taken], blocks)
            for i in taken:
                run[i] = -1
            freed += self._pool.release_idle(blocks)
        return freed

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def _inside(self, node: Node) -> range:
        """Which of the node's full blocks lie behind the sinks and before the window at its end: a
        token more than a match there needs, as the same prompt again computes its last token."""
        edge, first = (node.end - self._pool.group.window_tokens) // self._size, node.start
        return range(max(0, self._sinks - first // self._size), edge - first // self._size)
