"""Prompts, and the comparison of two greedy answers that forgives a true tie and nothing else."""

from __future__ import annotations

from banyan.events import Completion

TIE = 2e-3  # logprob gap under which two next tokens count as tied

SYSTEM = (
    "You are the assistant of a small library. It is open from Monday to Friday from nine until "
    "seven and on Saturday from ten until four; it is closed on Sunday. A reader may borrow five "
    "books for four weeks. Rare prints stay in the house. Answer in one short sentence."
)
CHAT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "When are you open on Monday?"},
]


def tie_or_equal(one: Completion, other: Completion) -> None:
    """Same tokens, or a first difference where the two best were tied. Needs logprobs >= 2."""
    if one.token_ids == other.token_ids:
        assert one.text == other.text and one.finish_reason == other.finish_reason
        return
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    (_, best), (_, second) = one.logprobs_all[0][at].top[:2]
    print(f"tie at token {at}: logprob gap {best - second:.5f}")
    assert best - second < TIE, f"differs at token {at} without a tie"
