"""What a prefix cache is, written naively: a dict of every known prefix, one entry per token.

A prefix is a string: one character for the root, then one per token, which stands for (salt in
force, extra of the block, token id). Two chains share a prefix exactly if the strings are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.keys import ChainSpec


class Alphabet:
    """Characters for whatever hashable thing stands at a position."""

    def __init__(self) -> None:
        self._characters: dict[object, str] = {}

    def character(self, thing: object) -> str:
        """Always the same character for the same thing."""
        return self._characters.setdefault(thing, chr(0x4E00 + len(self._characters)))

    def spell(self, chain: ChainSpec, tokens: Sequence[int]) -> str:
        """The prefix string of all tokens."""
        out = [self.character(("root", chain.root))]
        extras = chain.extra or {}
        for position, token in enumerate(tokens):
            block = position // chain.block_tokens
            salt = chain.salt if block >= chain.private_from // chain.block_tokens else b""
            out.append(self.character((salt, extras.get(block, b""), token)))
        return "".join(out)


@dataclass
class Entry:
    """One prefix: when it was last used, how many holds lock it, which groups have its last
    token."""

    used: int
    locks: int = 0
    groups: set[int] = field(default_factory=set)


class NaivePrefixes:
    """The dict. `windows`: group -> window_tokens, `sinks`: -> leading blocks always seen."""

    def __init__(
        self, block_tokens: int, windows: dict[int, int], sinks: dict[int, int] | None = None
    ) -> None:
        self.size = block_tokens
        self.windows = windows
        self.sinks = sinks or {}
        self.entries: dict[str, Entry] = {}
        self._now = 0

    def tick(self) -> int:
        """The next moment."""
        self._now += 1
        return self._now

    def depth(self, text: str) -> int:
        """Tokens of the longest known prefix, usable or not."""
        depth = 0
        while depth < len(text) - 1 and text[: depth + 2] in self.entries:
            depth += 1
        return depth

    def match(self, text: str, limit: int) -> int:
        """Tokens of the longest usable prefix; marks them used."""
        depth = min(limit, self.depth(text))
        while depth and not all(self._window_there(text, depth, g) for g in self.windows):
            depth -= 1
        now = self.tick()
        for end in range(1, depth + 1):
            self.entries[text[: end + 1]].used = now
        return depth

    def _window_there(self, text: str, depth: int, group: int) -> bool:
        first = max(0, depth - self.windows[group] + 1) // self.size
        last = (depth - 1) // self.size
        seen = {*range(min(self.sinks.get(group, 0), last + 1)), *range(first, last + 1)}
        ends = (min(depth, (block + 1) * self.size) for block in seen)
        return all(group in self.entries[text[: end + 1]].groups for end in ends)

    def insert(self, text: str, end: int, blocks: Sequence[Sequence[int]]) -> None:
        """The first `end` tokens are known; `blocks[g][i]` >= 0 where group g has block i."""
        now = self.tick()
        for depth in range(1, end + 1):
            entry = self.entries.setdefault(text[: depth + 1], Entry(now))
            entry.used = now
            there = (g for g, run in enumerate(blocks) if run[(depth - 1) // self.size] >= 0)
            entry.groups.update(there)

    def lock(self, text: str, depth: int) -> None:
        """Keep the first `depth` tokens."""
        for end in range(1, depth + 1):
            self.entries[text[: end + 1]].locks += 1

    def unlock(self, text: str, depth: int) -> None:
        """Undo one lock; what nobody locks any more was used just now."""
        now = self.tick()
        for end in range(1, depth + 1):
            entry = self.entries[text[: end + 1]]
            entry.locks -= 1
            if entry.locks == 0:
                entry.used = now

    def eviction_order(self) -> list[str]:
        """Unlocked prefixes, least recently used first, deeper before shallower."""
        free = [text for text, entry in self.entries.items() if entry.locks == 0]
        return sorted(free, key=lambda text: (self.entries[text].used, -len(text)))

    def forget(self, texts: Iterable[str]) -> None:
        """Drop entries."""
        for text in texts:
            del self.entries[text]

    def full_blocks(self, group: int) -> set[str]:
        """Prefixes that end on a block edge and whose last block the group has."""
        return {
            text
            for text, entry in self.entries.items()
            if (len(text) - 1) % self.size == 0 and group in entry.groups
        }
