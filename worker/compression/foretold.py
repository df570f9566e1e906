"""How well TriAttention foretells attention: keys are scored from statistics alone, then the text
goes on and its queries are looked at. Knows no pool that is short of room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from seams.bench import Row
from worker.compression.base import PLAIN, Findings, Settings
from worker.compression.reading import Reader
from worker.compression.subject import Subject
from worker.compression.texts import Text
from worker.engine.retention.triattention import Centres

SINKS = 4  # every head looks at the first tokens, whatever it looks for
QUARTER = 4  # the share of keys of which it is asked how much attention they hold


@dataclass
class Foretold:
    """One entry per query head of each layer and text."""

    correlation: list[float] = field(default_factory=list)  # of score and mean logit to come
    held: list[float] = field(default_factory=list)  # share of attention, by the best by score
    recent: list[float] = field(default_factory=list)  # by the newest
    most: list[float] = field(default_factory=list)  # by those that get most: what can be held

    def add(self, score: torch.Tensor, logits: torch.Tensor) -> None:
        """Of one query head: scores [keys], and logits [queries to come, keys]."""
        weight = logits.softmax(-1).mean(0)
        count = len(score) // QUARTER
        pair = torch.stack([score, logits.mean(0)])
        self.correlation.append(float(torch.corrcoef(pair)[0, 1]))
        self.held.append(float(weight[score.topk(count).indices].sum()))
        self.recent.append(float(weight[-count:].sum()))
        self.most.append(float(weight.topk(count).values.sum()))


def measure_foretold(
    subject: Subject, texts: Sequence[Text], settings: Settings, found: Findings
) -> None:
    """Rows `foretold/...`, over the texts that are long enough. Raises OutOfBlocks."""
    if subject.statistics is None:
        found.left_out.append("The score against attention to come: there is no calibration.")
        return
    seen, ahead = settings.foretold_tokens
    first = {text.name: subject.tokenizer.encode(text.text).ids[: seen + ahead] for text in texts}
    read = {name: ids for name, ids in first.items() if len(ids) == seen + ahead}
    if not read or seen + ahead > subject.config.context_tokens:
        found.left_out.append(f"The score against attention to come: {seen + ahead} tokens lack.")
        return
    sums = Foretold()
    found.read["score"] = list(read)
    for ids in read.values():
        _watch(subject, Centres.of(subject.statistics), ids, seen, sums)
    for row in foretold_rows(sums):
        found.add(row)


def _watch(subject: Subject, centres: Centres, ids: list[int], seen: int, sums: Foretold) -> None:
    """Score the keys of the first `seen` ids, and look at the queries of the others."""
    model = subject.model(PLAIN)
    reader = Reader(model, len(ids))
    reader.read(ids[:seen], 0)
    keys = model.read_keys(0, np.arange(seen))
    scores = centres.scores(keys, seen)[:, :, SINKS:]
    queries: list[torch.Tensor] = []
    model.tap = lambda layer, before, query, out: queries.append(query)
    try:
        reader.read(ids[seen:], seen)
    finally:
        model.tap = None
    config = subject.config
    for layer, query in enumerate(queries):
        key = keys[layer, :, SINKS:].repeat_interleave(config.query_heads // config.kv_heads, 0)
        logits = query.transpose(0, 1) @ key.transpose(1, 2) * config.attention_scale
        for score, of_head in zip(scores[layer], logits, strict=True):
            sums.add(score, of_head)


def foretold_rows(sums: Foretold) -> Iterator[Row]:
    """Means over heads."""
    heads = len(sums.correlation)
    yield Row("foretold/correlation", float(np.mean(sums.correlation)), "", heads)
    yield Row("foretold/correlation, median", float(np.median(sums.correlation)), "", heads)
    most, recent = float(np.mean(sums.most)), float(np.mean(sums.recent))
    yield Row(
        "foretold/held by the best quarter", float(np.mean(sums.held)), "of attention", heads,
        "what a quarter can hold", most, {"the newest quarter": recent},
    )  # fmt: skip
