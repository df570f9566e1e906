"""Which segments belong together, and which episode a question gets: ids only, no model."""

import numpy as np
import pytest

from kvstore.keys import BlockKey
from seams.errors import InvalidRequest
from worker.engine.retention.options import Options
from worker.episodes.base import EpisodeIndex, EpisodeOptions, Segment, Words
from worker.episodes.clusters import cluster
from worker.episodes.embedding import DIMENSIONS, embed, learn
from worker.episodes.outline import nearest, outline
from worker.episodes.record import decode_index, encode_index, episode_name, index_name
from worker.episodes.segments import UTTERANCE_TOKENS_MAX, segments

TOPICS, TOPIC_WORDS, COMMON_WORDS = 4, 30, 12
UTTERANCE = 14
OPTIONS = EpisodeOptions(block_tokens=256, window_utterances=2)


def conversation(seed: int, utterances: int = 64) -> tuple[list[int], list[int], list[int]]:
    """Ids, ends of utterances, and the topic of each: half of the words are everybody's, the rest
    its topic's own. Topics come in runs of four utterances, again and again."""
    print(f"conversation seed {seed}")
    rng = np.random.default_rng(seed)
    ids, ends, topics = [], [], []
    for number in range(utterances):
        topic = number // 4 % TOPICS
        own = 1000 * (topic + 1) + rng.integers(TOPIC_WORDS, size=UTTERANCE // 2)
        ids += [*own.tolist(), *rng.integers(COMMON_WORDS, size=UTTERANCE // 2).tolist()]
        ends.append(len(ids))
        topics.append(topic)
    return ids, ends, topics


def test_segments_cover_everything_in_windows_of_utterances() -> None:
    ends = [10, 25, 31, 60, 66]
    found = segments([66, 31, 10, 25, 60, 0, 500], 70, 2)
    assert found == [Segment(0, 25), Segment(25, 60), Segment(60, 70)]
    assert segments(ends, 70, 100) == [Segment(0, 70)]
    assert segments([], 3, 4) == [Segment(0, 3)]


def test_a_long_utterance_counts_as_several() -> None:
    long = 3 * UTTERANCE_TOKENS_MAX - 1
    found = segments([5, 5 + long], 5 + long, 1)
    assert found[0] == Segment(0, 5) and len(found) == 4 and found[-1].last == 5 + long
    assert all(0 < part.last - part.first <= UTTERANCE_TOKENS_MAX for part in found)
    assert [part.first for part in found[1:]] == [part.last for part in found[:-1]]


def test_an_embedding_counts_what_tells_segments_apart() -> None:
    words = learn([[1, 2, 3], [1, 4, 5], [1, 6]])
    assert dict(zip(words.ids.tolist(), words.weights.tolist(), strict=True)) == pytest.approx(
        {1: np.log(2), **dict.fromkeys((2, 3, 4, 5, 6), np.log(4))}
    )
    one = embed(words, [2, 3, 1])
    assert one.shape == (DIMENSIONS,) and float((one**2).sum()) == pytest.approx(1.0)
    assert np.array_equal(one, embed(words, [1, 2, 3]))
    assert one @ embed(words, [2, 3, 7]) > 0.9 > 0.4 > abs(one @ embed(words, [1, 4]))
    assert not embed(words, [7, 8]).any() and not embed(words, []).any()
    assert not embed(Words(np.zeros(0, np.int32), np.zeros(0, np.float32)), [1]).any()


def test_clusters_are_those_that_were_planted_and_always_the_same() -> None:
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(5, 16))
    true = rng.permutation(np.arange(60) % 5)
    vectors = (centres[true] + 0.2 * rng.normal(size=(60, 16))).astype(np.float32)
    found, again = cluster(vectors, 5, seed=42), cluster(vectors, 5, seed=42)
    assert np.array_equal(found.labels, again.labels)
    assert np.array_equal(found.centroids, again.centroids)
    pairs = set(zip(true.tolist(), found.labels.tolist(), strict=True))
    assert len(pairs) == 5  # one to one
    firsts = [int(np.nonzero(found.labels == one)[0][0]) for one in range(5)]
    assert firsts == sorted(firsts)
    assert np.allclose((found.centroids**2).sum(axis=1), 1.0)
    near = found.nearest_members(vectors, 2)
    likeness = vectors[near] @ found.centroids[2]
    assert set(near.tolist()) == set(np.nonzero(found.labels == 2)[0].tolist())
    assert (np.diff(likeness) <= 1e-6).all()


def test_several_starts_find_no_worse_than_each() -> None:
    vectors = np.random.default_rng(4).normal(size=(40, 8)).astype(np.float32)
    inertias = [cluster(vectors, 6, seed).inertia for seed in range(4)]
    alone = ((vectors - vectors.mean(axis=0)) ** 2).sum()
    print("inertia", np.round(inertias, 2), "of one cluster", round(float(alone), 2))
    assert max(inertias) < 1.1 * min(inertias) < alone


@pytest.mark.parametrize("asked", [1, 3, 7])
def test_equal_vectors_give_fewer_clusters_and_none_empty(asked: int) -> None:
    vectors = np.eye(8, dtype=np.float32)[[0, 0, 0, 5, 5, 2]]
    found = cluster(vectors, asked, seed=0)
    assert len(found.centroids) == min(asked, 3)
    assert set(found.labels.tolist()) == set(range(min(asked, 3)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_question_gets_the_episode_that_it_is_about(seed: int) -> None:
    ids, ends, topics = conversation(seed)
    found = outline(ids, ends, [7, 7], OPTIONS)
    assert len(found.patches) == TOPICS and found.index.segments.sum() == len(found.segments)
    by_topic = dict(zip(topics[:: OPTIONS.window_utterances], found.labels.tolist(), strict=True))
    assert sorted(by_topic.values()) == list(range(TOPICS))
    rng = np.random.default_rng(seed + 100)
    for topic in range(TOPICS):
        question = [
            *(1000 * (topic + 1) + rng.integers(TOPIC_WORDS, size=3)).tolist(),
            *rng.integers(COMMON_WORDS, size=5).tolist(),
        ]
        assert nearest(found.index, question) == by_topic[topic]
    assert nearest(found.index, [999_999]) == int(found.index.segments.argmax())


def test_a_patched_prompt_is_the_instruction_and_segments_of_its_own() -> None:
    ids, ends, _ = conversation(5)
    found = outline(ids, ends, [7, 7, 7], OPTIONS)
    for episode, patch in enumerate(found.patches):
        assert patch[:3] == (7, 7, 7) and 3 < len(patch) <= OPTIONS.patch_tokens_max
        own = [part for part, e in zip(found.segments, found.labels, strict=True) if e == episode]
        texts = [tuple(ids[part.first : part.last]) for part in own]
        rest, used = patch[3:], 0
        for text in texts:  # in the order in which they were said
            if rest[: len(text)] == text:
                rest, used = rest[len(text) :], used + 1
        assert rest == () and used == OPTIONS.medoid_segments
    assert outline(ids, ends, [7] * 3, OPTIONS).patches == found.patches


def test_the_last_segment_of_a_patched_prompt_is_cut_where_its_room_ends() -> None:
    ids, ends, _ = conversation(6)
    options = EpisodeOptions(block_tokens=80, window_utterances=2)
    assert {len(patch) for patch in outline(ids, ends, [7] * 5, options).patches} == {40}
    with pytest.raises(InvalidRequest, match="no room for a patched prompt"):
        outline(ids, ends, [7] * 40, options)


def test_an_index_comes_back_as_it_was_and_damage_is_none() -> None:
    ids, ends, _ = conversation(7)
    index = outline(ids, ends, [7], OPTIONS).index
    written = encode_index(index)
    found = decode_index(written)
    assert isinstance(found, EpisodeIndex) and found.history_tokens == len(ids)
    assert np.array_equal(found.centroids, index.centroids)
    assert np.array_equal(found.segments, index.segments)
    assert np.array_equal(found.words.ids, index.words.ids)
    assert np.array_equal(found.words.weights, index.words.weights)
    for wrong in (b"", written[:-4], written + b"\0" * 4, b"x" + written[1:], written[:10]):
        assert decode_index(wrong) is None


def test_every_option_and_the_conversation_are_in_the_names() -> None:
    def of(text: str) -> EpisodeOptions:
        return EpisodeOptions.of(Options(text), 16)

    plain = of("epicache")
    assert plain == EpisodeOptions() == of("epicache:budget=2041,block=500")
    others = [
        of(f"epicache:{option}")
        for option in ("episodes=5", "budget=1024", "block=256", "window=3", "medoids=5",
                       "sinks=0", "seed=1")
    ]  # fmt: skip
    last, other = BlockKey(b"a" * 16), BlockKey(b"b" * 16)
    names = [index_name(last, options) for options in (plain, *others)]
    names += [index_name(other, plain), *(episode_name(last, plain, e) for e in range(3))]
    names += [episode_name(other, plain, 0), episode_name(last, others[0], 0)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epicache:episodes=0", "episodes is a whole number from 1 to 64"),
        ("epicache:episodes=65", "episodes is a whole number from 1 to 64"),
        ("epicache:budget=16,sinks=16", "sinks are fewer than its budget"),
        ("epicache:colour=red", "has no option colour"),
        ("epicache:window=a", "window is a whole number"),
    ],
)
def test_options_that_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        EpisodeOptions.of(Options(text), 16)
