"""vLLM as a measured process, its CPU build or any other; runs where vllm can be imported."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from itertools import count
from typing import Any

from worker.peers.protocol import Settings, serve

DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
CONTEXT_TOKENS = 4096
RUNNING_MAX = 64  # as ours


class Vllm:
    """Implements worker.peers.protocol.Engine over vLLM's engine, in its own process' thread."""

    def __init__(self, settings: Settings) -> None:
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(max(1, round(settings["pool_gib"]))),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",  # a step is a call
            VLLM_NO_USAGE_STATS="1",
        )
        self._vllm: Any = importlib.import_module("vllm")
        sampling: Any = importlib.import_module("vllm.sampling_params")
        self._kind = sampling.RequestOutputKind.DELTA
        llm = self._vllm.LLM(
            settings["model"],
            dtype=DTYPES[settings["dtype"]],
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=RUNNING_MAX,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._engine: Any = llm.llm_engine
        self._names = count()

    def facts(self) -> dict[str, Any]:
        """Its version."""
        return {"version": self._vllm.__version__}

    def add(self, prompt: Sequence[int], output_tokens: int, together: bool = False) -> None:
        """A greedy request that ignores end tokens."""
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._kind,
        )
        self._engine.add_request(f"r{next(self._names)}", {"prompt_token_ids": prompt}, params)

    def step(self) -> int:
        """One step of its engine."""
        return sum(len(out.outputs[0].token_ids) for out in self._engine.step())

    def busy(self) -> bool:
        """Whether requests are left."""
        return bool(self._engine.has_unfinished_requests())


def main() -> None:
    """Serve cases until standard input ends."""
    serve(Vllm)
