"""Records: one that differs in anything is a fault with a cause, and no bytes raise."""

import random
import tracemalloc
from collections import Counter
from struct import pack_into, unpack_from

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.record import (
    FAULTS,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    REPRESENTATION_BYTES_MAX,
    TOKENS_BYTES_MAX,
    Header,
    decode,
    encode,
    fault,
)
from kvstore.tiers.base import BlockName

REPRESENTATION = "bf16-0123456789ab"
FIXED_BYTES = 80
# offset of each field of the fixed part, written again here on purpose: the layout may not drift
VERSION_AT, TOTAL_AT, TOKENS_BYTES_AT, PAYLOAD_BYTES_AT = 8, 10, 14, 24

names = st.builds(
    BlockName,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.integers(0, TOKENS_BYTES_MAX // 4).flatmap(
        lambda n: st.binary(min_size=4 * n, max_size=4 * n)
    ),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
texts = st.text(max_size=60).filter(lambda text: "\ud800" not in text)


def name_of(seed: int, block_tokens: int = 16) -> BlockName:
    rng = random.Random(seed)
    return BlockName(
        rng.randbytes(16), rng.randbytes(16), rng.randbytes(4 * block_tokens), seed % 3, seed % 2
    )


def payload_of(seed: int, size: int = 300) -> memoryview:
    return memoryview(bytearray(random.Random(~seed).randbytes(size)))


def cause(header: bytes | memoryview, name: BlockName, payload: memoryview) -> str | None:
    """What a tier does on a read."""
    found = decode(header)
    return found if isinstance(found, str) else fault(found, name, REPRESENTATION, payload)


@given(names, texts, st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_round_trip(name: BlockName, representation: str, payload: bytes, seq: int) -> None:
    written = encode(name, representation, payload, seq)
    assert len(written) == FIXED_BYTES + len(representation.encode()) + len(name.tokens) + 8
    expected = Header(name, representation, len(payload), seq, xxh3_64_intdigest(payload))
    for around in (written, written.ljust(HEADER_BYTES, b"\0"), written + payload):
        assert decode(around) == expected
        assert decode(memoryview(around)) == expected
    assert fault(expected, name, representation, payload) is None


def test_the_layout_is_what_disks_hold() -> None:
    name = BlockName(bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48)), 2, 1)
    written = encode(name, "bf16-x", b"payload", 7)
    assert written.hex() == (
        "42616e79616e4b56" "0100" "6e00" "0600" "1000" "02000000" "01000000"
        "0700000000000000" "0700000000000000"
        + xxh3_64_intdigest(b"payload").to_bytes(8, "little").hex()
        + "000102030405060708090a0b0c0d0e0f" "101112131415161718191a1b1c1d1e1f"
        + b"bf16-x".hex() + "202122232425262728292a2b2c2d2e2f"
        + xxh3_64_intdigest(written[:-8]).to_bytes(8, "little").hex()
    )  # fmt: skip


def test_the_longest_header_fits_a_slot() -> None:
    name = name_of(1, TOKENS_BYTES_MAX // 4)
    assert len(encode(name, "r" * REPRESENTATION_BYTES_MAX, b"")) <= HEADER_BYTES


def test_every_flipped_bit_of_a_header_is_a_fault() -> None:
    name, payload = name_of(2), payload_of(2)
    written = encode(name, REPRESENTATION, payload)
    assert cause(written, name, payload) is None
    causes = Counter[str]()
    for bit in range(8 * len(written)):
        flipped = bytearray(written)
        flipped[bit // 8] ^= 1 << bit % 8
        found = decode(bytes(flipped))
        assert isinstance(found, str), f"bit {bit} went unnoticed"
        causes[found] += 1
    assert causes["magic"] == 64 and causes["version"] == 16
    assert causes["header"] == 8 * len(written) - 80


def test_every_flipped_bit_of_a_payload_is_a_fault() -> None:
    name, payload = name_of(3), payload_of(3)
    written = encode(name, REPRESENTATION, payload)
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        assert cause(written, name, payload) == "payload"
        payload[bit // 8] ^= 1 << bit % 8
    assert cause(written, name, payload) is None


def test_every_cut_is_a_fault() -> None:
    written = encode(name_of(4), REPRESENTATION, payload_of(4))
    for end in range(len(written)):
        assert decode(written[:end]) == ("magic" if end < 8 else "header")
        zeroed = written[:end].ljust(HEADER_BYTES, b"\0")
        assert decode(zeroed) in ("magic", "version", "header") or zeroed.startswith(written)


def test_two_valid_records_swapped_are_faults() -> None:
    one, two = name_of(5), name_of(6)
    headers = [encode(name, REPRESENTATION, payload_of(n)) for n, name in ((5, one), (6, two))]
    assert cause(headers[1], one, payload_of(6)) == "key", "whole records swapped"
    assert cause(headers[0], one, payload_of(6)) == "payload", "payloads swapped"
    assert cause(headers[0], one, payload_of(5)) is None


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("key", {"key": bytes(16)}),
        ("parent", {"parent": bytes(16)}),
        ("tokens", {"tokens": bytes(64)}),
        ("tokens", {"tokens": b""}),
        ("group", {"group": 9}),
        ("group", {"rank": 9}),
    ],
)
def test_each_difference_has_its_cause(expected: str, changes: dict[str, bytes | int]) -> None:
    name, payload = name_of(7), payload_of(7)
    other = BlockName(**{**name._asdict(), **changes})
    assert cause(encode(other, REPRESENTATION, payload), name, payload) == expected
    foreign = encode(other, "fp16-another", payload)
    assert cause(foreign, name, payload) == "representation", "another model's says so first"
    assert expected in FAULTS


def test_length_before_payload() -> None:
    name, payload = name_of(8), payload_of(8)
    written = encode(name, REPRESENTATION, payload)
    assert cause(written, name, payload[:-1]) == "length"
    assert cause(written, name, memoryview(bytes(301))) == "length"
    wide = memoryview(bytes(payload)).cast("I")  # 75 items, 300 bytes
    assert cause(written, name, wide) is None


def resealed(header: bytearray) -> bytes:
    """A header with the checksum that its content asks for: a writer's lie, not an accident."""
    pack_into("<Q", header, len(header) - 8, xxh3_64_intdigest(bytes(header[:-8])))
    return bytes(header)


def test_limits_hold_even_under_a_true_checksum() -> None:
    written = encode(name_of(9), REPRESENTATION, payload_of(9))
    huge = bytearray(written)
    pack_into("<Q", huge, PAYLOAD_BYTES_AT, PAYLOAD_BYTES_MAX + 1)
    assert decode(resealed(huge)) == "header"
    odd = bytearray(written[:-8] + b"\0" + written[-8:])
    (tokens_bytes,) = unpack_from("<H", odd, TOKENS_BYTES_AT)
    pack_into("<H", odd, TOKENS_BYTES_AT, tokens_bytes + 1)
    pack_into("<H", odd, TOTAL_AT, len(odd))
    assert decode(resealed(odd)) == "header", "tokens are whole ids"
    newer = bytearray(written)
    pack_into("<H", newer, VERSION_AT, 2)
    assert decode(resealed(newer)) == "version"
    text = bytearray(written)
    text[FIXED_BYTES] = 0xFF
    assert decode(resealed(text)) == "header", "not text"


def mutated(rng: random.Random, records: list[bytes]) -> bytes:
    """One of: chance, chance behind a true start, and accidents of disks and networks."""
    base = rng.choice(records)
    match rng.randrange(7):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return base[: rng.randrange(20)] + rng.randbytes(rng.randrange(300))
        case 2:
            return base[: rng.randrange(len(base))]
        case 3:
            other, cut = rng.choice(records), rng.randrange(len(base))
            return base[:cut] + other[cut:]
        case 4:
            block = bytearray(base)
            at = rng.randrange(len(block))
            block[at : at + 16] = bytes(len(block[at : at + 16]))
            return bytes(block)
        case 5:
            return resealed(bytearray(base[:8] + rng.randbytes(len(base) - 8)))
        case _:
            block = bytearray(base)
            for _ in range(rng.randrange(1, 4)):
                block[rng.randrange(len(block))] ^= 1 << rng.randrange(8)
            return bytes(block)


def fuzz(rounds: int, seed: int) -> Counter[str]:
    """Nothing raises, and what passes as `name` is the record that was written for it."""
    print(f"record fuzz seed {seed}")
    rng = random.Random(seed)
    wanted, payload = name_of(10), payload_of(10)
    written = encode(wanted, REPRESENTATION, payload)
    records = [written, *(encode(name_of(n), REPRESENTATION, payload_of(n)) for n in range(11, 15))]
    causes = Counter[str]()
    for _ in range(rounds):
        header = mutated(rng, records)
        found = cause(header, wanted, payload)
        assert found is not None or header.startswith(written), header.hex()
        causes[found or "none"] += 1
    assert set(causes) <= {*FAULTS, "none"}
    return causes


def test_fuzz() -> None:
    causes = fuzz(10_000, 1)
    assert causes["magic"] and causes["version"] and causes["header"] and causes["key"]


def test_no_length_that_was_read_is_allocated() -> None:
    tracemalloc.start()
    try:
        fuzz(2_000, 2)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.soak
def test_fuzz_at_full_size() -> None:
    for seed in range(2, 12):
        fuzz(100_000, seed)
