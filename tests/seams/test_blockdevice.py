"""BlockDevice: one suite for the file and the memory implementation."""

from collections.abc import Callable
from pathlib import Path

import pytest

from seams.blockdevice import BlockDevice, FileBlockDevice, MemoryBlockDevice

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
