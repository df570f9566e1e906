"""One record to or from one slot: one disk operation and every check. It knows no index.

The payload goes straight between the caller's memory and the disk where its address and length
allow it, else by way of an aligned buffer that each thread has.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import NamedTuple

import numpy as np

from kvstore import record
from kvstore.record import HEADER_BYTES
from kvstore.tiers.base import BlockName
from seams.blockdevice import PAGE_BYTES, BlockDevice

_NO_BYTES = bytes(PAGE_BYTES)


class Reading(NamedTuple):
    """What a slot held: the header if it is one, and what is wrong (None: nothing)."""

    header: record.Header | None
    fault: str | None


def _address(view: memoryview) -> int:
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class SlotIO:
    """Reads and writes records of one representation. Thread-safe for different slots."""

    def __init__(self, representation: str, payload_bytes_max: int, memory_alignment: int) -> None:
        self._representation = representation
        self._buffer_bytes = HEADER_BYTES + -(-payload_bytes_max // PAGE_BYTES) * PAGE_BYTES
        self._alignment = memory_alignment
        self._of_thread = threading.local()

    def _buffer(self) -> memoryview:
        """This thread's: a header page and room for the longest payload, page-aligned."""
        buffer: memoryview | None = getattr(self._of_thread, "buffer", None)
        if buffer is None:
            buffer = memoryview(mmap.mmap(-1, self._buffer_bytes))
            self._of_thread.buffer = buffer
        return buffer

    def _goes_straight(self, payload: memoryview) -> bool:
        if self._alignment == 1:
            return True
        return len(payload) % PAGE_BYTES == 0 and _address(payload) % self._alignment == 0

    def write(
        self, device: BlockDevice, offset: int, name: BlockName, payload: memoryview, seq: int
    ) -> None:
        """Put the record of `payload` (bytes) at `offset`. Raises OSError; the slot is then torn,
        which a read finds out."""
        buffer = self._buffer()
        header = record.encode(name, self._representation, payload, seq)
        buffer[: len(header)] = header
        buffer[len(header) : HEADER_BYTES] = _NO_BYTES[len(header) :]
        if self._goes_straight(payload):
            device.writev(offset, [buffer[:HEADER_BYTES], payload])
            return
        end = HEADER_BYTES + len(payload)
        padded = -(-end // PAGE_BYTES) * PAGE_BYTES
        buffer[HEADER_BYTES:end] = payload
        buffer[end:padded] = _NO_BYTES[: padded - end]
        device.writev(offset, [buffer[:padded]])

    def read(self, device: BlockDevice, offset: int, name: BlockName, into: memoryview) -> Reading:
        """Fill `into` with the payload of the record at `offset` if it is `name`, whole and as it
        was stored. Raises OSError."""
        buffer = self._buffer()
        end = HEADER_BYTES + len(into)
        if self._goes_straight(into):
            count = device.readv(offset, [buffer[:HEADER_BYTES], into])
        else:
            count = device.readv(offset, [buffer[: -(-end // PAGE_BYTES) * PAGE_BYTES]])
            into[:] = buffer[HEADER_BYTES:end]
        header = record.decode(buffer[: min(count, HEADER_BYTES)])
        if isinstance(header, str):
            return Reading(None, header)
        if count < end and header.name == name:
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
