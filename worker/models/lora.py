"""LoRA adapters: PEFT folders read, checked and applied beside a dense layer; knows no request.

An adapter adds to a linear layer W x the low-rank part s B A x (Hu et al., "LoRA", 2021), with s =
alpha / rank, or alpha / sqrt(rank) for rank-stabilised ones. Many adapters share one base model in
one step: each adds to the rows of its own sequences only, so no row depends on its neighbours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from seams.errors import ModelLoadError
from worker.models.config import ModelConfig, read_json
from worker.models.fingerprint import described_digest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RANK_MAX = 1024
ADAPTERS_MAX = 256
PREFIX = "base_model.model.model.layers."

# Fields that change what an adapter computes in ways that are not done here, and their harmless
# values.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
}


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to rows first .. first + out of a (fused) layer's output."""

    first: int
    down: torch.Tensor  # A: [rank, in]
    up: torch.Tensor  # s B: [out, rank]


@dataclass(frozen=True)
class Adapter:
    """One loaded adapter, on the model's device and in its dtype. `parts[layer][fused]`: fused is
    qkv, output, gate_up or down.
    """

    name: str
    fingerprint: str
    parts: tuple[Mapping[str, tuple[LowRank, ...]], ...]


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a step that belong to one adapter; int64 on the model's device."""

    adapter: Adapter
    rows: torch.Tensor


def adapter_rows(
    adapters: Sequence[Adapter], chosen: Sequence[int], starts: Sequence[int], device: torch.device
) -> list[AdapterRows]:
    """`chosen[s]` is sequence s's adapter from 1, 0 for none; its rows start at starts[s]."""
    rows: dict[int, list[int]] = {}
    for sequence, number in enumerate(chosen):
        if number:
            rows.setdefault(number, []).extend(range(starts[sequence], starts[sequence + 1]))
    return [
        AdapterRows(adapters[number - 1], torch.tensor(mine, dtype=torch.int64, device=device))
        for number, mine in sorted(rows.items())
    ]


def add_low_rank(
    out: torch.Tensor, x: torch.Tensor, layer: int, fused: str, groups: Sequence[AdapterRows]
) -> torch.Tensor:
    """`out` [N, out] with every adapter's part for its rows of x [N, in] added in place."""
    for group in groups:
        for part in group.adapter.parts[layer].get(fused, ()):
            added = x[group.rows] @ part.down.T @ part.up.T
            columns = out[:, part.first : part.first + len(part.up)]
            columns[group.rows] += added
    return out


def named_folders(given: Sequence[str]) -> dict[str, Path]:
    """NAME=FOLDER texts, checked; raises ModelLoadError."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or not folder or not NAME.fullmatch(name):
            raise ModelLoadError(
                "An adapter is NAME=FOLDER, its name of letters, digits, dots, dashes."
            )
        if name in found:
            raise ModelLoadError(f"Two adapters are named {name}.")
        found[name] = Path(folder).expanduser()
    if len(found) > ADAPTERS_MAX:
        raise ModelLoadError(f"More than {ADAPTERS_MAX} adapters cannot be served at once.")
    return found


def load_adapter(
    name: str, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Read a PEFT folder for a base model of `config`; raises ModelLoadError, one sentence."""
    document = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    if document is None or not (folder / WEIGHTS).is_file():
        raise ModelLoadError(f"The folder of adapter {name} lacks {CONFIG} or {WEIGHTS}.")
    _check_kind(name, document)
    tensors = _read(name, folder / WEIGHTS)
    reader = _Reader(name, document, config, tensors)
    parts = tuple(
        {
            fused: tuple(_placed(low, dtype, device) for low in made)
            for fused, made in reader.layer(number).items()
        }
        for number in range(config.layers)
    )
    reader.check_leftover()
    settings = {"scales": sorted(reader.scales.items())}
    described: list[tuple[list[object], torch.Tensor]] = [([settings], torch.empty(0))]
    described += [([n, str(t.dtype), list(t.shape)], t) for n, t in sorted(tensors.items())]
    return Adapter(name, described_digest(described), parts)


def _check_kind(name: str, document: Mapping[str, Any]) -> None:
    if document.get("peft_type") != "LORA":
        kind = str(document.get("peft_type"))[:64]
        raise ModelLoadError(f"Adapter {name} is of kind {kind!r}; only LORA is supported.")
    for field, harmless in PLAIN.items():
        if document.get(field) not in harmless:
            raise ModelLoadError(f"Adapter {name} uses {field}, which is not supported.")


def _read(name: str, path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            return {key: opened.get_tensor(key) for key in list(opened.keys())}
    except (SafetensorError, OSError):
        raise ModelLoadError(f"The weights of adapter {name} are damaged or incomplete.") from None


def _placed(low: LowRank, dtype: torch.dtype, device: torch.device) -> LowRank:
    return LowRank(low.first, low.down.to(device, dtype), low.up.to(device, dtype))


class _Reader:
    """Takes the tensors of one adapter layer by layer and remembers which."""

    def __init__(
        self,
        name: str,
        document: Mapping[str, Any],
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self._name, self._config, self._tensors = name, config, tensors
        self._used: set[str] = set()
        self._alpha = document.get("lora_alpha", 8)
        self._stabilised = document.get("use_rslora") is True
        if isinstance(self._alpha, bool) or not isinstance(self._alpha, int | float):
            raise ModelLoadError(f"The lora_alpha of adapter {name} is not a number.")
        self.scales: dict[str, float] = {}  # by the layer's name: part of the adapter's identity

    def layer(self, number: int) -> dict[str, tuple[LowRank, ...]]:
        """The parts of one decoder layer, by fused projection."""
        c = self._config
        query, key = c.query_heads * c.head_dim, c.kv_heads * c.head_dim
        fused: dict[str, tuple[tuple[str, int, int, int], ...]] = {
            "qkv": (
                ("self_attn.q_proj", 0, query, c.hidden),
                ("self_attn.k_proj", query, key, c.hidden),
                ("self_attn.v_proj", query + key, key, c.hidden),
            ),
            "output": (("self_attn.o_proj", 0, c.hidden, query),),
            "gate_up": (
                ("mlp.gate_proj", 0, c.intermediate, c.hidden),
                ("mlp.up_proj", c.intermediate, c.intermediate, c.hidden),
            ),
            "down": (("mlp.down_proj", 0, c.hidden, c.intermediate),),
        }
        if c.model_type == "phi3":
            fused["qkv"] = (("self_attn.qkv_proj", 0, c.qkv_rows, c.hidden),)
            fused["gate_up"] = (("mlp.gate_up_proj", 0, 2 * c.intermediate, c.hidden),)
        found = {
            name: tuple(low for place in places if (low := self._low_rank(number, *place)))
            for name, places in fused.items()
        }
        return {name: parts for name, parts in found.items() if parts}

    def _low_rank(
        self, number: int, projection: str, first: int, rows: int, columns: int
    ) -> LowRank | None:
        prefix = f"{PREFIX}{number}.{projection}"
        names = [f"{prefix}.lora_{letter}.weight" for letter in "AB"]
        if not any(name in self._tensors for name in names):
            return None
        if not all(name in self._tensors for name in names):
            raise ModelLoadError(f"Adapter {self._name} lacks one half of {prefix}.")
        self._used.update(names)
        down, up = (self._tensors[name].float() for name in names)
        rank = len(down)
        fits = down.dim() == up.dim() == 2 and 0 < rank <= RANK_MAX
        if not fits or down.shape != (rank, columns) or up.shape != (rows, rank):
            raise ModelLoadError(f"Adapter {self._name} does not fit the model at {prefix}.")
        if not bool(torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise ModelLoadError(f"Adapter {self._name} has numbers that are not finite.")
        scale = self._alpha / (math.sqrt(rank) if self._stabilised else rank)
        self.scales[f"{number}.{projection}"] = scale
        return LowRank(first, down, up * scale)

    def check_leftover(self) -> None:
        """Every tensor must have had its place, and there must be one."""
        if not self._used:
            raise ModelLoadError(f"Adapter {self._name} has no weights for this model.")
        for name in sorted(self._tensors):
            if name not in self._used:
                shown = re.sub(r"[^\w.-]", "?", name[:160])
                raise ModelLoadError(f"Tensor {shown} of adapter {self._name} has no place here.")
