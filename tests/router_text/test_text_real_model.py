"""The real model's text, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from router.text.model import TextModel
from seams.textfiles import read_text_files

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "naïve café — 東京 🙂🙃 \u200d family 👩‍👩‍👧",
    "tabs\tand\r\nnewlines\n\n\n",
    "special <|im_start|>user\nand <|im_end|> in the text",
    "0123456789 " * 20,
    "mixed العربية हिन्दी ไทย",
]
CHATS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "What is a banyan?")],
    [("user", "a"), ("assistant", "b 🙂"), ("user", "c <|im_end|> d")],
]


@pytest.fixture(scope="module")
def ours(demo_model: Path) -> TextModel:
    return TextModel(read_text_files(demo_model))


@pytest.fixture(scope="module")
def theirs(demo_model: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(demo_model)


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_encodes_alike(ours: TextModel, theirs: Any, text: str) -> None:
    assert ours.encode_text(text) == theirs.encode(text)


@pytest.mark.parametrize("chat", CHATS)
def test_chats_render_and_encode_alike(
    ours: TextModel, theirs: Any, chat: list[tuple[str, str]]
) -> None:
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(chat) == list(expected)


def test_random_ids_decode_alike_one_by_one(ours: TextModel, theirs: Any) -> None:
    for seed in range(100):
        draw = random.Random(seed)
        ids = [draw.randrange(len(theirs)) for _ in range(draw.randrange(1, 60))]
        detokenizer = ours.detokenizer()
        streamed = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert streamed == theirs.decode(ids, skip_special_tokens=True), f"seed {seed}"
