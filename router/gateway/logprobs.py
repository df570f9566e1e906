"""Logprobs in OpenAI's two forms. Knows tokens as text, and models without text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from banyan.v1 import common_pb2
from router.text.model import TextModel

LOGPROB_MIN = -9999.0  # JSON has no infinity


class Spelling:
    """How token ids are shown: as text, or by number where the model has none."""

    def __init__(self, text: TextModel | None) -> None:
        self._text = text

    def token(self, token_id: int) -> tuple[str, list[int] | None]:
        """A token's text and its bytes. Bytes that are no whole character show as U+FFFD."""
        if self._text is None:
            return f"token_id:{token_id}", None
        spelt = self._text.token_bytes(token_id)
        return spelt.decode("utf-8", "replace"), list(spelt)


def _entry(token: common_pb2.TokenLogprob, spelling: Spelling) -> dict[str, Any]:
    text, spelt = spelling.token(token.token_id)
    return {"token": text, "logprob": max(token.logprob, LOGPROB_MIN), "bytes": spelt}


def chat_logprobs(
    positions: Sequence[common_pb2.PositionLogprobs], spelling: Spelling
) -> dict[str, Any]:
    """One entry per token, with its alternatives."""
    content = [
        _entry(position.chosen, spelling)
        | {"top_logprobs": [_entry(top, spelling) for top in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Sequence[common_pb2.PositionLogprobs], spelling: Spelling, offset: int
) -> dict[str, Any]:
    """Lists side by side; `offset` is where the first token's text begins in its choice."""
    tokens = [spelling.token(position.chosen.token_id)[0] for position in positions]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(p.chosen.logprob, LOGPROB_MIN) for p in positions],
        "top_logprobs": [
            {spelling.token(t.token_id)[0]: max(t.logprob, LOGPROB_MIN) for t in p.top}
            for p in positions
        ],
        "text_offset": offsets,
    }
