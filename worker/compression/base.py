"""What the parts of the compression report share: its settings, and where figures go. Knows no
model.

A part is a function of a Subject, the Settings and the Findings; it adds rows, and curves for
plots. Every figure of a page or a table is made of those alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from seams.bench import Report, Row

PARTS = ("combinations", "sweep", "steps", "retention", "foretold", "pools")
PLAIN = "model"  # no codec: the model's dtype
KEEP_ALL = "none"  # no retention policy
CODECS = (
    "fp8",
    "turboquant:k8v4",
    "turboquant:k4v4",
    "turboquant:k4v4,boundary=2",
    "turboquant:k3v4",
    "turboquant:k3v3",
    "turboquant:k2v2",
    "oscar",
)

Point = tuple[float, float]


@dataclass(frozen=True)
class Settings:
    """How much is measured. Contexts longer than the model's are left out, and said to be."""

    codecs: tuple[str, ...] = CODECS
    parts: tuple[str, ...] = PARTS
    contexts_tokens: tuple[int, ...] = (2048, 8192)
    documents: tuple[int, ...] = (2, 1)  # of each context, at most
    needles: int = 8  # planted in each document
    step_rounds: int = 9  # decode steps of each codec
    batches: tuple[int, ...] = (1, 8)  # sequences in such a step
    retention_tokens: int = 2048  # of each text that is read under policies
    retention_documents: int = 1
    prompt_tokens: int = 128
    budget_tokens: int = 256
    interval_tokens: int = 64
    window_tokens: int = 64
    bands: tuple[float, ...] = (0.0, 0.1, 0.3)
    crossed_codec: str = "turboquant:k4v4"  # of the table codec x retention
    foretold_tokens: tuple[int, int] = (1024, 128)  # whose keys are scored, that look at them
    generations: int = 12  # long ones, in a small pool
    generated_tokens: int = 320
    pool_codecs: tuple[str, ...] = (PLAIN, "turboquant:k4v4")
    calibration_tokens: int = 4096
    seed: int = 1  # of needles


QUICK = Settings(
    codecs=("fp8", "turboquant:k8v4", "turboquant:k4v4", "turboquant:k2v2", "oscar"),
    contexts_tokens=(512,),
    documents=(1,),
    needles=4,
    step_rounds=5,
    batches=(1,),
    retention_tokens=448,
    retention_documents=1,
    prompt_tokens=64,
    budget_tokens=128,
    interval_tokens=32,
    window_tokens=32,
    bands=(0.0, 0.1),
    foretold_tokens=(256, 64),
    generations=8,
    generated_tokens=144,
    pool_codecs=(PLAIN,),
    calibration_tokens=512,
)


@dataclass
class Findings:
    """What was found so far; `told` hears of each row as it comes."""

    told: Callable[[Row], None] = lambda row: None
    report: Report = field(default_factory=Report)
    curves: dict[str, list[Point]] = field(default_factory=dict)  # for plots, by "part/label"
    read: dict[str, list[str]] = field(default_factory=dict)  # by part: names of texts
    combinations: list[tuple[str, str]] = field(default_factory=list)  # what, and the verdict
    left_out: list[str] = field(default_factory=list)  # sentences

    def add(self, row: Row) -> None:
        """One more figure; its name is new."""
        self.told(self.report.add(row))

    def draw(self, name: str, points: Sequence[Point]) -> None:
        """A curve of a plot; its name is new."""
        assert name not in self.curves, name
        self.curves[name] = list(points)

    def as_json(self, run: dict[str, Any]) -> dict[str, Any]:
        """The bench format, and beside it what was run on what."""
        return self.report.as_json() | {
            "run": run,
            "curves": {name: [list(p) for p in points] for name, points in self.curves.items()},
            "read": self.read,
            "combinations": [list(pair) for pair in self.combinations],
            "left_out": self.left_out,
        }
