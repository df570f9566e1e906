"""BlockFolder: one suite for the directory and the memory implementation, and what only one has."""

import subprocess
import sys
from pathlib import Path

import pytest

from seams.blockfolder import LOCK_NAME, BlockFolder, FileBlockFolder, MemoryBlockFolder

REPOSITORY = Path(__file__).resolve().parents[2]
SIZE = 8192


@pytest.fixture(params=["file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> BlockFolder:
    return FileBlockFolder(tmp_path / "d") if request.param == "file" else MemoryBlockFolder()


def test_devices_come_and_go(folder: BlockFolder) -> None:
    assert folder.names() == []
    device = folder.create("one", SIZE)
    assert device.size_bytes == SIZE and folder.names() == ["one"]
    assert folder.footprint_bytes("one") >= SIZE
    device.close()
    again = folder.open("one")
    assert again.size_bytes == SIZE
    folder.remove("one")
    folder.remove("one")
    assert folder.names() == []
    again.close()


def test_small_files_are_replaced_as_a_whole(folder: BlockFolder) -> None:
    folder.replace("index", b"first")
    folder.replace("index", b"2nd")
    assert folder.read("index", 3) == b"2nd"
    with pytest.raises(OSError, match="too large"):
        folder.read("index", 2)
    folder.replace("other", b"")
    folder.rename("index", "other")
    assert folder.names() == ["other"] and folder.read("other", 9) == b"2nd"


def test_too_much_leaves_nothing(folder: BlockFolder) -> None:
    with pytest.raises(OSError, match=r"[Nn]o space|too large"):
        folder.create("huge", folder.free_bytes() + (1 << 45))
    assert folder.names() == []


def test_closing_twice_is_safe(folder: BlockFolder) -> None:
    folder.close()
    folder.close()


def test_a_directory_is_private_and_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "d"
    folder = FileBlockFolder(path)
    assert path.stat().st_mode & 0o777 == 0o700
    folder.create("one", SIZE).close()
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o600}
    with pytest.raises(BlockingIOError):
        FileBlockFolder(path)
    other = "import sys; from seams.blockfolder import *; FileBlockFolder(Path(sys.argv[1]))"
    command = [sys.executable, "-c", other, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert "BlockingIOError" in ended.stderr
    folder.close()
    FileBlockFolder(path).close()


def test_only_an_empty_or_own_directory_is_made_private(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    (foreign / "thesis.tex").write_text("mine")
    with pytest.raises(PermissionError, match="open to other users"):
        FileBlockFolder(foreign)
    assert foreign.stat().st_mode & 0o777 == 0o755
    assert [p.name for p in foreign.iterdir()] == ["thesis.tex"]
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o755)
    FileBlockFolder(empty).close()
    assert empty.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "d"
    if kind == "file":
        path.write_text("")
    else:
        path.mkdir()
        (path / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"exists|symbolic links"):
        FileBlockFolder(path)


def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    path = tmp_path / "d"
    FileBlockFolder(path).close()
    (path / ".unfinished-index").write_bytes(b"half")
    (path / "foreign").write_bytes(b"not ours")
    folder = FileBlockFolder(path)
    assert folder.names() == ["foreign"]
