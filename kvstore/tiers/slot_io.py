"""Records to or from slots side by side: one disk operation and every check. It knows no index.

The payload goes straight between the caller's memory and the disk where its address and length
allow it, else by way of an aligned buffer that each thread has.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore import record
from kvstore.record import HEADER_BYTES
from kvstore.tiers.base import BlockName
from kvstore.tiers.slot_runs import RUN_BLOCKS_MAX
from seams.blockdevice import PAGE_BYTES, BlockDevice

_NO_BYTES = bytes(PAGE_BYTES)


class Reading(NamedTuple):
    """What a slot held: the header if it is one, and what is wrong (None: nothing)."""

    header: record.Header | None
    fault: str | None


class Record(NamedTuple):
    """What is to be written."""

    name: BlockName
    payload: memoryview  # of bytes
    seq: int


class _Buffers(threading.local):
    """Page-aligned memory of one thread: a whole slot, and the header pages of a run."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot = memoryview(mmap.mmap(-1, slot_bytes))
        pages = memoryview(mmap.mmap(-1, RUN_BLOCKS_MAX * HEADER_BYTES))
        starts = range(0, len(pages), HEADER_BYTES)
        self.headers = [pages[start : start + HEADER_BYTES] for start in starts]


def _address(view: memoryview) -> int:
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class SlotIO:
    """Reads and writes records of one representation. Thread-safe for different slots."""

    def __init__(self, representation: str, payload_bytes_max: int, memory_alignment: int) -> None:
        self._representation = representation
        self._alignment = memory_alignment
        padded = -(-payload_bytes_max // PAGE_BYTES) * PAGE_BYTES
        self._own = _Buffers(HEADER_BYTES + padded)

    def _buffer(self) -> memoryview:
        """This thread's: a header page and room for the longest payload, page-aligned."""
        return self._own.slot

    def _goes_straight(self, payload: memoryview) -> bool:
        if self._alignment == 1:
            return True
        return len(payload) % PAGE_BYTES == 0 and _address(payload) % self._alignment == 0

    def joins(self, payload: memoryview) -> bool:
        """Whether a record of `payload` may share a disk operation with its neighbours: it fills
        its slot, straight from where it lies."""
        return len(payload) % PAGE_BYTES == 0 and self._goes_straight(payload)

    def write(self, device: BlockDevice, offset: int, records: Sequence[Record]) -> None:
        """Put the records into the slots from `offset` on; several only if each `joins`. Raises
        OSError; any of the slots may then be torn, which a read finds out."""
        if len(records) == 1 and not self._goes_straight(records[0].payload):
            self._write_copied(device, offset, records[0])
            return
        parts = list[memoryview]()
        for page, new in zip(self._own.headers, records, strict=False):
            page[:] = self._encoded(new)
            parts += (page, new.payload)
        device.writev(offset, parts)

    def _encoded(self, new: Record) -> bytes:
        header = record.encode(new.name, self._representation, new.payload, new.seq)
        return header.ljust(HEADER_BYTES, b"\0")

    def _write_copied(self, device: BlockDevice, offset: int, new: Record) -> None:
        buffer = self._buffer()
        buffer[:HEADER_BYTES] = self._encoded(new)
        end = HEADER_BYTES + len(new.payload)
        padded = -(-end // PAGE_BYTES) * PAGE_BYTES
        buffer[HEADER_BYTES:end] = new.payload
        buffer[end:padded] = _NO_BYTES[: padded - end]
        device.writev(offset, [buffer[:padded]])

    def read(
        self, device: BlockDevice, offset: int, wanted: Sequence[tuple[BlockName, memoryview]]
    ) -> list[Reading] | None:
        """Fill each view with the payload of its record if that lies there, whole and as it was
        stored: the first at `offset`, the others in the slots after it; several only if each
        `joins`. None if of several not all could be read. Raises OSError."""
        name, into = wanted[0]
        end = HEADER_BYTES + len(into)
        assert 0 < len(wanted) <= RUN_BLOCKS_MAX
        if len(wanted) == 1 and not self._goes_straight(into):
            buffer = self._buffer()
            count = device.readv(offset, [buffer[: -(-end // PAGE_BYTES) * PAGE_BYTES]])
            into[:] = buffer[HEADER_BYTES:end]
            return [self._judged(name, buffer[:HEADER_BYTES], into, count)]
        pairs = list(zip(self._own.headers, wanted, strict=False))
        parts = [part for page, (_, view) in pairs for part in (page, view)]
        count = device.readv(offset, parts)
        if len(wanted) > 1:
            if count < sum(map(len, parts)):
                return None
            count = end
        return [self._judged(name, page, view, count) for page, (name, view) in pairs]

    def _judged(self, name: BlockName, page: memoryview, into: memoryview, count: int) -> Reading:
        """What the first `count` bytes of a slot, header page and payload, are."""
        header = record.decode(page[:count])
        if isinstance(header, str):
            return Reading(None, header)
        if count < HEADER_BYTES + len(into) and header.name == name:
            return Reading(header, "length")
        return Reading(header, record.fault(header, name, self._representation, into))

    def read_header(self, device: BlockDevice, offset: int) -> record.Header | None:
        """The header at `offset`, if there is one of this representation. Raises OSError."""
        page = self._buffer()[:HEADER_BYTES]
        header = record.decode(page[: device.readv(offset, [page])])
        if isinstance(header, str) or header.representation != self._representation:
            return None
        return header

    def read_whole(
        self, device: BlockDevice, offset: int, slot_bytes: int, *, payloads: bool = True
    ) -> Reading:
        """Check the record at `offset` against itself, whatever its name and representation; no
        header and no fault for a slot never written. Without `payloads` only its header. Raises
        OSError."""
        buffer = self._buffer()[: slot_bytes if payloads else HEADER_BYTES]
        count = device.readv(offset, [buffer])
        header = record.decode(buffer[: min(count, HEADER_BYTES)])
        if isinstance(header, str):
            unused = header == "magic" and buffer[: min(count, HEADER_BYTES)] == _NO_BYTES
            return Reading(None, None if unused else header)
        end = HEADER_BYTES + header.payload_bytes
        if not payloads:
            return Reading(header, None)
        if end > count:
            return Reading(header, "length")
        payload = buffer[HEADER_BYTES:end]
        return Reading(header, record.fault(header, header.name, header.representation, payload))

    def erase(self, device: BlockDevice, offset: int) -> None:
        """Write over a record's header, so that no later start finds it. Raises OSError."""
        page = self._buffer()[:HEADER_BYTES]
        page[:] = _NO_BYTES
        device.writev(offset, [page])
