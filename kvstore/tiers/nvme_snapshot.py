"""The index on disk: which record was in which slot. A hint and nothing more: what it says is
checked against the record whenever it matters. It does no IO.

    magic | version | representation bytes | segments | tokens bytes | entries | last seq |
    representation | (number, slot bytes, slots)* |
    (segment, slot, seq, record id, parent, tokens)* | xxh3

Little endian; entries in the order of use, oldest first, all with equally many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.record import REPRESENTATION_BYTES_MAX, TOKENS_BYTES_MAX
from seams.blockdevice import PAGE_BYTES

MAGIC = b"BanyanIX"
VERSION = 1
_FIXED = Struct("<8sHHIIQQ")
_SEGMENT = Struct("<IIQ")
_ENTRY = Struct("<IIQ24s16s")  # and the tokens
_TOKENS_BYTES_USUAL = 128  # of 32 ids; what room is kept for
_SUM = Struct("<Q")


class Listed(NamedTuple):
    """One record as the snapshot has it."""

    segment: int
    slot: int
    seq: int
    id: bytes
    parent: bytes
    tokens: bytes


class ListedSegment(NamedTuple):
    """A segment all of whose records are listed."""

    number: int
    slot_bytes: int
    slots: int


class Snapshot(NamedTuple):
    """Everything listed; `last_seq` is the highest number any record had at that time."""

    segments: tuple[ListedSegment, ...]
    entries: tuple[Listed, ...]
    last_seq: int


def snapshot_bytes_max(segments: int, entries: int) -> int:
    """How long a snapshot of so many may be, in whole pages."""
    exact = _FIXED.size + REPRESENTATION_BYTES_MAX + _SUM.size
    exact += segments * _SEGMENT.size + entries * (_ENTRY.size + _TOKENS_BYTES_USUAL)
    return -(-exact // PAGE_BYTES) * PAGE_BYTES


def _row(tokens_bytes: int) -> Struct:
    return Struct(f"{_ENTRY.format}{tokens_bytes}s")


def encode(
    representation: str,
    segments: Sequence[ListedSegment],
    entries: Sequence[Listed],
    last_seq: int,
    bytes_max: int,
) -> bytes:
    """The file's content, at most `bytes_max`. Pure. If not all entries fit, or their tokens are
    not equally many, the last used are listed and no segment: a start then looks at the rest."""
    written = representation.encode()
    assert len(written) <= REPRESENTATION_BYTES_MAX
    tokens_bytes = len(entries[-1].tokens) if entries else 0
    row = _row(tokens_bytes)
    fitting = [entry for entry in entries if len(entry.tokens) == tokens_bytes]
    room = bytes_max - _FIXED.size - len(written) - len(segments) * _SEGMENT.size - _SUM.size
    fitting = fitting[max(0, len(fitting) - max(0, room) // row.size) :]
    if len(fitting) < len(entries):
        segments = ()
    fixed = _FIXED.pack(
        MAGIC, VERSION, len(written), len(segments), tokens_bytes, len(fitting), last_seq
    )
    rows = [row.pack(*entry) for entry in fitting]
    body = b"".join([fixed, written, *(_SEGMENT.pack(*segment) for segment in segments), *rows])
    return body + _SUM.pack(xxh3_64_intdigest(body))


def decode(content: bytes, representation: str) -> Snapshot | None:
    """What a file says; None if it is damaged or of another representation. Takes any bytes."""
    if len(content) < _FIXED.size + _SUM.size:
        return None
    magic, version, written_bytes, segments, tokens_bytes, entries, last_seq = _FIXED.unpack_from(
        content
    )
    segments_at = _FIXED.size + written_bytes
    entries_at = segments_at + segments * _SEGMENT.size
    end = entries_at + entries * (_ENTRY.size + tokens_bytes)
    if (
        magic != MAGIC
        or version != VERSION
        or tokens_bytes > TOKENS_BYTES_MAX
        or end + _SUM.size != len(content)
        or _SUM.unpack_from(content, end)[0] != xxh3_64_intdigest(content[:end])
        or content[_FIXED.size : segments_at] != representation.encode()
    ):
        return None
    return Snapshot(
        tuple(ListedSegment(*row) for row in _SEGMENT.iter_unpack(content[segments_at:entries_at])),
        tuple(map(Listed._make, _row(tokens_bytes).iter_unpack(content[entries_at:end]))),
        last_seq,
    )
