"""transformers as a measured process: one static batch at a time, one forward pass a step.

Queued prompts start together and have one length. After a request alone its keys and values are
kept, and the next one alone computes only what lies behind their common prefix.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from worker.peers.protocol import Settings, serve

DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Transformers:
    """Implements worker.peers.protocol.Engine."""

    def __init__(self, settings: Settings) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(settings["threads"])
        self._library: Any = importlib.import_module("transformers")
        name = DTYPES[settings["dtype"]]
        dtype = name if name == "auto" else getattr(self._torch, name)
        loader = self._library.AutoModelForCausalLM
        self._model: Any = loader.from_pretrained(settings["model"], dtype=dtype).eval()
        accepted = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # 5.24 renamed it
        self._waiting: list[list[int]] = []
        self._left = 0  # tokens that the batch has still to sample
        self._output = 0
        self._next: Any = None  # [batch, new tokens], what the next pass computes
        self._cache: Any = None
        self._kept: list[int] = []  # the prompt alone whose cache is still here

    def facts(self) -> dict[str, Any]:
        """Its version."""
        return {"version": self._library.__version__}

    def add(self, prompt: Sequence[int], output_tokens: int, together: bool = False) -> None:
        """Queue it; all that is queued together must ask for the same lengths."""
        assert not self._left and all(len(prompt) == len(other) for other in self._waiting)
        self._waiting.append(list(prompt))
        self._output = output_tokens

    def step(self) -> int:
        """One forward pass over the batch, and its most likely tokens."""
        if not self._left:
            self._begin()
        with self._torch.inference_mode():
            out = self._model(
                input_ids=self._next,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: self._cache},
            )
            self._next = out.logits[:, -1].argmax(-1, keepdim=True)
        self._cache = out.past_key_values
        self._left -= 1
        return len(self._next)

    def busy(self) -> bool:
        """Whether requests are left."""
        return bool(self._left or self._waiting)

    def _begin(self) -> None:
        prompts, self._waiting = self._waiting, []
        shared = common_prefix(self._kept, prompts[0]) if len(prompts) == 1 else 0
        if shared:
            self._cache.crop(shared - self._cache.get_seq_length())  # takes what is to go
        else:
            self._cache = None
        self._kept = prompts[0] if len(prompts) == 1 else []
        self._next = self._torch.tensor([prompt[shared:] for prompt in prompts])
        self._left = self._output


def common_prefix(old: Sequence[int], new: Sequence[int]) -> int:
    """Leading tokens that agree, less than all of `new`: its last one has to be computed."""
    shared = 0
    for mine, other in zip(old, new[:-1], strict=False):
        if mine != other:
            break
        shared += 1
    return shared


def main() -> None:
    """Serve cases until standard input ends."""
    serve(Transformers)
