"""A disk tier's directory without its replica: what is in it, whether it is sound, and emptying it.

It needs no model: records are checked against themselves, in whatever representation. All of it
takes the directory's lock and raises LaunchError if a replica has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvstore.tiers.nvme import open_folder
from kvstore.tiers.nvme_start import CLOSED_NAME, INDEX_NAME, unknown_names
from kvstore.tiers.segments import SegmentName, parse_name
from kvstore.tiers.slot_io import Reading, SlotIO
from seams.blockfolder import BlockFolder
from seams.errors import LaunchError


class Contents(NamedTuple):
    """What a directory holds. A record may be listed that its tier has forgotten."""

    segments: int
    bytes: int  # on the disk, everything counted
    records: int
    representations: Counter[str]  # of the records
    corrupt: Counter[str]  # by cause (record.FAULTS), or "unreadable"
    unknown_files: int  # not a tier's


@contextmanager
def _opened(directory: Path) -> Iterator[BlockFolder]:
    if not directory.is_dir():
        raise LaunchError("There is no such directory.")
    folder = open_folder(directory)
    try:
        yield folder
    finally:
        folder.close()


def contents(directory: Path, *, payloads: bool = False) -> Contents:
    """Read every header, or every record with `payloads`. Changes nothing. Raises LaunchError."""
    with _opened(directory) as folder:
        names = folder.names()
        segments = [(name, parsed) for name in names if (parsed := parse_name(name))]
        representations, corrupt = Counter[str](), Counter[str]()
        for name, parsed in segments:
            for found in _read_segment(folder, name, parsed, payloads):
                if found.fault is not None:
                    corrupt[found.fault] += 1
                elif found.header is not None:
                    representations[found.header.representation] += 1
        return Contents(
            len(segments),
            sum(map(folder.footprint_bytes, names)),
            sum(representations.values()) + sum(corrupt.values()),
            representations,
            corrupt,
            len(unknown_names(folder)),
        )


def verify(directory: Path) -> tuple[int, Counter[str]]:
    """Read everything: how many records, and the damaged ones by cause. Raises LaunchError."""
    found = contents(directory, payloads=True)
    return found.records, found.corrupt


def clear(directory: Path) -> int:
    """Remove all segments and snapshots; returns the bytes given back. Files that are not a tier's
    stay. Raises LaunchError."""
    with _opened(directory) as folder:
        freed = 0
        for name in folder.names():
            if name in (INDEX_NAME, CLOSED_NAME) or parse_name(name) is not None:
                freed += folder.footprint_bytes(name)
                try:
                    folder.remove(name)
                except OSError as error:
                    raise LaunchError(f"A file cannot be removed: {error.strerror}.") from None
        return freed


def _read_segment(
    folder: BlockFolder, name: str, parsed: SegmentName, payloads: bool
) -> Iterator[Reading]:
    """What each slot of a segment holds."""
    io = SlotIO("", parsed.slot_bytes, folder.memory_alignment)
    try:
        device = folder.open(name)
    except OSError:
        yield Reading(None, "unreadable")
        return
    try:
        for offset in range(0, device.size_bytes, parsed.slot_bytes):
            try:
                yield io.read_whole(device, offset, parsed.slot_bytes, payloads=payloads)
            except OSError:
                yield Reading(None, "unreadable")
    finally:
        device.close()
