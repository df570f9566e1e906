"""The one bench format of the project: rows, a table, JSON, and A/B measured alternately."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measured figure. `name` is unique in a report; `against` names a peer or physical limit
    measured in the same run; `others` holds all peers. `foreign` is the share of the machine's CPU
    time that others took meanwhile, None where it was not watched."""

    name: str
    value: float
    unit: str
    samples: int
    against: str = ""
    against_value: float | None = None
    others: dict[str, float] = field(default_factory=dict)
    foreign: float | None = None

    @property
    def ratio(self) -> float | None:
        """value / against_value, None without one."""
        if self.against_value is None or self.against_value == 0:
            return None
        return self.value / self.against_value

    def as_json(self) -> dict[str, Any]:
        """The row as the documented JSON object."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "samples": self.samples,
            "against": self.against,
            "against_value": self.against_value,
            "ratio": self.ratio,
            "others": self.others,
            **({} if self.foreign is None else {"foreign": self.foreign}),
        }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What the figures were taken on; no host name."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


class Report:
    """Collects rows, prints them, writes them."""

    def __init__(self, command: str | None = None) -> None:
        self.command = command or " ".join(sys.orig_argv[1:])
        self.rows: list[Row] = []

    def add(self, row: Row) -> Row:
        """Append `row`; its name must be new."""
        assert all(row.name != other.name for other in self.rows), f"duplicate row {row.name}"
        self.rows.append(row)
        return row

    def table(self) -> str:
        """The rows as aligned text."""
        peers = list(dict.fromkeys(p for r in self.rows for p in r.others if p != r.against))
        watched = any(row.foreign is not None for row in self.rows)
        fixed = ("name", "value", "unit", "samples", "against", "its value", "ratio")
        lines = [(*fixed, *peers, *(["foreign"] if watched else []))]
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
            other = "" if row.against_value is None else f"{row.against_value:.4g}"
            value = f"{row.value:.4g}"
            cells = [row.name, value, row.unit, str(row.samples), row.against, other, ratio]
            cells += [f"{row.others[peer]:.4g}" if peer in row.others else "" for peer in peers]
            if watched:
                cells.append("" if row.foreign is None else f"{row.foreign:.0%}")
            lines.append(tuple(cells))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def as_json(self) -> dict[str, Any]:
        """{"machine", "command", "rows"}."""
        return {
            "machine": machine(),
            "command": self.command,
            "rows": [r.as_json() for r in self.rows],
        }

    def write(self, path: Path) -> None:
        """Write the JSON form to `path`."""
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def show(self, json_path: Path | None = None) -> None:
        """Print the table; write the JSON too if a path is given."""
        print(self.table())
        if json_path is not None:
            self.write(json_path)


def alternate(
    measures: dict[str, Callable[[], float]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Run the measures A B A B ... so that noise hits all alike; returns each one's samples."""
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(warmup + rounds):
        for name, measure in measures.items():
            value = measure()
            if turn >= warmup:
                samples[name].append(value)
    return samples


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)
