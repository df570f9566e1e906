"""Stop strings over streamed text, against a search of the whole text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.output import ChoiceText
from router.text.stops import StopMatcher

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def cut_up(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def first_match(text: str, stops: list[str]) -> tuple[str, str]:
    """(text before, stop) of the match that ends first, the longest of those; all text if none."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, ""


@settings(max_examples=600, deadline=None, print_blob=True)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 12), max_size=6))
def test_matches_what_a_search_of_the_whole_text_finds(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher, out = StopMatcher(stops), ""
    for piece in cut_up(text, cuts):
        out += matcher.push(piece)
        if matcher.stop:
            break
    if not matcher.stop:
        out += matcher.flush()
    assert (out, matcher.stop) == first_match(text, stops)


@settings(max_examples=600, deadline=None, print_blob=True)
@given(text=LETTERS, stops=STOPS)
def test_holds_back_only_a_real_partial_match(text: str, stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for end, char in enumerate(text, start=1):
        out += matcher.push(char)
        if matcher.stop:
            return
        held = text[len(out) : end]
        longest = max(
            (
                size
                for size in range(end + 1)
                for s in stops
                if size < len(s) and s[:size] and text[:end].endswith(s[:size])
            ),
            default=0,
        )
        assert len(held) == longest, (text[:end], stops)


def test_across_tokens_and_several_strings() -> None:
    matcher = StopMatcher(["\n\nUser:", "END"])
    assert [matcher.push(p) for p in ["Hello\n", "\nUs", "e E", "N", "D more"]] == [
        "Hello",
        "",
        "\n\nUse ",
        "",
        "",
    ]
    assert matcher.stop == "END"


class Spelled:
    """A detokenizer whose tokens are characters."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return "!"


def spell(text: str, stops: list[str], min_tokens: int) -> tuple[str, str]:
    choice, out = ChoiceText(Spelled(), stops, min_tokens), ""
    for char in text:
        out += choice.push(ord(char))
        if choice.stop:
            return out, choice.stop
    return out + choice.flush(), choice.stop


def test_stop_strings_apply_after_min_tokens() -> None:
    assert spell("abcabc", ["bc"], 0) == ("a", "bc")
    assert spell("abcabc", ["bc"], 2) == ("abca", "bc")
    assert spell("abcabc", ["bc"], 6) == ("abcabc!", "")


def test_the_flushed_rest_may_hold_a_stop_string() -> None:
    assert spell("ab", ["b!"], 0) == ("a", "b!")
    assert spell("ab", ["bx"], 0) == ("ab!", "")
