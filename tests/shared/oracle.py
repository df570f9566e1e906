"""The oracle: what transformers' greedy decoding gives, checked by teacher forcing.

One forward pass over prompt + output gives, at every position, the token that greedy decoding would
choose after that prefix. If all agree, the output *is* the greedy continuation. Where it differs,
it counts unless the oracle's logit gap between its own choice and ours is below 2 epsilon, epsilon
being the difference between transformers' own eager and sdpa paths; such ties are printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Tie:
    prompt: int
    position: int
    chosen: int
    expected: int
    gap: float


class GreedyOracle:
    """transformers in fp32 on the folder that the cluster serves."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()

        def load(attention: str) -> torch.nn.Module:
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=attention
            ).eval()

        self._sdpa = load("sdpa")
        self.epsilon = self._measure_epsilon(load("eager"))

    @torch.inference_mode()
    def _measure_epsilon(self, eager: torch.nn.Module) -> float:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(100, 40000, (1, 200), generator=generator)
        difference = eager(ids).logits - self._sdpa(ids).logits
        return float(difference.abs().max())

    @torch.inference_mode()
    def ties(self, index: int, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[Tie]:
        """Divergences that are ties; raises AssertionError at the first real one."""
        ids = torch.tensor([[*prompt, *output]])
        logits = self._sdpa(ids, logits_to_keep=len(output) + 1).logits[0, :-1]
        found = []
        for position, (row, chosen) in enumerate(zip(logits, output, strict=True)):
            expected = int(row.argmax())
            if chosen == expected:
                continue
            gap = float(row[expected] - row[chosen])
            assert gap < 2 * self.epsilon, (
                f"prompt {index}, position {position}: {chosen}, not {expected}, gap {gap:.2e}"
            )
            found.append(Tie(index, position, chosen, expected, gap))
        return found
