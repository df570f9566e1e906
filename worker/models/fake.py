"""FakeModel: its KV of a token is a hash of the prefix, kept in real pool bytes, its logits a hash
of all visible KV. It knows nothing of language; any wrong, stale, torn, foreign or mis-ordered
block changes its output, so caches, schedulers and whole clusters have an exact oracle.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.slots import Longs
from kvstore.groups import DEFAULT_BLOCK_TOKENS, GroupKind, KVGroup, Representation
from seams.errors import ModelLoadError, OutOfBlocks
from worker.engine.plan import BlockCopy, Ints, StepPlan
from worker.models.base import ModelSpec

Bytes = npt.NDArray[np.uint8]

CANARY = 0xDB
LAYOUTS = {"plain": 0x00, "inverted": 0xA5}
"""Page layouts: what every stored byte is xored with. Same tokens, foreign bytes."""

_FULL_BYTES = 16  # per position over all ranks
_LATENT_BYTES = 24


def _full(block_tokens: int, ranks: int = 1) -> KVGroup:
    size = block_tokens * _FULL_BYTES // ranks
    return KVGroup(0, GroupKind.FULL, (0,), size, ranks=ranks)


def _window(block_tokens: int) -> KVGroup:
    size = block_tokens * _FULL_BYTES
    return KVGroup(1, GroupKind.WINDOW, (1,), size, window_tokens=2 * block_tokens + 5)


def _sinks(block_tokens: int) -> KVGroup:
    size, window, sinks = block_tokens * _FULL_BYTES, block_tokens + 3, block_tokens + 2
    return KVGroup(1, GroupKind.WINDOW, (0,), size, window_tokens=window, sink_tokens=sinks)


def _latent(block_tokens: int) -> KVGroup:
    return KVGroup(0, GroupKind.LATENT, (0,), block_tokens * _LATENT_BYTES)


SHAPES: dict[str, Callable[[int], tuple[KVGroup, ...]]] = {
    "full": lambda block_tokens: (_full(block_tokens),),
    "window": lambda block_tokens: (_full(block_tokens), _window(block_tokens)),
    "sinks": lambda block_tokens: (_full(block_tokens), _sinks(block_tokens)),
    "latent": lambda block_tokens: (_latent(block_tokens),),
    "ranks": lambda block_tokens: (_full(block_tokens, ranks=2),),
}


class _Pool:
    """The bytes of one group on all its ranks, addressed by position through a block table."""

    def __init__(self, group: KVGroup, block_tokens: int, mask: int, blocks: int) -> None:
        self.group, self.block_tokens, self.mask, self.blocks = group, block_tokens, mask, blocks
        self.slot_bytes = group.block_bytes // block_tokens  # on one rank
        self.ranks = [
            torch.full((blocks, group.block_bytes), CANARY, dtype=torch.uint8)
            for _ in range(group.ranks)
        ]
        self._bytes: list[Bytes] = [rank.numpy() for rank in self.ranks]
        self._slots: list[Bytes] = [b.reshape(-1, self.slot_bytes) for b in self._bytes]

    def read(self, table: Ints, start: int, stop: int) -> bytes:
        """KV of positions start..stop-1; every block they lie in must be present."""
        if start >= stop:
            return b""
        size = self.block_tokens
        first = start // size
        blocks = table[first : (stop - 1) // size + 1].tolist()
        assert min(blocks) >= 0, "a visible position lies in an absent block"
        assert first + len(blocks) == (stop - 1) // size + 1, "the block table is too short"
        begin, end = start - first * size, stop - first * size
        parts = [b[blocks].reshape(-1, self.slot_bytes)[begin:end] for b in self._bytes]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return (joined ^ self.mask if self.mask else joined).tobytes()

    def write(self, slots: Ints, kv: bytes) -> None:
        """Store one hash per slot."""
        rows = np.frombuffer(kv, np.uint8).reshape(len(slots), -1)
        masked = rows ^ self.mask if self.mask else rows
        for rank, array in enumerate(self._slots):
            array[slots] = masked[:, rank * self.slot_bytes : (rank + 1) * self.slot_bytes]

    def move(self, sources: Longs, targets: Longs) -> None:
        """Copy slots; none of them is read after it was written."""
        for array in self._slots:
            array[targets] = array[sources]

    def copy(self, copy: BlockCopy) -> None:
        """Copy the first positions of a block."""
        size = copy.tokens * self.slot_bytes
        for array in self._bytes:
            array[copy.target, :size] = array[copy.source, :size]

    def fill(self, blocks: list[int], value: int) -> None:
        """Overwrite whole blocks."""
        for array in self._bytes:
            array[blocks] = value


def _extend_full(key: bytes, width: int, prefix: bytes, start: int, ids: list[int]) -> bytes:
    """KV of `ids` at positions start.. after `prefix`: each hashes all before it."""
    state = hashlib.blake2b(prefix, digest_size=width, key=key)
    out = []
    for position, token in enumerate(ids, start):
        own = state.copy()
        own.update(struct.pack("<II", position, token))
        kv = own.digest()
        state.update(kv)
        out.append(kv)
    return b"".join(out)


def _extend_window(
    key: bytes, width: int, group: KVGroup, prefix: bytes, start: int, ids: list[int]
) -> bytes:
    """The same for a window group: each hashes the window_tokens - 1 positions before it and what
    sinks lie before those. `prefix` is what the first of `ids` sees."""
    seen, visible = bytearray(prefix), (group.window_tokens - 1) * width
    sinks = bytearray(prefix[: group.sink_tokens * width])
    for position, token in enumerate(ids, start):
        passed = min(group.sink_tokens, max(0, position - group.window_tokens + 1))
        own = hashlib.blake2b(sinks[: passed * width], digest_size=width, key=key)
        own.update(seen[-visible:])
        own.update(struct.pack("<II", position, token))
        seen += own.digest()
        if position < group.sink_tokens:
            sinks += own.digest()
    return bytes(seen[len(prefix) :])


class FakeModel:
    """A decoder over paged KV (worker/models/base.py) made of hashes. Greedy ties: lowest id."""

    def __init__(self, spec: ModelSpec, mask: int = 0) -> None:
        self._spec, self._mask = spec, mask
        self._pools: list[_Pool] = []
        self._widths = [g.block_bytes * g.ranks // spec.block_tokens for g in spec.groups]
        self._keys = [f"{g.id} {spec.fingerprint}".encode()[:64] for g in spec.groups]

    @property
    def spec(self) -> ModelSpec:
        """Constant."""
        return self._spec

    def allocate(self, blocks: tuple[int, ...]) -> None:
        """Make the pools, all bytes the canary. Raises OutOfBlocks."""
        assert not self._pools and len(blocks) == len(self._spec.groups)
        try:
            self._pools = [
                _Pool(group, self._spec.block_tokens, self._mask, count)
                for group, count in zip(self._spec.groups, blocks, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            raise OutOfBlocks("There is not enough memory for the requested blocks.") from error

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Copies in order, then all KV through slots, then logits read back through the tables."""
        for copy in plan.copies:
            self._pools[copy.group].copy(copy)
        assert all(table.flags.c_contiguous for table in plan.tables)
        for s in range(plan.sequences):
            self._compute(plan, s)
        digests = [self._visible_digest(plan, sample.row) for sample in plan.samples]
        return self._logits(digests)

    def _visible(self, group: KVGroup, position: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of positions before `stop` that the row at `position` sees in a group."""
        if not group.window_tokens:
            return [(0, stop)]
        low = max(0, position - group.window_tokens + 1)
        return [(0, min(group.sink_tokens, low)), (low, stop)]

    def _read(self, pool: _Pool, table: Ints, position: int, stop: int) -> bytes:
        """KV of these positions."""
        parts = self._visible(pool.group, position, stop)
        return b"".join(pool.read(table, *part) for part in parts)

    def _compute(self, plan: StepPlan, s: int) -> None:
        """Write the KV of sequence s's new rows, hashed from what its table shows before them."""
        begin, end = int(plan.starts[s]), int(plan.starts[s + 1])
        last = int(plan.lengths[s])
        first = last - (end - begin)
        logical = int(plan.positions[begin])  # more than `first` once tokens were dropped
        assert logical >= first
        assert plan.positions[begin:end].tolist() == list(range(logical, logical + end - begin))
        ids = plan.token_ids[begin:end].tolist()
        for g, pool in enumerate(self._pools):
            seen = self._read(pool, plan.tables[g][s], first, first)
            pool.write(plan.slots[g][begin:end], self._extend(g, seen, logical, ids))

    def _extend(self, g: int, seen: bytes, start: int, ids: list[int]) -> bytes:
        key, width, group = self._keys[g], self._widths[g], self._spec.groups[g]
        if group.window_tokens:
            return _extend_window(key, width, group, seen, start, ids)
        return _extend_full(key, width, seen, start, ids)

    def _visible_digest(self, plan: StepPlan, row: int) -> bytes:
        """Hash of all KV that row sees, own position included, of every group."""
        s = bisect_right(plan.starts, row) - 1
        position = int(plan.lengths[s]) - (int(plan.starts[s + 1]) - row)
        seen = [
            self._read(pool, plan.tables[g][s], position, position + 1)
            for g, pool in enumerate(self._pools)
        ]
        return hashlib.blake2b(b"".join(seen)).digest()

    def _logits(self, digests: list[bytes]) -> torch.Tensor:
        """float32 [rows, vocab] in [0, 8), from the digests alone."""
        vocab = self._spec.vocab_tokens
        drawn = b"".join(hashlib.shake_128(digest).digest(2 * vocab) for digest in digests)
        values = np.frombuffer(drawn, "<u2").reshape(len(digests), vocab)
        return torch.from_numpy(values.astype(np.float32) / 8192)

    def move_slots(
        self, group: int, sources: Longs, targets: Longs, rows: Longs | None = None
    ) -> None:
        """Copy token slots; it has no heads to copy by themselves."""
        assert rows is None and not set(sources.tolist()) & set(targets.tolist())
        self._pools[group].move(sources, targets)

    def read_keys(self, group: int, slots: Longs) -> torch.Tensor:
        """It has no keys."""
        raise NotImplementedError("A fake model has no keys.")

    def read_queries(self, plan: StepPlan) -> torch.Tensor:
        """It has no queries."""
        raise NotImplementedError("A fake model has no queries.")

    def read_block(self, group: int, block: int, rank: int = 0) -> bytes:
        """The block's bytes as they lie in the pool."""
        return self._pools[group].ranks[rank][block].numpy().tobytes()

    def write_block(self, group: int, block: int, data: bytes, rank: int = 0) -> None:
        """Overwrite a block's bytes; len(data) == block_bytes."""
        assert len(data) == self._spec.groups[group].block_bytes
        self._pools[group].ranks[rank][block] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def block_view(self, group: int, block: int, rank: int = 0) -> memoryview | None:
        """The block's own bytes."""
        return self._pools[group].ranks[rank][block].numpy().data

    def poison(self, group: int, blocks: list[int]) -> None:
        """Fill freed blocks with the canary."""
        self._pools[group].fill(blocks, CANARY)

    def oracle_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [vocab] after `token_ids`, computed without pools, blocks or cache."""
        return self._oracle_logits(self._oracle_kv(token_ids))

    def oracle(
        self, token_ids: Sequence[int], count: int, *, ignore_eos: bool = False
    ) -> list[int]:
        """The greedy continuation: up to `count` ids, ending with an end token unless ignored."""
        kv, out = self._oracle_kv(token_ids), list[int]()
        while len(out) < count:
            out.append(int(torch.argmax(self._oracle_logits(kv))))
            if out[-1] in self._spec.eos_token_ids and not ignore_eos:
                break
            self._oracle_append(kv, len(token_ids) + len(out) - 1, out[-1:])
        return out

    def _oracle_kv(self, token_ids: Sequence[int]) -> list[bytearray]:
        kv = [bytearray() for _ in self._spec.groups]
        self._oracle_append(kv, 0, list(token_ids))
        return kv

    def _oracle_append(self, kv: list[bytearray], start: int, ids: list[int]) -> None:
        for g in range(len(kv)):
            kv[g] += self._extend(g, self._cut(kv, g, start), start, ids)

    def _cut(self, kv: list[bytearray], g: int, position: int) -> bytes:
        """Of a group's KV what the row at `position` sees."""
        width, group = self._widths[g], self._spec.groups[g]
        parts = self._visible(group, position, len(kv[g]) // width)
        return b"".join(kv[g][first * width : stop * width] for first, stop in parts)

    def _oracle_logits(self, kv: list[bytearray]) -> torch.Tensor:
        seen = [self._cut(kv, g, len(kv[g]) // self._widths[g] - 1) for g in range(len(kv))]
        return self._logits([hashlib.blake2b(b"".join(seen)).digest()])[0]


def fake_model(
    shape: str,
    *,
    context_tokens: int = 4096,
    vocab_tokens: int = 256,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    name: str = "fake",
    weights: int = 0,
) -> FakeModel:
    """A FakeModel of "SHAPE" or "SHAPE/LAYOUT" (SHAPES, LAYOUTS); the end token is the highest id.

    Models that differ only in name, layout, ranks or context give the same tokens and have one
    fingerprint; other `weights` are another model. Raises ModelLoadError for an unknown shape.
    """
    kind, _, layout = shape.partition("/")
    layout = layout or "plain"
    if kind not in SHAPES or layout not in LAYOUTS:
        known = ", ".join(SHAPES)
        raise ModelLoadError(f"There is no such fake model; the shapes are {known}.")
    groups = SHAPES[kind](block_tokens)
    seen = [(g.window_tokens, g.sink_tokens) for g in groups]
    meaning = [(g.kind.value, *(w if w[1] else w[:1])) for g, w in zip(groups, seen, strict=True)]
    identity = repr(("fake/1", weights, vocab_tokens, meaning)).encode()
    spec = ModelSpec(
        name=name,
        fingerprint=hashlib.sha256(identity).hexdigest(),
        vocab_tokens=vocab_tokens,
        context_tokens=context_tokens,
        eos_token_ids=(vocab_tokens - 1,),
        block_tokens=block_tokens,
        groups=groups,
        representation=Representation(
            dtype="hash", layout=layout, rectangle="all" if groups[0].ranks == 1 else "half"
        ),
        numeric_class="fake",
    )
    return FakeModel(spec, LAYOUTS[layout])
