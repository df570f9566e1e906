"""A small random decoder in a folder, with a tokenizer of whole words and texts made of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from worker.compression.base import Settings
from worker.compression.needles import NAMES, WORDS
from worker.compression.subject import Subject, calibrated, open_subject
from worker.compression.texts import Text

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 4, 64, 96, 4, 2, 32, 320
OSCAR = "oscar:sinks=16,window=32"  # so that short documents have codes too
FILLER = [f"w{number}" for number in range(200)]
SETTINGS = Settings(
    codecs=("fp8", "turboquant:k8v4", "turboquant:k4v4,boundary=1", "turboquant:k2v2", OSCAR),
    contexts_tokens=(192, 384, 100_000),
    documents=(2, 1, 1),
    needles=4,
    step_rounds=2,
    batches=(1, 2),
    retention_tokens=256,
    retention_documents=2,
    prompt_tokens=32,
    budget_tokens=64,
    interval_tokens=32,
    window_tokens=16,
    bands=(0.0, 0.5),
    foretold_tokens=(128, 32),
    generations=6,
    generated_tokens=192,
    pool_codecs=("model",),
    calibration_tokens=256,
)


def words_text(name: str, seed: int, count: int = 600) -> Text:
    """Lines of ten words."""
    drawn = random.Random(seed)
    words = [drawn.choice(FILLER) for _ in range(count)]
    lines = [" ".join(words[at : at + 10]) for at in range(0, count, 10)]
    return Text(name, "\n".join(lines) + "\n")


def word_tokenizer() -> Tokenizer:
    every = ["[UNK]", "The", "secret", "word", "of", "is", ".", *NAMES, *WORDS, *FILLER]
    vocab = {word: number for number, word in enumerate(every)}
    assert len(vocab) == len(every) <= VOCAB
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """config.json, weights and tokenizer of a Llama with random weights."""
    generator = torch.Generator().manual_seed(1)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=generator) * gain * inputs**-0.5).to(dtype)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 8.0)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    for number in range(LAYERS):
        start = f"model.layers.{number}"
        shapes = {
            "self_attn.q_proj": (HEADS * DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, shape in shapes.items():
            tensors[f"{start}.{name}.weight"] = matrix(*shape, 1.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}.{name}.weight"] = torch.ones(HIDDEN, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 10_000.0,
        "hidden_act": "silu", "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    word_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def tiny_subject(folder: Path) -> Subject:
    """Calibrated on a text of its own."""
    subject = open_subject(str(write_model(folder / "tiny")))
    file = folder / "tiny.calibration"
    return calibrated(subject, words_text("learnt", 9), SETTINGS.calibration_tokens, file)
