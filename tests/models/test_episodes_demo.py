"""A real model and a conversation with planted topics: the right episode answers better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from episode_runs import logits
from planted_topics import QUESTIONS, TOPICS, planted
from random_decoders import in_torch, of_folder

from banyan.conversation import read_conversation
from router.text.model import TextModel
from seams.textfiles import read_text_files
from worker.episodes.base import EpisodeOptions
from worker.episodes.build import EpisodeBuilder
from worker.episodes.outline import nearest, outline
from worker.models.llama import LlamaModel

OPTIONS = EpisodeOptions(
    episodes=len(TOPICS), budget_tokens=192, block_tokens=320, window_utterances=4,
    medoid_segments=2, sink_tokens=4,
)  # fmt: skip


def likelihood(
    model: LlamaModel, pages: Sequence[int], stored: int, ids: Sequence[int], first: int, last: int
) -> float:
    """Log-likelihood of the last `last` of these ids, given what is stored and those before."""
    found = logits(model, pages, stored, ids, first).log_softmax(-1)
    at = len(ids) - last
    answer = torch.tensor(ids[at:])
    return float(found[at - 1 : -1].gather(1, answer[:, None]).sum())


@pytest.mark.soak
def test_the_right_episode_answers_better_than_the_others(demo_model: Path, tmp_path: Path) -> None:
    config, weights = of_folder(demo_model, torch.float32)
    text = TextModel(read_text_files(demo_model))
    (tmp_path / "talk.txt").write_text(planted())
    said = read_conversation(tmp_path / "talk.txt", text, 16)
    history = said.token_ids
    found = outline(history, said.ends, said.instruction, OPTIONS)
    asked = [
        (topic, *(text.encode_text(planted() + end) for end in (question, question + right)))
        for topic, pairs in QUESTIONS.items()
        for question, right in pairs
    ]
    for _, before, whole in asked:
        assert whole[: len(history)] == list(history) and whole[: len(before)] == before

    def answers(model: LlamaModel, pages: Sequence[int], stored: int) -> list[float]:
        return [
            likelihood(
                model, pages, stored, whole[len(history) :], len(history), len(whole) - len(before)
            )
            for _, before, whole in asked
        ]

    full = in_torch(config, weights)
    full.allocate((len(history) // 16 + 8,))
    logits(full, range(len(history) // 16), 0, history, 0)
    with_all = np.array(answers(full, range(len(history) // 16), len(history)))
    model = in_torch(config, weights)
    builder = EpisodeBuilder(model, history, OPTIONS)
    by_episode = []
    for patch in found.patches:
        builder.build(patch)
        by_episode.append(answers(model, builder.pages, builder.stored))
    builder.build(said.instruction)  # one cache for every question: no episodes
    alone = np.array(answers(model, builder.pages, builder.stored))
    table = np.array(by_episode)  # [episodes, questions]
    chosen = [nearest(found.index, whole[len(history) : len(before)]) for _, before, whole in asked]
    own = table[chosen, np.arange(len(asked))]
    others = (table.sum(axis=0) - own) / (len(table) - 1)
    topics = np.array([topic for topic, _, _ in asked])
    print(f"{len(history)} tokens, {builder.stored} kept, at most {builder.peak_tokens} stored")
    print("segments", found.labels.tolist())
    for topic in TOPICS:
        mine = topics == topic
        print(
            f"{topic}: episodes {[chosen[i] for i in np.nonzero(mine)[0]]}; mean log-likelihood "
            f"own {own[mine].mean():.2f}, others {others[mine].mean():.2f}, "
            f"all {with_all[mine].mean():.2f}; by episode {np.round(table[:, mine].mean(1), 2)}"
        )
    means = own.mean(), others.mean(), alone.mean(), with_all.mean()
    print("own {:.2f}, others {:.2f}, one for all {:.2f}, full cache {:.2f}".format(*means))
    of_topic = {topic: {chosen[i] for i in np.nonzero(topics == topic)[0]} for topic in TOPICS}
    assert all(len(episodes) == 1 for episodes in of_topic.values()), of_topic
    assert len(set().union(*of_topic.values())) == len(TOPICS)
    for topic in TOPICS:
        assert own[topics == topic].mean() > others[topics == topic].mean() + 0.3
    assert own.mean() > others.mean() + 1.0 and own.mean() > alone.mean() + 0.5
