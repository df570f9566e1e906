"""The whole compression report of a model: all parts in their order, and what names the run. Knows
no page: what it returns is the bench format's JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from seams.bench import Row
from worker.compression.base import PARTS, Findings, Settings
from worker.compression.combined import measure_combinations
from worker.compression.foretold import measure_foretold
from worker.compression.pools import measure_pools
from worker.compression.pruned import measure_retention
from worker.compression.steps import measure_steps
from worker.compression.subject import Subject, usable
from worker.compression.sweep import measure_sweep
from worker.compression.texts import Text
from worker.models.weights import FLOATS

Part = Callable[[], None]


def measure(
    subject: Subject,
    texts: Sequence[Text],
    learnt_from: str,
    settings: Settings,
    told: Callable[[Row], None],
) -> dict[str, Any]:
    """The report as JSON. `told` hears of each row as it comes; `learnt_from` names the text of the
    calibration. Raises InvalidRequest or OutOfBlocks, one sentence."""
    found, took_s = Findings(told=told), {}
    codecs = usable(subject, settings.codecs)
    found.left_out += [
        f"{codec}: the model is not calibrated." for codec in settings.codecs if codec not in codecs
    ]
    settings = replace(settings, codecs=codecs)
    parts: dict[str, Part] = {
        "combinations": lambda: measure_combinations(settings, found),
        "sweep": lambda: measure_sweep(subject, texts, settings, found),
        "steps": lambda: measure_steps(subject, settings, found),
        "retention": lambda: measure_retention(subject, texts, settings, found),
        "foretold": lambda: measure_foretold(subject, texts, settings, found),
        "pools": lambda: measure_pools(subject, texts, settings, found),
    }
    assert tuple(parts) == PARTS
    for name in settings.parts:
        began = time.perf_counter()
        parts[name]()
        took_s[name] = round(time.perf_counter() - began, 1)
    return found.as_json(header(subject, texts, learnt_from, settings) | {"took_s": took_s})


def header(
    subject: Subject, texts: Sequence[Text], learnt_from: str, settings: Settings
) -> dict[str, Any]:
    """What was run on what: enough to run it again."""
    shape = subject.shape
    read = [text.as_json(len(subject.tokenizer.encode(text.text).ids)) for text in texts]
    learnt = subject.statistics
    return {
        "model": Path(subject.told.model).name,
        "fingerprint": subject.fingerprint,
        "dtype": FLOATS[subject.stored],
        "shape": asdict(shape) | {"context_tokens": subject.config.context_tokens},
        "texts": read,
        "calibration": None
        if learnt is None
        else {"text": learnt_from, "tokens": learnt.tokens, "hash": learnt.hash},
        "settings": asdict(settings),
    }
