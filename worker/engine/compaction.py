"""Compactor: survivors of a sequence move together, and whole blocks become free. It knows block
tables and slots; it does not choose, and knows no layout.

A round is plan, execute, commit; or abort in place of commit. Sources are slots of survivors,
targets slots of dropped tokens or blocks of its own: until the commit every survivor lies where it
lay, so `execute` may fail and be called again. What is shared, with a sequence or with the cache,
is read and never written: a page of it that gets other tokens is copied first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.slots import Longs
from worker.engine.messages import Compacted
from worker.engine.packing import Packing, pack
from worker.engine.paging import PagedMemory
from worker.engine.request import Sequence
from worker.engine.retention.base import Ints, Mask
from worker.models.base import Model


@dataclass(frozen=True, eq=False)
class CompactionPlan:
    """One round of one sequence, of all groups alike. Valid until the sequence's tables change."""

    sequence: Sequence
    order: Ints  # as in Packing
    copied: Mask  # [pages] new pages in blocks of their own
    tables: list[list[int]]  # [groups] as they will be
    rows: Longs  # moves, those of copied pages among them
    sources: Longs
    targets: Longs
    positions: Ints  # [R, kept] logical position of the token in each slot
    dropped: int  # tokens
    moved_bytes: int


class Compactor:
    """Works on the tables of `memory` and, through `model`, on the bytes of its blocks."""

    def __init__(self, memory: PagedMemory, model: Model) -> None:
        assert not any(pool.group.window_tokens for pool in memory.pools)
        self._memory, self._model = memory, model
        self.total = Compacted()

    def plan(self, sequence: Sequence, kept: Mask) -> CompactionPlan | None:
        """Let the slots kept [R, stored] survive. Takes the blocks that shared ones make necessary;
        None, and nothing taken, if they are not to be had. Followed by `commit` or `abort`."""
        memory, retained = self._memory, sequence.retained
        assert retained is not None and not sequence.copies
        before = retained.positions_of(sequence.computed, sequence.stored)
        assert kept.shape[1] == sequence.stored and len(kept) >= len(before)
        packing = pack(kept, retained.fixed, memory.block_tokens)
        copied = self._copied(sequence, packing)
        rows, sources, targets = _with_copies(packing, copied)
        positions = _positions(packing, before, len(kept), memory.block_tokens)
        fresh = memory.take(int(copied.sum()))  # last: nobody else would give them back
        if fresh is None:
            self.total.waited += 1
            return None
        return CompactionPlan(
            sequence=sequence,
            order=packing.order,
            copied=copied,
            tables=[
                _table(packing.order, copied, table, blocks)
                for table, blocks in zip(sequence.tables, fresh, strict=True)
            ],
            rows=rows,
            sources=sources,
            targets=targets,
            positions=positions,
            dropped=sequence.stored - packing.kept,
            moved_bytes=self._slot_bytes() * len(rows) // len(kept),
        )

    def execute(self, plan: CompactionPlan) -> None:
        """Copy survivors into their new slots. Raises what the model does."""
        retained, size = plan.sequence.retained, self._memory.block_tokens
        assert retained is not None
        retained.begun = True
        retained.plain = min(retained.plain, _leading_plain(plan.positions))
        if not len(plan.rows):
            return
        rows = plan.rows if len(plan.positions) > 1 else None
        for g, (old, new) in enumerate(zip(plan.sequence.tables, plan.tables, strict=True)):
            sources = _slots(plan.sources, old, size)
            self._model.move_slots(g, sources, _slots(plan.targets, new, size), rows)

    def commit(self, plan: CompactionPlan) -> int:
        """The new tables are the sequence's; returns how many blocks that made available, net, over
        all groups. Sources that others hold stay theirs."""
        sequence, retained = plan.sequence, plan.sequence.retained
        assert retained is not None and retained.begun
        before = self._available() + int(plan.copied.sum()) * len(plan.tables)
        self._memory.replace_tables(sequence, plan.tables, np.where(plan.copied, -1, plan.order))
        sequence.dropped += plan.dropped
        retained.positions = plan.positions
        freed = self._available() - before
        total = self.total
        total.rounds += 1
        total.dropped_tokens += plan.dropped
        total.freed_blocks += freed
        total.moved_bytes += plan.moved_bytes
        return freed

    def abort(self, plan: CompactionPlan) -> None:
        """Nothing of it happens; the sequence has all its survivors, if not all its tokens once
        `execute` has begun."""
        for pool, table in zip(self._memory.pools, plan.tables, strict=True):
            pool.release(np.array(table)[plan.copied].tolist())

    def _copied(self, sequence: Sequence, packing: Packing) -> Mask:
        """[pages] new pages that are written and that somebody else holds, in any group."""
        written = np.zeros(len(packing.order), dtype=np.bool_)
        written[packing.targets // self._memory.block_tokens] = True
        shared = [
            [pool.references(table[page]) > 1 for page in packing.order.tolist()]
            for pool, table in zip(self._memory.pools, sequence.tables, strict=True)
        ]
        return written & np.array(shared, dtype=np.bool_).any(axis=0)

    def _available(self) -> int:
        return sum(self._memory.available(g) for g in range(len(self._memory.pools)))

    def _slot_bytes(self) -> int:
        """Of one token, all groups and ranks."""
        size = self._memory.block_tokens
        return sum(p.group.block_bytes * p.group.ranks // size for p in self._memory.pools)


def _with_copies(packing: Packing, copied: Mask) -> tuple[Longs, Longs, Longs]:
    """Rows, sources and targets of all moves: of a copied page those too that stay in it."""
    if not copied.any():
        return packing.rows, packing.sources, packing.targets
    size = packing.staying.shape[2]
    rows, page, offset = np.nonzero(packing.staying & copied[:, None])
    sources = packing.order.astype(np.int64)[page] * size + offset
    return (
        np.concatenate([packing.rows, rows]),
        np.concatenate([packing.sources, sources]),
        np.concatenate([packing.targets, page * size + offset]),
    )


def _table(order: Ints, copied: Mask, table: list[int], fresh: list[int]) -> list[int]:
    """The new order's blocks, each fresh one once."""
    blocks = np.array(table)[order]
    blocks[copied] = fresh
    return [int(block) for block in blocks]


def _slots(at: Longs, table: list[int], block_tokens: int) -> Longs:
    """Slots of the pool at these slots of the table."""
    page, offset = np.divmod(at, block_tokens)
    return np.array(table, dtype=np.int64)[page] * block_tokens + offset


def _positions(packing: Packing, before: Ints, rows: int, block_tokens: int) -> Ints:
    """[rows, kept]: what lies where after the moves."""
    old = np.broadcast_to(before, (rows, before.shape[1]))
    pages = -(-old.shape[1] // block_tokens)
    padded = np.full((rows, pages * block_tokens), -1, dtype=np.int32)
    padded[:, : old.shape[1]] = old
    after = padded.reshape(rows, pages, block_tokens)[:, packing.order].reshape(rows, -1)
    after[packing.rows, packing.targets] = padded[packing.rows, packing.sources]
    return after[:, : packing.kept].copy()


def _leading_plain(positions: Ints) -> int:
    """Leading slots that hold, in all rows, the token of their own number."""
    same = (positions == np.arange(positions.shape[1], dtype=np.int32)).all(axis=0)
    return len(same) if same.all() else int(same.argmin())
