"""Retention policies over text, and the table codec x retention: quality lost, blocks freed, bytes
moved. Knows no request: a text is read as if the model had written it.

Source of the method: worker/bench_retention.py, of which this adds up several texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from seams.bench import Row
from worker.bench_retention import Read, Reader
from worker.compression.base import KEEP_ALL, PLAIN, Findings, Settings
from worker.compression.reading import Tally
from worker.compression.subject import Subject
from worker.compression.sweep import block_bytes
from worker.compression.texts import Text
from worker.engine.messages import Compacted
from worker.engine.retention.policies import Policies
from worker.models.llama import LlamaModel

MIB = 2**20


@dataclass
class Pruned:
    """Sums over texts of one policy over one codec."""

    tally: Tally = field(default_factory=Tally)
    compacted: Compacted = field(default_factory=Compacted)
    in_order_bytes: float = 0.0
    stored_tokens: int = 0  # at the ends of the texts

    def add(self, read: Read, exact: torch.Tensor, ids: Sequence[int], prompt: int) -> None:
        """One text; `exact` as Read.log_probs, of the model that keeps all."""
        self.tally.add(exact, read.log_probs, torch.tensor(ids[prompt:]))
        for name in vars(read.compacted):
            more = getattr(self.compacted, name) + getattr(read.compacted, name)
            setattr(self.compacted, name, more)
        self.in_order_bytes += read.in_order_bytes
        self.stored_tokens += len(ids) - read.compacted.dropped_tokens

    @property
    def freed_per_mib(self) -> float:
        """Blocks made free for each MiB that was copied; infinite where none was."""
        return _per_mib(self.compacted.freed_blocks, self.compacted.moved_bytes)

    @property
    def freed_per_mib_in_order(self) -> float:
        """The same if survivors kept their order, as a plain selection has them."""
        return _per_mib(self.compacted.freed_blocks, self.in_order_bytes)


def _per_mib(blocks: int, moved_bytes: float) -> float:
    return blocks / (moved_bytes / MIB) if moved_bytes else math.inf


def scored(settings: Settings, band: float, select: str = "union") -> str:
    """TriAttention with a band of equal scores."""
    return (
        f"triattention:budget={settings.budget_tokens},interval={settings.interval_tokens},"
        f"window={settings.window_tokens},select={select},band={band}"
    )


def policies_of(settings: Settings) -> list[str]:
    """What is measured alone, by the text of the option."""
    budget, interval = settings.budget_tokens, settings.interval_tokens
    window = min(32, interval)
    return [
        f"streaming:window={budget},interval={interval}",
        f"snapkv:budget={budget},interval={interval},window={window}",
        scored(settings, settings.bands[-1], "head"),
        *(scored(settings, band) for band in settings.bands),
    ]


def measure_retention(
    subject: Subject, texts: Sequence[Text], settings: Settings, found: Findings
) -> None:
    """Rows `retention/POLICY/...` and `crossed/CODEC + POLICY/...`. Raises OutOfBlocks."""
    if settings.retention_tokens > subject.config.context_tokens:
        found.left_out.append("Retention: the model's context is too short for it.")
        return
    if not subject.prunable:
        found.left_out.append("Retention: a model with sliding windows drops tokens already.")
        return
    chosen = _ids_of(subject, texts, settings)
    if not chosen:
        found.left_out.append(f"Retention: no text has {settings.retention_tokens} tokens.")
        return
    found.read["retention"] = list(chosen)
    long_enough = list(chosen.values())
    names = policies_of(settings)
    crossed = scored(settings, settings.bands[min(1, len(settings.bands) - 1)])
    cells = [(PLAIN, name) for name in names]
    cells += [(settings.crossed_codec, KEEP_ALL), (settings.crossed_codec, crossed)]
    sums = {cell: Pruned() for cell in cells}
    for ids in long_enough:
        _read_all(subject, ids, settings.prompt_tokens, sums)
    plain = sums[PLAIN, scored(settings, 0.0)]
    for name in names:
        for row in policy_rows(name, sums[PLAIN, name], plain):
            found.add(row)
    sums[PLAIN, KEEP_ALL] = _kept_all(long_enough, settings.prompt_tokens)
    for codec in (PLAIN, settings.crossed_codec):
        size = block_bytes(subject, codec, settings.retention_tokens) / subject.told.block_tokens
        for policy in (KEEP_ALL, crossed):
            for row in crossed_rows(codec, policy, sums[codec, policy], size):
                found.add(row)


def _ids_of(subject: Subject, texts: Sequence[Text], settings: Settings) -> dict[str, list[int]]:
    """By name, of the first texts that are long enough."""
    count = settings.retention_tokens
    read = {text.name: subject.tokenizer.encode(text.text).ids[:count] for text in texts}
    fitting = [(name, ids) for name, ids in read.items() if len(ids) == count]
    return dict(fitting[: settings.retention_documents])


def _read_all(
    subject: Subject, ids: list[int], prompt: int, sums: dict[tuple[str, str], Pruned]
) -> None:
    """One text under every cell; pools are made for each codec, and given back."""
    exact = Reader(subject.model(PLAIN), len(ids)).read(ids, prompt, None).log_probs
    for codec in dict.fromkeys(codec for codec, _ in sums):
        model: LlamaModel = subject.model(codec)
        policies = Policies(model.spec, statistics=subject.statistics)
        reader = Reader(model, len(ids))
        for (of, name), pruned in sums.items():
            if of == codec:
                pruned.add(reader.read(ids, prompt, policies.make(name)), exact, ids, prompt)


def _kept_all(texts: Sequence[list[int]], prompt: int) -> Pruned:
    """The cell that all others are compared with: it differs from itself by nothing."""
    rows = sum(len(ids) - prompt for ids in texts)
    return Pruned(tally=Tally(rows=rows), stored_tokens=sum(len(ids) for ids in texts))


def policy_rows(name: str, pruned: Pruned, plain: Pruned) -> list[Row]:
    """Of one policy; `plain` is the selection without an eye on pages, whose KL and whose blocks
    per MiB in order are what page-awareness is held against."""
    start, rounds = f"retention/{name}", pruned.compacted.rounds
    tally, could = pruned.tally, pruned.compacted.dropped_tokens
    made = [
        Row(f"{start}/kl", tally.kl, "nats", tally.rows, "plain selection", plain.tally.kl),
        Row(f"{start}/perplexity", 100 * tally.perplexity_more, "% more", tally.rows),
        Row(f"{start}/dropped", could, "tokens", rounds),
        Row(f"{start}/blocks freed", pruned.compacted.freed_blocks, "blocks", rounds),
        Row(f"{start}/moved", pruned.compacted.moved_bytes / MIB, "MiB", rounds),
    ]
    if pruned.compacted.moved_bytes:
        against = ("plain selection, in order", plain.freed_per_mib_in_order)
        filled = {"plain selection": plain.freed_per_mib}
        name_of_row = f"{start}/freed per MiB"
        made.append(Row(name_of_row, pruned.freed_per_mib, "blocks", rounds, *against, filled))
    return made


def crossed_rows(codec: str, policy: str, pruned: Pruned, token_bytes: float) -> list[Row]:
    """One cell of codec x retention, beside the cell without either."""
    start, tally = f"crossed/{codec} + {policy}", pruned.tally
    held = pruned.stored_tokens * token_bytes / MIB
    return [
        Row(f"{start}/kl", tally.kl, "nats", tally.rows),
        Row(f"{start}/perplexity", 100 * tally.perplexity_more, "% more", tally.rows),
        Row(f"{start}/held", held, "MiB", 1),
    ]
