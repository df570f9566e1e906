"""Proofs and tickets: only the secret's holder makes them, and a changed byte breaks them."""

import pytest

from seams.errors import Unauthenticated
from seams.proof import matches, replica_proof, router_proof, seal, session_token, unseal

SECRET, A, B = b"s" * 32, b"a" * 32, b"b" * 32


def test_roles_nonces_and_secrets_all_matter() -> None:
    proofs = {
        router_proof(SECRET, A, B),
        router_proof(SECRET, B, A),
        replica_proof(SECRET, A, B),
        router_proof(b"t" * 32, A, B),
        bytes.fromhex(session_token(SECRET, "execute", A, B)),
        bytes.fromhex(session_token(SECRET, "events", A, B)),
    }
    assert len(proofs) == 6


def test_a_ticket_opens_only_unchanged_and_with_its_secret() -> None:
    ticket = seal(SECRET, b"body")
    assert unseal(SECRET, ticket) == b"body"
    for i in range(len(ticket)):
        changed = bytes(b ^ 1 if i == j else b for j, b in enumerate(ticket))
        with pytest.raises(Unauthenticated):
            unseal(SECRET, changed)
    for bad in (b"", ticket[:20], ticket + b"x"):
        with pytest.raises(Unauthenticated):
            unseal(SECRET, bad)
    with pytest.raises(Unauthenticated):
        unseal(b"t" * 32, ticket)


def test_matches_compares_text_and_bytes() -> None:
    assert matches("ab", "ab")
    assert not matches("ab", "abc")
    assert matches(b"\xff", b"\xff")
