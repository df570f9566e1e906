"""Texts have the length that was asked for, in the model's tokens, and are the same every time."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest

from loadtest.text import FILLER, Writer, made_up, rng_of, words_of
from loadtest.tokens import ModelTokens, WordTokens, folder_tokens
from router.text.model import TextModel
from seams.errors import InvalidRequest, ModelLoadError
from seams.textfiles import read_text_files


class Letters:
    """A tokenizer whose words have one token per three letters, so that few lengths fit exactly."""

    def count(self, text: str) -> int:
        return sum(-(-len(word) // 3) for word in text.split())


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 100, 1000])
@pytest.mark.parametrize("counter", [WordTokens(), Letters()])
def test_lengths_are_met(tokens: int, counter: WordTokens) -> None:
    text = Writer(counter).write(rng_of(3, tokens), tokens)
    print("seed 3")
    assert counter.count(text) == tokens


def test_lengths_are_met_in_a_real_models_tokens(demo_model: Path) -> None:
    counter = folder_tokens(str(demo_model))
    model = TextModel(read_text_files(demo_model))
    for tokens in (5, 64, 517):
        text = Writer(counter).write(rng_of(1, tokens), tokens)
        assert len(model.encode_text(f" {text}")) == tokens


def test_a_counter_leaves_out_what_surrounds_every_prompt() -> None:
    class Edged:
        def encode_text(self, text: str) -> list[int]:
            return [1, *range(len(text.split())), 2]

    assert ModelTokens(Edged()).count("a b c") == 3  # type: ignore[arg-type]


def test_same_seed_same_text_and_shorter_ones_begin_alike() -> None:
    writer = Writer(WordTokens())
    text = writer.write(rng_of("1.0", "block", 7), 50)
    assert writer.write(rng_of("1.0", "block", 7), 50) == text
    assert writer.write(rng_of("1.1", "block", 7), 50) != text
    assert text.startswith(writer.write(rng_of("1.0", "block", 7), 20))


def test_words_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("one two\nthree  four five " + "x" * 500)
    words = list(islice(words_of(path)(rng_of(2)), 13))
    assert set(words) == {"one", "two", "three", "four", "five", "x" * 64}
    assert words[:6] == words[6:12]  # round and round
    text = Writer(WordTokens(), words_of(path)).write(rng_of(2), 9)
    assert len(text.split()) == 9 and FILLER not in text.split()


def test_made_up_words_are_words() -> None:
    assert all(re.fullmatch("[a-z]+", word) for word in islice(made_up(rng_of(1)), 100))


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff", b"  \n "])
def test_a_file_without_words_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"words\.txt (cannot be read as text|has no words)\."):
        words_of(path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no tokenizer that can be read"):
        folder_tokens(str(tmp_path))
    assert folder_tokens("words").count("three little words") == 3
