"""RadixCache and BlockPool against a naive dict of prefixes, with real content in every block.

Reliability scenario 2 (and the block part of scenario 1): random requests of several tenants run,
share, branch, publish, finish, die and are evicted. After every operation: same prefixes, exact
LRU order, exact content, refcount = holders, ops replayed = snapshot, the tree's own laws.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from radix_model import Alphabet, NaivePrefixes

from kvstore import keys
from kvstore.groups import GroupKind, KVGroup
from worker.engine.block_pool import BlockPool
from worker.engine.messages import CacheOp, CacheOpKind
from worker.engine.radix import Hold, Match, RadixCache
from worker.engine.radix_node import Node, split_label

SEEDS = 20
OPERATIONS = 1_000
OPERATIONS_SOAK = 100_000
FULL, WINDOW, LATENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.LATENT
WITH_SINKS, SINK_TOKENS = 28, 6
# name -> (block_tokens, [(kind, blocks, window_tokens)]); WITH_SINKS blocks: a window with sinks
SHAPES = {
    "full": (4, [(FULL, 26, 0)]),
    "full+window": (4, [(FULL, 40, 0), (WINDOW, 26, 6)]),
    "latent": (3, [(LATENT, 30, 0)]),
    "full+latent+windows": (2, [(FULL, 70, 0), (LATENT, 70, 0), (WINDOW, 40, 3), (WINDOW, 60, 8)]),
    "window, one-token blocks": (1, [(FULL, 90, 0), (WINDOW, 60, 4)]),
    "full+window, sinks": (4, [(FULL, 40, 0), (WINDOW, WITH_SINKS, 6)]),
}


@dataclass(eq=False)
class Request:
    """A running request of the machine."""

    chain: keys.ChainSpec
    tokens: list[int]
    text: str
    blocks: list[list[int]]  # [G]
    computed: int
    hold: Hold
    boundary: tuple[int, ...] | None
    locked: int  # tokens


class Machine:
    """The real cache, the model, and requests that hold blocks."""

    def __init__(self, seed: int, shape: str) -> None:
        self.rng = random.Random(seed)
        self.size, groups = SHAPES[shape]
        self.groups = [
            KVGroup(
                g, kind, (g,), 64, window, sink_tokens=SINK_TOKENS if count == WITH_SINKS else 0
            )
            for g, (kind, count, window) in enumerate(groups)
        ]
        self.sinks = {g.id: g.sink_blocks(self.size) for g in self.groups}
        self.pools = [
            BlockPool(group, blocks, self.on_free)
            for group, (_, blocks, _) in zip(self.groups, groups, strict=True)
        ]
        self.windows = {g.id: g.window_tokens for g in self.groups if g.kind is WINDOW}
        self.cache = RadixCache(self.pools, self.size)
        self.model = NaivePrefixes(self.size, self.windows, self.sinks)
        self.alphabet = Alphabet()
        # What each position of each block holds: the prefix it was computed from.
        self.content = [[[""] * self.size for _ in range(blocks)] for _, blocks, _ in groups]
        self.requests: list[Request] = []
        self.replayed: list[list[bytes]] = [[] for _ in groups]
        self.text_of_key: dict[bytes, str] = {}
        self.prompts: list[list[int]] = [[]]
        self.counts: Counter[str] = Counter()

    def on_free(self, group: int, blocks: list[int]) -> None:
        for block in blocks:
            self.content[group][block] = ["freed"] * self.size

    # --- what requests do ---

    def chain(self) -> keys.ChainSpec:
        rng = self.rng
        extra = None
        if rng.random() < 0.15:
            extra = {rng.randrange(4): rng.choice([b"", b"image", b"sound"]) for _ in range(2)}
        return keys.ChainSpec(
            keys.root("model", rng.choice(["", "", "", "adapter"]), self.size),
            self.size,
            rng.choice([b"", b"tenant a", b"tenant b"]),
            rng.choice([0, 0, 5, 8, 1 << 30]),
            extra,
        )

    def prompt(self) -> list[int]:
        rng = self.rng
        base = rng.choice(self.prompts)
        kept = base[: rng.randint(0, len(base))] if rng.random() < 0.6 else base
        tokens = (kept + [rng.randrange(3) for _ in range(rng.randint(1, 9))])[:40]
        self.prompts.append(tokens)
        if len(self.prompts) > 12:
            self.prompts.pop(rng.randrange(len(self.prompts)))
        return tokens

    def match(self, chain: keys.ChainSpec, tokens: list[int], limit: int) -> Match:
        text = self.alphabet.spell(chain, tokens)
        known = self.cache.matched(chain, tokens, limit)
        match = self.cache.match(chain, tokens, limit)
        assert known == match.tokens == self.model.match(text, limit)
        full, rest = divmod(match.tokens, self.size)
        assert (match.boundary is None) == (rest == 0)
        for g, run in enumerate(match.blocks):
            assert len(run) == full
            left = 0
            if g in self.windows:
                left = min(full, max(0, match.tokens - self.windows[g] + 1) // self.size)
            kept = min(left, self.sinks[g])
            assert all(block == -1 for block in run[kept:left])
            whole = [(i, run[i], self.size) for i in (*range(kept), *range(left, full))]
            part = [(full, match.boundary[g], rest)] if match.boundary is not None else []
            for i, block, count in whole + part:
                first = i * self.size
                expected = [text[: first + j + 2] for j in range(count)]
                assert block >= 0 and self.content[g][block][:count] == expected
        self.counts["hit"] += match.tokens > 0
        self.counts["boundary"] += rest > 0
        return match

    def look(self) -> None:
        tokens = self.prompt()
        self.match(self.chain(), tokens, self.rng.randint(0, len(tokens) + 1))

    def start(self) -> None:
        chain, tokens = self.chain(), self.prompt()
        text = self.alphabet.spell(chain, tokens)
        match = self.match(chain, tokens, len(tokens) - 1)
        hold = self.cache.hold(match)
        self.model.lock(text, match.tokens)
        missing = -(-len(tokens) // self.size) - match.tokens // self.size
        request = Request(
            chain,
            tokens,
            text,
            [list(run) for run in hold.blocks],
            match.tokens,
            hold,
            hold.boundary,
            hold.tokens,
        )
        self.requests.append(request)
        if not self.evict([missing] * len(self.pools)):
            self.counts["refused"] += 1
            self.leave(request)
            return
        for g, pool in enumerate(self.pools):
            new = pool.allocate(missing)
            assert new is not None
            request.blocks[g] += new
        self.counts["started"] += 1
        if self.rng.random() < 0.7:
            self.copy_boundary(request)

    def copy_boundary(self, request: Request) -> None:
        if request.boundary is None:
            return
        full, rest = divmod(request.hold.tokens, self.size)
        for g, source in enumerate(request.boundary):
            target = request.blocks[g][full]
            self.content[g][target][:rest] = self.content[g][source][:rest]
            self.pools[g].release([source])
        request.boundary = None

    def compute(self, request: Request, count: int) -> None:
        self.copy_boundary(request)
        for position in range(request.computed, min(request.computed + count, len(request.tokens))):
            i, j = divmod(position, self.size)
            for g in range(len(self.pools)):
                self.content[g][request.blocks[g][i]][j] = request.text[: position + 2]
            request.computed = position + 1
        for g, window in self.windows.items():
            for i in range(self.sinks[g], max(0, request.computed - window + 1) // self.size):
                if request.blocks[g][i] >= 0 and self.rng.random() < 0.9:
                    self.pools[g].release([request.blocks[g][i]])
                    request.blocks[g][i] = -1

    def publish(self, request: Request, partial: bool) -> None:
        chain, valid = request.chain, request.computed
        if request.boundary is not None:
            return  # the boundary block has no content of its own yet
        whole = keys.chain(chain, request.tokens)
        for i, key in enumerate(whole):
            text = request.text[: (i + 1) * self.size + 1]
            assert self.text_of_key.setdefault(key, text) == text
        known = self.model.depth(request.text)
        hold = request.hold if request.locked > 0 and self.rng.random() < 0.5 else None
        adopted = self.cache.insert(
            chain, request.tokens, whole, request.blocks, valid, partial=partial, hold=hold
        )
        end = valid if partial else valid - valid % self.size
        new = -(-end // self.size) - known // self.size if end > known else 0
        assert adopted == new
        if end:
            self.model.insert(request.text, end, request.blocks)
        if hold is not None and end > request.locked:
            self.model.lock(request.text, end)
            self.model.unlock(request.text, request.locked)
            request.locked = end
        self.counts["adopted"] += adopted

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        unlock_first = self.rng.random() < 0.5
        if unlock_first:
            self.unlock(request)
        if self.rng.random() < 0.8 and len(request.blocks[0]) * self.size >= len(request.tokens):
            self.publish(request, partial=True)
        if not unlock_first:
            self.unlock(request)
        for g, pool in enumerate(self.pools):
            pool.release(request.blocks[g])
            if request.boundary is not None:
                pool.release([request.boundary[g]])

    def unlock(self, request: Request) -> None:
        if request.locked >= 0:
            self.cache.unlock(request.hold)
            self.model.unlock(request.text, request.locked)
            request.locked = -1

    def evict(self, needed: list[int]) -> bool:
        before = [pool.free for pool in self.pools]
        possible = all(
            pool.free + self.cache.evictable(g) >= needed[g] for g, pool in enumerate(self.pools)
        )
        order = self.model.eviction_order()
        nodes = self.prefixes()
        ends = {text: node.end for text, node in nodes.items()}
        blocks = {(t, g): self.block(nodes[t], t, g) for t in nodes for g in self.windows}
        done = self.cache.evict(needed)
        assert done == possible
        there = self.prefixes()
        gone = self.model.entries.keys() - there.keys()
        assert gone == set(order[: len(gone)]), "not in LRU order"
        self.model.forget(gone)
        after = [pool.free for pool in self.pools]
        short = [b < n for b, n in zip(before, needed, strict=True)]
        stripped = self.strip(there, ends, blocks, short)
        if not done:
            assert not gone and not stripped and before == after
        elif gone or stripped:
            assert all(a >= n for a, n in zip(after, needed, strict=True))
            assert any(b < n == a for b, n, a in zip(before, needed, after, strict=True)), (
                "too much"
            )
            self.counts["evicted"] += 1
            self.counts["stripped"] += stripped
        return done

    def block(self, node: Node, text: str, group: int) -> int:
        """The block of the last token of `text`, which lies in `node`."""
        return node.block_at(group, (len(text) - 2) // self.size - node.start // self.size)

    def strip(
        self,
        there: dict[str, Node],
        ends: dict[str, int],
        blocks: dict[tuple[str, int], int],
        short: list[bool],
    ) -> bool:
        """Take over which window blocks eviction dropped but not their nodes: the group had to be
        short, and the block free now and farther than the window from where its node ended, unless
        nothing unlocked is left to drop."""
        stripped = False
        for text, entry in self.model.entries.items():
            index = (len(text) - 2) // self.size
            for g in sorted(entry.groups):
                if self.block(there[text], text, g) < 0:
                    inside = (index + 1) * self.size <= ends[text] - self.windows[g]
                    inside = inside and index >= self.sinks[g]
                    gone = self.pools[g].references(blocks[text, g]) == 0
                    assert short[g] and ((inside and gone) or not self.model.eviction_order())
                    entry.groups.remove(g)
                    stripped = True
        return stripped

    def clear(self) -> None:
        locked = {text for text, entry in self.model.entries.items() if entry.locks}
        self.cache.clear()
        assert self.prefixes().keys() == locked
        self.model.forget(self.model.entries.keys() - locked)

    # --- one random operation ---

    def operate(self) -> None:
        rng = self.rng
        choice = rng.random()
        request = rng.choice(self.requests) if self.requests else None
        if request is None or (choice < 0.25 and len(self.requests) < 6):
            self.start()
        elif choice < 0.33:
            self.look()
        elif choice < 0.62:
            self.compute(request, rng.randint(1, 10))
            if rng.random() < 0.5:
                self.publish(request, partial=False)
        elif choice < 0.67:
            self.unlock(request)
        elif choice < 0.92:
            if rng.random() < 0.7:
                self.compute(request, len(request.tokens))
            self.leave(request)
        elif choice < 0.995:
            self.evict([rng.randint(0, pool.total) for pool in self.pools])
        else:
            self.clear()

    # --- what must hold afterwards ---

    def check(self) -> None:
        self.cache.check_integrity()
        there = self.prefixes()
        assert there.keys() == self.model.entries.keys()
        for g, pool in enumerate(self.pools):
            holders = Counter(self.cache.holders()[g])
            for request in self.requests:
                holders.update(block for block in request.blocks[g] if block >= 0)
                if request.boundary is not None:
                    holders[request.boundary[g]] += 1
            pool.check_integrity(holders)
        self.replay(self.cache.take_ops())
        for g, expected in enumerate(self.replayed):
            assert sorted(expected) == sorted(flat(self.cache.snapshot(), g))
            assert {self.text_of_key[key] for key in expected} == self.model.full_blocks(g)

    def replay(self, ops: list[CacheOp]) -> None:
        for op in ops:
            known = self.replayed[op.group]
            for key in op.keys:
                if op.kind is CacheOpKind.STORED:
                    assert key not in known, "stored twice"
                    known.append(key)
                    text = self.text_of_key[key][: -self.size]
                    if op.group == 0 and len(text) > 1:
                        assert text in {self.text_of_key[k] for k in known}, "before its parent"
                else:
                    known.remove(key)

    def prefixes(self) -> dict[str, Node]:
        """Every prefix in the real tree, spelled as the model does."""
        found: dict[str, Node] = {}
        for root_id, root in self.cache._tree.roots.items():
            stack = [
                (c, self.alphabet.character(("root", root_id)), b"") for c in root.children.values()
            ]
            while stack:
                node, text, salt = stack.pop()
                new_salt, extra, _ = split_label(node.label)
                salt = salt or new_salt
                ids = memoryview(node.tokens).cast("I").tolist()
                if node.start % self.size and node.start:
                    extra = self.extra_of(node)
                for position, token in enumerate(ids, node.start):
                    here = extra if position // self.size == node.start // self.size else b""
                    text += self.alphabet.character((salt, here, token))
                    found[text] = node
                stack += [(child, text, salt) for child in node.children.values()]
        return found

    def extra_of(self, node: Node) -> bytes:
        """The extra of the block in the middle of which `node` starts."""
        block = node.start // self.size
        above = node.parent
        while above is not None and above.start > block * self.size:
            above = above.parent
        if above is None or above.start < block * self.size:
            return b""
        return split_label(above.label)[1]


def flat(ops: list[CacheOp], group: int) -> list[bytes]:
    return [key for op in ops if op.group == group for key in op.keys]


def run(seed: int, shape: str, operations: int) -> Counter[str]:
    machine = Machine(seed, shape)
    for step in range(operations):
        try:
            machine.operate()
            machine.check()
            if step % 97 == 0:
                could = [pool.free + pool.evictable for pool in machine.pools]
                twin = copy.deepcopy(machine)
                assert twin.evict(could)
        except AssertionError as error:
            error.add_note(f"replay: run({seed}, {shape!r}, {step + 1})")
            raise
    return machine.counts


@pytest.mark.parametrize("seed", range(SEEDS))
def test_against_naive_prefixes(seed: int) -> None:
    shape = list(SHAPES)[seed % len(SHAPES)]
    counts = run(seed, shape, OPERATIONS)
    # The run is worth something only if it reached the interesting parts.
    assert min(counts[k] for k in ("hit", "started", "adopted", "evicted", "refused")) > 0, counts
    assert counts["boundary"] > 0 or SHAPES[shape][0] == 1, counts
    assert counts["stripped"] > 0 or "window" not in shape, counts


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_against_naive_prefixes_soak(seed: int) -> None:
    run(seed + 1000, list(SHAPES)[seed % len(SHAPES)], OPERATIONS_SOAK)
