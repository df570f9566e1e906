"""LlamaModel: a Llama-family decoder over paged KV, in torch; knows no text, request or file.

One call computes all rows of a step, prefill and decode alike. Keys are stored rotated. The
residual stream is float32 whatever the weights are: in bfloat16 it alone would double the distance
(KL) to the float32 model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.attention import AttentionBackend, AttentionBatch, AttentionSpec, PageLoader
from kernels.batch import build_batch
from kernels.codecs.base import KVCodec
from kernels.codecs.pages import CodecAttention, CodecLayout, CodecPages
from kernels.codecs.slots import CodeSlots
from kernels.hybrid import HybridAttention, HybridPages, HybridStep, MixedBlocks, Reach
from kernels.layout import LayerPages, PageLayout
from kernels.slots import SlotMover, Slots
from kvstore.groups import GroupKind, KVGroup, Representation
from worker.engine.plan import StepPlan
from worker.models.base import AdapterSpec, ModelSpec
from worker.models.config import ModelConfig
from worker.models.invariant import VARIANT, Arithmetic, Prepared
from worker.models.linear import packs
from worker.models.lora import Adapter, AdapterRows, adapter_rows, add_low_rank
from worker.models.pools import BlockPools, PooledModel
from worker.models.rope import build_table, rotate
from worker.models.weights import FLOATS, Weights

Tap = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Of a layer: its number, queries before and after RoPE, attention's output; [N, Hq, dim] each."""


def page_layouts(
    config: ModelConfig, block_tokens: int, dtype: torch.dtype
) -> tuple[tuple[KVGroup, PageLayout], ...]:
    """The groups of a model and how their blocks look.

    A model whose layers all slide gets a full group too, of its first layer: group 0 carries the
    chain of prefixes, so its blocks outlive the window, although attention never looks past it.
    """
    full = tuple(i for i, window in enumerate(config.windows) if window == 0) or (0,)
    sliding = tuple(i for i in range(config.layers) if i not in full)
    kinds = [(GroupKind.FULL, full, 0)]
    if sliding:
        kinds.append((GroupKind.WINDOW, sliding, config.windows[sliding[0]]))
    made = []
    for number, (kind, layers, window) in enumerate(kinds):
        layout = PageLayout(
            layers=len(layers),
            kv_heads=config.kv_heads,
            block_tokens=block_tokens,
            qk_dim=config.head_dim,
            v_dim=config.head_dim,
            dtype=FLOATS[dtype],
        )
        made.append((KVGroup(number, kind, layers, layout.block_bytes, window), layout))
    return tuple(made)


def coded_layouts(
    config: ModelConfig, block_tokens: int, dtype: torch.dtype, codec: KVCodec
) -> tuple[tuple[KVGroup, CodecLayout], ...]:
    """The groups of a model whose blocks hold codes; smaller ones than `page_layouts` says."""
    made = []
    for group, _ in page_layouts(config, block_tokens, dtype):
        layers = tuple(codec.layers[number] for number in group.layers)
        layout = CodecLayout(layers, config.kv_heads, block_tokens)
        made.append((replace(group, block_bytes=layout.block_bytes), layout))
    return tuple(made)


def hybrid_layouts(
    config: ModelConfig, block_tokens: int, dtype: torch.dtype, codec: KVCodec, reach: Reach
) -> tuple[tuple[KVGroup, CodecLayout | PageLayout], ...]:
    """The groups of a model that reads some positions exactly and the rest as codes: group 0 holds
    codes of all positions, the last one sinks and windows of the same layers in the model's dtype.
    Layers that slide are as they are: what they hold is bounded.
    """
    (full, exact), *sliding = page_layouts(config, block_tokens, dtype)
    assert config.windows[full.layers[0]] == 0, "no layer looks back far"
    codes = CodecLayout(
        tuple(codec.layers[number] for number in full.layers), config.kv_heads, block_tokens
    )
    near = KVGroup(
        1 + len(sliding),
        GroupKind.WINDOW,
        full.layers,
        exact.block_bytes,
        window_tokens=reach.window_tokens,
        sink_tokens=reach.sink_tokens,
    )
    return (replace(full, block_bytes=codes.block_bytes), codes), *sliding, (near, exact)


def numeric_class(
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    packed: bool = False,
    numerics: str = VARIANT.numerics,
) -> str:
    """Names what decides the rounding: device kind, library (and whether its linear layers are
    packed), arithmetic, attention path, dtype. `variant`: a row's logits may change by a rounding
    with what shares its batch."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        kind = f"cuda-sm{major}{minor}"
    else:
        kind = f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    version = torch.__version__.split("+")[0]
    library = f"torch{version}-packed" if packed else f"torch{version}"
    return f"{kind}-{library}-{numerics}-{attention}-{FLOATS[dtype]}"


@dataclass(frozen=True)
class _Layer:
    number: int
    qkv: Prepared
    output: Prepared
    gate_up: Prepared
    down: Prepared
    input_norm: torch.Tensor  # norms are float32, as in LayerWeights
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp_post_norm: torch.Tensor | None
    attention: AttentionSpec
    group: int
    index: int  # among the group's layers
    rope: int  # which of the model's tables


@dataclass(frozen=True)
class _LayerStep:
    """What a step means to the attention of one layer."""

    angles: tuple[torch.Tensor, torch.Tensor]
    batch: AttentionBatch
    hybrid: HybridStep | None  # of a layer that is stored twice
    adapters: list[AdapterRows]


class LlamaModel(PooledModel):
    """Implements worker.models.base.Model on one rank."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: AttentionBackend,
        *,
        name: str,
        fingerprint: str,
        block_tokens: int,
        context_tokens: int,
        adapters: Sequence[Adapter] = (),
        arithmetic: Arithmetic = VARIANT,
    ) -> None:
        """Weights decide device and dtype; context_tokens <= the config's. The numeric class says
        invariant if `arithmetic` is, so then `backend` must be too, and adapters are not.

        Where Linear packs, matrices are copied and only the embedding is kept: a caller who drops
        `weights` gets the memory back. Tied models then hold the embedding twice, as the head too.
        """
        assert 0 < context_tokens <= config.context_tokens
        assert arithmetic is VARIANT or not adapters
        self._config = config
        self._embedding, self._norm = weights.embedding, weights.norm
        self._head = arithmetic.linear(weights.head, None)
        self._norm_rows = arithmetic.norm
        self._backend: AttentionBackend = backend
        self._adapters = tuple(adapters)
        self._device, dtype = weights.embedding.device, weights.embedding.dtype
        grouped = page_layouts(config, block_tokens, dtype)
        self._layouts: tuple[PageLayout | CodecLayout, ...] = tuple(page for _, page in grouped)
        self._layers = _place_layers(config, weights, [group for group, _ in grouped], arithmetic)
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self._ropes = [build_table(r, config.head_dim, context_tokens, self._device) for r in ropes]
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self._pools = BlockPools([group for group, _ in grouped], self._device)
        self._pages: list[list[PageLoader]] = []  # [group][layer of the group]
        self._reach: Reach | None = None  # None: every layer is stored once
        self._hybrids: list[HybridPages] = []  # of layers that are stored twice: those of group 0
        self._hybrid_attention = HybridAttention(backend)
        self.tap: Tap | None = None  # told of every layer of every step; for calibration
        self._spec = ModelSpec(
            name=name,
            fingerprint=fingerprint,
            vocab_tokens=config.vocab_tokens,
            context_tokens=context_tokens,
            eos_token_ids=config.eos_token_ids,
            block_tokens=block_tokens,
            groups=tuple(group for group, _ in grouped),
            layouts=tuple(layout for _, layout in grouped),
            representation=Representation(dtype=FLOATS[dtype]),
            numeric_class=numeric_class(
                self._device,
                dtype,
                backend.name,
                arithmetic is VARIANT and packs(self._device, dtype),
                arithmetic.numerics,
            ),
            adapters=tuple(AdapterSpec(a.name, a.fingerprint) for a in self._adapters),
            reads_keys=True,
            reads_queries=True,
        )

    def recode(self, codec: KVCodec) -> None:
        """Store keys and values in `codec` from now on; once. Pools are dropped: allocate again.

        They are encoded as they are written, and a step attends to what the codes stand for, its
        own tokens too: where a prompt was cut, or whether its beginning was cached, changes nothing
        of what is attended to. Representation and numeric class name the codec.
        """
        layouts = coded_layouts(self._config, self._spec.block_tokens, self._embedding.dtype, codec)
        self._regroup(layouts, codec)
        self._backend = CodecAttention(self._backend)

    def recode_behind(self, codec: KVCodec, reach: Reach) -> None:
        """As `recode`, but what `reach` says is read exactly, from a group of its own. The codec's
        id must say so too. Layers that slide keep the model's dtype."""
        tokens, dtype = self._spec.block_tokens, self._embedding.dtype
        self._regroup(hybrid_layouts(self._config, tokens, dtype, codec, reach), codec)
        self._reach = reach

    def _regroup(
        self, grouped: Sequence[tuple[KVGroup, CodecLayout | PageLayout]], codec: KVCodec
    ) -> None:
        assert "-invariant-" not in self._spec.numeric_class
        assert self._spec.representation.codec == "none", "once"
        groups, dtype = tuple(group for group, _ in grouped), self._embedding.dtype
        self._layouts = tuple(layout for _, layout in grouped)
        self._pools, self._pages = BlockPools(groups, self._device), []
        self._spec = replace(
            self._spec,
            groups=groups,
            layouts=(),
            representation=Representation(FLOATS[dtype], codec.id, codec.calibration),
            numeric_class=f"{self._spec.numeric_class}-kv-{codec.id}{codec.calibration}",
        )

    def allocate(self, blocks: tuple[int, ...]) -> None:
        """Zeroed pools; raises OutOfBlocks if the device has not the memory for them now."""
        self._pools.allocate(blocks)
        self._pages = [
            list(layout.pages(pool))
            for layout, pool in zip(self._layouts, self._pools.pools, strict=True)
        ]
        if self._reach is not None:
            mixed = MixedBlocks(blocks[0])
            self._hybrids = [
                HybridPages(codes, exact, mixed)
                for codes, exact in zip(self._pages[0], self._pages[-1], strict=True)
                if isinstance(codes, CodecPages) and isinstance(exact, LayerPages)
            ]
            assert len(self._hybrids) == len(self._pages[0])

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
            for group in range(len(self._pages))
        ]
        token_ids = torch.tensor(plan.token_ids, dtype=torch.int64, device=self._device)
        hidden = F.embedding(token_ids, self._embedding).float()
        hidden *= self._embedding_scale
        angles = [table.at(batches[0].positions) for table in self._ropes]
        starts = [int(start) for start in plan.starts]
        groups = adapter_rows(self._adapters, plan.adapters, starts, self._device)
        hybrid = None
        if self._reach is not None:
            blocks = len(self._pools.pools[0])
            hybrid = HybridStep(batches[0], batches[-1], self._reach, blocks)
        for layer in self._layers:
            twice = hybrid if layer.group == 0 else None
            step = _LayerStep(angles[layer.rope], batches[layer.group], twice, groups)
            self._attend(layer, hidden, step)
            self._feed_forward(layer, hidden, groups)
        return self._logits(hidden, [sample.row for sample in plan.samples])

    def _make_slots(self) -> list[SlotMover]:
        if self._spec.layouts:
            return super()._make_slots()
        return [
            CodeSlots(layout, pool) if isinstance(layout, CodecLayout) else Slots(layout, pool)
            for layout, pool in zip(self._layouts, self._pools.pools, strict=True)
        ]

    def read_queries(self, plan: StepPlan) -> torch.Tensor:
        """See Model.read_queries; writes the step's keys and values again, off by a rounding where
        the numeric class is variant."""
        found: list[torch.Tensor] = []
        before, self.tap = self.tap, lambda layer, early, query, out: found.append(query)
        try:
            self.execute(plan)
        finally:
            self.tap = before
        return torch.stack(found).transpose(1, 2).float() * self._config.attention_scale

    def _attend(self, layer: _Layer, hidden: torch.Tensor, step: _LayerStep) -> None:
        """Adds attention's output to hidden float32 [N, hidden]; stores the rows' KV."""
        config, groups = self._config, step.adapters
        normed = self._normed(hidden, layer.input_norm)
        heads = add_low_rank(layer.qkv(normed), normed, layer.number, "qkv", groups).view(
            len(hidden), config.query_heads + 2 * config.kv_heads, config.head_dim
        )
        turned, values = torch.split(
            heads, [config.query_heads + config.kv_heads, config.kv_heads], dim=1
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = self._normed_heads(turned, layer.query_norm, layer.key_norm)
        query, keys = torch.split(
            rotate(turned, *step.angles).to(heads.dtype),
            [config.query_heads, config.kv_heads],
            dim=1,
        )
        attended = self._stored_and_seen(layer, step, query, keys, values).flatten(1)
        if self.tap is not None:
            count = config.query_heads
            self.tap(layer.number, turned[:, :count], query, attended.view(len(query), count, -1))
        out = add_low_rank(layer.output(attended), attended, layer.number, "output", groups)
        self._add(hidden, out, layer.attention_post_norm)

    def _stored_and_seen(
        self,
        layer: _Layer,
        step: _LayerStep,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Stores the rows' keys and values [N, Hkv, dim]; attention's output [N, Hq, dim]."""
        if step.hybrid is not None:
            twice = self._hybrids[layer.index]
            twice.write(step.hybrid, keys, values)
            attention = layer.attention
            return self._hybrid_attention.attend(query, twice, step.hybrid, attention).out
        pages = self._pages[layer.group][layer.index]
        pages.write(step.batch.slots, keys, values)
        return self._backend.attend(query, pages, step.batch, layer.attention).out

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The residual stream as a layer reads it: normalised, in the model's dtype."""
        normed = self._norm_rows(hidden, weight, self._config.norm_eps)
        return normed.to(self._embedding.dtype)

    def _normed_heads(
        self, heads: torch.Tensor, query_norm: torch.Tensor, key_norm: torch.Tensor
    ) -> torch.Tensor:
        """Per-head norms: heads [N, Hq + Hkv, head_dim], queries first; float32, to be rotated."""
        config = self._config
        query, keys = torch.split(heads.float(), [config.query_heads, config.kv_heads], dim=1)
        return torch.cat(
            (
                self._norm_rows(query, query_norm, config.norm_eps),
                self._norm_rows(keys, key_norm, config.norm_eps),
            ),
            dim=1,
        )

    def _feed_forward(self, layer: _Layer, hidden: torch.Tensor, groups: list[AdapterRows]) -> None:
        """Adds the gated MLP's output to hidden float32 [N, hidden]."""
        normed = self._normed(hidden, layer.mlp_norm)
        both = add_low_rank(layer.gate_up(normed), normed, layer.number, "gate_up", groups)
        gate, up = both.chunk(2, dim=1)
        if self._config.activation == "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
        else:
            gate = F.silu(gate)
        gated = gate.mul_(up)
        out = add_low_rank(layer.down(gated), gated, layer.number, "down", groups)
        self._add(hidden, out, layer.mlp_post_norm)

    def _add(self, hidden: torch.Tensor, part: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Adds a layer's output to the residual stream, normed where the model does so."""
        if norm is not None:
            part = self._norm_rows(part.float(), norm, self._config.norm_eps)
        hidden += part

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """float32 [len(rows), vocab] of the rows that a token is drawn from."""
        picked = hidden[torch.tensor(rows, dtype=torch.int64, device=self._device)]
        logits = self._head(self._normed(picked, self._norm)).float()
        cap = self._config.final_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _place_layers(
    config: ModelConfig, weights: Weights, groups: list[KVGroup], arithmetic: Arithmetic
) -> tuple[_Layer, ...]:
    linear = arithmetic.linear
    places = {
        layer: (group.id, index) for group in groups for index, layer in enumerate(group.layers)
    }
    return tuple(
        _Layer(
            number=i,
            qkv=linear(w.qkv, w.qkv_bias),
            output=linear(w.output, w.output_bias),
            gate_up=linear(w.gate_up, w.gate_up_bias),
            down=linear(w.down, w.down_bias),
            input_norm=w.input_norm,
            query_norm=w.query_norm,
            key_norm=w.key_norm,
            attention_post_norm=w.attention_post_norm,
            mlp_norm=w.mlp_norm,
            mlp_post_norm=w.mlp_post_norm,
            attention=AttentionSpec(
                query_heads=config.query_heads,
                kv_heads=config.kv_heads,
                qk_dim=config.head_dim,
                v_dim=config.head_dim,
                scale=config.attention_scale,
                window=config.windows[i],
                soft_cap=config.attention_cap,
            ),
            group=places[i][0],
            index=places[i][1],
            rope=int(config.local_rope is not None and config.windows[i] > 0),
        )
        for i, w in enumerate(weights.layers)
    )
