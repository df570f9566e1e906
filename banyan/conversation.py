"""A conversation from a file, as the token ids with which every later prompt of it begins. It knows
text and templates; no model's weights and no cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from router.text.model import TextModel
from seams.errors import InvalidRequest, LaunchError

INSTRUCTION = (
    "Extract what is essential in this conversation: who speaks, what they are like, what they "
    "said, did and planned, with names, places, numbers and dates."
)
"""The beginning of every patched prompt, after the one that EpiCache's authors use."""

PROBES = ("Why?", "7")  # whatever is asked next, the prompt begins alike

Messages = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Conversation:
    """`token_ids` are whole blocks; what is left of a last one belongs to the question. `ends` are
    the places behind utterances."""

    token_ids: tuple[int, ...]
    ends: tuple[int, ...]
    instruction: tuple[int, ...]


def read_conversation(path: Path, text: TextModel, block_tokens: int) -> Conversation:
    """A JSON file is a chat: messages of role and content, as a list or in an object's `messages`.
    Anything else is plain text, a line an utterance. Raises LaunchError or InvalidRequest."""
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError):
        raise LaunchError(f"The conversation {path} cannot be read.") from None
    messages = _messages(content)
    found = _text(text, content) if messages is None else _chat(text, messages)
    token_ids, ends = found
    whole = len(token_ids) // block_tokens * block_tokens
    if whole == 0:
        raise LaunchError(f"The conversation {path} has fewer than {block_tokens} tokens.")
    return Conversation(
        tuple(token_ids[:whole]), tuple(end for end in ends if end < whole), _instruction(text)
    )


def _messages(content: str) -> list[tuple[str, str]] | None:
    """Of a chat; None if it is not JSON. Raises LaunchError."""
    try:
        document = json.loads(content)
    except ValueError:
        return None
    given = document.get("messages") if isinstance(document, dict) else document
    if not (isinstance(given, list) and given and all(map(_is_message, given))):
        raise LaunchError(
            'A conversation in JSON is a list of {"role": ..., "content": ...} with texts.'
        )
    return [(message["role"], message["content"]) for message in given]


def _is_message(value: Any) -> bool:
    parts = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None,)
    return all(isinstance(part, str) for part in parts)


def _text(text: TextModel, content: str) -> tuple[list[int], list[int]]:
    """Ids, and where lines end: behind a token with a line feed in it."""
    token_ids = _stem(lambda probe: text.encode_text(content + probe))
    lines = [b"\n" in text.token_bytes(token) for token in token_ids]
    return token_ids, [at + 1 for at, ends in enumerate(lines) if ends]


def _chat(text: TextModel, messages: Messages) -> tuple[list[int], list[int]]:
    """Ids, and where messages end: as far as the prompt of so many is the beginning of all."""
    token_ids = _stem(lambda probe: text.encode_chat([*messages, ("user", probe)]))
    return token_ids, list(_message_ends(text, messages, token_ids))


def _message_ends(text: TextModel, messages: Messages, token_ids: Sequence[int]) -> Iterator[int]:
    for count in range(1, len(messages)):
        try:
            yield _common(token_ids, text.encode_chat(messages[:count]))
        except InvalidRequest:
            continue  # a template that takes no chat ending here: two messages are one utterance


def _stem(prompt: Callable[[str], list[int]]) -> list[int]:
    """The beginning that the prompts of all probes share."""
    prompts = [prompt(probe) for probe in PROBES]
    return prompts[0][: min(_common(one, other) for one, other in pairwise(prompts))]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _instruction(text: TextModel) -> tuple[int, ...]:
    """Without what the tokenizer puts around a text of its own."""
    around = set(text.encode_text(""))
    return tuple(i for i in text.encode_text(f"\n{INSTRUCTION}\n") if i not in around)
