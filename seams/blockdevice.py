"""BlockDevice: random access to bytes that outlive the process, without knowing what they mean."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

PAGE_BYTES = 4096
"""What a disk writes at once, at least; direct IO wants offsets and lengths in it."""


class PageCache(Enum):
    """What the operating system keeps in memory of a file we read and write."""

    KEPT = "kept"
    DROPPED = "dropped"  # after each read
    BYPASSED = "bypassed"  # O_DIRECT: aligned offsets, lengths and addresses only


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

    def readv(self, offset: int, into: Sequence[memoryview]) -> int:
        """Fill the parts one after the other, in one operation; returns as `read_into`."""
        ...

    def writev(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write the parts one after the other, in one operation; else as `write`."""
        ...

    def sync(self) -> None:
        """Return once everything written so far survives a power cut."""
        ...

    def close(self) -> None:
        """Release the device; nothing may be called afterwards. Safe to repeat."""
        ...


def _check_range(device: BlockDevice, offset: int, length: int) -> None:
    assert offset >= 0 and offset + length <= device.size_bytes, "range outside the device"


def _after(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of `parts` after their first `done` bytes."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left


class FileBlockDevice:
    """A preallocated file, mode 0600, created if missing. Raises OSError if there is no room."""

    def __init__(self, path: Path, size_bytes: int, page_cache: PageCache = PageCache.KEPT) -> None:
        self._size_bytes = size_bytes
        self._page_cache = page_cache
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        if page_cache is PageCache.BYPASSED:
            flags |= os.O_DIRECT
        self._fd = os.open(path, flags, 0o600)
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
        return self.readv(offset, [into])

    def readv(self, offset: int, into: Sequence[memoryview]) -> int:
        wanted = sum(map(len, into))
        done = os.preadv(self._fd, into, offset) if wanted else 0
        while 0 < done < wanted:
            if self._page_cache is PageCache.BYPASSED and done % PAGE_BYTES:
                break  # the end of the file; nowhere aligned to go on from
            count = os.preadv(self._fd, _after(into, done), offset + done)
            if count == 0:
                break
            done += count
        if self._page_cache is PageCache.DROPPED:
            os.posix_fadvise(self._fd, offset, wanted, os.POSIX_FADV_DONTNEED)
        return done

    def write(self, offset: int, data: memoryview | bytes) -> None:
        self.writev(offset, [memoryview(data)])

    def writev(self, offset: int, parts: Sequence[memoryview]) -> None:
        wanted = sum(map(len, parts))
        _check_range(self, offset, wanted)
        done = os.pwritev(self._fd, parts, offset) if wanted else 0
        while done < wanted:
            count = os.pwritev(self._fd, _after(parts, done), offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the disk takes no more bytes")
            done += count

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

    def readv(self, offset: int, into: Sequence[memoryview]) -> int:
        done = 0
        for part in into:
            done += self.read_into(offset + done, part)
        return done

    def writev(self, offset: int, parts: Sequence[memoryview]) -> None:
        self.write(offset, b"".join(parts))

    def sync(self) -> None:
        self._durable = bytes(self._bytes)

    def cut_power(self, survives: Callable[[int], bool] = lambda page: False) -> None:
        """Forget what was written since the last `sync`, but for the 4 KiB pages (by number) that
        had reached the disk by chance."""
        left = bytearray(self._durable)
        for page in range(-(-len(left) // PAGE_BYTES)):
            part = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
            if self._bytes[part] != left[part] and survives(page):
                left[part] = self._bytes[part]
        self._bytes, self._durable = left, bytes(left)

    def close(self) -> None:
        """Nothing to release."""
