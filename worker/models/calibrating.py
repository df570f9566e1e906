"""Scales of FP8 keys and values, fitted to what a model makes of tokens of all its vocabulary.

It knows token ids only. The scales depend on the weights alone, up to rounding; where two replicas
find different ones their calibration names differ, and each misses the other's blocks.
"""

from __future__ import annotations

import torch

from kernels.codecs.fp8 import LayerScales, fit_scales
from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.base import Model

PROBE_TOKENS = 256


def fp8_scales(model: Model) -> list[LayerScales]:
    """By layer number, of a model without a codec. Allocates its pools and leaves the probe's keys
    in them: recode it afterwards. Raises OutOfBlocks.

    Pages may order the numbers of a head as they like: only the largest counts.
    """
    spec = model.spec
    count = min(PROBE_TOKENS, spec.context_tokens)
    blocks = -(-count // spec.block_tokens)
    model.allocate((blocks,) * len(spec.groups))
    model.execute(_plan(model, count, blocks))
    found: dict[int, LayerScales] = {}
    for group, layout in zip(spec.groups, spec.layouts, strict=True):
        stored = b"".join(model.read_block(group.id, block) for block in range(blocks))
        pool = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(blocks, -1)
        for layer, pages in zip(group.layers, layout.pages(pool), strict=True):
            # Places behind the last token are zero: they make nothing larger.
            found[layer] = LayerScales(fit_scales(pages.keys), fit_scales(pages.values))
    return [found[layer] for layer in sorted(found)]


def _plan(model: Model, count: int, blocks: int) -> StepPlan:
    """One prompt, in blocks 0, 1, ... of every group."""
    groups, vocab = len(model.spec.groups), model.spec.vocab_tokens
    ids = [(place * place * 7919 + place * 104_729) % vocab for place in range(count)]
    places = list(range(count))
    sample = SampleRow(count - 1, 0, 0, 0, SamplingParams(0, 1))
    tables = [[list(range(blocks))]] * groups
    return StepPlan.of_lists(
        0, ids, places, [0, count], [count], tables, [places] * groups, (), [sample]
    )
