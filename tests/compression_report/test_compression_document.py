"""A whole compression report of a tiny random model: its figures computed again by other code, and
its pages, tables and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_subject import OSCAR, SETTINGS, tiny_subject, words_text

from banyan.compression_page import PAGE, PICTURE, REPORT, page, plots, write
from banyan.compression_tables import Figures, aligned, short, tables
from seams.bench import Row
from worker.bench_retention import Reader as PrunedReader
from worker.compression.pruned import policies_of, scored
from worker.compression.reading import Reader
from worker.compression.report import measure
from worker.compression.subject import Subject
from worker.compression.sweep import documents_of
from worker.engine.retention.policies import Policies

TEXTS = [words_text("first", 1), words_text("second", 2), words_text("short", 3, count=60)]
CONTEXT = 192


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return tiny_subject(tmp_path_factory.mktemp("document"))


@pytest.fixture(scope="module")
def document(subject: Subject) -> dict[str, Any]:
    heard: list[Row] = []
    made = measure(subject, TEXTS, "learnt", SETTINGS, heard.append)
    assert [row.name for row in heard] == [row["name"] for row in made["rows"]]
    again: dict[str, Any] = json.loads(json.dumps(made))
    return again


@pytest.fixture(scope="module")
def figures(document: dict[str, Any]) -> Figures:
    return Figures(document)


def test_every_codec_is_there_at_every_possible_context(
    document: dict[str, Any], figures: Figures
) -> None:
    assert figures.contexts == [192, 384]
    assert any("512" in said for said in document["left_out"])
    for context in figures.contexts:
        assert figures.subjects(str(context), "kl") == ["model", *SETTINGS.codecs]
        for codec in SETTINGS.codecs:
            for batch in SETTINGS.batches:
                row = figures.row(f"{context}/{codec}/steps b={batch}")
                assert row is not None and row["value"] > 0
                assert row["against"].startswith("model on cpu-")
            size = figures.row(f"{context}/{codec}/token")
            assert size is not None and size["ratio"] == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("codec", ["fp8", "turboquant:k2v2", OSCAR])
def test_kl_and_needles_are_those_of_one_long_step(
    subject: Subject, figures: Figures, codec: str
) -> None:
    documents = documents_of(subject, TEXTS, SETTINGS, CONTEXT, 2)
    kl, rows, found = 0.0, 0, 0
    for one in documents:
        length = len(one.ids)
        models = [Reader(subject.model(name), CONTEXT) for name in ("model", codec)]
        exact, told = (m.read(one.ids, 0)[:-1].double().log_softmax(-1) for m in models)
        each = (exact.exp() * (exact - told)).sum(-1)[~torch.tensor(one.planted[1:])]
        kl, rows = kl + float(each.sum()), rows + len(each)
        for needle in one.needles:
            fresh = Reader(subject.model(codec), CONTEXT)
            last = fresh.read([*one.ids, *needle.question], 0)[-1]
            found += max(needle.candidates, key=lambda token: float(last[token])) == needle.answer
        assert length == 160
    start = f"{CONTEXT}/{codec}"
    kl_row, needles = figures.row(f"{start}/kl"), figures.row(f"{start}/needles")
    assert kl_row is not None and needles is not None
    assert kl_row["samples"] == rows and kl_row["value"] == pytest.approx(kl / rows, rel=1e-3)
    assert kl_row["value"] > 1e-6
    assert needles["value"] == found and needles["samples"] == 8


def test_what_has_no_codec_differs_by_nothing(figures: Figures) -> None:
    for context in figures.contexts:
        assert figures.value(f"{context}/model/kl") == 0
        assert figures.value(f"{context}/model/perplexity") == 0
    assert figures.value("crossed/model + none/kl") == 0


def test_fewer_bits_are_farther_off(figures: Figures) -> None:
    kl = [figures.value(f"384/{codec}/kl") for codec in ("fp8", "turboquant:k2v2")]
    assert kl[0] is not None and kl[1] is not None and 3 * kl[0] < kl[1]


def test_retention_is_what_a_reader_finds_text_by_text(subject: Subject, figures: Figures) -> None:
    count, prompt = SETTINGS.retention_tokens, SETTINGS.prompt_tokens
    name = policies_of(SETTINGS)[-1]
    kl, freed, moved, in_order = 0.0, 0, 0, 0.0
    for text in TEXTS[:2]:
        ids = subject.tokenizer.encode(text.text).ids[:count]
        model = subject.model("model")
        policies = Policies(model.spec, statistics=subject.statistics)
        reader = PrunedReader(model, count)
        whole = reader.read(ids, prompt, None).log_probs.double()
        read = reader.read(ids, prompt, policies.make(name))
        kl += float((whole.exp() * (whole - read.log_probs)).sum())
        freed, moved = freed + read.compacted.freed_blocks, moved + read.compacted.moved_bytes
        if name == scored(SETTINGS, SETTINGS.bands[-1]):
            in_order += read.in_order_bytes
    rows = 2 * (count - prompt)
    start = f"retention/{name}"
    assert figures.value(f"{start}/kl") == pytest.approx(kl / rows, rel=1e-4)
    assert figures.value(f"{start}/blocks freed") == freed > 0
    assert figures.value(f"{start}/freed per MiB") == pytest.approx(freed / (moved / 2**20))
    assert in_order > moved  # holes are fewer than survivors


def test_codec_and_retention_are_crossed(figures: Figures) -> None:
    cells = figures.subjects("crossed", "kl")
    assert len(cells) == 4
    held = {cell: figures.value(f"crossed/{cell}/held") for cell in cells}
    plain, pruned, coded, both = (held[cell] for cell in cells)
    assert None not in (plain, pruned, coded, both)
    assert both == min(held.values()) and plain == max(held.values())  # type: ignore[type-var]
    assert both / coded == pytest.approx(pruned / plain)  # type: ignore[operator]


def test_a_full_pool_refuses_nobody_and_holds_three_times_as_many(figures: Figures) -> None:
    runs = figures.subjects("pool", "together")
    assert [run.split(" + ")[1] for run in runs] == ["none", "streaming", "triattention"]
    for run in runs:
        assert figures.value(f"pool/{run}/refused") == 0
        assert figures.value(f"pool/{run}/preempted") == 0
    for run in runs[1:]:
        assert figures.ratio(f"pool/{run}/together") >= 3  # type: ignore[operator]
        assert figures.value(f"pool/{run}/free as a round began") == 0
        assert figures.value(f"pool/{run}/blocks freed") > 0  # type: ignore[operator]


def test_the_score_is_held_to_attention(figures: Figures) -> None:
    row = figures.row("foretold/held by the best quarter")
    assert row is not None
    assert 0 < row["value"] <= row["against_value"] <= 1
    assert row["samples"] == 2 * 4 * 4  # texts, layers, heads
    assert -1 <= figures.value("foretold/correlation") <= 1  # type: ignore[operator]


def test_what_makes_no_sense_is_said(document: dict[str, Any]) -> None:
    said = dict(document["combinations"])
    assert said["turboquant:k2v2 with triattention"].startswith("warned: ")
    assert said["turboquant:k2v2 with streaming"] == said["fp8 with triattention"] == "served"
    assert said[f"{OSCAR} with streaming"].startswith("refused: ")
    both = next(verdict for what, verdict in said.items() if what.startswith("a request with"))
    assert both.startswith("refused: A request has one retention policy")


def test_the_page_is_a_function_of_the_json(document: dict[str, Any], tmp_path: Path) -> None:
    write(document, tmp_path / "made")
    made = {name: (tmp_path / "made" / name).read_text() for name in (REPORT, PAGE, PICTURE)}
    assert made[PAGE] == page(json.loads(made[REPORT]))
    for text in TEXTS[:2]:
        assert text.sha256 in made[PAGE]
    assert "<script" not in made[PAGE] and "src=" not in made[PAGE] and "href=" not in made[PAGE]
    for codec in SETTINGS.codecs:
        assert made[PAGE].count(short(codec)) >= 3
    drawn = plots(document)
    assert len(drawn) == 6
    assert all(any(series.points for series in plot.series) for plot in drawn)


def test_tables_show_the_rows(document: dict[str, Any], figures: Figures) -> None:
    by_title = {table.title: table for table in tables(document)}
    codecs = by_title["Codecs at 192 tokens"]
    fp8 = dict(zip(codecs.columns, codecs.rows[1], strict=True))
    assert fp8["codec"] == "fp8" and fp8[">bytes per token"] == "512"
    assert fp8[">less than bf16"] == "2.00 x"
    assert fp8[">KL, nats"] == f"{figures.value('192/fp8/kl'):.3g}"
    ratio = figures.ratio("192/fp8/steps b=2")
    assert fp8[">throughput, batch 2"] == f"{ratio:.2f}"
    for table in by_title.values():
        assert all(len(row) == len(table.columns) for row in table.rows)
        lines = aligned(table).splitlines()
        assert len(lines) == 1 + len(table.rows) and all(lines)


@pytest.mark.soak
def test_a_quick_run_on_the_real_model(demo_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "banyan", "bench", "compression", "--quick"]
    command += ["--model", str(demo_model), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = Figures(json.loads((tmp_path / REPORT).read_text()))
    for codec in found.subjects("512", "token"):
        row = found.row(f"512/{codec}/token")
        assert row is not None and row["ratio"] == pytest.approx(1)
    assert found.value("512/fp8/kl") < 0.05  # type: ignore[operator]
    assert found.value("512/fp8/kl") < found.value("512/turboquant:k2v2/kl")  # type: ignore[operator]
    needles = found.row("512/model/needles")
    assert needles is not None and needles["value"] >= 3
    assert found.ratio("pool/model + triattention/together") >= 3  # type: ignore[operator]
    assert found.value("foretold/correlation") > 0.7  # type: ignore[operator]
