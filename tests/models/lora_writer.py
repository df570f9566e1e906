"""Writes PEFT folders with random weights, and the dense checkpoint that each comes to."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    seed: int,
    rank: int = 4,
    alpha: float = 16,
    targets: Sequence[str] = TARGETS,
    layers: int | None = None,
    size: float = 0.02,
    **fields: Any,
) -> Path:
    """For every (first `layers`) layer's `targets`: A and B of normal numbers, B times `size`."""
    generator = torch.Generator().manual_seed(seed)
    document = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **fields}
    document |= {"target_modules": list(targets)}
    tensors = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest.split(".")[-2:-1] == [] or rest.split(".")[-2] not in targets:
            continue
        if not name.endswith("weight") or (layers is not None and int(layer) >= layers):
            continue
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        down = torch.randn(rank, weight.shape[1], generator=generator)
        tensors[f"{key}A.weight"] = down / math.sqrt(weight.shape[1])
        tensors[f"{key}B.weight"] = torch.randn(len(weight), rank, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(adapter: Path, base: Path, into: Path) -> Path:
    """The base model's folder with scale * B A added to its weights, in float32."""
    document = json.loads((adapter / "adapter_config.json").read_text())
    held = {n: t.float() for n, t in load_file(base / "model.safetensors").items()}
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        up = tensors[name.replace(".lora_A.", ".lora_B.")]
        root = math.sqrt(len(down)) if document.get("use_rslora") else len(down)
        weight = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        held[weight] += document["lora_alpha"] / root * (up @ down)
    into.mkdir(parents=True, exist_ok=True)
    save_file(held, into / "model.safetensors")
    (into / "config.json").write_text((base / "config.json").read_text())
    return into
