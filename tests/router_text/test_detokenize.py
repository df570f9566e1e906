"""Incremental detokenization equals decoding everything at once, and never splits a character."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import BUILDERS, text_files

from router.text.detokenize import HELD_TOKENS_MAX, REPLACEMENT, WindowDetokenizer
from router.text.model import TextModel


@functools.cache
def model_of(kind: str) -> TextModel:
    return TextModel(text_files(BUILDERS[kind]()))


@functools.cache
def vocab_tokens(kind: str) -> int:
    return int(BUILDERS[kind]().get_vocab_size())


def stream(model: TextModel, ids: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = model.detokenizer(context or [])
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=400, deadline=None, print_blob=True)
@given(drawn=st.data())
def test_deltas_add_up_to_the_full_decode(kind: str, drawn: st.DataObject) -> None:
    beyond = vocab_tokens(kind) + 3  # models pad their vocabulary: such ids have no text
    ids = drawn.draw(st.lists(st.integers(0, beyond), max_size=40))
    assert "".join(stream(model_of(kind), ids)) == model_of(kind).decode(ids)


@settings(max_examples=400, deadline=None, print_blob=True)
@given(text=st.text(max_size=40))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    for kind in ("byte_level", "byte_fallback"):
        model = model_of(kind)
        pieces = stream(model, model.encode_text(text))
        assert "".join(pieces) == text, kind
        assert not any(REPLACEMENT in piece for piece in pieces), kind


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=100, deadline=None, print_blob=True)
@given(drawn=st.data())
def test_held_back_state_depends_on_the_ids_alone(kind: str, drawn: st.DataObject) -> None:
    """A replay of the first ids gives what the broken stream gave: the rest then fits on to it."""
    ids = drawn.draw(st.lists(st.integers(0, vocab_tokens(kind) - 1), max_size=30))
    cut = drawn.draw(st.integers(0, len(ids)))
    whole = stream(model_of(kind), ids)
    again = model_of(kind).detokenizer()
    replayed = [again.push(i) for i in ids[:cut]]
    assert replayed == whole[:cut]
    assert [*(again.push(i) for i in ids[cut:]), again.flush()] == whole[cut:]


def test_a_character_over_three_tokens_appears_with_its_last() -> None:
    model = model_of("byte_fallback")
    ids = [3 + byte for byte in "東".encode()]
    assert stream(model, ids) == ["", "", "", "東"]
    dot = model.encode_text(".")[-1]  # the run of bytes ends: the character is certain
    assert stream(model, [*ids, dot]) == ["", "", "", "東.", ""]


def test_a_continued_prompt_keeps_its_leading_space() -> None:
    model = model_of("byte_fallback")
    the = model.encode_text("the")  # sentencepiece marks the space before the word
    assert "".join(stream(model, the)) == "the"
    assert "".join(stream(model, the, context=the)) == " the"


def test_work_per_token_does_not_grow_with_the_text() -> None:
    model = model_of("byte_fallback")
    detokenizer = model.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    for i in model.encode_text("the tree. a banyan. " * 200):
        detokenizer.push(i)
        assert len(detokenizer._ids) <= 2 * HELD_TOKENS_MAX
