"""What an operator does with the shared tier: count it, check it, empty it. No replica is needed.

Here alone is the key space scanned, with redis-py's own client, slowly and a page at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from kvstore import record
from kvstore.tiers.redis_layout import part_key, part_sizes, prefix
from seams.errors import LaunchError

PAGE_KEYS = 512
CALL_S = 5.0


class Held(NamedTuple):
    """What lies in the server for one representation."""

    blocks: int
    bytes: int  # of their values, without the server's own overhead


class Verified(NamedTuple):
    """The outcome of reading everything."""

    blocks: int  # whole and right
    partial: int  # evicted in part: misses, not errors
    corrupt: Counter[str]  # by cause, record.FAULTS


def survey(url: str, namespace: str) -> dict[str, Held]:
    """Representation -> what a cluster holds in it. Raises LaunchError if it cannot tell."""
    held: dict[str, Held] = {}
    with _client(url) as client:
        for keys in _pages(client, prefix_of(namespace)):
            sizes = client.pipeline(transaction=False)
            for key in keys:
                sizes.strlen(key)
            for key, size in zip(keys, sizes.execute(raise_on_error=False), strict=True):
                representation = key.split(b":")[2].decode("ascii", "replace")
                was = held.get(representation, Held(0, 0))
                blocks = was.blocks + key.endswith(b":0")
                held[representation] = Held(blocks, was.bytes + (size if type(size) is int else 0))
    return held


def verify(url: str, namespace: str, *, remove: bool = False) -> Verified:
    """Read every block of a cluster and check it as a load would. `remove` deletes what is corrupt
    or partial. Raises LaunchError if the server cannot be read."""
    right = partial = 0
    corrupt: Counter[str] = Counter()
    with _client(url) as client:
        for keys in _pages(client, prefix_of(namespace)):
            for key in keys:
                if not key.endswith(b":0"):
                    continue
                fault = _fault(client, key)
                if fault is None:
                    right += 1
                elif fault == "":
                    partial += 1
                else:
                    corrupt[fault] += 1
                if remove and fault is not None:
                    client.delete(key)
    return Verified(right, partial, corrupt)


def clear(url: str, namespace: str) -> int:
    """Delete every block of a cluster; how many keys that were. Raises LaunchError."""
    return _clear(url, prefix_of(namespace), float("inf"))


def clear_prefix(url: str, start: bytes, within_s: float) -> None:
    """Delete every key that starts so, as far as the server and the time allow."""
    with suppress(LaunchError):
        _clear(url, start, time.monotonic() + within_s)


def prefix_of(namespace: str) -> bytes:
    """What all keys of a cluster start with."""
    return prefix(namespace, "x")[:-2]


def _clear(url: str, start: bytes, until: float) -> int:
    deleted = 0
    with _client(url) as client:
        for keys in _pages(client, start):
            deleted += client.delete(*keys)
            if time.monotonic() > until:
                break
    return deleted


def _fault(client: Redis, key: bytes) -> str | None:
    """What is wrong with the record that starts at `key`; "" if a part is gone, None if nothing."""
    first = _value(client, key)
    if not isinstance(first, bytes):
        return first
    header = record.decode(first)
    if isinstance(header, str):
        return header
    start = b":".join(key.split(b":")[:3]) + b":"
    if part_key(start, header.name, 0) != key:
        return "key"
    sizes = part_sizes(header.payload_bytes)
    front: list[bytes] = []
    for part in range(1, len(sizes)):
        value = _value(client, part_key(start, header.name, part))
        if not isinstance(value, bytes):
            return value
        front.append(value)
    rest = first[len(first) - sizes[0] :] if sizes[0] else b""
    representation = start.split(b":")[2].decode()
    return record.fault(header, header.name, representation, b"".join([*front, rest]))


def _value(client: Redis, key: bytes) -> bytes | str:
    """The value, "" if there is none, a cause if it is no string."""
    if client.type(key) not in (b"string", b"none"):
        return "magic"
    value = client.get(key)
    return value if isinstance(value, bytes) else ""


def _pages(client: Redis, start: bytes) -> Iterator[list[bytes]]:
    page: list[bytes] = []
    for key in client.scan_iter(match=start + b"*", count=PAGE_KEYS):
        page.append(bytes(key))
        if len(page) >= PAGE_KEYS:
            yield page
            page = []
    if page:
        yield page


@contextmanager
def _client(url: str) -> Iterator[Redis]:
    """A client for one errand; what goes wrong is one LaunchError."""
    try:
        with Redis.from_url(
            url, socket_timeout=CALL_S, socket_connect_timeout=CALL_S, protocol=2
        ) as client:
            yield client
    except (RedisError, OSError, ValueError) as error:
        raise LaunchError(f"the shared cache cannot be read: {type(error).__name__}") from None
