"""Large blocks go into host memory past the caches where there is a compiled library: the same
bytes either way, for memory of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tier_contract import SOON, names_of_chain

from kernels.native.build import NativeUnavailable, load_library
from kvstore.tiers import host
from kvstore.tiers.base import Status
from kvstore.tiers.host import STREAM_BYTES_MIN, HostTier

SIZES = {0: STREAM_BYTES_MIN, 1: STREAM_BYTES_MIN + 4097, 2: STREAM_BYTES_MIN - 1}
SEED = 3


@pytest.fixture(params=["streamed", "plain"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy past the caches; none without the library."""
    made: list[int] = []
    if request.param == "plain":
        monkeypatch.setattr(host, "streaming_copy", lambda: None)
        return made
    try:
        load_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    real = host.streaming_copy

    def counting() -> Callable[[int, int, int], None]:
        copy = real()
        assert copy is not None, "it is built"

        def counted(to: int, source: int, size: int) -> None:
            made.append(size)
            copy(to, source, size)

        return counted

    monkeypatch.setattr(host, "streaming_copy", counting)
    return made


@pytest.mark.parametrize("verify", [False, True])
def test_blocks_come_back_as_they_were(copies: list[int], verify: bool) -> None:
    """Twice as many as there is room for, from memory at odd addresses, read-only memory too."""
    rng, streams = random.Random(SEED), host.streaming_copy() is not None
    tier = HostTier(SIZES, 12 * max(SIZES.values()), verify=verify, prefault=False)
    stored = {}
    for turn in range(24):
        (name,) = names_of_chain(turn, 1, turn % 3)
        size, odd = SIZES[name.group], rng.randrange(64)
        content = rng.randbytes(size)
        memory = memoryview(bytearray(odd) + content)[odd:]
        view = memoryview(content) if turn % 5 == 4 else memory
        assert tier.store([name], [view], SOON) == [Status.OK]
        stored[name] = content
    held = tier.names()
    assert len(held) >= 8
    into = [bytearray(SIZES[name.group]) for name in held]
    loaded = tier.load(held, [memoryview(view) for view in into], SOON)
    assert loaded == [Status.OK] * len(held)
    assert into == [stored[name] for name in held]
    large = [turn for turn in range(24) if turn % 3 < 2 and turn % 5 < 4]
    assert copies == ([SIZES[turn % 3] for turn in large] if streams else [])
    tier.check_integrity()
    tier.close()


def test_views_of_other_formats_are_bytes(copies: list[int]) -> None:
    tier = HostTier({0: STREAM_BYTES_MIN}, 4 * STREAM_BYTES_MIN, prefault=False)
    content = random.Random(SEED).randbytes(STREAM_BYTES_MIN)
    for seed, form in enumerate(("b", "c", "h", "d")):
        (name,) = names_of_chain(seed, 1)
        view = memoryview(bytearray(content)).cast(form)
        into = bytearray(STREAM_BYTES_MIN)
        assert tier.store([name], [view], SOON) == [Status.OK]
        assert tier.load([name], [memoryview(into)], SOON) == [Status.OK]
        assert into == content, form
    tier.close()
