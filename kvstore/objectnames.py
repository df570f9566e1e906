"""Names of objects and of their parts in the tiers. It knows no tier and no bytes but names.

An object is bytes of somebody's own (its meta) and blocks that are no chain of tokens: the pruned
state of a conversation, an episode of one. Its parts lie in tiers as blocks do. What tells them
from blocks of a chain are their tokens, ids that no vocabulary has: routers never hear of them,
and no chain can take one for its own.
"""

from __future__ import annotations

import hashlib
from typing import NewType

from kvstore.keys import KEY_BYTES
from kvstore.tiers.base import BlockName

ObjectName = NewType("ObjectName", bytes)
"""32 bytes: one object, whatever is in it."""

FORMAT = b"banyan/objects/1"
_META = b"\xff\xff\xff\xff"
_BLOCK = b"\xfe\xff\xff\xff"


def object_name(kind: str, *fields: bytes) -> ObjectName:
    """The name of an object of a kind: equal only for equal fields, in this order. Pure.

    Who may read an object is in its name alone: a tenant's salt, model, adapter and whatever else
    keeps two of them apart are fields, or in the chain key that is one. The codec is not: tiers
    keep representations apart.
    """
    return ObjectName(_digest(FORMAT, kind.encode(), *fields))


def head_part(name: ObjectName, block_tokens: int) -> BlockName:
    """What says what the object consists of: found by the object's name."""
    return _part(name, _META, _digest(FORMAT, name, b"head"), 0, 0, block_tokens)


def meta_part(name: ObjectName, content: bytes, number: int, block_tokens: int) -> BlockName:
    """A further part of the meta, found by what the head says of the content: parts of two objects
    that were stored under one name never meet."""
    key = _digest(FORMAT, name, b"meta", content, number.to_bytes(4, "little"))
    return _part(name, _META, key, 0, 0, block_tokens)


def block_part(
    name: ObjectName, content: bytes, number: int, group: int, rank: int, block_tokens: int
) -> BlockName:
    """One of its blocks, likewise."""
    key = _digest(FORMAT, name, b"block", content, number.to_bytes(4, "little"))
    return _part(name, _BLOCK, key, group, rank, block_tokens)


def is_part(name: BlockName) -> bool:
    """Whether it is a part of an object, and no block of a chain."""
    return name.tokens[:4] in (_META, _BLOCK)


def is_meta(name: BlockName) -> bool:
    """Whether its bytes are no block's: no codec may touch them."""
    return name.tokens[:4] == _META


def _part(
    name: ObjectName, mark: bytes, key: bytes, group: int, rank: int, block_tokens: int
) -> BlockName:
    """As many tokens as every block has: the disk tier lists them in rows. The parent is nowhere:
    each part is evicted by itself, in the order of use."""
    return BlockName(key[:KEY_BYTES], name[:KEY_BYTES], mark * block_tokens, group, rank)


def _digest(*fields: bytes) -> bytes:
    framed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    return hashlib.sha256(framed).digest()
