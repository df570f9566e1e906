"""The real Gemma-3-270M against transformers, beyond its window of 512 tokens.

`banyan model fetch gemma` gets it from the package index (240 MB); without it these tests skip. Its
vocabulary has 262,144 tokens, so only the last rows of a prompt are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_stepper import Stepper

from banyan.models import GEMMA, packaged_folder
from kvstore.groups import GroupKind
from worker.config import ReplicaConfig
from worker.models.base import Model
from worker.models.load import load_model

TEXT = "A banyan is a fig that begins its life on another tree, and tree {} has {} trunks. "
TOKENS, LAST_ROWS, CHUNK, FACTOR = 570, 12, 113, 3.0


@pytest.fixture(scope="module")
def folder() -> Path:
    found = packaged_folder(GEMMA)
    if found is None:
        pytest.skip("Gemma is not on this machine: `banyan model fetch gemma` gets it")
    return found


def load(folder: Path, dtype: str) -> Model:
    return load_model(ReplicaConfig("r0", str(folder), "model", (), "", dtype=dtype, device="cpu"))


def prompt(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    text = "".join(TEXT.format(i, i * i) for i in range(40))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(ids) >= TOKENS
    return [int(i) for i in ids[:TOKENS]]


@torch.inference_mode()
def reference(folder: Path, token_ids: list[int], path: str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=path, dtype=torch.float32
    )
    logits: torch.Tensor = model(torch.tensor([token_ids]), logits_to_keep=LAST_ROWS).logits[0]
    return logits


def last_logits(model: Model, token_ids: list[int]) -> torch.Tensor:
    """In chunks, the last rows one by one."""
    stepper = Stepper(model, blocks=60)
    stream = stepper.add(token_ids)
    while stream.computed < len(token_ids):
        left = len(token_ids) - LAST_ROWS - stream.computed
        stepper.step([(stream, min(CHUNK, left) if left > 0 else 1)])
        stream.logits = stream.logits[-LAST_ROWS:]
    return torch.stack(stream.logits)


def test_logits_beyond_the_window(folder: Path) -> None:
    token_ids = prompt(folder)
    eager, sdpa = (reference(folder, token_ids, path) for path in ("eager", "sdpa"))
    model = load(folder, "fp32")
    assert [g.kind for g in model.spec.groups] == [GroupKind.FULL, GroupKind.WINDOW]
    assert model.spec.groups[1].window_tokens < TOKENS
    ours = last_logits(model, token_ids)
    allowed = FACTOR * float((eager - sdpa).abs().max())
    for name, theirs in (("eager", eager), ("sdpa", sdpa)):
        found = float((ours - theirs).abs().max())
        print(f"{found:.2e} from {name}, allowed {allowed:.2e}")
        assert found <= allowed
    half = last_logits(load(folder, "bf16"), token_ids).log_softmax(-1)
    full = eager.log_softmax(-1)
    divergence = (full.exp() * (full - half)).sum(-1)
    print(f"bf16: KL mean {float(divergence.mean()):.1e}, max {float(divergence.max()):.1e}")
    assert float(divergence.max()) < 0.05
