"""BlockDevice: random access to bytes that outlive the process, without knowing what they mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class BlockDevice(Protocol):
    """A fixed number of bytes, read and written at offsets. Errors are OSError, as a disk's."""

    @property
    def size_bytes(self) -> int:
        """The capacity; constant."""
        ...

    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; returns the bytes read, fewer only at the device's end."""
        ...

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at `offset`. Visible to later reads; durable only after `sync`."""
        ...

    def sync(self) -> None:
        """Return once everything written so far survives a power cut."""
        ...

    def close(self) -> None:
        """Release the device; nothing may be called afterwards. Safe to repeat."""
        ...


def _check_range(device: BlockDevice, offset: int, length: int) -> None:
    assert offset >= 0 and offset + length <= device.size_bytes, "range outside the device"


class FileBlockDevice:
    """A preallocated file, mode 0600, created if missing. Raises OSError if there is no room."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(self._fd).st_size < size_bytes:
                os.posix_fallocate(self._fd, 0, size_bytes)
        except OSError:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, offset: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def write(self, offset: int, data: memoryview | bytes) -> None:
        _check_range(self, offset, len(data))
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], offset + done)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemoryBlockDevice:
    """A device in memory whose unsynced writes can be lost, to simulate power cuts."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = bytearray(size_bytes)
        self._durable = bytes(size_bytes)

    @property
    def size_bytes(self) -> int:
        return len(self._bytes)

    def read_into(self, offset: int, into: memoryview) -> int:
        chunk = self._bytes[offset : offset + len(into)]
        into[: len(chunk)] = chunk
        return len(chunk)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        _check_range(self, offset, len(data))
        self._bytes[offset : offset + len(data)] = data

    def sync(self) -> None:
        self._durable = bytes(self._bytes)

    def cut_power(self) -> None:
        """Forget everything since the last `sync`."""
        self._bytes = bytearray(self._durable)

    def close(self) -> None:
        """Nothing to release."""
