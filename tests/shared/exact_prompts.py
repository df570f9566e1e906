"""Fifty prompts in ten groups of five; a group shares a beginning that ends inside a block."""

import random
from pathlib import Path

from tokenizers import Tokenizer

PROMPTS, OUTPUT = 50, 64
TOPICS = ("rivers", "bread", "clocks", "bees", "maps", "rain", "glass", "ships", "trees", "salt")
QUESTIONS = ("Why?", "Tell me a story.", "List three facts.", "Who cares?", "And then what?")


def exact_prompts(folder: Path) -> list[tuple[int, ...]]:
    """The prompts as token ids of the model in `folder`; always the same."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(11)
    made = []
    for topic in TOPICS:
        system = f"You know all about {topic}. " * rng.randint(2, 18)
        for question in QUESTIONS:
            text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}"
            text += "<|im_end|>\n<|im_start|>assistant\n"
            made.append(tuple(tokenizer.encode(text, add_special_tokens=False).ids))
    assert len(made) == PROMPTS
    return made
