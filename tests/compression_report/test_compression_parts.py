"""The parts of the compression report, each against what can be worked out by hand."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_subject import SETTINGS, tiny_subject, word_tokenizer, words_text

from seams.errors import InvalidRequest
from worker.compression.arithmetic import Shape, plain_token_bytes, token_bytes
from worker.compression.base import CODECS, PLAIN, Findings
from worker.compression.needles import Retrieval, make_needles, plant
from worker.compression.pruned import measure_retention
from worker.compression.reading import Reader, Tally
from worker.compression.subject import Subject, check_codecs
from worker.compression.sweep import measure_sweep, size_rows
from worker.compression.texts import Text, docstrings, text_of_file, texts_on_this_machine

ONE_HEAD = Shape((0,), 1, 128, 2, 16)  # a KV head of 128 in bf16


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return tiny_subject(tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        ("model", 512),
        ("fp8", 256),
        ("turboquant:k8v4", 194),
        ("turboquant", 132),
        ("turboquant:k3v4", 116),
        ("turboquant:k3v3", 100),
        ("turboquant:k2v2", 68),
        ("turboquant:k4v4,boundary=1", 512),
        ("oscar:sinks=0,window=1", 72 + 512 * 16 / 4096),
        ("oscar", 72 + 512 * (64 + 272) / 4096),
    ],
)
def test_bytes_of_a_head_of_128_are_the_documented_ones(codec: str, size: float) -> None:
    assert token_bytes(codec, ONE_HEAD, 4096) == size


def test_windows_hold_whole_blocks_and_the_first_of_sliding_layers_all() -> None:
    sliding = Shape((33, 33), 1, 128, 2, 16)
    assert plain_token_bytes(sliding, 480) == 512 * (1 + 48 / 480)
    assert plain_token_bytes(Shape((0, 33), 1, 128, 2, 16), 32) == 2 * 512
    with pytest.raises(InvalidRequest, match="cannot work out"):
        token_bytes("zip", ONE_HEAD, 16)


def test_layouts_take_what_arithmetic_says(subject: Subject) -> None:
    rows = size_rows(subject, (*CODECS, *SETTINGS.codecs[2:3]), 512)
    sizes = [row for row in rows if row.name.endswith("/token")]
    assert len(sizes) == len(CODECS) + 2
    for row in sizes:
        assert row.value == row.against_value, row.name
    by_name = {row.name: row for row in rows}
    plain = by_name["512/model/token"].value
    assert plain == 4 * 2 * 2 * 32 * 2 == by_name["512/fp8/token"].others["bf16"]
    assert by_name["512/fp8/blocks per GiB"].value == 2**30 / (plain / 2 * 16)
    assert by_name["512/fp8/blocks per GiB"].ratio == 2


def test_layers_that_slide_are_counted_by_their_windows(subject: Subject) -> None:
    windows = (0, 33, 0, 33)
    sliding = replace(subject, config=replace(subject.config, windows=windows))
    for row in size_rows(sliding, ("fp8", "turboquant:k3v3", "oscar"), 512):
        if row.name.endswith("/token"):
            assert row.ratio == pytest.approx(1, rel=1e-12), row.name
    found = Findings()
    asked = replace(SETTINGS, contexts_tokens=(192,), documents=(1,), codecs=("fp8",))
    measure_sweep(sliding, [words_text("a", 1)], asked, found)
    measure_retention(sliding, [words_text("a", 1)], asked, found)
    assert any("sliding windows" in said for said in found.left_out)
    names = [row.name for row in found.report.rows]
    assert "192/fp8/kl" in names and not any(name.startswith("retention") for name in names)


def test_short_texts_leave_out_what_they_cannot_fill(subject: Subject) -> None:
    short, found = [words_text("short", 3, count=250)], Findings()
    asked = replace(SETTINGS, contexts_tokens=(192, 384), documents=(1, 1), codecs=("fp8",))
    measure_sweep(subject, short, asked, found)
    measure_retention(subject, short, asked, found)
    names = [row.name for row in found.report.rows]
    assert "192/fp8/kl" in names and "384/fp8/kl" not in names
    assert len(found.left_out) == 2 and "384" in found.left_out[0]
    with pytest.raises(InvalidRequest, match="192 tokens"):
        measure_sweep(subject, [words_text("shorter", 3, count=90)], asked, Findings())


def test_needles_are_words_of_one_token_each_with_its_own_name() -> None:
    tokenizer = word_tokenizer()
    needles = make_needles(tokenizer, 8, seed=3)
    assert needles == make_needles(tokenizer, 8, seed=3) != make_needles(tokenizer, 8, seed=4)
    assert len({needle.answer for needle in needles}) == 8
    assert len({needle.question for needle in needles}) == 8
    for needle in needles:
        assert needle.sentence[:-2] == needle.question
        assert needle.sentence[-2] == needle.answer
        assert len(set(needle.candidates)) == 16 and needle.answer in needle.candidates
    with pytest.raises(InvalidRequest, match="30 needles"):
        make_needles(tokenizer, 30, seed=1)


def test_a_document_has_its_length_and_its_needles_at_even_depths() -> None:
    tokenizer, text = word_tokenizer(), words_text("a", 1)
    needles = make_needles(tokenizer, 5, seed=1)
    document = plant(text.name, text.text, tokenizer, needles, 304)
    assert len(document.ids) == len(document.planted) == 304
    kept = [i for i, planted in zip(document.ids, document.planted, strict=True) if not planted]
    assert kept == tokenizer.encode(text.text).ids[: len(kept)]
    firsts = []
    for needle in needles:
        size = len(needle.sentence)
        found = [
            at for at in range(304 - size) if document.ids[at : at + size] == [*needle.sentence]
        ]
        assert len(found) == 1 and all(document.planted[found[0] : found[0] + size])
        firsts.append(found[0])
    assert firsts == sorted(firsts)
    for number, first in enumerate(firsts):
        assert abs(first / 304 - (number + 0.5) / 5) < 0.06
    with pytest.raises(InvalidRequest, match="600 tokens"):
        plant(text.name, text.text, tokenizer, needles, 900)


def test_retrieval_counts_what_logits_say() -> None:
    needles = make_needles(word_tokenizer(), 3, seed=1)
    logits = torch.zeros(3, 320)
    logits[0, needles[0].answer] = 2.0  # first by likelihood and of all
    logits[1, needles[1].answer] = 1.0  # first of its candidates; token 0 is likelier
    logits[1, 0] = 3.0
    logits[2, needles[2].candidates[needles[2].candidates[0] == needles[2].answer]] = 4.0
    found = Retrieval()
    found.add(needles, logits)
    assert (found.asked, found.found, found.greedy) == (3, 2, 1)
    assert found.lead_nats == pytest.approx(2.0 + 1.0 - 4.0)


def test_chunks_and_questions_read_as_one_sequence_does(subject: Subject) -> None:
    ids = subject.tokenizer.encode(words_text("b", 2).text).ids[:160]
    needles = make_needles(subject.tokenizer, 3, seed=2)
    questions = [needle.question for needle in needles]
    cut = Reader(subject.model(PLAIN), 160, len(questions))
    parts = [cut.read(ids[a:b], a).clone() for a, b in ((0, 50), (50, 51), (51, 160))]
    answers = cut.ask(160, questions)
    for number, question in enumerate(questions):
        whole = Reader(subject.model(PLAIN), 192).read([*ids, *question], 0)
        assert torch.allclose(torch.cat(parts), whole[:160], atol=2e-4)
        assert torch.allclose(answers[number], whole[-1], atol=2e-4)


def test_a_tally_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    e, f = (torch.randn(2, 130, 50, generator=generator) * 2).log_softmax(-1)
    targets = torch.randint(0, 50, (130,), generator=generator)
    tally = Tally()
    tally.add(e[:70], f[:70], targets[:70])
    tally.add(e[70:], f[70:], targets[70:])
    kl = torch.nn.functional.kl_div(f.double(), e.double(), log_target=True, reduction="batchmean")
    assert tally.rows == 130 and tally.kl == pytest.approx(float(kl), rel=1e-5)
    loss = torch.nn.functional.nll_loss
    ratio = torch.exp(loss(f.double(), targets)) / torch.exp(loss(e.double(), targets))
    assert tally.perplexity_more == pytest.approx(float(ratio) - 1, rel=1e-5)
    assert tally.other_share == float((e.argmax(-1) != f.argmax(-1)).double().mean())


def test_texts_are_long_and_none_is_learnt_from(tmp_path: Path) -> None:
    measured, learnt = texts_on_this_machine(), docstrings()
    assert len(measured) >= 2 and min(len(text.text) for text in measured) > 30_000
    assert len(learnt.text) > 100_000
    assert learnt.sha256 not in {text.sha256 for text in measured}
    said = measured[0].as_json(7)
    assert said["sha256"] == hashlib.sha256(measured[0].text.encode()).hexdigest()
    assert said["tokens"] == 7 and said["bytes"] == len(measured[0].text.encode())
    file = tmp_path / "own.txt"
    file.write_text("ours")
    assert text_of_file(file) == Text("own.txt", "ours")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        text_of_file(tmp_path / "none.txt")


@pytest.mark.parametrize("codecs", [("model",), ("zip",), ("fp8", "fp8"), ("turboquant:k5v4",)])
def test_what_is_no_codec_is_refused(codecs: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="codec"):
        check_codecs(codecs)
