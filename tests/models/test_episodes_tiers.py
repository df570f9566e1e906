"""Episodes through host memory, disk and a shared server and back: to the byte, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
import torch
from random_decoders import config_of, in_torch, random_weights, token_ids

from kvstore.keys import BlockKey
from kvstore.objects import Objects
from kvstore.tiered import TieredStore
from kvstore.tiers.embedded import EmbeddedValkey
from worker.config import ReplicaConfig
from worker.engine.derived_state import DerivedState
from worker.episodes.base import EpisodeOptions
from worker.episodes.build import EpisodeBuilder
from worker.episodes.keeping import EpisodeShelf
from worker.episodes.outline import outline
from worker.models.llama import LlamaModel
from worker.service.tiers import open_tiers

LAST, OTHER = BlockKey(b"k" * 16), BlockKey(b"o" * 16)
OPTIONS = EpisodeOptions(
    episodes=2, budget_tokens=64, block_tokens=96, sink_tokens=5, window_utterances=1
)
HISTORY = 160
WITHIN_S = 20.0

Open = Callable[[], TieredStore]


def decoder(seed: int = 0) -> LlamaModel:
    config = config_of("llama")
    return in_torch(config, random_weights(config, torch.float32, seed))


def shelf(store: TieredStore, model: LlamaModel, last: BlockKey = LAST) -> EpisodeShelf:
    objects = Objects(store, model.spec.groups, model.spec.block_tokens)
    return EpisodeShelf(objects, model, last, OPTIONS)


def content(model: LlamaModel, pages: list[int]) -> list[bytes]:
    return [model.read_block(0, page) for page in pages]


@pytest.fixture(params=["host", "disk", "shared"])
def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same tiers again and again; only what is below host memory outlives it."""
    config = ReplicaConfig("r", "small", "small", (), "", host_gib=0.05)
    server = None
    if request.param == "disk":
        config = replace(config, nvme=str(tmp_path), nvme_gib=0.2)
    elif request.param == "shared":
        server = EmbeddedValkey(1 << 26)
        config = replace(config, redis=server.url)
    opened: list[TieredStore] = []

    def again() -> TieredStore:
        if opened and not opened[-1].lower:
            return opened[-1]
        if opened:
            assert opened[-1].flush(WITHIN_S)
            opened[-1].close()
        store = open_tiers(config, decoder().spec)
        assert store is not None
        opened.append(store)
        return store

    yield again
    opened[-1].close()
    if server is not None:
        server.close()


def test_episodes_come_back_to_the_byte(reopened: Open) -> None:
    model = decoder()
    history = token_ids(HISTORY, model.spec.vocab_tokens)
    found = outline(history, range(0, HISTORY, 20), [3] * 8, OPTIONS)
    builder = EpisodeBuilder(model, history, OPTIONS)
    written = shelf(reopened(), model)
    put = []
    for episode, patch in enumerate(found.patches):
        builder.build(patch)
        put.append((builder.positions, content(model, builder.pages)))
        assert written.put_episode(episode, builder.state, builder.pages)
    assert written.put_index(found.index)
    assert len(put) == 2 and put[0][1] != put[1][1]

    store, reader = reopened(), decoder()
    reader.allocate((9,))
    read = shelf(store, reader)
    index = read.index(WITHIN_S)
    assert index is not None and np.array_equal(index.centroids, found.index.centroids)
    for episode in (1, 0):
        pages = [7, 2, 5, 0]
        kept = read.load_episode(episode, pages, WITHIN_S)
        assert kept is not None and kept.computed == HISTORY
        assert np.array_equal(kept.positions, put[episode][0])
        assert content(reader, pages) == put[episode][1]
    stats = store.stats()
    assert not any(tier.corrupt for tier in stats.values())


def test_what_is_not_there_or_does_not_fit_is_none(reopened: Open) -> None:
    model = decoder()
    model.allocate((4,))
    positions = np.broadcast_to(np.arange(48, dtype=np.int32), (4, 48))
    first = shelf(reopened(), model)
    state = DerivedState(HISTORY, 5, plain_blocks=0, tail=(), positions=positions)
    assert first.put_episode(0, state, [0, 1, 2])
    again = shelf(reopened(), model)
    assert again.index(WITHIN_S) is None
    assert again.load_episode(1, [0, 1, 2], WITHIN_S) is None
    assert again.load_episode(0, [0, 1], WITHIN_S) is None
    assert shelf(reopened(), model, OTHER).load_episode(0, [0, 1, 2], WITHIN_S) is None
    found = shelf(reopened(), model).load_episode(0, [3, 1, 2], WITHIN_S)
    assert found is not None and np.array_equal(found.positions, positions)


def test_what_is_built_again_lives_as_long_as_what_is_new() -> None:
    model = decoder()
    model.allocate((4,))
    positions = np.broadcast_to(np.arange(48, dtype=np.int32), (4, 48))
    state = DerivedState(HISTORY, 5, plain_blocks=0, tail=(), positions=positions)
    config = ReplicaConfig("r", "small", "small", (), "", host_gib=0.05)
    with EmbeddedValkey(1 << 26) as server, redis.Redis.from_url(server.url) as client:
        for ttl_s in (100, 10_000, 500):
            store = open_tiers(replace(config, redis=server.url, redis_ttl_s=ttl_s), model.spec)
            assert store is not None
            assert shelf(store, model).put_episode(0, state, [0, 1, 2])
            assert store.flush(WITHIN_S)
            store.close()
            left_s = [client.ttl(key) for key in client.scan_iter()]
            assert len(left_s) >= 4 and ttl_s - 50 < min(left_s) <= max(left_s) <= ttl_s
