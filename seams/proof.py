"""Proof of the cluster secret between router and replica, and the tickets of direct clients.

HMAC-SHA256 throughout: the secret itself never crosses a socket, and both nonces enter every proof,
so a recorded proof is worth nothing in another session.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

from seams.errors import LaunchError, Unauthenticated

NONCE_BYTES = 32
PROOF_BYTES = 32
SECRET_BYTES_MIN = 16


def _mac(secret: bytes, *parts: bytes) -> bytes:
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(secret, framed, "sha256").digest()


def router_proof(secret: bytes, replica_nonce: bytes, router_nonce: bytes) -> bytes:
    """What a router answers to a replica's greeting."""
    return _mac(secret, b"banyan/v1/router", replica_nonce, router_nonce)


def replica_proof(secret: bytes, replica_nonce: bytes, router_nonce: bytes) -> bytes:
    """What a replica answers to a router's challenge."""
    return _mac(secret, b"banyan/v1/replica", replica_nonce, router_nonce)


def session_token(secret: bytes, purpose: str, replica_nonce: bytes, router_nonce: bytes) -> str:
    """Hex token of one attached session, for the metadata of its Execute or Events stream."""
    return _mac(secret, b"banyan/v1/" + purpose.encode(), replica_nonce, router_nonce).hex()


def admin_key(secret: bytes) -> str:
    """The key for what concerns all tenants. Whoever can read the cluster secret has it."""
    return _mac(secret, b"banyan/v1/admin").hex()


def matches(expected: bytes | str, given: bytes | str) -> bool:
    """Compare in constant time."""
    as_bytes = [v.encode() if isinstance(v, str) else v for v in (expected, given)]
    return hmac.compare_digest(as_bytes[0], as_bytes[1])


def token_digest(packed_ids: bytes, prompt_tokens: int) -> bytes:
    """What a ticket seals of its tokens: `packed_ids` is kvstore.keys.tokens_u32le of them all."""
    return hashlib.sha256(packed_ids + prompt_tokens.to_bytes(4, "little")).digest()


def seal(secret: bytes, body: bytes) -> bytes:
    """A ticket: proof, then the body in the clear. It can be read but not made or changed,
    so it holds no secret."""
    return _mac(secret, b"banyan/v1/ticket", body) + body


def unseal(secret: bytes, ticket: bytes) -> bytes:
    """The body of a ticket. Raises Unauthenticated if it was not sealed with this secret."""
    body = ticket[PROOF_BYTES:]
    if not matches(_mac(secret, b"banyan/v1/ticket", body), ticket[:PROOF_BYTES]):
        raise Unauthenticated("The ticket was not issued by this cluster.")
    return body


def read_secret(path: Path) -> bytes:
    """The cluster secret. Raises LaunchError if it is missing, damaged or readable by others.

    The group may read it: Kubernetes mounts a secret for the pod's group.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        raise LaunchError("The cluster secret file is missing or cannot be read.") from None
    if stat.S_IMODE(mode) & (stat.S_IRWXO | stat.S_IWGRP):
        raise LaunchError("The cluster secret file must not be readable by others (chmod 600).")
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) < SECRET_BYTES_MIN:
        raise LaunchError(f"The cluster secret must be hex of at least {SECRET_BYTES_MIN} bytes.")
    return secret
