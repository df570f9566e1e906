"""The tables of the compression report, from its JSON alone: columns and cells for people. Computes
nothing that is not in the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEFT = ""  # where there is no figure
SHORT = {"turboquant:": "", ",boundary=": " b"}


@dataclass(frozen=True)
class Table:
    """Columns whose name starts with > hold numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Figures:
    """Rows of a report by name."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._rows: dict[str, dict[str, Any]] = {row["name"]: row for row in document["rows"]}

    def row(self, name: str) -> dict[str, Any] | None:
        """None if it was not measured."""
        return self._rows.get(name)

    def value(self, name: str) -> float | None:
        """The figure itself."""
        row = self._rows.get(name)
        return None if row is None else float(row["value"])

    def ratio(self, name: str) -> float | None:
        """To what it was held against."""
        row = self._rows.get(name)
        return None if row is None or row["ratio"] is None else float(row["ratio"])

    def subjects(self, part: str, figure: str) -> list[str]:
        """What lies between `part` and `figure` in the names of rows, in their order."""
        ends = (f"{part}/", f"/{figure}")
        return [
            name[len(ends[0]) : -len(ends[1])]
            for name in self._rows
            if name.startswith(ends[0]) and name.endswith(ends[1])
        ]

    @property
    def contexts(self) -> list[int]:
        """That codecs were measured at."""
        heads = dict.fromkeys(name.partition("/")[0] for name in self._rows)
        return [int(head) for head in heads if head.isdigit()]


def short(codec: str) -> str:
    """A codec's name without what all of its kind share."""
    for long, brief in SHORT.items():
        codec = codec.replace(long, brief)
    return codec


def policy_name(policy: str) -> str:
    """What tells a policy from the others of a report."""
    kind, _, options = policy.partition(":")
    found = dict(option.split("=") for option in options.split(",") if option)
    head = " per head" if found.get("select") == "head" else ""
    band = f" band {found['band']}" if "band" in found else ""
    return f"{kind}{head}{band}"


def aligned(table: Table) -> str:
    """As text, whatever the terminal's width; numbers to the right."""
    lines = [[column.lstrip(">") for column in table.columns], *table.rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(table.columns))]
    right = [column.startswith(">") for column in table.columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def tables(document: dict[str, Any]) -> list[Table]:
    """All that have a row."""
    figures = Figures(document)
    made = [*(_codecs(figures, context) for context in figures.contexts)]
    made += [_retention(figures), _crossed(figures), _foretold(figures), _pools(figures)]
    made.append(Table("Combinations", ["what", "the server"], document["combinations"]))
    return [table for table in made if table.rows]


def shown(value: float | None, form: str = ".3g") -> str:
    """A figure for people."""
    if value is None:
        return LEFT
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:{form}}"


def _codecs(figures: Figures, context: int) -> Table:
    part = str(context)
    batches = _batches(figures, part)
    dtype = figures.document["run"]["dtype"]
    columns = [
        "codec", ">bytes per token", ">by arithmetic", f">less than {dtype}", ">blocks per GiB",
        ">KL, nats", ">perplexity", ">other first token", ">needles", ">greedy",
        *(f">throughput, batch {batch}" for batch in batches),
    ]  # fmt: skip
    rows = [_codec(figures, part, codec, batches) for codec in figures.subjects(part, "token")]
    return Table(f"Codecs at {context:,} tokens", columns, rows)


def _batches(figures: Figures, part: str) -> list[str]:
    found = [
        row["name"].rpartition("=")[2]
        for row in figures.document["rows"]
        if row["name"].startswith(f"{part}/") and "/steps b=" in row["name"]
    ]
    return list(dict.fromkeys(found))


def _codec(figures: Figures, part: str, codec: str, batches: list[str]) -> list[str]:
    start = f"{part}/{codec}"
    token = figures.row(f"{start}/token")
    assert token is not None
    dtype = figures.document["run"]["dtype"]
    steps = [figures.ratio(f"{start}/steps b={batch}") for batch in batches]
    return [
        short(codec),
        shown(token["value"], ".0f"),
        shown(token["against_value"], ".0f"),
        f"{token['others'][dtype] / token['value']:.2f} x",
        shown(figures.value(f"{start}/blocks per GiB"), ".0f"),
        shown(figures.value(f"{start}/kl")),
        percent(figures.value(f"{start}/perplexity")),
        percent(figures.value(f"{start}/other first token"), sign=""),
        _found(figures, f"{start}/needles"),
        _found(figures, f"{start}/needles greedy"),
        *(shown(ratio, ".2f") for ratio in steps),
    ]


def percent(value: float | None, sign: str = "+") -> str:
    """A figure that is in percent already."""
    return LEFT if value is None else f"{value:{sign}.1f} %"


def _found(figures: Figures, name: str) -> str:
    row = figures.row(name)
    return LEFT if row is None else f"{row['value']:.0f} {row['unit']}"


def _retention(figures: Figures) -> Table:
    columns = [
        "policy", ">KL, nats", ">to plain selection", ">perplexity", ">blocks freed", ">MiB moved",
        ">freed per MiB", ">plain selection", ">in order",
    ]  # fmt: skip
    rows = []
    for policy in figures.subjects("retention", "kl"):
        start = f"retention/{policy}"
        per_mib = figures.row(f"{start}/freed per MiB")
        others = per_mib["others"] if per_mib is not None else {}
        rows.append([
            policy_name(policy),
            shown(figures.value(f"{start}/kl")),
            shown(figures.ratio(f"{start}/kl"), ".2f"),
            percent(figures.value(f"{start}/perplexity")),
            shown(figures.value(f"{start}/blocks freed"), ".0f"),
            shown(figures.value(f"{start}/moved"), ".1f"),
            shown(figures.value(f"{start}/freed per MiB"), ".1f"),
            shown(others.get("plain selection"), ".1f"),
            shown(per_mib["against_value"] if per_mib is not None else None, ".1f"),
        ])  # fmt: skip
    told = figures.document["run"]["settings"]
    title = (
        f"Retention: {told['budget_tokens']} of the generated tokens stay, a round every "
        f"{told['interval_tokens']}, {told['retention_tokens']:,} tokens of text"
    )
    return Table(title, columns, rows)


def _crossed(figures: Figures) -> Table:
    columns = ["codec + policy", ">KL, nats", ">perplexity", ">MiB held at the end"]
    rows = [
        [
            _cell_name(cell),
            shown(figures.value(f"crossed/{cell}/kl")),
            percent(figures.value(f"crossed/{cell}/perplexity")),
            shown(figures.value(f"crossed/{cell}/held"), ".2f"),
        ]
        for cell in figures.subjects("crossed", "kl")
    ]
    return Table("Codec x retention", columns, rows)


def _cell_name(cell: str) -> str:
    codec, _, policy = cell.partition(" + ")
    return f"{short(codec)} + {policy_name(policy)}"


def _foretold(figures: Figures) -> Table:
    held = figures.row("foretold/held by the best quarter")
    if held is None:
        return Table("", [], [])
    columns = [
        ">correlation, mean", ">median", ">held by the best quarter", ">the newest", ">at most",
    ]  # fmt: skip
    row = [
        shown(figures.value("foretold/correlation")),
        shown(figures.value("foretold/correlation, median")),
        shown(held["value"]),
        shown(held["others"]["the newest quarter"]),
        shown(held["against_value"]),
    ]
    return Table("TriAttention's score and the attention that came", columns, [row])


def _pools(figures: Figures) -> Table:
    columns = [
        "codec + policy", ">blocks", ">at once", ">to none", ">refused", ">preempted",
        ">fewest free as a round began", ">blocks freed", ">tokens/s",
    ]  # fmt: skip
    rows = []
    for run in figures.subjects("pool", "together"):
        start = f"pool/{run}"
        rows.append([
            _cell_name(run),
            shown(figures.value(f"{start}/blocks"), ".0f"),
            _found(figures, f"{start}/together"),
            shown(figures.ratio(f"{start}/together"), ".2f"),
            shown(figures.value(f"{start}/refused"), ".0f"),
            shown(figures.value(f"{start}/preempted"), ".0f"),
            shown(figures.value(f"{start}/free as a round began"), ".0f"),
            shown(figures.value(f"{start}/blocks freed"), ".0f"),
            shown(figures.value(f"{start}/throughput"), ".0f"),
        ])  # fmt: skip
    return Table("Long generations in a pool of the same bytes", columns, rows)
