"""BlockFolder: the directory that block devices live in, for one owner at a time.

It knows names and sizes, not what is in them. Errors are OSError, as a file system's.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from seams.blockdevice import (
    PAGE_BYTES,
    BlockDevice,
    FileBlockDevice,
    MemoryBlockDevice,
    PageCache,
)

LOCK_NAME = "lock"
_UNFINISHED = ".unfinished-"  # what a crash may leave; swept at the next start


class BlockFolder(Protocol):
    """Named devices and a few small files. Thread-safe for different names."""

    @property
    def memory_alignment(self) -> int:
        """What addresses handed to its devices must be multiples of; 1 = any, and any length."""
        ...

    def names(self) -> list[str]:
        """Everything in it but the lock, sorted."""
        ...

    def footprint_bytes(self, name: str) -> int:
        """What `name` takes on the disk: its length or its blocks, whichever is more."""
        ...

    def free_bytes(self) -> int:
        """What the file system has left for us."""
        ...

    def create(self, name: str, size_bytes: int) -> BlockDevice:
        """A new device of zeros, all its room taken. Nothing is left if there is not enough."""
        ...

    def open(self, name: str) -> BlockDevice:
        """The device as it was left, as long as it is now."""
        ...

    def remove(self, name: str) -> None:
        """Take `name` away; missing is fine. Its room comes back once its device is closed."""
        ...

    def present(self) -> bool:
        """Whether the folder is still found where it was: what is written elsewhere is lost.

        Raises nothing: a folder that cannot be looked at counts as gone.
        """
        ...

    def rename(self, name: str, new_name: str) -> None:
        """Atomically, replacing `new_name`."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Make `content` the whole of `name`, durably: old or new after a crash, never both."""
        ...

    def read(self, name: str, bytes_max: int) -> bytes:
        """The content of a small file. Raises OSError (EFBIG) if it is longer."""
        ...

    def close(self) -> None:
        """Let the next owner in. Safe to repeat; the devices must be closed before."""
        ...


class FileBlockFolder:
    """A directory with mode 0700, locked as long as this lives.

    Raises BlockingIOError if another owner has it, other OSErrors if it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock_fd = self._directory_fd = -1
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._keep_others_out()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock_fd = os.open(path / LOCK_NAME, flags, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in self.names():
                if name.startswith(_UNFINISHED):
                    self.remove(name)
            self._page_cache, self._memory_alignment = self._probe()
        except OSError:
            self.close()
            raise

    def _keep_others_out(self) -> None:
        """Only a directory that is ours or empty gets its mode changed."""
        found = os.fstat(self._directory_fd)
        if found.st_mode & 0o077 == 0:
            return
        names = [entry.name for entry in self._path.iterdir()]
        if names and LOCK_NAME not in names:
            raise PermissionError(errno.EPERM, "it has files and is open to other users")
        os.fchmod(self._directory_fd, 0o700)

    def _probe(self) -> tuple[PageCache, int]:
        """Whether direct IO works here, and how memory must be aligned for it."""
        name = f"{_UNFINISHED}probe"
        with mmap.mmap(-1, 4 * PAGE_BYTES) as buffer, memoryview(buffer) as pages:
            try:
                device = FileBlockDevice(self._path / name, 2 * PAGE_BYTES, PageCache.BYPASSED)
            except OSError as error:
                self.remove(name)
                known = error.errno == errno.EINVAL
                return (PageCache.DROPPED, 1) if known else (PageCache.BYPASSED, PAGE_BYTES)
            try:
                for alignment in (64, 512, PAGE_BYTES):
                    start = PAGE_BYTES + alignment
                    parts = [pages[:PAGE_BYTES], pages[start : start + PAGE_BYTES]]
                    if _direct_works(device, parts):
                        return PageCache.BYPASSED, alignment
                return PageCache.DROPPED, 1
            finally:
                for part in parts:
                    part.release()
                device.close()
                self.remove(name)

    @property
    def memory_alignment(self) -> int:
        return self._memory_alignment

    def names(self) -> list[str]:
        return sorted(e.name for e in self._path.iterdir() if e.name != LOCK_NAME)

    def footprint_bytes(self, name: str) -> int:
        found = (self._path / name).lstat()
        return max(found.st_size, 512 * found.st_blocks)

    def present(self) -> bool:
        try:
            named, ours = self._path.stat(), os.fstat(self._directory_fd)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)

    def free_bytes(self) -> int:
        found = os.fstatvfs(self._directory_fd)
        return found.f_bavail * found.f_frsize

    def create(self, name: str, size_bytes: int) -> BlockDevice:
        self.remove(name)
        try:
            return FileBlockDevice(self._path / name, size_bytes, self._page_cache)
        except OSError:
            with suppress(OSError):
                self.remove(name)
            raise

    def open(self, name: str) -> BlockDevice:
        size_bytes = (self._path / name).lstat().st_size
        return FileBlockDevice(self._path / name, size_bytes, self._page_cache)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def rename(self, name: str, new_name: str) -> None:
        (self._path / name).rename(self._path / new_name)
        os.fsync(self._directory_fd)

    def replace(self, name: str, content: bytes) -> None:
        unfinished = f"{_UNFINISHED}{name}"
        self.remove(unfinished)
        try:
            device = FileBlockDevice(self._path / unfinished, len(content))
            try:
                device.write(0, content)
                device.sync()
            finally:
                device.close()
            self.rename(unfinished, name)
        except OSError:
            with suppress(OSError):
                self.remove(unfinished)
            raise

    def read(self, name: str, bytes_max: int) -> bytes:
        with (self._path / name).open("rb") as file:
            content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return content

    def close(self) -> None:
        for fd in (self._lock_fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._directory_fd = -1


def _direct_works(device: BlockDevice, parts: list[memoryview]) -> bool:
    try:
        device.writev(0, parts)
        return device.readv(0, parts) == 2 * PAGE_BYTES
    except OSError as error:
        return error.errno != errno.EINVAL  # any other is trouble of the disk, not of the kind


class MemoryBlockFolder:
    """A folder in memory whose unsynced writes, and devices, can be lost with the power."""

    memory_alignment = 1

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self._free_bytes = free_bytes
        self.devices: dict[str, MemoryBlockDevice] = {}
        self.files: dict[str, bytes] = {}

    def present(self) -> bool:
        return True

    def names(self) -> list[str]:
        return sorted([*self.devices, *self.files])

    def footprint_bytes(self, name: str) -> int:
        return self.devices[name].size_bytes if name in self.devices else len(self.files[name])

    def free_bytes(self) -> int:
        return self._free_bytes - sum(map(self.footprint_bytes, self.names()))

    def create(self, name: str, size_bytes: int) -> BlockDevice:
        if size_bytes > self.free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.devices[name] = MemoryBlockDevice(size_bytes)
        return self.devices[name]

    def open(self, name: str) -> BlockDevice:
        return self.devices[name]

    def remove(self, name: str) -> None:
        self.devices.pop(name, None)
        self.files.pop(name, None)

    def rename(self, name: str, new_name: str) -> None:
        self.files[new_name] = self.files.pop(name)

    def replace(self, name: str, content: bytes) -> None:
        self.files[name] = content

    def read(self, name: str, bytes_max: int) -> bytes:
        if len(self.files[name]) > bytes_max:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return self.files[name]

    def close(self) -> None:
        """Nothing to release."""
