"""Parts of the radix tree: nodes, their order of use, token runs. They know no pools and no locks'
owners.

Token runs are bytes (u32 little endian, as the key function packs them): comparing two runs is one
memcmp without a copy, and a slice of four bytes is the key a child is found by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstore.keys import BlockKey, ChainSpec, RootId, parent_of_first
from kvstore.tiers.base import BlockName

TOKEN_BYTES = 4


class Node:
    """Tokens start .. end-1 of a path, and what holds their KV.

    Either end may lie inside a block. `keys` and `blocks[g]` are of the full blocks whose *last*
    token is in the node: start//size .. end//size-1. A node that ends inside a block has in
    `tail[g]` a block with that block's positions up to `end`; else `tail` is empty. A window
    group's entries are -1 where the KV is not there. A block that begins before `start` also holds
    the ancestors' tokens of that block, so a node's blocks never need the ancestors' tails.
    """

    __slots__ = (
        "blocks",
        "children",
        "end",
        "keys",
        "label",
        "locks",
        "newer",
        "older",
        "parent",
        "start",
        "tail",
        "tokens",
    )

    def __init__(
        self,
        parent: Node | None,
        label: bytes,
        start: int,
        tokens: bytes,
        keys: list[BlockKey],
        blocks: list[list[int]],
        tail: list[int],
    ) -> None:
        self.parent = parent
        self.label = label  # its key in parent.children
        self.start = start
        self.end = start + len(tokens) // TOKEN_BYTES
        self.tokens = tokens
        self.keys = keys
        self.blocks = blocks  # [G][full blocks]
        self.tail = tail  # [G], or empty
        self.children: dict[bytes, Node] = {}
        self.locks = 0  # holds on this node or on descendants
        self.newer: Node = self
        self.older: Node = self

    def first_block(self, group: int) -> int:
        """The block that holds the node's first token."""
        run = self.blocks[group]
        return run[0] if run else self.tail[group]

    def block_at(self, group: int, offset: int) -> int:
        """The block that is `offset` blocks after the one with the node's first token."""
        run = self.blocks[group]
        return run[offset] if offset < len(run) else self.tail[group]

    def references(self, group: int) -> list[int]:
        """Every block the node refers to, -1 entries included."""
        return [*self.blocks[group], self.tail[group]] if self.tail else self.blocks[group]

    def attach(self, parent: Node, label: bytes) -> None:
        """Become a child of `parent`, which must have none of that label."""
        assert self.parent is None and self.start == parent.end and label not in parent.children
        self.parent, self.label = parent, label
        parent.children[label] = self

    def extend(self, piece: Node) -> None:
        """Take over the tokens and blocks of `piece`, which begins at the block edge this ends."""
        assert piece.start == self.end and not self.tail and not self.children
        self.tokens += piece.tokens
        self.end = piece.end
        self.keys += piece.keys
        for run, more in zip(self.blocks, piece.blocks, strict=True):
            run += more
        self.tail = piece.tail

    def cut(self, keep: int, edge: int) -> tuple[list[BlockKey], list[list[int]]]:
        """Shorten to the first `keep` full blocks, which end at token `edge`; to nothing if 0.

        Returns the keys of the full blocks cut off and, per group, all blocks cut off, those first.
        """
        keys = self.keys[keep:]
        blocks = [self.references(g)[keep:] for g in range(len(self.blocks))]
        del self.keys[keep:]
        for run in self.blocks:
            del run[keep:]
        self.tail = []
        self.end = edge if keep else self.start
        self.tokens = self.tokens[: TOKEN_BYTES * (self.end - self.start)]
        return keys, blocks

    def detach(self) -> Node:
        """Leave the parent, which is returned."""
        assert self.parent is not None and not self.children
        del self.parent.children[self.label]
        return self.parent


def root_node(groups: int, root_id: bytes = b"") -> Node:
    """The empty node at position 0 of one chain root, which is its label."""
    return Node(None, root_id, 0, b"", [], [[] for _ in range(groups)], [])


def block_name(node: Node, index: int, group: int, block_tokens: int) -> BlockName:
    """The name, on rank 0, of the node's full block `index`."""
    start = (node.start // block_tokens + index) * block_tokens
    tokens = _path_tokens(node, start, start + block_tokens)
    parent = node.keys[index - 1] if index else _key_before(node)
    return BlockName(node.keys[index], parent, tokens, group)


def _path_tokens(node: Node, start: int, stop: int) -> bytes:
    """Tokens start .. stop-1 of the path that ends in `node`."""
    parts: list[bytes] = []
    while stop > start:
        if stop > node.start:
            cut = TOKEN_BYTES * max(0, start - node.start)
            parts.append(node.tokens[cut : TOKEN_BYTES * (stop - node.start)])
            stop = max(start, node.start)
        if stop > start:
            assert node.parent is not None, "tokens before the chain's start"
            node = node.parent
    return b"".join(reversed(parts))


def _key_before(node: Node) -> bytes:
    """The key of the full block before the node's first one."""
    while node.parent is not None:
        node = node.parent
        if node.keys:
            return node.keys[-1]
    return parent_of_first(RootId(node.label))


def split_node(node: Node, at: int, block_tokens: int) -> Node:
    """Cut `node` at token `at`; returns the new upper half. `node` itself stays the lower one, so
    whoever refers to a node's end keeps the right node. Inside a block both halves refer to the
    same physical blocks (the upper half's tail): the caller counts those references.
    """
    assert node.start < at < node.end and node.parent is not None
    cut = TOKEN_BYTES * (at - node.start)
    full = at // block_tokens - node.start // block_tokens
    groups = range(len(node.blocks))
    tail = [node.block_at(g, full) for g in groups] if at % block_tokens else []
    upper = Node(
        node.parent,
        node.label,
        node.start,
        node.tokens[:cut],
        node.keys[:full],
        [run[:full] for run in node.blocks],
        tail,
    )
    upper.locks = node.locks
    node.parent.children[node.label] = upper
    node.parent, node.start, node.tokens = upper, at, node.tokens[cut:]
    node.label = node.tokens[:TOKEN_BYTES]
    node.keys = node.keys[full:]
    node.blocks = [run[full:] for run in node.blocks]
    upper.children[node.label] = node
    return upper


class RecencyList:
    """Unlocked nodes from most to least recently used; every change is O(1).

    Whoever touches a path pushes it deepest node first, so a node is always newer than its
    descendants and the oldest one is a leaf.
    """

    def __init__(self) -> None:
        self._ring = root_node(0)  # ring.older is the newest node, ring.newer the oldest

    def push(self, node: Node) -> None:
        """Make `node` the newest, whether it is in the list already or not."""
        node.newer.older, node.older.newer = node.older, node.newer
        ring = self._ring
        node.newer, node.older = ring, ring.older
        ring.older.newer = node
        ring.older = node

    def remove(self, node: Node) -> None:
        """Take `node` out."""
        assert node.newer is not node, "the node is not in the list"
        node.newer.older, node.older.newer = node.older, node.newer
        node.newer = node.older = node

    def oldest(self) -> Node | None:
        """The least recently used node; None if the list is empty."""
        node = self._ring.newer
        return None if node is self._ring else node

    def __iter__(self) -> Iterator[Node]:
        node = self._ring.newer
        while node is not self._ring:
            yield node
            node = node.newer


def edge_marks(chain: ChainSpec, end: int) -> dict[int, bytes]:
    """Token position -> what, besides tokens, the block that starts there stands for.

    The salt at the first private block and non-empty extras, as in the key function. A chain's
    nodes begin at its marks, and a mark is part of the child's label; everything below inherits it.
    """
    size = chain.block_tokens
    extras: Mapping[int, bytes] = chain.extra or {}
    marks = {
        index * size: _mark(b"", extra)
        for index, extra in extras.items()
        if extra and index * size < end
    }
    private = chain.first_private_block
    if chain.salt and private * size < end:
        marks[private * size] = _mark(chain.salt, extras.get(private, b""))
    return marks


def _mark(salt: bytes, extra: bytes) -> bytes:
    # Never of a bare token's length, and not ambiguous: the salt's length leads.
    return len(salt).to_bytes(8, "little") + salt + len(extra).to_bytes(8, "little") + extra


def split_label(label: bytes) -> tuple[bytes, bytes, bytes]:
    """(salt, extra, first token) of a child's label."""
    mark, token = label[:-TOKEN_BYTES], label[-TOKEN_BYTES:]
    if not mark:
        return b"", b"", token
    cut = 8 + int.from_bytes(mark[:8], "little")
    return mark[8:cut], mark[cut + 8 :], token


def common_tokens(query: bytes, at: int, run: bytes, count: int) -> int:
    """How many of the first `count` tokens of `run` equal the query's from token `at` on.

    One comparison if all do; else a bisection that compares each byte about once.
    """
    width = TOKEN_BYTES * count
    if len(run) == width and query.startswith(run, TOKEN_BYTES * at):
        return count
    ours, theirs = query[TOKEN_BYTES * at : TOKEN_BYTES * at + width], run[:width]
    if ours == theirs:
        return count
    low, high = 0, count  # `low` tokens are equal, `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        cut = slice(TOKEN_BYTES * low, TOKEN_BYTES * middle)
        if ours[cut] == theirs[cut]:
            low = middle
        else:
            high = middle
    return low
