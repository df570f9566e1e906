"""An index as bytes, and the names under which it and its episodes are kept. It knows no tier.

    magic | version | episodes | dimensions | words | history tokens |
    segments of each | centroids | ids of the words | their weights

Little endian. What an episode is beside its blocks is a DerivedState. Names stand for the
conversation's last block's key, which is model, adapter, tenant and all of its tokens, and for
every option.
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from kvstore.keys import BlockKey
from kvstore.objectnames import ObjectName, object_name
from worker.episodes.base import EPISODES_MAX, EpisodeIndex, EpisodeOptions, Words
from worker.episodes.embedding import DIMENSIONS

MAGIC = b"BanyanEI"
VERSION = 1
WORDS_MAX = 1 << 20

_HEAD = Struct("<8sHHIII")


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
    head = _HEAD.pack(MAGIC, VERSION, episodes, dimensions, len(ids), index.history_tokens)
    numbers = (
        index.segments.astype("<i4"), index.centroids.astype("<f4"),
        ids.astype("<i4"), weights.astype("<f4"),
    )  # fmt: skip
    return head + b"".join(part.tobytes() for part in numbers)


def decode_index(written: bytes) -> EpisodeIndex | None:
    """What `encode_index` wrote; None for any other bytes."""
    if len(written) < _HEAD.size:
        return None
    magic, version, episodes, dimensions, words, tokens = _HEAD.unpack_from(written)
    if (magic, version, dimensions) != (MAGIC, VERSION, DIMENSIONS):
        return None
    ids = episodes + episodes * dimensions  # where the words begin
    whole = _HEAD.size + 4 * (ids + 2 * words)
    if not (0 < episodes <= EPISODES_MAX and words <= WORDS_MAX and len(written) == whole):
        return None
    ints = np.frombuffer(written, "<i4", offset=_HEAD.size)
    floats = np.frombuffer(written, "<f4", offset=_HEAD.size)
    return EpisodeIndex(
        history_tokens=tokens,
        words=Words(ints[ids : ids + words], floats[ids + words :]),
        centroids=floats[episodes:ids].reshape(episodes, dimensions),
        segments=ints[:episodes],
    )
