"""The radix tree's own laws, checked node by node; it knows no way to change the tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvstore.groups import GroupKind
from kvstore.keys import BlockKey, ChainSpec, extend
from worker.engine.block_pool import BlockPool
from worker.engine.radix_node import TOKEN_BYTES, Node, split_label
from worker.engine.radix_tree import RadixTree, upwards


def check_tree(tree: RadixTree, block_tokens: int, held: Sequence[Node]) -> None:
    """Assert the laws below of every node; `held` are the nodes of live holds. Mutates nothing.

    Shape: parents and children agree, runs join, borders lie where the labels say. Keys: equal to
    the key function's. Blocks: as many as the range needs, all live, -1 only in window groups.
    Locks: the holds at or below a node. Recency: all unlocked nodes, each newer than its
    descendants. Counts: idle references per block, and with them the evictable counts.
    """
    pools = tree.pools
    locks = Counter(id(above) for node in held for above in upwards(node))
    unlocked: dict[int, Node] = {}
    known: set[int] = set()
    idle = [Counter[int]() for _ in pools]
    used = [Counter[int]() for _ in pools]
    for root_id, root in tree.roots.items():
        assert root.parent is None and root.end == 0 and root.locks == 0
        chain = ChainSpec(root_id, block_tokens)
        stack = [(child, _Prefix(chain, b"", [])) for child in root.children.values()]
        _check_children(root)
        while stack:
            node, prefix = stack.pop()
            _check_children(node)
            _check_blocks(node, pools, block_tokens)
            assert node.locks == locks[id(node)], "locks differ from the holds below"
            if node.locks == 0:
                unlocked[id(node)] = node
            known.add(id(node))
            for g in range(len(pools)):
                blocks = [block for block in node.references(g) if block >= 0]
                used[g].update(blocks)
                if node.locks == 0 or g in tree.interior:
                    idle[g].update(blocks)
            below = prefix.through(node, block_tokens)
            stack.extend((child, below) for child in node.children.values())
    _check_recency(list(tree.recency), unlocked)
    _check_counts(pools, used, idle)
    for interior in tree.interior.values():
        assert all(id(node) in known for node in interior), "a node that is gone is listed"


class _Prefix:
    """What the path down to a node says about its chain."""

    def __init__(self, chain: ChainSpec, tokens: bytes, keys: list[BlockKey]) -> None:
        self.chain = chain
        self.tokens = tokens
        self.keys = keys

    def through(self, node: Node, block_tokens: int) -> _Prefix:
        """The prefix with `node` added; asserts that the node's keys continue the chain."""
        chain, index = self.chain, node.start // block_tokens
        salt, extra, _ = split_label(node.label)
        assert not (salt or extra) or node.start % block_tokens == 0, "a mark inside a block"
        if salt:
            assert not chain.salt, "two salts on one path"
            chain = ChainSpec(chain.root, block_tokens, salt, node.start, chain.extra)
        if extra:
            extras = {**(chain.extra or {}), index: extra}
            chain = ChainSpec(chain.root, block_tokens, chain.salt, chain.private_from, extras)
        tokens = self.tokens + node.tokens
        ids = memoryview(tokens).cast("I").tolist()
        keys = [*self.keys, *extend(chain, self.keys, ids)]
        assert node.keys == keys[len(self.keys) :], "keys differ from the key function's"
        return _Prefix(chain, tokens, keys)


def _check_children(node: Node) -> None:
    for label, child in node.children.items():
        assert child.parent is node and child.label == label, "parent and child disagree"
        assert child.start == node.end < child.end, "runs do not join"
        assert len(child.tokens) == TOKEN_BYTES * (child.end - child.start)
        assert child.tokens[:TOKEN_BYTES] == split_label(label)[2], "label of another token"


def _check_blocks(node: Node, pools: Sequence[BlockPool], block_tokens: int) -> None:
    full = node.end // block_tokens - node.start // block_tokens
    assert len(node.blocks) == len(pools) and len(node.keys) == full
    assert len(node.tail) == (len(pools) if node.end % block_tokens else 0)
    for g, pool in enumerate(pools):
        assert len(node.blocks[g]) == full
        for block in node.references(g):
            if block < 0:
                assert pool.group.kind is GroupKind.WINDOW, "a full group misses a block"
            else:
                assert pool.references(block) > 0, "a node refers to a free block"


def _check_recency(oldest_first: Sequence[Node], unlocked: Mapping[int, Node]) -> None:
    age = {id(node): order for order, node in enumerate(oldest_first)}
    assert len(age) == len(oldest_first), "a node is listed twice"
    assert age.keys() == unlocked.keys(), "the list is not the set of unlocked nodes"
    for node in oldest_first:
        parent = node.parent
        if parent is not None and id(parent) in age:
            assert age[id(parent)] > age[id(node)], "a node is older than its descendant"
    for older, newer in pairwise(oldest_first):
        assert older.newer is newer and newer.older is older, "the list's links disagree"


def _check_counts(
    pools: Sequence[BlockPool], used: Sequence[Counter[int]], idle: Sequence[Counter[int]]
) -> None:
    for pool, references, droppable in zip(pools, used, idle, strict=True):
        for block, count in references.items():
            assert pool.references(block) >= count, "more nodes than references"
        evictable = sum(1 for b, count in droppable.items() if count == pool.references(b))
        assert evictable == pool.evictable, "the evictable count is wrong"
