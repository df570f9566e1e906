"""One `load` or `store` of the shared tier under way: its requests, its replies, what they say.

It knows no connections and no breaker: a Wire is given to it, and a LinkFault goes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore import record
from kvstore.tiers.base import BlockName, Status
from kvstore.tiers.redis_layout import Buffer, get_requests, part_sizes, set_requests
from kvstore.tiers.redis_wire import LinkFault, ServerError, Wire

BATCH_BYTES = 8 << 20
"""Payload asked for or sent before its replies are read: what a slow server must hold for us."""
_FOREIGN = "magic"  # record.FAULTS' word for "no record of ours"


def _batches(indices: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """`indices` in runs of about BATCH_BYTES, each at least one long."""
    batch: list[int] = []
    held = 0
    for index in indices:
        if batch and held + sizes[index] > BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(index)
        held += sizes[index]
    if batch:
        yield batch


class LoadCall:
    """One `load` under way: what is wanted and what became of it."""

    def __init__(
        self,
        start: bytes,
        representation: str,
        names: Sequence[BlockName],
        into: Sequence[memoryview],
    ) -> None:
        self._start, self._representation = start, representation
        self.names, self._into = names, [view.cast("B") for view in into]
        self._sizes = [part_sizes(view.nbytes) for view in into]
        self.statuses: list[Status | None] = [None] * len(names)
        self.hits = self.loaded_bytes = 0
        self.odd: list[BlockName] = []  # to be deleted
        self.faults: list[str] = []

    @property
    def parts(self) -> dict[tuple[int, int], int]:
        """(group, rank) -> parts of its blocks."""
        pairs = zip(self.names, self._sizes, strict=True)
        return {(name.group, name.rank): len(sizes) for name, sizes in pairs}

    def batches(self) -> Iterator[list[int]]:
        """Indices of the blocks of each round trip."""
        return _batches(range(len(self.names)), [len(view) for view in self._into])

    def requests(self, index: int) -> bytes:
        """What to send for one block."""
        return get_requests(self._start, self.names[index], len(self._sizes[index]))

    def read(self, wire: Wire, index: int) -> Status | ServerError:
        """The replies to `requests(index)`; its content is in place if that is OK."""
        try:
            return self._read(wire, index)
        except LinkFault as fault:
            if fault.cause == "odd":  # a value of no size of ours would end every load from now on
                self.statuses[index] = self._corrupt(index, "length", wire)
            raise

    def _read(self, wire: Wire, index: int) -> Status | ServerError:
        """All replies are read, whatever the first of them says."""
        view, sizes = self._into[index], self._sizes[index]
        first = wire.bulk(wire.first)
        front: list[int | ServerError] = []
        offset = 0
        for size in sizes[1:]:
            front.append(wire.bulk(view[offset : offset + size]))
            offset += size
        errors = [answer for answer in (first, *front) if isinstance(answer, ServerError)]
        for error in errors:
            if error.code != "WRONGTYPE":
                return error
        if errors:
            return self._corrupt(index, _FOREIGN, wire)
        assert isinstance(first, int)
        if first < 0:
            return Status.MISS
        if -1 in front:  # the server evicted one part, or somebody is storing or deleting it now
            self.odd.append(self.names[index])
            return Status.MISS
        whole = tuple(front) == sizes[1:] and first <= len(wire.first) and first >= sizes[0]
        fault = self._fault(wire.first[: min(first, len(wire.first))], index, offset, whole)
        if fault is not None:
            return self._corrupt(index, fault, wire)
        self.hits += 1
        self.loaded_bytes += first + offset
        return Status.OK

    def _fault(self, first: memoryview, index: int, offset: int, whole: bool) -> str | None:
        """What is wrong with a record, its front already in place; puts the rest there."""
        header = record.decode(first)
        if isinstance(header, str):
            return header
        view = self._into[index]
        rest = len(view) - offset
        if whole:
            view[offset:] = first[len(first) - rest :]
        found = record.fault(
            header, self.names[index], self._representation, view if whole else b""
        )
        return found if whole else found or "length"

    def _corrupt(self, index: int, fault: str, wire: Wire) -> Status:
        wire.suspect = wire.suspect or fault == "length"
        self.odd.append(self.names[index])
        self.faults.append(fault)
        return Status.CORRUPT


class StoreCall:
    """One `store` under way."""

    def __init__(
        self,
        start: bytes,
        representation: str,
        ttl_s: int,
        names: Sequence[BlockName],
        data: Sequence[memoryview],
    ) -> None:
        self._start, self._representation, self._ttl_s = start, representation, ttl_s
        self.names, self._data = names, [view.cast("B") for view in data]
        self.statuses: list[Status | None] = [None] * len(names)
        self.torn: list[BlockName] = []  # refused, perhaps after some of its parts were taken
        self.stored = self.stored_bytes = 0

    @property
    def parts(self) -> dict[tuple[int, int], int]:
        """(group, rank) -> parts of its blocks."""
        pairs = zip(self.names, self._data, strict=True)
        return {(name.group, name.rank): len(part_sizes(len(view))) for name, view in pairs}

    def batches(self) -> Iterator[list[int]]:
        """What is not there yet."""
        missing = [index for index, status in enumerate(self.statuses) if status is None]
        return _batches(missing, [len(view) for view in self._data])

    def send(self, wire: Wire, batch: Sequence[int]) -> ServerError | None:
        """One round trip: store a batch. The first of the server's refusals."""
        buffers: list[Buffer] = []
        replies = []
        for index in batch:
            name, view = self.names[index], self._data[index]
            header = record.encode(name, self._representation, view)
            pieces, count = set_requests(self._start, name, header, view, self._ttl_s)
            buffers += pieces
            replies.append(count)
        wire.send(buffers)
        refusals = [self._read(wire, i, count) for i, count in zip(batch, replies, strict=True)]
        return next((error for error in refusals if error is not None), None)

    def _read(self, wire: Wire, index: int, replies: int) -> ServerError | None:
        errors = [error for error in (wire.done() for _ in range(replies)) if error is not None]
        if errors:
            self.statuses[index] = Status.FAILED
            self.torn.append(self.names[index])
            return errors[0]
        self.statuses[index] = Status.OK
        self.stored += 1
        self.stored_bytes += len(self._data[index])
        return None

    def give_up(self) -> None:
        """Whatever is not stored now is dropped."""
        self.statuses = [s if s is Status.OK else Status.DROPPED for s in self.statuses]
