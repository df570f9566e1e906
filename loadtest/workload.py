"""Workloads: conversations with shared system prompts, made of deterministic words. No network."""

from __future__ import annotations

import random
from dataclasses import dataclass

WORDS = (  # noqa: SIM905
    "tree root branch trunk canopy leaf shade rain soil river stone bird nest seed fruit wind "
    "light night morning path bridge village market road boat island cloud winter summer field "
    "garden wall door window table paper letter story song drum bell water fire iron glass salt"
).split()


@dataclass(frozen=True)
class Conversation:
    """One user's turns under a system prompt that its group shares."""

    user: str
    system: str
    questions: tuple[str, ...]


def _sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize() + "."


def shared_prefix_chats(
    users: int, groups: int, turns: int, system_words: int, question_words: int, seed: int
) -> list[Conversation]:
    """`users` conversations over `groups` different system prompts; the same for the same seed."""
    rng = random.Random(seed)
    systems = [_sentence(rng, system_words) for _ in range(groups)]
    return [
        Conversation(
            user=f"user-{i}",
            system=systems[i % groups],
            questions=tuple(_sentence(rng, question_words) for _ in range(turns)),
        )
        for i in range(users)
    ]
