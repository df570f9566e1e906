"""How the command line speaks: tables and progress for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

STAGES = {
    "download": "download the model",
    "unpack": "unpack",
    "convert": "convert to safetensors (once)",
    "ray": "start Ray",
    "routers": "start routers",
    "replicas": "load and warm up replicas",
}


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table; columns whose name starts with > are aligned to the right."""
    drawn = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in columns:
        justify: Any = "right" if column.startswith(">") else "left"
        drawn.add_column(column.lstrip(">"), justify=justify, vertical="bottom")
    for row in rows:
        drawn.add_row(*[str(cell) for cell in row])
    console.print(drawn)


@contextmanager
def stages(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """Progress bars, one per stage, on standard error; a callable(stage, share)."""
    if quiet:
        yield lambda stage, share: None
        return
    columns = (
        SpinnerColumn(finished_text="[green]✓[/green]"),
        TextColumn("{task.description:<32}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors) as progress:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, share: float) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(STAGES.get(stage, stage), total=1.0)
            progress.update(tasks[stage], completed=share)

        yield report
