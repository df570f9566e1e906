"""An index and an episode as bytes, and the names under which they are kept. It knows no tier.

    index:    magic | version | episodes | dimensions | words | history tokens |
              segments of each | centroids | ids of the words | their weights
    episode:  magic | version | rows | slots | history tokens | positions of the slots, by row

Little endian. Names stand for the conversation's last block's key, which is model, adapter, tenant
and all of its tokens, and for every option.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import numpy as np

from kvstore.keys import BlockKey
from kvstore.objectnames import ObjectName, object_name
from worker.episodes.base import EPISODES_MAX, EpisodeIndex, EpisodeOptions, Ints, Words
from worker.episodes.embedding import DIMENSIONS

INDEX_MAGIC, EPISODE_MAGIC = b"BanyanEI", b"BanyanEp"
VERSION = 1
WORDS_MAX = 1 << 20

_INDEX = Struct("<8sHHIII")
_EPISODE = Struct("<8sHHII")


class Kept(NamedTuple):
    """What an episode is beside its blocks: slots of the first `history_tokens` positions."""

    history_tokens: int
    positions: Ints  # [layers * KV heads, slots] logical position of the token in each slot


def index_name(last: BlockKey, options: EpisodeOptions) -> ObjectName:
    """Of the index of a conversation whose last block has this key. Pure."""
    return object_name("epicache index", last, options.state_hash.encode())


def episode_name(last: BlockKey, options: EpisodeOptions, episode: int) -> ObjectName:
    """Of one of its episodes. Pure."""
    return object_name("epicache", last, options.state_hash.encode(), b"%d" % episode)


def encode_index(index: EpisodeIndex) -> bytes:
    """Pure."""
    episodes, dimensions = index.centroids.shape
    ids, weights = index.words.ids, index.words.weights
    assert episodes <= EPISODES_MAX and len(ids) <= WORDS_MAX
    head = _INDEX.pack(INDEX_MAGIC, VERSION, episodes, dimensions, len(ids), index.history_tokens)
    numbers = (
        index.segments.astype("<i4"), index.centroids.astype("<f4"),
        ids.astype("<i4"), weights.astype("<f4"),
    )  # fmt: skip
    return head + b"".join(part.tobytes() for part in numbers)


def decode_index(written: bytes) -> EpisodeIndex | None:
    """What `encode_index` wrote; None for any other bytes."""
    if len(written) < _INDEX.size:
        return None
    magic, version, episodes, dimensions, words, tokens = _INDEX.unpack_from(written)
    if (magic, version, dimensions) != (INDEX_MAGIC, VERSION, DIMENSIONS):
        return None
    ids = episodes + episodes * dimensions  # where the words begin
    whole = _INDEX.size + 4 * (ids + 2 * words)
    if not (0 < episodes <= EPISODES_MAX and words <= WORDS_MAX and len(written) == whole):
        return None
    ints = np.frombuffer(written, "<i4", offset=_INDEX.size)
    floats = np.frombuffer(written, "<f4", offset=_INDEX.size)
    return EpisodeIndex(
        history_tokens=tokens,
        words=Words(ints[ids : ids + words], floats[ids + words :]),
        centroids=floats[episodes:ids].reshape(episodes, dimensions),
        segments=ints[:episodes],
    )


def encode_episode(kept: Kept) -> bytes:
    """Pure."""
    rows, slots = kept.positions.shape
    head = _EPISODE.pack(EPISODE_MAGIC, VERSION, rows, slots, kept.history_tokens)
    return head + kept.positions.astype("<i4").tobytes()


def decode_episode(written: bytes) -> Kept | None:
    """What `encode_episode` wrote; None for any other bytes."""
    if len(written) < _EPISODE.size:
        return None
    magic, version, rows, slots, tokens = _EPISODE.unpack_from(written)
    whole = _EPISODE.size + 4 * rows * slots
    if (magic, version, len(written)) != (EPISODE_MAGIC, VERSION, whole) or not 0 < slots <= tokens:
        return None
    positions = np.frombuffer(written, "<i4", offset=_EPISODE.size).reshape(rows, slots)
    return Kept(tokens, positions)
