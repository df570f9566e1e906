"""Layers that are stored twice, from a seed: pages of both kinds, nonsense wherever nothing is, and
what attention must give, row by row in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from codec_cases import rotations

from kernels.attention import Attended, AttentionSpec
from kernels.batch import build_batch
from kernels.codecs.base import LayerCodec, VectorCodec
from kernels.codecs.oscar import LayerRotations, oscar_layer
from kernels.codecs.pages import CodecLayout, CodecPages
from kernels.codecs.turboquant import TurboVectors
from kernels.hybrid import HybridPages, HybridStep, MixedBlocks, Reach
from kernels.layout import DTYPES, PageLayout

BLOCK, DIM, HEADS = 16, 32, 2


@dataclass(frozen=True)
class HybridCase:
    """One attention problem; `stored` has keys and values, [2, Hkv, length, DIM] a sequence."""

    q: torch.Tensor
    pages: HybridPages
    step: HybridStep
    spec: AttentionSpec
    stored: tuple[torch.Tensor, ...]

    def expected(self) -> Attended:
        """float32, on the CPU."""
        codec = self.pages.codes.codec
        outs, lses = [], []
        for s, exact in enumerate(self.stored):
            coded = torch.stack([decoded(c, x) for c, x in zip(_sides(codec), exact, strict=True)])
            begin, end = self.step.codes.starts_list[s : s + 2]
            for row in range(begin, end):
                position = exact.shape[2] - (end - row)
                out, lse = self._row(self.q[row].double().cpu(), position, exact, coded)
                outs.append(out)
                lses.append(lse)
        return Attended(torch.stack(outs).float(), torch.stack(lses).float())

    def _row(
        self, q: torch.Tensor, position: int, exact: torch.Tensor, coded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of q [Hq, DIM]: output [Hq, DIM] and lse [Hq], float64."""
        place, reach, spec = torch.arange(position + 1), self.step.reach, self.spec
        as_is = (place < reach.sink_tokens) | (position - place < reach.window_tokens)
        there = slice(position + 1)
        seen = torch.where(as_is[:, None], exact[:, :, there], coded[:, :, there]).double()
        keys, values = seen.repeat_interleave(len(q) // HEADS, 1)  # [Hq, position + 1, DIM]
        logits = (keys @ q.unsqueeze(2)).squeeze(2) * spec.scale
        if spec.soft_cap:
            logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
        terms = logits
        if spec.sinks is not None:
            terms = torch.cat((logits, spec.sinks.double().cpu().unsqueeze(1)), 1)
        lse = torch.logsumexp(terms, 1)
        return (torch.exp(logits - lse[:, None]).unsqueeze(1) @ values).squeeze(1), lse


def _sides(codec: LayerCodec) -> tuple[VectorCodec, VectorCodec]:
    return codec.keys, codec.values


def decoded(codec: VectorCodec, vectors: torch.Tensor) -> torch.Tensor:
    """What the codes of [Hkv, T, DIM] stand for, in the model's basis."""
    return codec.turn_back(codec.decode(codec.encode(vectors))).float()


def layer_codec(name: str, device: str = "cpu") -> LayerCodec:
    """`oscar`, or `turbo`: one that does not turn each head in its own way."""
    if name == "turbo":
        every = TurboVectors(DIM, 4, device=device)
        return LayerCodec(every, every)
    keys, values = (rotations(DIM, HEADS, seed).to(device) for seed in (5, 6))
    return oscar_layer(LayerRotations(keys, values))


def hybrid_case(
    seed: int,
    lengths: Sequence[int],
    rows: Sequence[int],
    reach: Reach,
    *,
    codec: str = "oscar",
    dtype: str = "fp32",
    group: int = 2,
    soft_cap: float = 0.0,
    sinks: bool = False,
    device: str = "cpu",
) -> HybridCase:
    """Sequences of these lengths whose last `rows` are computed; blocks that a window has passed
    are absent, and every block lies anywhere in its pool."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    how, number = layer_codec(codec, device), DTYPES[dtype]
    counts = [-(-length // BLOCK) for length in lengths]
    total = sum(counts) + 3
    orders = [rng.sample(range(total), total) for _ in range(2)]
    layout = PageLayout(1, HEADS, BLOCK, DIM, DIM, dtype)
    coded = CodecLayout((how,), HEADS, BLOCK)
    pools = [
        torch.full((total, size), 255, dtype=torch.uint8, device=device)
        for size in (coded.block_bytes, layout.block_bytes)
    ]
    (codes,), (exact,) = coded.pages(pools[0]), layout.pages(pools[1])
    assert isinstance(codes, CodecPages)
    tables: list[list[list[int]]] = [[], []]
    stored = []
    for length, count, new in zip(lengths, counts, rows, strict=True):
        kv = (torch.rand(2, HEADS, length, DIM, generator=generator) * 2 - 1).to(number)
        stored.append(kv)
        passed = max(0, length - new - reach.window_tokens + 1) // BLOCK
        for order, table in zip(orders, tables, strict=True):
            table.append([order.pop() for _ in range(count)])
        for i in range(reach.sink_tokens // BLOCK, passed):
            tables[1][-1][i] = -1
        for pages, table in ((codes, tables[0][-1]), (exact, tables[1][-1])):
            there = torch.tensor([p for p in range(length) if table[p // BLOCK] >= 0])
            slots = torch.tensor(table)[there // BLOCK] * BLOCK + there % BLOCK
            keys, values = kv.transpose(1, 2)[:, there].to(device)
            pages.write(slots.to(device), keys, values)
    starts, positions = [0], []
    for length, new in zip(lengths, rows, strict=True):
        starts.append(starts[-1] + new)
        positions += range(length - new, length)
    batches = [
        build_batch(starts, list(lengths), positions, table, [0] * len(positions), BLOCK, device)
        for table in tables
    ]
    heads = HEADS * group
    extra = torch.randn(heads, generator=generator).to(device) if sinks else None
    spec = AttentionSpec(heads, HEADS, DIM, DIM, DIM**-0.5, soft_cap=soft_cap, sinks=extra)
    q = (torch.rand(len(positions), heads, DIM, generator=generator) * 4 - 2).to(device, number)
    step = HybridStep(batches[0], batches[1], reach, total)
    return HybridCase(q, HybridPages(codes, exact, MixedBlocks(total)), step, spec, tuple(stored))


def errors(case: HybridCase, found: Attended) -> dict[str, float]:
    """The largest of output and lse; NaN counts as infinite."""
    expected = case.expected()
    assert found.lse is not None and expected.lse is not None
    pairs = {"out": (found.out, expected.out), "lse": (found.lse, expected.lse)}
    return {
        name: float((a.float().cpu() - b).abs().nan_to_num(nan=torch.inf).max())
        for name, (a, b) in pairs.items()
    }
