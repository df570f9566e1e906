"""transformers as the yardstick for our logits, in float32.

The measure is what transformers' own two attention paths (eager, sdpa) differ by on the same
prompt: ours may differ from either by at most three times that. Where we decode token by token so
does transformers, with its own cache, and what it then differs by from itself on the whole prompt
counts too: a matrix times one row is rounded differently from a matrix times many, in any library.
"""

from __future__ import annotations

import inspect
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from worker.config import ReplicaConfig
from worker.models.base import Model
from worker.models.load import load_model

FACTOR = 3.0
WHOLE = 1 << 20  # a chunk larger than any prompt
SMALL_FIELDS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large weights, so that attention is far from uniform
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def load(folder: Path, **fields: Any) -> Model:
    fields = {"dtype": "fp32", "device": "cpu", **fields}
    return load_model(ReplicaConfig("r0", str(folder), "model", (), "", **fields))


def reference_models(folder: Path) -> dict[str, Any]:
    """transformers' model by the name of its attention path. A model that has but the eager one
    (Gemma 2) is compared with its own rounding: with the same in float64.
    """
    from transformers import AutoModelForCausalLM

    def load(path: str, dtype: torch.dtype, **kwargs: Any) -> Any:
        made = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=path, dtype=dtype, **kwargs
        )
        return made.eval()

    models = {"eager": load("eager", torch.float32)}
    if models["eager"]._supports_sdpa:
        return models | {"sdpa": load("sdpa", torch.float32)}
    return models | {"float64": load("eager", torch.float64, experts_implementation="eager")}


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int], chunk: int) -> torch.Tensor:
    """[tokens, vocab], through transformers' cache where the chunk is shorter than the prompt."""
    from transformers import DynamicCache

    accepted = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"  # its name before 5.24
    cache = {name: DynamicCache(config=model.config)}
    parts = [
        model(torch.tensor([token_ids[first : first + chunk]]), use_cache=True, **cache).logits[0]
        for first in range(0, len(token_ids), chunk)
    ]
    return torch.cat(parts)


class Yardstick:
    """transformers' logits per prompt, and what its two paths differ by."""

    def __init__(self, models: dict[str, Any], prompts: list[list[int]]) -> None:
        self.models = models
        self.prompts = prompts
        self._known: dict[int, list[dict[str, torch.Tensor]]] = {}

    def logits(self, chunk: int = WHOLE) -> list[dict[str, torch.Tensor]]:
        """Per prompt and path."""
        if chunk not in self._known:
            self._known[chunk] = [
                {path: reference_logits(model, p, chunk) for path, model in self.models.items()}
                for p in self.prompts
            ]
        return self._known[chunk]

    def allowed(self, number: int, chunk: int = WHOLE) -> float:
        """FACTOR times the prompt's own difference; where that is 0, the largest of any."""
        own = [
            max(float((a - b).abs().max()) for a, b in combinations(runs, 2))
            for runs in self._runs(chunk)
        ]
        assert max(own) > 0, "the two paths of transformers do not differ at all"
        return FACTOR * (own[number] or max(own))

    def _runs(self, chunk: int) -> list[list[torch.Tensor]]:
        """Per prompt: both paths on the whole prompt, and both in chunks."""
        paths = zip(self.logits(), self.logits(chunk), strict=True)
        return [[*whole.values(), *chunked.values()] for whole, chunked in paths]

    def check(
        self, number: int, ours: torch.Tensor, label: str, chunk: int = WHOLE, first: int = 0
    ) -> None:
        """`ours` are the logits from position `first` on."""
        allowed = self.allowed(number, chunk)
        for path, theirs in self.logits(chunk)[number].items():
            assert ours.shape == theirs[first:].shape
            found = float((ours - theirs[first:]).abs().max())
            length = len(self.prompts[number])
            print(f"{label}, {length} tokens: {found:.2e} from {path}, allowed {allowed:.2e}")
            assert found <= allowed, f"{label}: {length} tokens, {path}"


def save_small(folder: Path, config_class: str, changes: dict[str, Any], **save: Any) -> None:
    """A random model of four layers, of SMALL_FIELDS and the changes."""
    import transformers

    config = getattr(transformers, config_class)(**{**SMALL_FIELDS, **changes})
    torch.manual_seed(len(str(changes)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.3)  # else zeros and ones
    model.save_pretrained(folder, **save)


def small_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (5, 40, 133)]
