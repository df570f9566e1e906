"""A conversation's ids are those with which every later prompt of it begins."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from banyan.conversation import INSTRUCTION, read_conversation
from router.text.model import TextModel
from seams.errors import LaunchError
from seams.textfiles import read_text_files

CHAT = [
    ("system", "You are brief."),
    ("user", "Where is the boat?"),
    ("assistant", "In dock eleven.\nIt needs a mast."),
    ("user", "Who makes it?"),
    ("assistant", "Olaf does, of spruce."),
]
QUESTIONS = ["And what does it cost?", "\nWhen?", "Ümlaut", "12", "Why not? " * 20]


@pytest.fixture(scope="module")
def text(demo_model: Path) -> TextModel:
    return TextModel(read_text_files(demo_model))


def as_json(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


@pytest.mark.parametrize("wrapped", [False, True])
def test_every_later_prompt_of_a_chat_begins_with_it(
    text: TextModel, tmp_path: Path, wrapped: bool
) -> None:
    document = {"messages": as_json(CHAT)} if wrapped else as_json(CHAT)
    (tmp_path / "chat.json").write_text(json.dumps(document))
    found = read_conversation(tmp_path / "chat.json", text, 16)
    count = len(found.token_ids)
    assert count % 16 == 0
    for question in QUESTIONS:
        prompt = text.encode_chat([*CHAT, ("user", question)])
        assert tuple(prompt[:count]) == found.token_ids
    short = text.encode_chat(CHAT[:-1])
    assert count > len(short) - 16  # nothing that could be in it is left out
    assert list(found.ends) == sorted(found.ends) and len(found.ends) >= len(CHAT) - 2
    for end in found.ends:  # a message ends there, or the mark of the next one's beginning
        assert "<|im_end|>" in "".join(
            text.token_bytes(i).decode() for i in found.token_ids[end - 6 : end]
        )
    assert text.decode(found.instruction).strip() == INSTRUCTION


def test_every_later_prompt_of_a_text_begins_with_it(text: TextModel, tmp_path: Path) -> None:
    content = "\n".join(f"{role}: {said}" for role, said in CHAT) + "\n"
    (tmp_path / "talk.txt").write_text(content)
    found = read_conversation(tmp_path / "talk.txt", text, 16)
    count = len(found.token_ids)
    for question in QUESTIONS:
        assert tuple(text.encode_text(content + question)[:count]) == found.token_ids
    edges = pairwise((0, *found.ends))
    lines = [text.decode(found.token_ids[first:last]) for first, last in edges]
    assert lines == content.splitlines(keepends=True)[: len(lines)] and len(lines) >= 4


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "a list of"),
        ('{"messages": 3}', "a list of"),
        ('[{"role": "user"}]', "a list of"),
        ('[{"role": "user", "content": ["parts"]}]', "a list of"),
        ("too short", "fewer than 16 tokens"),
    ],
)
def test_what_is_no_conversation_is_one_sentence(
    text: TextModel, tmp_path: Path, content: str, sentence: str
) -> None:
    (tmp_path / "given").write_text(content)
    with pytest.raises(LaunchError, match=sentence):
        read_conversation(tmp_path / "given", text, 16)
    with pytest.raises(LaunchError, match="cannot be read"):
        read_conversation(tmp_path / "missing", text, 16)
