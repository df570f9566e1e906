"""The block record: what a cold tier writes, and every check a read must pass. It does no IO.

A header of fixed layout names the block, its representation and its bytes' checksum; the payload is
the block as it lies in the pool. A record that fails any check is a miss, counted by cause.

    magic | version | header bytes | representation bytes | tokens bytes | group | rank |
    payload bytes | seq | xxh3 of the payload | key | parent |
    representation | tokens | xxh3 of all before

Little endian. The checksums find accidents; identity is the 16-byte key, the parent and the tokens.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.keys import KEY_BYTES
from kvstore.tiers.base import BlockName

MAGIC = b"BanyanKV"
VERSION = 1
HEADER_BYTES = 4096
"""What a header takes where records are aligned; after the encoded header come zeros."""
REPRESENTATION_BYTES_MAX = 255
TOKENS_BYTES_MAX = 1024
PAYLOAD_BYTES_MAX = 1 << 30
FAULTS = (
    "magic",  # no record of ours, or a slot never written
    "version",  # another layout of this header
    "header",  # cut short, or its checksum does not fit
    "representation",  # another model, dtype, codec or rectangle
    "key",
    "parent",
    "tokens",
    "group",  # or rank
    "length",  # the payload's
    "payload",  # its checksum does not fit
)

_FIXED = Struct("<8sHHHHIIQQQ16s16s")
_SUM = Struct("<Q")


class Header(NamedTuple):
    """What a record says of itself; true only of an intact header."""

    name: BlockName
    representation: str
    payload_bytes: int
    seq: int
    payload_xxh3: int


def encode(
    name: BlockName, representation: str, payload: memoryview | bytes, seq: int = 0
) -> bytes:
    """The header of the record that keeps `payload` (contiguous bytes) as `name`. Pure.

    80 bytes + representation + tokens + 8: at most 1,367, not padded. `seq` is the writer's own
    number (0..2^64-1), for one that must tell a slot's older record from its newer one.
    """
    written, tokens = representation.encode(), name.tokens
    size = memoryview(payload).nbytes
    assert len(name.key) == KEY_BYTES and len(name.parent) == KEY_BYTES
    assert len(written) <= REPRESENTATION_BYTES_MAX and size <= PAYLOAD_BYTES_MAX
    assert len(tokens) <= TOKENS_BYTES_MAX and len(tokens) % 4 == 0
    total = _FIXED.size + len(written) + len(tokens) + _SUM.size
    fixed = _FIXED.pack(
        MAGIC, VERSION, total, len(written), len(tokens), name.group, name.rank,
        size, seq, xxh3_64_intdigest(payload), name.key, name.parent,
    )  # fmt: skip
    summed = b"".join((fixed, written, tokens))
    return summed + _SUM.pack(xxh3_64_intdigest(summed))


def decode(header: memoryview | bytes) -> Header | str:
    """The header at the start of `header`, or what is wrong with it: "magic", "version", "header".

    Takes any bytes, raises nothing. What follows the encoded header (padding, payload) is not
    looked at; bytes given short are a fault like any other.
    """
    if bytes(header[: len(MAGIC)]) != MAGIC:
        return "magic"
    if len(header) < _FIXED.size:
        return "header"
    (
        _, version, total, written_bytes, tokens_bytes, group, rank,
        size, seq, payload_xxh3, key, parent,
    ) = _FIXED.unpack_from(header)  # fmt: skip
    if version != VERSION:
        return "version"
    tokens_at = _FIXED.size + written_bytes
    end = tokens_at + tokens_bytes
    if (
        written_bytes > REPRESENTATION_BYTES_MAX
        or tokens_bytes > TOKENS_BYTES_MAX
        or tokens_bytes % 4
        or size > PAYLOAD_BYTES_MAX
        or total != end + _SUM.size
        or total > len(header)
        or _SUM.unpack_from(header, end)[0] != xxh3_64_intdigest(header[:end])
    ):
        return "header"
    try:
        representation = bytes(header[_FIXED.size : tokens_at]).decode()
    except UnicodeDecodeError:  # the checksum fits: somebody wrote it so
        return "header"
    name = BlockName(key, parent, bytes(header[tokens_at:end]), group, rank)
    return Header(name, representation, size, seq, payload_xxh3)


def fault(
    header: Header, name: BlockName, representation: str, payload: memoryview | bytes
) -> str | None:
    """Why this record is not exactly `name` in that representation; None if it is.

    The first that differs in the order of FAULTS, so another model's record says so rather than
    which of its keys is odd. Reads all of `payload` only if everything else fits.
    """
    found = header.name
    if header.representation != representation:
        return "representation"
    if found.key != name.key:
        return "key"
    if found.parent != name.parent:
        return "parent"
    if found.tokens != name.tokens:
        return "tokens"
    if found.group != name.group or found.rank != name.rank:
        return "group"
    if header.payload_bytes != memoryview(payload).nbytes:
        return "length"
    return "payload" if xxh3_64_intdigest(payload) != header.payload_xxh3 else None
