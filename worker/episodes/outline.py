"""From a conversation's tokens to its episodes: which segments belong together, and the patched
prompt of each episode. It knows ids; no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seams.errors import InvalidRequest
from worker.episodes.base import EpisodeIndex, EpisodeOptions, Floats, Ints, Segment
from worker.episodes.clusters import Clusters, cluster, means
from worker.episodes.embedding import embed, learn
from worker.episodes.segments import segments


@dataclass(frozen=True, eq=False)
class Outline:
    """What the episodes of one conversation are. `labels` [segments] says whose each segment is;
    `patches` [episodes] are patched prompts, at most EpisodeOptions.patch_tokens_max ids each."""

    index: EpisodeIndex
    segments: tuple[Segment, ...]
    labels: Ints
    patches: tuple[tuple[int, ...], ...]


def patch_room(instruction: Sequence[int], options: EpisodeOptions) -> int:
    """How many ids of segments a patched prompt has room for. Raises InvalidRequest if for none."""
    room = options.patch_tokens_max - len(instruction)
    if room < 1:
        raise InvalidRequest(
            f"A block of {options.block_tokens} tokens has no room for a patched prompt."
        )
    return room


def outline(
    history: Sequence[int],
    ends: Sequence[int],
    instruction: Sequence[int],
    options: EpisodeOptions,
) -> Outline:
    """Cluster a conversation. `ends` are the places behind its utterances; the instruction's ids
    begin every patched prompt. Deterministic by options.seed. Raises InvalidRequest if the
    instruction leaves a patched prompt no room."""
    cut = tuple(segments(ends, len(history), options.window_utterances))
    texts = [history[part.first : part.last] for part in cut]
    words, links = learn(texts), learn(texts, having_min=2)  # what one has links it to no other
    vectors = np.stack([embed(links, ids) for ids in texts])
    found = cluster(vectors, options.episodes, options.seed)
    centroids = means(np.stack([embed(words, ids) for ids in texts]), found.labels)
    room = patch_room(instruction, options)
    patches = tuple(
        (*instruction, *_medoids(found, vectors, episode, texts, options.medoid_segments, room))
        for episode in range(len(found.centroids))
    )
    counts = np.bincount(found.labels, minlength=len(found.centroids)).astype(np.int32)
    index = EpisodeIndex(len(history), words, centroids, counts)
    return Outline(index, cut, found.labels.astype(np.int32), patches)


def _medoids(
    found: Clusters,
    vectors: Floats,
    episode: int,
    texts: Sequence[Sequence[int]],
    count: int,
    room: int,
) -> list[int]:
    """Ids of an episode's most typical segments, in the order in which they were said; the last one
    for which there is room may be cut short."""
    taken: dict[int, Sequence[int]] = {}
    for member in found.nearest_members(vectors, episode)[:count].tolist():
        if room > 0:
            taken[member] = texts[member][:room]
            room -= len(taken[member])
    return [token for member in sorted(taken) for token in taken[member]]


def nearest(index: EpisodeIndex, question: Sequence[int]) -> int:
    """The episode that a question is about: the one with the most similar centroid, of equals the
    first. A question of which no token is known gets the one with most segments. O(question)."""
    vector = embed(index.words, question)
    if not vector.any():
        return int(index.segments.argmax())
    return int((index.centroids @ vector).argmax())
