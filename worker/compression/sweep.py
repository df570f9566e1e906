"""Every codec at every context: bytes, what it changes in the next-token distribution, needles.

All models read the same documents in step, chunk by chunk, so a distribution is compared when it
is made and never kept. In float32 by torch: the codec is all that rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import torch

from seams.bench import Row
from seams.errors import InvalidRequest
from worker.compression.arithmetic import plain_token_bytes, token_bytes
from worker.compression.base import PLAIN, Findings, Settings
from worker.compression.needles import Document, Retrieval, make_needles, plant
from worker.compression.reading import Reader, Tally
from worker.compression.subject import Subject
from worker.compression.texts import Text
from worker.engine.block_pool import BlockPool
from worker.engine.paging import PagedMemory
from worker.models.weights import FLOATS

CHUNK_TOKENS = 1024  # a codec decodes all that is behind a chunk, for each chunk again
QUESTION_TOKENS = 32  # of a context, left free behind the document
CURVE_POINTS = 8  # of KL along a document
GIB = 2**30


def measure_sweep(
    subject: Subject, texts: Sequence[Text], settings: Settings, found: Findings
) -> None:
    """Rows `CONTEXT/CODEC/...`. Raises InvalidRequest if no context is possible or all texts are
    too short, OutOfBlocks."""
    most = subject.config.context_tokens
    asked = zip(settings.contexts_tokens, settings.documents, strict=True)
    chosen_of = {
        context: documents_of(subject, texts, settings, context, documents)
        for context, documents in asked
        if context <= most
    }
    if not chosen_of:
        raise InvalidRequest(f"The model's context of {most} tokens is below all that were asked.")
    if not any(chosen_of.values()):
        raise InvalidRequest(f"No text has the {min(chosen_of)} tokens of the shortest context.")
    if len(chosen_of) < len(settings.contexts_tokens):
        found.left_out.append(f"Contexts above the model's {most} tokens.")
    longest, names = max(chosen_of), (PLAIN, *settings.codecs)
    readers = {name: Reader(subject.model(name), longest, settings.needles) for name in names}
    for context, chosen in chosen_of.items():
        if not chosen:
            found.left_out.append(f"Quality at {context} tokens: no text is so long.")
            continue
        found.read[f"codecs at {context}"] = [document.name for document in chosen]
        for row in size_rows(subject, settings.codecs, context):
            found.add(row)
        _compare(readers, chosen, context, found)


def documents_of(
    subject: Subject, texts: Sequence[Text], settings: Settings, context: int, most: int
) -> list[Document]:
    """Of the first `most` texts that are long enough, each with needles of its own. Raises
    InvalidRequest if the tokenizer has no words for them."""
    size = subject.told.block_tokens
    tokens = (context - QUESTION_TOKENS) // size * size
    made = []
    for number, text in enumerate(texts):
        needles = make_needles(subject.tokenizer, settings.needles, settings.seed + number)
        with suppress(InvalidRequest):  # it is too short
            made.append(plant(text.name, text.text, subject.tokenizer, needles, tokens))
    return made[:most]


def size_rows(subject: Subject, codecs: Sequence[str], context: int) -> list[Row]:
    """Bytes of a token as the engine's accounting has them in the stored dtype, beside arithmetic;
    and blocks per GiB."""
    shape, size, made = subject.shape, subject.told.block_tokens, []
    dtype = FLOATS[subject.stored]
    plain = block_bytes(subject, PLAIN, context)
    for codec in (PLAIN, *codecs):
        stored = block_bytes(subject, codec, context)
        worked_out = token_bytes(codec, shape, context)
        start, others = f"{context}/{codec}", {dtype: plain_token_bytes(shape, context)}
        made += [
            Row(f"{start}/token", stored / size, "bytes", 1, "arithmetic", worked_out, others),
            Row(f"{start}/blocks per GiB", GIB / stored, "blocks", 1, dtype, GIB / plain),
        ]
    return made


def block_bytes(subject: Subject, codec: str, context: int) -> float:
    """What a sequence of `context` tokens holds of all groups in the stored dtype, per block of its
    tokens, as the engine counts blocks."""
    size, blocks = subject.told.block_tokens, -(-context // subject.told.block_tokens)
    groups = subject.groups(codec)
    memory = PagedMemory([BlockPool(group, blocks) for group in groups], None, size)
    held = [memory.blocks_held(g, context) * group.block_bytes for g, group in enumerate(groups)]
    return sum(held) / blocks


def _compare(
    readers: dict[str, Reader], documents: Sequence[Document], context: int, found: Findings
) -> None:
    """Read the documents with all models and add what came of it."""
    tallies = {name: [Tally() for _ in range(CURVE_POINTS)] for name in readers}
    retrieved = {name: Retrieval() for name in readers}
    for document in documents:
        _read_in_step(readers, document, tallies)
        questions = [needle.question for needle in document.needles]
        for name, reader in readers.items():
            retrieved[name].add(document.needles, reader.ask(len(document.ids), questions))
    for name, parts in tallies.items():
        whole = total(parts)
        for row in quality_rows(f"{context}/{name}", whole, retrieved[name], retrieved[PLAIN]):
            found.add(row)
        step = context / CURVE_POINTS
        points = [((i + 0.5) * step, part.kl) for i, part in enumerate(parts) if part.rows]
        found.draw(f"kl along {context}/{name}", points)


def _read_in_step(
    readers: dict[str, Reader], document: Document, tallies: dict[str, list[Tally]]
) -> None:
    ids, planted = document.ids, torch.tensor(document.planted)
    targets = torch.tensor(ids)
    part_tokens = -(-len(ids) // CURVE_POINTS)
    parts = [*range(0, len(ids), part_tokens), len(ids)]
    spans = pairwise(parts)
    cuts = [at for a, b in spans for at in range(a, b, CHUNK_TOKENS)] + [len(ids)]
    for first, end in pairwise(cuts):
        chunk, last = ids[first:end], min(end, len(ids) - 1)
        rows = torch.arange(last - first)[~planted[first + 1 : last + 1]]
        followed = targets[first + 1 : last + 1][~planted[first + 1 : last + 1]]
        exact = None
        for name, reader in readers.items():  # the model without a codec is the first
            told = reader.read(chunk, first)[rows].log_softmax(-1)
            exact = told if exact is None else exact
            tallies[name][first // part_tokens].add(exact, told, followed)


def total(parts: Sequence[Tally]) -> Tally:
    """All rows of all parts."""
    whole = Tally()
    for part in parts:
        whole.rows += part.rows
        whole.kl_nats += part.kl_nats
        whole.told += part.told
        whole.told_exact += part.told_exact
        whole.differ += part.differ
    return whole


def quality_rows(start: str, tally: Tally, needles: Retrieval, plain: Retrieval) -> list[Row]:
    """Of one codec at one context; needles beside those of the model without a codec."""
    rows, asked = tally.rows, needles.asked
    return [
        Row(f"{start}/kl", tally.kl, "nats", rows),
        Row(f"{start}/perplexity", 100 * tally.perplexity_more, "% more", rows),
        Row(f"{start}/other first token", 100 * tally.other_share, "% of tokens", rows),
        Row(f"{start}/needles", needles.found, f"of {asked}", asked, PLAIN, plain.found),
        Row(f"{start}/needles greedy", needles.greedy, f"of {asked}", asked, PLAIN, plain.greedy),
        Row(
            f"{start}/needle lead", needles.lead_nats / asked, "nats", asked, PLAIN,
            plain.lead_nats / asked,
        ),
    ]  # fmt: skip
