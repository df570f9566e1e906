"""Questions about documents: every prompt begins with documents that others ask about too."""

from __future__ import annotations

import random
from functools import cache

from loadtest.text import Writer, rng_of
from loadtest.workloads.base import Message, Session, Shape, Turn


class Questions:
    """A session asks `turns` questions about the documents that were found for it. Which and in
    which order is chance, so two prompts share a prefix as far as their first documents agree."""

    sessions_max: int | None = None

    def __init__(self, shape: Shape, writer: Writer, seed: str) -> None:
        self._shape, self._writer, self._seed = shape, writer, seed
        self._document = cache(self._write)

    def session(self, number: int) -> Session:
        """See Workload."""
        shape, rng = self._shape, rng_of(self._seed, "rag", number)
        found = self._found(rng)
        texts = [self._document(document) for document in found]
        turns: list[Turn] = []
        for index in range(shape.turns):
            output_tokens, input_tokens = shape.output_of(rng), shape.input_of(rng)
            question = self._writer.write(rng, input_tokens)
            if index == 0:
                asked = Message("user", "\n\n".join([*texts, question]))
                turns.append(Turn((asked,), output_tokens))
            else:
                asked = Message("user", question)
                turns.append(Turn((asked,), output_tokens, index - 1, wait_s=shape.think_s))
        return Session(f"rag-{number}", tuple(turns), f"document-{found[0]}")

    def _found(self, rng: random.Random) -> list[int]:
        """Different documents, each chosen as the skew says."""
        shape, found = self._shape, list[int]()
        while len(found) < min(shape.documents_per_question, shape.documents):
            document = shape.chosen(rng, shape.documents)
            if document not in found:
                found.append(document)
        return found

    def _write(self, document: int) -> str:
        rng = rng_of(self._seed, "document", document)
        return self._writer.write(rng, self._shape.document_tokens)
