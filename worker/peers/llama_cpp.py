"""llama.cpp as a measured process, through llama-cpp-python's C interface, on a GGUF file.

Queued prompts are one static batch. A request alone leaves its cells, and the next one alone
computes only what lies behind their common prefix, as llama-server does in a slot.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from worker.peers.hf import common_prefix
from worker.peers.protocol import Settings, serve

CELLS = 32768  # KV cells in all
BATCH_TOKENS_MAX = 2048  # in one call
SEQUENCES_MAX = 64


class _Token(NamedTuple):
    id: int
    position: int
    sequence: int
    sampled: bool


class LlamaCpp:
    """Implements worker.peers.protocol.Engine."""

    def __init__(self, settings: Settings) -> None:
        if not settings["extra"]:
            raise ValueError("a GGUF file is needed, llama.cpp=PYTHON:FILE.gguf")
        self._numpy: Any = importlib.import_module("numpy")
        self._c: Any = importlib.import_module("llama_cpp")
        c = self._c
        c.llama_backend_init()
        model = c.llama_model_load_from_file(
            settings["extra"].encode(), c.llama_model_default_params()
        )
        if not model:
            raise ValueError("the GGUF file cannot be loaded")
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = CELLS, BATCH_TOKENS_MAX, SEQUENCES_MAX
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.kv_unified = True
        self._context = c.llama_init_from_model(model, params)
        self._cells = c.llama_get_memory(self._context)
        self._vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        self._batch = c.llama_batch_init(BATCH_TOKENS_MAX, 0, 1)
        self._waiting: list[list[int]] = []
        self._output = self._left = 0
        self._next: list[_Token] = []  # what the next step computes
        self._kept: list[int] = []  # the prompt alone whose cells are still there

    def facts(self) -> dict[str, Any]:
        """Its version."""
        return {"version": self._c.__version__}

    def add(self, prompt: Sequence[int], output_tokens: int, together: bool = False) -> None:
        """Queue it; all that is queued together must ask for the same output."""
        assert not self._left
        self._waiting.append(list(prompt))
        self._output = output_tokens

    def step(self) -> int:
        """One pass over the batch, and its most likely tokens."""
        if not self._left:
            self._begin()
        tokens, self._next = self._next, []
        for first in range(0, len(tokens), BATCH_TOKENS_MAX):
            self._next += self._decode(tokens[first : first + BATCH_TOKENS_MAX])
        self._left -= 1
        return len(self._next)

    def busy(self) -> bool:
        """Whether requests are left."""
        return bool(self._left or self._waiting)

    def _begin(self) -> None:
        prompts, self._waiting = self._waiting, []
        shared = common_prefix(self._kept, prompts[0]) if len(prompts) == 1 else 0
        if shared:
            self._c.llama_memory_seq_rm(self._cells, 0, shared, -1)
        else:
            self._c.llama_memory_clear(self._cells, False)
        self._kept = prompts[0] if len(prompts) == 1 else []
        self._next = [
            _Token(token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
            if position >= shared
        ]
        self._left = self._output

    def _decode(self, tokens: list[_Token]) -> list[_Token]:
        """The tokens that follow the sampled ones."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token.id, token.position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, token.sequence
            batch.logits[i] = token.sampled
        status = self._c.llama_decode(self._context, batch)
        if status != 0:
            raise ValueError(f"llama_decode returned {status}")
        return [
            _Token(self._most_likely(i), token.position + 1, token.sequence, True)
            for i, token in enumerate(tokens)
            if token.sampled
        ]

    def _most_likely(self, row: int) -> int:
        logits = self._c.llama_get_logits_ith(self._context, row)
        return int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def main() -> None:
    """Serve cases until standard input ends."""
    serve(LlamaCpp)
