"""The order of one replica's block events: what is applied, held back, ignored, or asked for again.

It knows sequence numbers, snapshots and digests; not how events travel, nor what blocks are for.

A batch is applied when it follows the last one. After a gap, a malformed batch or a wrong digest a
snapshot is asked for; live batches are held back meanwhile (bounded) and follow it. A snapshot is
built in a slot of its own and takes the old view's place when its last part has arrived, so the old
view serves until then. Anything at or before the applied number is a repetition and changes
nothing: a late removal or a late store cannot undo what came after it.

Of the shared tier, which tells nobody what it lost, only what was stored lately is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from banyan.v1 import internal_pb2
from kvstore.keys import KEY_BYTES
from router.generations import Generations
from router.index import DEVICE, GROUPS_MAX, SHARED, PrefixIndex, prefix, prefixes
from router.provisional import Provisional

HELD_BATCHES_MAX = 4096
HELD_BYTES_MAX = 64 * 1024 * 1024
ASK_AGAIN_S = 1.0  # without a part of the snapshot that was asked for
HOLDOFF_S = 0.25  # between requests after wrong digests in a row; a lasting difference must not
HOLDOFF_DOUBLES_AFTER = 12  # become a stream of snapshots, a bad line must not delay the truth
HOLDOFF_S_MAX = 60.0
DISTRUSTED_MAX = 3  # snapshots in a row that may be refused for their digest


class Want(Enum):
    """Why a snapshot is wanted."""

    NOTHING = "nothing"
    START = "start"
    GAP = "gap"
    DIGEST = "digest"


@dataclass
class EventCounts:
    """Totals of one replica's stream."""

    applied: int = 0
    ignored: int = 0
    held: int = 0
    gaps: int = 0
    snapshots: int = 0
    digest_mismatches: int = 0
    malformed_ops: int = 0


class BlockStream:
    """One (replica, epoch)'s events, applied to the index. `slot` is the view that serves now."""

    def __init__(self, index: PrefixIndex, provisional: Provisional) -> None:
        self._index, self._provisional = index, provisional
        self.counts = EventCounts()
        self.slot = index.allocate()
        index.set_live(self.slot, True)
        self.seq: int | None = None  # of the last batch applied
        self.want = Want.START
        self._shadow: int | None = None  # slot of the snapshot being received
        self._shadow_seq = 0
        self._shared = Generations()  # blocks of the view that are said to be on the shared tier
        self._shadow_shared = Generations()
        self._snapshot_seq: int | None = None  # of the last one completed
        self._held: dict[int, internal_pb2.EventBatch] = {}
        self._held_bytes = 0
        self._ask_at_s = float("-inf")
        self._wrong_in_a_row = 0

    def close(self) -> None:
        """The replica or its epoch is gone: its blocks leave the index."""
        self._provisional.forget(self.slot)
        self._index.retire(self.slot)
        self._drop_shadow()
        self._held.clear()

    def receive(self, batch: internal_pb2.EventBatch, now_s: float) -> bool:
        """Apply, hold or ignore `batch`; True = ask the replica for a snapshot now."""
        if batch.snapshot:
            return self._receive_snapshot(batch, now_s)
        if self.seq is not None and batch.seq <= self.seq:
            self.counts.ignored += 1
            return self._ask(now_s)
        if self.want is Want.NOTHING and self.seq is not None and batch.seq == self.seq + 1:
            self._apply_next(batch, now_s)
        else:
            self._hold(batch)
            if self.want is Want.NOTHING:
                self.counts.gaps += 1
                self.want = Want.GAP
            if self.want is Want.GAP and self._shadow is None:
                self._drain(now_s)  # the missing batch may only have been late
        return self._ask(now_s)

    # ---- Live batches ----

    def _hold(self, batch: internal_pb2.EventBatch) -> None:
        if batch.seq in self._held:
            self.counts.ignored += 1
            return
        self.counts.held += 1
        self._held[batch.seq] = batch
        self._held_bytes += batch.ByteSize()
        while len(self._held) > HELD_BATCHES_MAX or self._held_bytes > HELD_BYTES_MAX:
            self._release(min(self._held))  # the oldest: a later snapshot may cover it

    def _release(self, seq: int) -> internal_pb2.EventBatch:
        batch = self._held.pop(seq)
        self._held_bytes -= batch.ByteSize()
        return batch

    def _drain(self, now_s: float) -> None:
        """Apply the held batches that follow; a gap that closes ends the wish for a snapshot."""
        assert self.seq is not None
        for seq in [seq for seq in self._held if seq <= self.seq]:
            self._release(seq)
        while self.want in (Want.NOTHING, Want.GAP) and self.seq + 1 in self._held:
            self._apply_next(self._release(self.seq + 1), now_s)
        if self.want in (Want.NOTHING, Want.GAP):
            self.want = Want.GAP if self._held else Want.NOTHING

    def _apply_next(self, batch: internal_pb2.EventBatch, now_s: float) -> None:
        whole = self._apply(self.slot, self._shared, batch)
        self.seq = batch.seq
        self.counts.applied += 1
        if not self._agrees(self.slot, batch) or not whole:
            self._distrust(now_s)
        elif batch.digest:
            self._wrong_in_a_row = 0

    def _agrees(self, slot: int, batch: internal_pb2.EventBatch) -> bool:
        if not batch.digest or prefix(batch.digest) == self._index.digest(slot):
            return True
        self.counts.digest_mismatches += 1
        return False

    def _distrust(self, now_s: float) -> None:
        """The view is wrong: want a snapshot, at once or, if that recurs, after a while."""
        if self._wrong_in_a_row:
            doublings = min(max(0, self._wrong_in_a_row - HOLDOFF_DOUBLES_AFTER), 16)
            self._ask_at_s = now_s + min(HOLDOFF_S * 2**doublings, HOLDOFF_S_MAX)
        self._wrong_in_a_row += 1
        self.want = Want.DIGEST

    def _ask(self, now_s: float) -> bool:
        if self.want is Want.NOTHING or now_s < self._ask_at_s:
            return False
        self._ask_at_s = now_s + ASK_AGAIN_S
        return True

    # ---- Snapshots ----

    def _receive_snapshot(self, batch: internal_pb2.EventBatch, now_s: float) -> bool:
        if self._is_stale(batch.seq):
            self.counts.ignored += 1
            return self._ask(now_s)
        if self._shadow is None or batch.seq != self._shadow_seq:
            self._drop_shadow()
            self._shadow, self._shadow_seq = self._index.allocate(), batch.seq
            self._shadow_shared = Generations()
        whole = self._apply(self._shadow, self._shadow_shared, batch)
        self._ask_at_s = max(self._ask_at_s, now_s + ASK_AGAIN_S)  # it is on its way
        if batch.snapshot_last:
            self._complete(self._shadow, batch, whole, now_s)
        return self._ask(now_s)

    def _is_stale(self, seq: int) -> bool:
        if self._shadow is not None and seq < self._shadow_seq:
            return True
        if self.seq is not None and seq < self.seq:
            return True
        return self.want is Want.NOTHING and seq == self._snapshot_seq  # sent twice

    def _complete(
        self, shadow: int, batch: internal_pb2.EventBatch, whole: bool, now_s: float
    ) -> None:
        self.counts.snapshots += 1
        right = self._agrees(shadow, batch) and whole
        self._ask_at_s = float("-inf")
        if not right and self._wrong_in_a_row < DISTRUSTED_MAX:
            self._drop_shadow()
            self._distrust(now_s)
            return
        self._shadow = None
        self._replace_view(shadow)
        self.seq = self._snapshot_seq = batch.seq
        self.want = Want.NOTHING
        if right and batch.digest:
            self._wrong_in_a_row = 0
        self._drain(now_s)

    def _replace_view(self, new_slot: int) -> None:
        old, self.slot = self.slot, new_slot
        self._shared = self._shadow_shared
        self._index.set_live(new_slot, True)
        self._provisional.rebase(old, new_slot)
        self._index.retire(old)

    def _drop_shadow(self) -> None:
        if self._shadow is not None:
            self._index.retire(self._shadow)
            self._shadow = None

    # ---- Operations ----

    def _apply(self, slot: int, shared: Generations, batch: internal_pb2.EventBatch) -> bool:
        """Apply all operations; False if some were malformed (they are left out)."""
        malformed = sum(not self._apply_op(slot, shared, op) for op in batch.ops)
        self.counts.malformed_ops += malformed
        return not malformed

    def _apply_op(self, slot: int, shared: Generations, op: internal_pb2.BlockOp) -> bool:
        tier, group, packed = int(op.tier), op.group, op.keys
        if len(packed) % KEY_BYTES or not DEVICE <= tier <= SHARED or group >= GROUPS_MAX:
            return False
        apply = self._operation(op.kind)
        if apply is None:
            return False
        if packed:
            keys = prefixes(packed, group)
            apply(slot, tier, keys)
            moved = op.kind == internal_pb2.BlockOp.KIND_MOVED
            if moved or (op.kind == internal_pb2.BlockOp.KIND_REMOVED and tier != SHARED):
                self._follow_removal(slot, keys)
            if tier == SHARED and op.kind != internal_pb2.BlockOp.KIND_REMOVED:
                self._index.remove(slot, SHARED, shared.note(keys))
        return True

    def _operation(self, kind: int) -> Callable[[int, int, list[int]], None] | None:
        if kind == internal_pb2.BlockOp.KIND_STORED:
            return self._index.store
        if kind == internal_pb2.BlockOp.KIND_REMOVED:
            return self._index.remove
        if kind == internal_pb2.BlockOp.KIND_MOVED:
            return self._index.move
        return None

    def _follow_removal(self, slot: int, keys: list[int]) -> None:
        gone = [key for key in keys if not self._index.on_device(slot, key)]
        if gone:
            self._provisional.removed(slot, gone)
