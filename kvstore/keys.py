"""Block identity: the only key function. Router, radix cache and tiers all call it.

A key says which tokens a block stands for, never how its bytes are written (that is the
representation, kvstore/groups.py). SHA-256 because keys are attackable and 0.4 us a block is cheap;
every field is length-framed so that no two different inputs share one byte string.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

RootId = NewType("RootId", bytes)
"""32 bytes: which model, adapter and block size a chain belongs to."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes: one full block of tokens and everything before it."""

KEY_BYTES = 16
FORMAT = b"banyan/keys/1"
_U32 = "I" if array("I").itemsize == 4 else "L"


def _framed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def root(model_fingerprint: str, adapter_fingerprint: str, block_tokens: int) -> RootId:
    """The start of every chain of one (model, adapter, block size). Pure."""
    assert block_tokens > 0
    framed = _framed(
        FORMAT,
        model_fingerprint.encode(),
        adapter_fingerprint.encode(),
        block_tokens.to_bytes(4, "little"),
    )
    return RootId(hashlib.sha256(framed).digest())


def tenant_salt(cluster_secret: bytes, tenant: str) -> bytes:
    """32 bytes that keep one tenant's chains apart from all others'. Never chosen by a client."""
    return hmac.new(cluster_secret, _framed(b"banyan/salt/1", tenant.encode()), "sha256").digest()


def parent_of_first(root_id: RootId) -> bytes:
    """What stands for the parent's key in the record of a chain's first block. Pure."""
    return root_id[:KEY_BYTES]


_NOTHING_MORE = _framed(b"", b"")  # no salt and no extra: almost every block
_sha256 = hashlib.sha256


@dataclass(frozen=True)
class ChainSpec:
    """What, besides tokens, decides the keys of a chain.

    `private_from` is a token position: the salt enters at the first block that reaches past it and
    everything after inherits it; 0 makes all blocks private. `extra` maps a block index to bytes
    that stand for what is not a token (an image hash); absent means empty.
    """

    root: RootId
    block_tokens: int
    salt: bytes = b""
    private_from: int = 0
    extra: Mapping[int, bytes] | None = None

    @property
    def first_private_block(self) -> int:
        """Index of the block at which the salt enters."""
        return self.private_from // self.block_tokens


def tokens_u32le(token_ids: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit little endian. Raises OverflowError outside 0..2^32-1."""
    packed = array(_U32, token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def extend(
    spec: ChainSpec, keys: Sequence[BlockKey], token_ids: Sequence[int], *, limit: int | None = None
) -> list[BlockKey]:
    """The keys of the full blocks of `token_ids` that follow the ones already in `keys`.

    `keys` must be the keys of the first len(keys) blocks of the same tokens. `limit` bounds the
    total number of blocks. O(1) per new block; mutates nothing.
    """
    size = spec.block_tokens
    total = len(token_ids) // size
    if limit is not None:
        total = min(total, limit)
    first = len(keys)
    if first >= total:
        return []
    data = tokens_u32le(token_ids[first * size : total * size])
    previous: bytes = keys[-1] if keys else spec.root
    salted_at, extra, width = spec.first_private_block, spec.extra, 4 * size
    new: list[BlockKey] = []
    for index in range(first, total):
        start = (index - first) * width
        framed = _NOTHING_MORE
        if index == salted_at or extra:
            salt = spec.salt if index == salted_at else b""
            framed = _framed(salt, extra.get(index, b"") if extra else b"")
        block = previous + data[start : start + width] + framed
        previous = _sha256(block).digest()[:KEY_BYTES]
        new.append(BlockKey(previous))
    return new


def chain(spec: ChainSpec, token_ids: Sequence[int]) -> list[BlockKey]:
    """The keys of all full blocks of `token_ids`, in order. A partial last block has none."""
    return extend(spec, [], token_ids)
