"""BlockDevice: one suite for the file and the memory implementation."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from seams import blockdevice
from seams.blockdevice import (
    PAGE_BYTES,
    BlockDevice,
    FileBlockDevice,
    MemoryBlockDevice,
    PageCache,
)

SIZE = 4096
Open = Callable[[], BlockDevice]


@pytest.fixture(params=["file", "memory"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> BlockDevice:
    if request.param == "file":
        return FileBlockDevice(tmp_path / "segment", SIZE)
    return MemoryBlockDevice(SIZE)


def read(device: BlockDevice, offset: int, length: int) -> bytes:
    into = bytearray(length)
    count = device.read_into(offset, memoryview(into))
    return bytes(into[:count])


def test_starts_as_zeros_of_the_stated_size(device: BlockDevice) -> None:
    assert device.size_bytes == SIZE
    assert read(device, 0, SIZE) == bytes(SIZE)


def test_what_was_written_is_read(device: BlockDevice) -> None:
    device.write(100, b"hello")
    device.write(102, memoryview(b"LL"))
    assert read(device, 99, 7) == b"\0heLLo\0"
    device.sync()
    assert read(device, 100, 5) == b"heLLo"


def test_reads_are_short_only_at_the_end(device: BlockDevice) -> None:
    assert len(read(device, SIZE - 10, 50)) == 10


@pytest.mark.parametrize("offset", [-1, SIZE - 4])
def test_writes_outside_are_our_own_fault(device: BlockDevice, offset: int) -> None:
    with pytest.raises(AssertionError):
        device.write(offset, b"hello")


def test_closing_twice_is_safe(device: BlockDevice) -> None:
    device.close()
    device.close()


def test_a_file_keeps_its_bytes_and_is_private(tmp_path: Path) -> None:
    first = FileBlockDevice(tmp_path / "s", SIZE)
    first.write(7, b"kept")
    first.close()
    again = FileBlockDevice(tmp_path / "s", SIZE)
    assert read(again, 7, 4) == b"kept"
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_power_cut_loses_what_was_not_synced() -> None:
    device = MemoryBlockDevice(SIZE)
    device.write(0, b"old")
    device.sync()
    device.write(0, b"new")
    device.cut_power()
    assert read(device, 0, 3) == b"old"


def test_parts_are_one_run_of_bytes(device: BlockDevice) -> None:
    device.writev(50, [memoryview(b"one"), memoryview(b""), memoryview(b"two")])
    parts = [bytearray(2), bytearray(5)]
    assert device.readv(50, [memoryview(part) for part in parts]) == 7
    assert parts == [b"on", b"etwo\0"]
    assert device.readv(SIZE - 3, [memoryview(part) for part in parts]) == 3


def test_parts_outside_are_our_own_fault(device: BlockDevice) -> None:
    with pytest.raises(AssertionError):
        device.writev(SIZE - 4, [memoryview(b"two"), memoryview(b"two")])


def test_short_operations_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may do less than it was asked for; only the end of the file ends a read."""

    def at_most_three(call: Callable[..., int]) -> Callable[..., int]:
        def short(fd: int, parts: list[memoryview], offset: int) -> int:
            return call(fd, [next(part for part in parts if len(part))[:3]], offset)

        return short

    names = {name: getattr(os, name) for name in dir(os)}
    names["preadv"], names["pwritev"] = at_most_three(os.preadv), at_most_three(os.pwritev)
    device = FileBlockDevice(tmp_path / "s", SIZE)
    monkeypatch.setattr(blockdevice, "os", SimpleNamespace(**names))
    device.writev(10, [memoryview(b"0123456"), memoryview(b"789")])
    parts = [bytearray(4), bytearray(6)]
    assert device.readv(10, [memoryview(part) for part in parts]) == 10
    assert b"".join(parts) == b"0123456789"
    assert len(read(device, SIZE - 10, 50)) == 10


def test_a_disk_that_takes_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FileBlockDevice(tmp_path / "s", SIZE)
    names = {name: getattr(os, name) for name in dir(os)}
    monkeypatch.setattr(blockdevice, "os", SimpleNamespace(**{**names, "pwritev": lambda *_: 0}))
    with pytest.raises(OSError, match="no more bytes"):
        device.write(0, b"hello")


@pytest.mark.parametrize("page_cache", PageCache)
def test_past_the_page_cache(tmp_path: Path, page_cache: PageCache) -> None:
    """Aligned operations work in every mode; a file cut short is read to where it ends."""
    device = FileBlockDevice(tmp_path / "s", 4 * PAGE_BYTES, page_cache)
    pages = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
    pages[:] = bytes(range(256)) * 32
    device.writev(PAGE_BYTES, [pages[:PAGE_BYTES], pages[PAGE_BYTES:]])
    pages[:] = bytes(len(pages))
    assert device.readv(PAGE_BYTES, [pages]) == 2 * PAGE_BYTES
    assert pages == bytes(range(256)) * 32
    os.truncate(tmp_path / "s", PAGE_BYTES + 100)
    assert device.readv(PAGE_BYTES, [pages]) == 100
    assert device.readv(3 * PAGE_BYTES, [pages]) == 0


def test_a_power_cut_may_keep_any_pages() -> None:
    device = MemoryBlockDevice(3 * PAGE_BYTES)
    device.write(0, b"a" * 3 * PAGE_BYTES)
    device.cut_power(lambda page: page == 1)
    kept = read(device, 0, 3 * PAGE_BYTES)
    assert kept == bytes(PAGE_BYTES) + b"a" * PAGE_BYTES + bytes(PAGE_BYTES)
    device.cut_power()
    assert read(device, 0, 3 * PAGE_BYTES) == kept, "what survived one cut survives the next"
