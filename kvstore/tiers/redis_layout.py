"""How a block lies in Redis: its keys, its parts, and the requests for them. It does no IO.

A block is one record: `PREFIX key:group.rank:0` holds the header and the payload's last bytes, the
keys that end in 1, 2, ... hold the payload's front as it is. The last bytes lie in front because
they are what is left over: an allocator has room for 256 KiB or 320 KiB but nothing between, so a
block and its header in one value waste a quarter. Part 0 is written last and deleted first: a
record without it does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from kvstore.record import REPRESENTATION_BYTES_MAX, TOKENS_BYTES_MAX
from kvstore.tiers.base import BlockName

PART_BYTES_MAX = (512 << 10) - 16
REST_BYTES_MAX = 8192
"""Payload that may lie beside the header; more is cut into parts."""
FIRST_BYTES_MAX = REST_BYTES_MAX + REPRESENTATION_BYTES_MAX + TOKENS_BYTES_MAX + 128
"""No part 0 of ours is longer."""
_ALLOCATOR_BYTES = 16  # a string's own header and its final zero byte
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""No wildcard, no separator: a prefix can stand in an ACL and in a SCAN pattern as it is."""

Buffer = bytes | memoryview


def prefix(namespace: str, representation: str) -> bytes:
    """What all keys of one cluster and representation start with."""
    assert _PLAIN.fullmatch(namespace) and _PLAIN.fullmatch(representation)
    return f"banyan:{namespace}:{representation}:".encode()


def part_key(start: bytes, name: BlockName, part: int) -> bytes:
    """Where part `part` of a block lies. Says no more than the block's (salted) key."""
    return b"%b%b:%d.%d:%d" % (start, name.key.hex().encode(), name.group, name.rank, part)


@lru_cache(maxsize=64)
def part_sizes(payload_bytes: int) -> tuple[int, ...]:
    """Payload bytes of each part, part 0's first. Pure.

    Parts 1, 2, ... are the payload's front in order and as large as the allocator's size classes
    (four to a power of two) hold without waste.
    """
    parts, left = [0], payload_bytes
    while left > REST_BYTES_MAX:
        fitting = min(left, PART_BYTES_MAX) + _ALLOCATOR_BYTES
        step = 1 << (fitting.bit_length() - 3)
        parts.append(fitting // step * step - _ALLOCATOR_BYTES)
        left -= parts[-1]
    parts[0] = left
    return tuple(parts)


def request(*words: bytes) -> bytes:
    """One command as the protocol writes it."""
    framed = [b"*%d\r\n" % len(words)]
    framed += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(framed)


def get_requests(start: bytes, name: BlockName, parts: int) -> bytes:
    """GET of every part, part 0 first."""
    return b"".join(request(b"GET", part_key(start, name, part)) for part in range(parts))


def set_requests(
    start: bytes, name: BlockName, header: bytes, payload: memoryview, ttl_s: int
) -> tuple[list[Buffer], int]:
    """(buffers to send one after the other, how many replies come): SET of every part, 0 last.

    The buffers hold views of `payload`, no copy of it.
    """
    sizes = part_sizes(payload.nbytes)
    tail = b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s)
    buffers: list[Buffer] = []
    offset, between = 0, b""
    for part, size in enumerate(sizes[1:], start=1):
        buffers.append(between + _set_head(part_key(start, name, part), size))
        buffers.append(payload[offset : offset + size])
        offset, between = offset + size, tail
    rest = bytes(payload[offset:])
    head = _set_head(part_key(start, name, 0), len(header) + len(rest))
    buffers.append(b"".join((between, head, header, rest, tail)))
    return buffers, len(sizes)


def _set_head(key: bytes, value_bytes: int) -> bytes:
    return b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, value_bytes)


def delete_request(start: bytes, name: BlockName, parts: int) -> bytes:
    """DEL of all parts at once, part 0 first."""
    keys = [part_key(start, name, part) for part in range(parts)]
    return request(b"DEL", *keys)


def exists_requests(start: bytes, names: Sequence[BlockName]) -> bytes:
    """EXISTS of each block's part 0."""
    return b"".join(request(b"EXISTS", part_key(start, name, 0)) for name in names)
