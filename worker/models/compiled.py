"""CompiledModel: a Llama-family decoder on CPU through the compiled step; exact batch by batch.

Same weights, groups, block sizes and codes as LlamaModel; only the order of numbers and bytes
inside a page differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from kernels.codecs.base import KVCodec
from kernels.codecs.pages import CodecLayout
from kernels.native.decoder import PAGE_LAYOUT, DecoderShape, LayerTensors, NativeDecoder
from kernels.native.memory import huge_bytes
from kernels.native.pages import CODE_LAYOUT, LayeredSlots, LayerPlaces, coded_places, plain_places
from kernels.slots import SlotMover
from kvstore.groups import KVGroup, Representation
from worker.engine.plan import StepPlan
from worker.models.base import ModelSpec
from worker.models.config import ModelConfig
from worker.models.llama import coded_layouts, page_layouts
from worker.models.pools import BlockPools, PooledModel
from worker.models.rope import RopeTable, build_table
from worker.models.weights import FLOATS, Weights

NUMERICS = 2  # raised whenever the compiled arithmetic changes a bit of any result


def decoder_shape(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> DecoderShape:
    """What the compiled path must support to run this model."""
    groups = page_layouts(config, block_tokens, dtype)
    return DecoderShape(
        dtype=FLOATS[dtype],
        layers=config.layers,
        hidden=config.hidden,
        intermediate=config.intermediate,
        query_heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_tokens,
        block_tokens=block_tokens,
        groups=len(groups),
        tied=config.tied,
        norm_eps=config.norm_eps,
        attention_scale=config.attention_scale,
        activation=config.activation,
        attention_cap=config.attention_cap,
        final_cap=config.final_cap,
        embedding_scale=float(torch.tensor(config.embedding_scale, dtype=dtype)),
    )


class CompiledModel(PooledModel):
    """Implements worker.models.base.Model on one rank, on CPU."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        name: str,
        fingerprint: str,
        block_tokens: int,
        context_tokens: int,
        threads: int = 0,
        isa: str = "",
    ) -> None:
        """Packs the weights, which are not needed afterwards. threads 0 = torch's number.

        Raises NativeUnavailable if there is no compiled path here, MemoryError.
        """
        assert 0 < context_tokens <= config.context_tokens
        dtype = weights.embedding.dtype
        shape = decoder_shape(config, dtype, block_tokens)
        self._config, self._dtype = config, dtype
        self._coded: list[CodecLayout] = []  # of the groups, once recoded
        grouped = page_layouts(config, block_tokens, dtype)
        groups = [group for group, _ in grouped]
        places = _by_layer(groups, [plain_places(layout) for _, layout in grouped])
        self._decoder = NativeDecoder(
            shape,
            _layers(config, weights, groups, places, context_tokens),
            weights.embedding,
            weights.head,
            weights.norm,
            threads or torch.get_num_threads(),
            isa,
        )
        self._pools = BlockPools(groups, torch.device("cpu"))
        self._spec = ModelSpec(
            name=name,
            fingerprint=fingerprint,
            vocab_tokens=config.vocab_tokens,
            context_tokens=context_tokens,
            eos_token_ids=config.eos_token_ids,
            block_tokens=block_tokens,
            groups=tuple(groups),
            representation=Representation(dtype=shape.dtype, layout=PAGE_LAYOUT),
            numeric_class=f"cpu-{self._decoder.isa}-banyan{NUMERICS}-invariant-{shape.dtype}",
            layouts=tuple(layout for _, layout in grouped),
            reads_keys=True,
        )

    def recode(self, codec: KVCodec) -> None:
        """As LlamaModel.recode, and as exact as before: a code is written and read the same way
        whatever the step. Pages have an order of their own, so torch's blocks are no hits here."""
        assert not self._coded, "once"
        grouped = coded_layouts(self._config, self._spec.block_tokens, self._dtype, codec)
        groups = [group for group, _ in grouped]
        self._coded = [layout for _, layout in grouped]
        places = _by_layer(groups, [coded_places(layout) for layout in self._coded])
        self._decoder.recode([places[layer] for layer in range(self._config.layers)])
        self._pools = BlockPools(groups, torch.device("cpu"))
        written = Representation(
            FLOATS[self._dtype], codec.id, codec.calibration, layout=CODE_LAYOUT
        )
        self._spec = replace(
            self._spec,
            groups=tuple(groups),
            layouts=(),
            representation=written,
            numeric_class=f"{self._spec.numeric_class}-kv-{codec.id}{codec.calibration}",
        )

    def _make_slots(self) -> list[SlotMover]:
        if not self._coded:
            return super()._make_slots()
        pools = zip(self._coded, self._pools.pools, strict=True)
        return [LayeredSlots(layout, pool) for layout, pool in pools]

    def allocate(self, blocks: tuple[int, ...]) -> None:
        """Zeroed pools; raises OutOfBlocks if the memory for them is not there now."""
        self._pools.allocate(blocks, huge_bytes)
        self._decoder.bind(self._pools.pools)

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See Model.execute; drops the GIL while it computes."""
        self._pools.copy(plan.copies)
        return self._decoder.step(
            token_ids=_ints(plan.token_ids),
            positions=_ints(plan.positions),
            starts=_ints(plan.starts),
            lengths=_ints(plan.lengths),
            tables=[_ints(table) for table in plan.tables],
            sample_rows=_ints([sample.row for sample in plan.samples]),
        )

    @property
    def weight_bytes(self) -> int:
        """Of the packed matrices."""
        return self._decoder.weight_bytes

    def read_rate(self) -> float:
        """Bytes per second of reading the weights on all threads; for benchmarks, between steps."""
        return self._decoder.read_rate()


def _ints(values: object) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int32)


def _by_layer(groups: list[KVGroup], places: list[list[LayerPlaces]]) -> dict[int, LayerPlaces]:
    """From each group's layers in its own order to all by their number."""
    both = zip(groups, places, strict=True)
    return {n: place for group, of in both for n, place in zip(group.layers, of, strict=True)}


def _layers(
    config: ModelConfig,
    weights: Weights,
    groups: list[KVGroup],
    places: dict[int, LayerPlaces],
    context_tokens: int,
) -> Iterator[LayerTensors]:
    cpu = torch.device("cpu")
    group_of = {layer: group.id for group in groups for layer in group.layers}
    rope = build_table(config.rope, config.head_dim, context_tokens, cpu)
    local: RopeTable | None = None
    if config.local_rope is not None:
        local = build_table(config.local_rope, config.head_dim, context_tokens, cpu)
    for number, layer in enumerate(weights.layers):
        window = config.windows[number]
        table = local if local is not None and window else rope
        yield LayerTensors(
            qkv=layer.qkv,
            output=layer.output,
            gate_up=layer.gate_up,
            down=layer.down,
            input_norm=layer.input_norm,
            mlp_norm=layer.mlp_norm,
            cos=table.cos,
            sin=table.sin,
            group=group_of[number],
            places=places[number],
            window=window,
            attention_post_norm=layer.attention_post_norm,
            mlp_post_norm=layer.mlp_post_norm,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            qkv_bias=layer.qkv_bias,
            output_bias=layer.output_bias,
            gate_up_bias=layer.gate_up_bias,
            down_bias=layer.down_bias,
        )
