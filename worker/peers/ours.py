"""Our engine as a measured process: EngineCore over a model loaded as a replica loads it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from worker.peers.protocol import Settings, serve
from worker.service.settings import set_thread_variables

READ_BYTES_MIN = 256 << 20  # far more than any cache holds


class Ours:
    """Implements worker.peers.protocol.Engine."""

    def __init__(self, settings: Settings) -> None:
        """Loads the model. Raises ModelLoadError, OutOfBlocks."""
        from seams.clock import SystemClock
        from worker.config import EngineConfig, ReplicaConfig
        from worker.engine.core import EngineCore
        from worker.models.load import load_model, plan_blocks

        config = ReplicaConfig(
            "bench", settings["model"], "bench", (), "", dtype=settings["dtype"],
            threads=settings["threads"], pool_gib=settings["pool_gib"],
        )  # fmt: skip
        self._model: Any = load_model(config)
        self.weight_bytes = _weight_bytes(self._model, Path(settings["model"]))
        self._pool_bytes = 0
        self._watch_allocation()
        blocks = plan_blocks(config, self._model.spec)
        engine = EngineConfig(
            blocks, step_tokens_max=config.step_tokens_max, running_max=config.running_max
        )
        self._core = EngineCore(self._model, engine, SystemClock())
        self._names = count()
        self._held: dict[str, int] = {}  # request -> tokens that it has no credit for yet
        self._unheard: set[str] = set()  # of them, those without a first token
        self._buffer: Any = None

    def _watch_allocation(self) -> None:
        """Of the pools only what is in memory already counts: pages come as they are written."""
        allocate = self._model.allocate

        def watched(blocks: tuple[int, ...]) -> None:
            before = resident_bytes()
            allocate(blocks)
            self._pool_bytes = max(0, resident_bytes() - before)

        self._model.allocate = watched

    def facts(self) -> dict[str, Any]:
        """Sizes in bytes; `own_bytes` is what is resident besides weights and pools."""
        spec = self._model.spec
        return {
            "version": spec.numeric_class,
            "vocab_tokens": spec.vocab_tokens,
            "weight_bytes": self.weight_bytes,
            "own_bytes": resident_bytes() - self.weight_bytes - self._pool_bytes,
        }

    def add(self, prompt: Sequence[int], output_tokens: int, together: bool = False) -> None:
        """A greedy request that ignores end tokens; together: with credit for one token, and for
        the rest once all that wait so have theirs."""
        from worker.engine.messages import EngineRequest
        from worker.engine.sampling import SamplingParams

        params = SamplingParams(seed=0, max_tokens=output_tokens, ignore_eos=True)
        tokens, name = tuple(prompt), f"r{next(self._names)}"
        request = EngineRequest(name, tokens, len(tokens), params)
        if together:
            request = replace(request, credit_tokens=1)
            self._held[name] = output_tokens - 1
            self._unheard.add(name)
        self._core.submit(request)

    def step(self) -> int:
        """Schedule, compute, sample, emit. Raises what an emission says went wrong."""
        sampled = 0
        output = self._core.step()
        for emission in output.emissions if output else ():
            if emission.error is not None:
                raise emission.error
            sampled += len(emission.token_ids)
            self._unheard.discard(emission.request_id)
        if self._held and not self._unheard:
            for name, tokens in self._held.items():
                self._core.grant(name, tokens)
            self._held = {}
        return sampled

    def busy(self) -> bool:
        """Whether requests are left."""
        return self._core.has_work()

    def read(self) -> float:
        """Seconds in which all threads read as many bytes as the weights have, in huge pages."""
        rate = getattr(self._model, "read_rate", None)
        return self.weight_bytes / (self._buffer_rate() if rate is None else rate())

    def _buffer_rate(self) -> float:
        import torch

        from kernels.native.memory import huge_bytes

        if self._buffer is None:
            self._buffer = huge_bytes(READ_BYTES_MIN).view(torch.int64).fill_(1)
        begin = time.perf_counter()
        self._buffer.sum()
        return READ_BYTES_MIN / (time.perf_counter() - begin)


def resident_bytes() -> int:
    """Of this process, shared libraries included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _weight_bytes(model: Any, path: Path) -> int:
    """What the model says; else its files, which hold 16 bits a number, in the model's dtype."""
    known = getattr(model, "weight_bytes", None)
    if known is not None:
        return int(known)
    stored = sum(p.stat().st_size for p in path.glob("*.safetensors"))
    return stored * (2 if model.spec.representation.dtype == "fp32" else 1)


def _make(settings: Settings) -> Ours:
    set_thread_variables(settings["threads"])  # before torch is loaded
    return Ours(settings)


def main() -> None:
    """Serve cases until standard input ends."""
    serve(_make)
