"""`banyan bench compression`: from options to the report, shown while it is measured."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from banyan.cli import output
from banyan.models import resolve_model
from seams.bench import Row
from seams.errors import InvalidRequest, ModelLoadError

if TYPE_CHECKING:
    from worker.compression.base import Settings

FAKE = "fake:"


@dataclass(frozen=True)
class Asked:
    """The options as they were given; "" and () stand for what was not."""

    model: str
    texts: tuple[str, ...]
    calibration: str
    codecs: str
    contexts: str
    only: str
    quick: bool
    out: str
    json_file: str


def run(asked: Asked) -> None:
    """Measure, print the tables, write the files. Raises a BanyanError, one sentence."""
    if asked.model.startswith(FAKE):
        raise ModelLoadError("A fake model has no keys and values to compress.")
    from banyan.compression_page import write

    settings = settings_of(asked)
    document = _measured(asked, settings)
    show(document)
    if asked.out:
        write(document, Path(asked.out).expanduser())
    if asked.json_file:
        _write_json(document, Path(asked.json_file).expanduser())


def settings_of(asked: Asked) -> Settings:
    """The full ones or the quick ones, with what was asked for instead. Raises InvalidRequest."""
    from worker.compression.base import QUICK, Settings
    from worker.compression.subject import check_codecs

    settings = QUICK if asked.quick else Settings()
    if asked.codecs:
        settings = replace(settings, codecs=tuple(asked.codecs.split()))
    if asked.contexts:
        tokens = _contexts(asked.contexts)
        settings = replace(settings, contexts_tokens=tokens, documents=(1,) * len(tokens))
    if asked.only:
        settings = replace(settings, parts=_parts(asked.only))
    check_codecs(settings.codecs)
    return settings


def _contexts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    wrong = InvalidRequest("--contexts are tokens, multiples of 16 from 128 on, comma between.")
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
        raise wrong
    if any(int(part) < 128 or int(part) % 16 for part in parts):
        raise wrong
    return tuple(sorted({int(part) for part in parts}))


def _parts(text: str) -> tuple[str, ...]:
    from worker.compression.base import PARTS

    named = {part.strip() for part in text.split(",")}
    if named - set(PARTS):
        raise InvalidRequest(f"--only names parts, comma between: {', '.join(PARTS)}.")
    return tuple(part for part in PARTS if part in named)


def _measured(asked: Asked, settings: Settings) -> dict[str, Any]:
    from worker.compression.report import measure
    from worker.compression.subject import calibrated, open_subject, with_calibration
    from worker.compression.texts import docstrings, text_of_file, texts_on_this_machine

    texts = [text_of_file(Path(name).expanduser()) for name in asked.texts]
    with output.stages(quiet=False) as progress:
        folder = resolve_model(asked.model, progress)
    subject = open_subject(folder)
    with tempfile.TemporaryDirectory(prefix="banyan-report-") as scratch:
        if asked.calibration:
            learnt_from = Path(asked.calibration).name
            subject = with_calibration(subject, Path(asked.calibration).expanduser())
        else:
            learnt = docstrings()
            learnt_from = f"{learnt.name}, sha256 {learnt.sha256}"
            file = Path(scratch) / "calibration.safetensors"
            subject = calibrated(subject, learnt, settings.calibration_tokens, file)
        found = measure(subject, texts or texts_on_this_machine(), learnt_from, settings, _tell)
    return found | {"command": shlex.join(["banyan", *sys.argv[1:]])}


def _tell(row: Row) -> None:
    beside = "" if row.against_value is None else f" ({row.against}: {row.against_value:.4g})"
    output.errors.print(
        f"{row.name}: {row.value:.4g} {row.unit}{beside}", markup=False, soft_wrap=True
    )


def show(document: dict[str, Any]) -> None:
    """The tables, what they were measured on, and what was left out."""
    from banyan.compression_tables import aligned, tables

    for table in tables(document):
        print(f"{table.title}\n\n{aligned(table)}\n")
    for text in document["run"]["texts"]:
        size = f"{text['bytes']:,} bytes, {text['tokens']:,} tokens"
        print(f"{text['name']}: {size}, sha256 {text['sha256'][:16]}")
    for said in document["left_out"]:
        print(f"left out: {said}")


def _write_json(document: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}.") from None
