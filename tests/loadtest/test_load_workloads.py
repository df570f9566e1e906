"""Workloads make the sessions that they promise: what is shared, what follows what, how long."""

from __future__ import annotations

from itertools import combinations

import pytest

from loadtest.text import Writer, rng_of
from loadtest.tokens import WordTokens
from loadtest.workloads.base import Message, Session, Shape, Turn
from loadtest.workloads.catalog import MADE, maker
from seams.errors import InvalidRequest

SHAPE = Shape(
    turns=3, groups=2, branches=3, documents=5, documents_per_question=2, prefix_tokens=40,
    document_tokens=30, input_tokens=10, output_tokens=6, think_s=0.5,
)  # fmt: skip


def sessions(name: str, count: int = 12, seed: str = "1.0", shape: Shape = SHAPE) -> list[Session]:
    workload = maker(name, shape)(Writer(WordTokens()), seed)
    return [workload.session(number) for number in range(count)]


def words(text: str) -> int:
    return WordTokens().count(text)


@pytest.mark.parametrize("name", list(MADE))
def test_a_session_depends_on_its_seed_and_number_alone(name: str) -> None:
    made = sessions(name)
    workload = maker(name, SHAPE)(Writer(WordTokens()), "1.0")
    assert [workload.session(number) for number in reversed(range(12))] == made[::-1]
    others = sessions(name, seed="1.1")
    assert all(a.turns != b.turns for a, b in zip(made, others, strict=True))
    assert len({session.name for session in made}) == 12
    assert len({session.turns for session in made}) == 12


def test_random_prompts_share_nothing() -> None:
    texts = [session.turns[0].messages[0].content for session in sessions("random")]
    assert all(words(text) == 10 for text in texts)
    assert all(a.split()[:4] != b.split()[:4] for a, b in combinations(texts, 2))


def test_prefix_groups_share_their_prefix() -> None:
    made = sessions("prefix-groups")
    prefixes = {(s.group, s.turns[0].messages[0]) for s in made}
    assert {group for group, _ in prefixes} == {"group-0", "group-1"} and len(prefixes) == 2
    assert all(words(m.content) == 40 and m.role == "system" for _, m in prefixes)
    assert len({s.turns[0].messages[1].content for s in made}) == 12


def test_without_prefix_tokens_there_is_no_system_message() -> None:
    (session,) = sessions("chat", 1, shape=Shape(prefix_tokens=0))
    assert [m.role for m in session.turns[0].messages] == ["user"]


def test_a_chat_follows_itself() -> None:
    for session in sessions("chat"):
        assert [turn.follows for turn in session.turns] == [None, 0, 1]
        assert [turn.wait_s for turn in session.turns] == [0.0, 0.5, 0.5]
        assert [len(turn.messages) for turn in session.turns] == [2, 1, 1]


def test_an_agent_branches_and_joins() -> None:
    for session in sessions("agent"):
        turns = session.turns
        assert len(turns) == 1 + 3 * (3 + 1)
        assert [turn.needs for turn in turns[:5]] == [(), (0,), (0,), (0,), (0, 1, 2, 3)]
        assert turns[5].needs == (4,) and turns[8].needs == (4, 5, 6, 7)
        assert {turn.wait_s for turn in turns[1:4]} == {0.5} and turns[4].wait_s == 0.0


def test_rag_prompts_begin_with_documents_that_others_have_too() -> None:
    made = sessions("rag", 40)
    opened = [session.turns[0].messages[0].content.split("\n\n") for session in made]
    assert all([words(part) for part in parts] == [30, 30, 10] for parts in opened)
    assert all(parts[0] != parts[1] for parts in opened)
    firsts = {parts[0] for parts in opened}
    assert len(firsts) == 5  # of 40 prompts
    assert {session.group for session in made} == {f"document-{i}" for i in range(5)}


def test_lengths_spread_around_their_mean() -> None:
    shape = Shape(input_tokens=100, output_tokens=50, spread=0.5)
    rng = rng_of(5)
    drawn = [shape.input_of(rng) for _ in range(2000)]
    assert 50 <= min(drawn) < 60 and 140 < max(drawn) <= 150
    assert abs(sum(drawn) / len(drawn) - 100) < 3
    assert Shape(output_tokens=50).output_of(rng) == 50


def test_skew_follows_zipfs_law() -> None:
    rng = rng_of(6)
    shape = Shape(skew=1.0)
    drawn = [shape.chosen(rng, 4) for _ in range(4000)]
    shares = [drawn.count(number) / len(drawn) for number in range(4)]
    wanted = [1 / k / (1 + 1 / 2 + 1 / 3 + 1 / 4) for k in (1, 2, 3, 4)]
    assert shares == pytest.approx(wanted, abs=0.03)


def test_a_turn_needs_earlier_ones() -> None:
    said = (Message("user", "hello"),)
    with pytest.raises(AssertionError):
        Session("s", (Turn(said, 1, follows=0),))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="There is no workload nonsense; there are random"):
        maker("nonsense", SHAPE)
    with pytest.raises(InvalidRequest, match="The workload trace needs --trace FILE"):
        maker("trace", SHAPE)
