"""EventLog: a replica's block events in order, numbered. Synchronous; knows no network or engine.

One numbering for all routers: batch n is the same batch for each of them. A cursor is one router's
place in the log. Batches are kept up to a bound; a cursor that falls behind it, or is new, or is
asked to, starts over from a snapshot valid at the log's number of that moment.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from functools import reduce

from banyan.v1 import internal_pb2
from kvstore.keys import KEY_BYTES
from worker.engine.messages import CacheOp, CacheOpKind
from worker.service.convert import block_ops

PART_KEYS_MAX = 8192  # keys in one message: 128 KiB
KEPT_KEYS_MAX = 1 << 18  # keys in kept batches: 4 MiB, whatever the number of routers
KEPT_BATCHES_MAX = 1 << 14


def _parts(ops: Iterable[CacheOp], keys_max: int) -> list[list[CacheOp]]:
    """Cut `ops` into runs of at most `keys_max` keys, order kept; one empty run if there are none.

    No op is empty, so a message also holds at most `keys_max` ops.
    """
    parts: list[list[CacheOp]] = [[]]
    room = keys_max
    for op in ops:
        start = 0
        while start < len(op.keys):
            if room == 0:
                parts.append([])
                room = keys_max
            keys = op.keys[start : start + room]
            parts[-1].append(CacheOp(op.kind, op.group, keys, op.tier))
            start += len(keys)
            room -= len(keys)
    return parts


def xor(keys: Iterable[bytes]) -> int:
    """All keys xored, as an integer."""
    return reduce(operator.xor, (int.from_bytes(key, "little") for key in keys), 0)


def digest_of(ops: Iterable[CacheOp]) -> int:
    """Xor of the device's group-0 keys in `ops`: what they change in the digest."""
    return xor(key for op in ops if op.group == 0 and op.tier == 0 for key in op.keys)


class EventLog:
    """All block events of one epoch. `append` in the order of the engine's StepOutputs."""

    def __init__(
        self,
        replica: str,
        epoch: int,
        *,
        part_keys_max: int = PART_KEYS_MAX,
        kept_keys_max: int = KEPT_KEYS_MAX,
    ) -> None:
        self._replica = replica
        self._epoch = epoch
        self._part_keys_max = part_keys_max
        self._kept_keys_max = kept_keys_max
        self._kept: deque[tuple[internal_pb2.EventBatch, int]] = deque()
        self._kept_keys = 0
        self._digest = 0
        self._snapshot_keys: set[bytes] | None = None  # of group 0, until `append` settles it
        self.seq = 0  # of the newest batch
        self.digest_repairs = 0  # times the cache's content contradicted its events

    @property
    def digest(self) -> bytes:
        """Xor of the device keys of group 0 after batch `seq`; 16 bytes little endian."""
        return self._digest.to_bytes(KEY_BYTES, "little")

    @property
    def first_kept(self) -> int:
        """Number of the oldest batch still here; seq + 1 if there is none."""
        return self.seq + 1 - len(self._kept)

    def append(self, ops: Sequence[CacheOp]) -> None:
        """Number `ops` as one or more batches and keep them; drops the oldest over the bound."""
        if not any(op.keys for op in ops):
            return
        for part in _parts(ops, self._part_keys_max):
            self._digest ^= digest_of(part)
            self._keep(part, b"")
        if self._snapshot_keys is not None:
            self._settle(self._snapshot_keys, ops)

    def mark(self) -> None:
        """Append an empty batch that carries the digest, so that a silent loss is noticed.

        No digest while a snapshot is ahead of the events: it would be wrong for one side.
        """
        self._keep([], b"" if self._snapshot_keys is not None else self.digest)

    def _settle(self, held: set[bytes], ops: Sequence[CacheOp]) -> None:
        """The first events after a snapshot may repeat what it holds; with them both agree, or the
        running digest is wrong and set right."""
        for op in ops:
            if op.group == 0 and op.tier == 0:
                change = held.update if op.kind is CacheOpKind.STORED else held.difference_update
                change(op.keys)
        self._snapshot_keys = None
        truth = xor(held)
        if truth != self._digest:
            self._digest = truth
            self.digest_repairs += 1

    def _keep(self, part: list[CacheOp], digest: bytes) -> None:
        self.seq += 1
        keys = sum(len(op.keys) for op in part)
        self._kept.append((self._batch(part, self.seq, digest), keys))
        self._kept_keys += keys
        while self._kept_keys > self._kept_keys_max or len(self._kept) > KEPT_BATCHES_MAX:
            self._kept_keys -= self._kept.popleft()[1]

    def _batch(self, part: list[CacheOp], seq: int, digest: bytes) -> internal_pb2.EventBatch:
        return internal_pb2.EventBatch(
            replica=self._replica,
            epoch=self._epoch,
            seq=seq,
            ops=block_ops(part),
            digest=digest,
        )

    def kept(self, seq: int) -> internal_pb2.EventBatch:
        """Batch `seq`, which must be kept. Shared by all cursors: not to be changed."""
        assert self.first_kept <= seq <= self.seq
        return self._kept[seq - self.first_kept][0]

    def snapshot(self, ops: Sequence[CacheOp]) -> list[internal_pb2.EventBatch]:
        """`ops` (STORED of all that is cached now) as parts valid at `seq`, the last one marked.

        The cache may be ahead of the events by what the next step's output will tell: such events
        apply to the snapshot again without harm.
        """
        digest = digest_of(ops)
        if digest != self._digest:
            self._snapshot_keys = {
                key for op in ops if op.group == 0 and op.tier == 0 for key in op.keys
            }
        parts = [self._batch(part, self.seq, b"") for part in _parts(ops, self._part_keys_max)]
        for part in parts:
            part.snapshot = True
        parts[-1].snapshot_last = True
        parts[-1].digest = digest.to_bytes(KEY_BYTES, "little")
        return parts


class Cursor:
    """One router's place in the log: what to send it next. A new one wants a snapshot."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._parts: deque[internal_pb2.EventBatch] = deque()
        self._next = 0
        self.wants_snapshot = True
        self.snapshots = 0  # begun so far

    def want_snapshot(self) -> None:
        """The router asks to start over: nothing is sent before `begin`."""
        self._parts.clear()
        self.wants_snapshot = True

    def begin(self, ops: Sequence[CacheOp]) -> None:
        """Start over from `ops`, the cache's content at the log's present number."""
        self._parts = deque(self._log.snapshot(ops))
        self._next = self._log.seq + 1
        self.wants_snapshot = False
        self.snapshots += 1

    def take(self) -> internal_pb2.EventBatch | None:
        """The next batch to send, None if there is none now. Not to be changed by the caller.

        Sets `wants_snapshot` if the next batch is no longer kept.
        """
        if self.wants_snapshot:
            return None
        if self._parts:
            return self._parts.popleft()
        if self._next < self._log.first_kept:
            self.want_snapshot()
            return None
        if self._next > self._log.seq:
            return None
        self._next += 1
        return self._log.kept(self._next - 1)
