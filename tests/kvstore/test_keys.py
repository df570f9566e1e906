"""The key function: golden vectors (they may never change within one FORMAT) and its properties."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.keys import KEY_BYTES, ChainSpec, chain, extend, root, tenant_salt, tokens_u32le

ROOT = root("model-fingerprint", "", 16)
SALT = tenant_salt(bytes(range(32)), "tenant-a")
TOKENS = list(range(100, 148))

GOLD_PLAIN = [
    "4f0e40937bce5888545a4eedc8c043fb",
    "0ca73ad3ca75903428484ee59d59f97d",
    "0c70a3154684a018a09ee0bd97b0a08f",
]
GOLD_SALTED = [
    "a62d01fa8d4c3be63058e6d731b4cbd6",
    "535219ae3c20429a784ecbc7d3856a04",
    "6eb3e3c6a3dc6640206dada651dcf85d",
]
GOLD_PRIVATE_16 = [
    "4f0e40937bce5888545a4eedc8c043fb",
    "4cd5b953b921aa160676ddf8c94f3692",
    "63af7b77509096060a93f2f71b3f171f",
]
GOLD_EXTRA = [
    "4f0e40937bce5888545a4eedc8c043fb",
    "90302ce34ef1d45be75732489630569e",
    "185a9978316a97cc4be54848cfdb019f",
]

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def spec(**changes: object) -> ChainSpec:
    return ChainSpec(**{"root": ROOT, "block_tokens": 16, **changes})  # type: ignore[arg-type]


def hexes(keys: list) -> list[str]:  # type: ignore[type-arg]
    return [key.hex() for key in keys]


def framed(*fields: bytes) -> bytes:
    """Written again here on purpose: the golden vectors must not come from the code they check."""
    return b"".join(len(f).to_bytes(8, "little") + f for f in fields)


def test_golden_root_and_salt() -> None:
    expected = hashlib.sha256(
        framed(b"banyan/keys/1", b"model-fingerprint", b"", (16).to_bytes(4, "little"))
    ).hexdigest()
    assert ROOT.hex() == expected
    assert ROOT.hex() == "6a00368340621ace6a7d33272163f26e173e4acca7fc0bad0cc0a96ba1a13245"
    assert SALT.hex() == "e28cfbd4f139dea76c800ad656a0803bc661665d06565897f87ed9081d964136"


def test_golden_chains() -> None:
    assert hexes(chain(spec(), TOKENS)) == GOLD_PLAIN
    assert hexes(chain(spec(salt=SALT), TOKENS)) == GOLD_SALTED
    assert hexes(chain(spec(salt=SALT, private_from=16), TOKENS)) == GOLD_PRIVATE_16
    assert hexes(chain(spec(extra={1: b"image"}), TOKENS)) == GOLD_EXTRA


def test_by_hand() -> None:
    data = b"".join(t.to_bytes(4, "little") for t in TOKENS)
    first = hashlib.sha256(ROOT + data[:64] + framed(SALT, b"")).digest()[:KEY_BYTES]
    second = hashlib.sha256(first + data[64:128] + framed(b"", b"x")).digest()[:KEY_BYTES]
    assert chain(spec(salt=SALT, extra={1: b"x"}), TOKENS)[:2] == [first, second]


def test_salt_enters_at_the_first_private_block_and_stays() -> None:
    plain, private = chain(spec(), TOKENS), chain(spec(salt=SALT, private_from=20), TOKENS)
    assert private[0] == plain[0]
    assert private[1] != plain[1]
    assert private[2] != plain[2]


def test_equal_content_under_another_prefix_differs() -> None:
    a = chain(spec(), [1] * 16 + [2] * 16)
    b = chain(spec(), [3] * 16 + [2] * 16)
    assert a[1] != b[1]


@pytest.mark.parametrize(
    "other",
    [
        root("model-fingerprint", "adapter", 16),
        root("model-fingerprint", "", 32),
        root("m", "", 16),
    ],
)
def test_roots_separate(other: bytes) -> None:
    assert other != ROOT


def test_framing_keeps_fields_apart() -> None:
    assert root("ab", "c", 16) != root("a", "bc", 16)
    assert chain(spec(salt=b"ab", extra={0: b"c"}), TOKENS) != chain(
        spec(salt=b"a", extra={0: b"bc"}), TOKENS
    )


@given(tokens_lists, st.integers(0, 5))
def test_extend_equals_chain(tokens: list[int], cut: int) -> None:
    whole = chain(spec(salt=SALT, private_from=32), tokens)
    assert len(whole) == len(tokens) // 16
    part = whole[: min(cut, len(whole))]
    assert part + extend(spec(salt=SALT, private_from=32), part, tokens) == whole


@given(tokens_lists, tokens_lists)
def test_keys_are_equal_exactly_where_prefixes_are(a: list[int], b: list[int]) -> None:
    keys_a, keys_b = chain(spec(), a), chain(spec(), b)
    for i, (key_a, key_b) in enumerate(zip(keys_a, keys_b, strict=False)):
        assert (key_a == key_b) == (a[: (i + 1) * 16] == b[: (i + 1) * 16])


def test_limit_bounds_the_chain() -> None:
    assert extend(spec(), [], TOKENS, limit=2) == chain(spec(), TOKENS)[:2]


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_outside_32_bits_are_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        tokens_u32le([bad])
