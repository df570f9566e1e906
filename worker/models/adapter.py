"""AdaptedModel: any decoder of transformers over paged KV; no code of ours per architecture.

transformers computes everything but attention. Its attention interface hands us the queries, keys
and values of all rows of a step, which lie in one batch row with their own positions; we write the
keys and values into pages and call the attention backend. The model itself keeps no cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention import AttentionBackend, AttentionBatch, AttentionSpec, PageLoader
from kernels.batch import build_batch
from kernels.layout import PageLayout
from kvstore.groups import GroupKind, KVGroup, Representation
from worker.engine.plan import Ints, StepPlan
from worker.models.adapter_probe import AttentionLayer
from worker.models.base import ModelSpec
from worker.models.llama import numeric_class
from worker.models.pools import BlockPools, PooledModel
from worker.models.weights import FLOATS

PAGED = "banyan-paged"


def adapted_groups(
    layers: Sequence[AttentionLayer], block_tokens: int, dtype: torch.dtype
) -> tuple[tuple[KVGroup, PageLayout], ...]:
    """Groups of layers that are alike in window and shape, full ones first.

    As in page_layouts, a model whose layers all slide gets a full group of its first layer.
    """
    alike: dict[AttentionLayer, list[int]] = {}
    for number, layer in enumerate(layers):
        alike.setdefault(layer, []).append(number)
    full = [(layer, numbers) for layer, numbers in alike.items() if layer.window == 0]
    sliding = [(layer, numbers) for layer, numbers in alike.items() if layer.window > 0]
    if not full:
        first = sliding[0][1].pop(0)
        full = [(layers[first], [first])]
    made: list[tuple[KVGroup, PageLayout]] = []
    for layer, numbers in [*full, *(pair for pair in sliding if pair[1])]:
        layout = PageLayout(
            layers=len(numbers),
            kv_heads=layer.kv_heads,
            block_tokens=block_tokens,
            qk_dim=layer.qk_dim,
            v_dim=layer.v_dim,
            dtype=FLOATS[dtype],
        )
        window = layer.window if len(made) >= len(full) else 0
        kind = GroupKind.WINDOW if window else GroupKind.FULL
        group = KVGroup(len(made), kind, tuple(numbers), layout.block_bytes, window)
        made.append((group, layout))
    return tuple(made)


@dataclass
class _Step:
    """Attention of one forward pass: its calls come in the order of the layers."""

    layers: tuple[AttentionLayer, ...]
    pages: list[PageLoader]  # of each layer
    batches: list[AttentionBatch]  # of each layer
    backend: AttentionBackend
    done: int = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [1, Hq, N, D], key and value [1, Hkv, N, ...] -> [1, N, Hq, Dv]."""
        layer, pages = self.layers[self.done], self.pages[self.done]
        batch = self.batches[self.done]
        self.done += 1
        pages.write(batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        spec = AttentionSpec(
            query_heads=layer.query_heads,
            kv_heads=layer.kv_heads,
            qk_dim=layer.qk_dim,
            v_dim=layer.v_dim,
            scale=layer.qk_dim**-0.5 if scale is None else float(scale),
            window=layer.window,
            soft_cap=soft_cap or 0.0,
            sinks=sinks,
        )
        rows = query[0].transpose(0, 1).contiguous()
        return self.backend.attend(rows, pages, batch, spec).out.unsqueeze(0)


_step: ContextVar[_Step] = ContextVar("banyan_attention_step")


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention interface calls; windows are known from the probe."""
    return _step.get().attend(query, key, value, scaling, softcap, s_aux), None


class AdaptedModel(PooledModel):
    """Implements worker.models.base.Model on one rank, for a loaded transformers model."""

    def __init__(
        self,
        model: Any,
        layers: tuple[AttentionLayer, ...],
        backend: AttentionBackend,
        *,
        name: str,
        fingerprint: str,
        block_tokens: int,
        context_tokens: int,
        vocab_tokens: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Switches the model's attention to ours."""
        import transformers

        transformers.AttentionInterface.register(PAGED, paged_attention)
        model.set_attn_implementation(PAGED)  # has no mask function: masks are not made
        self._model, self._layers, self._backend = model, layers, backend
        self._device, dtype = model.device, model.dtype
        self._keeps_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        grouped = adapted_groups(layers, block_tokens, dtype)
        groups = tuple(group for group, _ in grouped)
        self._layouts = tuple(layout for _, layout in grouped)
        self._places = [
            next((g.id, g.layers.index(number)) for g in groups if number in g.layers)
            for number in range(len(layers))
        ]  # of each layer: its group, its index there
        self._pools = BlockPools(groups, self._device)
        self._pages: list[PageLoader] = []  # of each layer
        attention = f"transformers{transformers.__version__}-{backend.name}"
        self._spec = ModelSpec(
            name=name,
            fingerprint=fingerprint,
            vocab_tokens=vocab_tokens,
            context_tokens=context_tokens,
            eos_token_ids=eos_token_ids,
            block_tokens=block_tokens,
            groups=groups,
            layouts=self._layouts,
            representation=Representation(dtype=FLOATS[dtype]),
            numeric_class=numeric_class(self._device, dtype, attention),
        )

    def allocate(self, blocks: tuple[int, ...]) -> None:
        """Zeroed pools; raises OutOfBlocks if the device has not the memory for them now."""
        self._pools.allocate(blocks)
        pages = [
            layout.pages(pool)
            for layout, pool in zip(self._layouts, self._pools.pools, strict=True)
        ]
        self._pages = [pages[group][index] for group, index in self._places]

    def release(self) -> None:
        """Drop the pools; allocate() may follow."""
        self._pools = BlockPools(self._spec.groups, self._device)
        self._pages = []

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See Model.execute; the returned tensor is the caller's."""
        assert self._pages, "allocate() comes first"
        self._pools.copy(plan.copies)
        batches = [
            build_batch(
                plan.starts,
                plan.lengths,
                plan.positions,
                plan.tables[group],
                plan.slots[group],
                self._spec.block_tokens,
                self._device,
            )
            for group in range(len(self._spec.groups))
        ]
        by_layer = [batches[group] for group, _ in self._places]
        step = _Step(self._layers, self._pages, by_layer, self._backend)
        rows = self._integers([sample.row for sample in plan.samples])
        kept = {"logits_to_keep": rows} if self._keeps_rows else {}
        token = _step.set(step)
        try:
            logits = self._model(
                input_ids=self._integers(plan.token_ids).unsqueeze(0),
                position_ids=batches[0].positions.unsqueeze(0),
                use_cache=False,
                **kept,
            ).logits[0]
        finally:
            _step.reset(token)
        assert step.done == len(self._layers), "a layer's attention was not called"
        picked: torch.Tensor = logits if self._keeps_rows else logits[rows]
        return picked.float()

    def _integers(self, values: list[int] | Ints) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
