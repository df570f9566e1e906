"""Does a model compute the same through pages as by itself? Asked once, when it is loaded.

An architecture may keep state that attention's interface does not show, mix the rows of a step, or
ask of attention what ours lacks. Each changes the logits of two sequences that are computed in
chunks, side by side, so that is what is compared.
"""

from __future__ import annotations

from typing import Any

import torch

from seams.errors import ModelLoadError
from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.adapter import PAGED, AdaptedModel

LENGTHS = (29, 18)  # of the two sequences
CHUNKS = ((13, 6), (15, 0), (1, 12))  # rows of each sequence, step by step
# 1 - cosine of a row's logits, centred, the median over the rows behind the first chunk. There what
# is wrong shows as more than 0.1, and rounding as 1e-11 (fp32) to 3e-3 (bf16) on random models.
# Experts chosen by another rounding move single rows, not the median.
DISTANCE_MAX = {torch.float32: 1e-7, torch.bfloat16: 0.02, torch.float16: 0.002}


def check_adapted(adapted: AdaptedModel, model: Any) -> None:
    """Raises ModelLoadError if paged logits are not the model's own. Leaves no pools behind."""
    spec = adapted.spec
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(spec.vocab_tokens, (n,), generator=generator).tolist()
        for n in (min(length, spec.context_tokens) for length in LENGTHS)
    ]
    kind = str(model.config.model_type)[:64]
    try:
        ours = _paged(adapted, sequences)
    except Exception as error:  # the model's own code, of any kind
        raise ModelLoadError(
            f"{kind} models cannot run over pages ({type(error).__name__})."
        ) from error
    model.set_attn_implementation("eager")
    try:
        theirs = [_own(model, token_ids) for token_ids in sequences]
    finally:
        model.set_attn_implementation(PAGED)
    for s, (paged, own) in enumerate(zip(ours, theirs, strict=True)):
        behind = CHUNKS[0][s] if len(own) > CHUNKS[0][s] else 0
        if not _distance(paged[behind:], own[behind:]) <= DISTANCE_MAX[model.dtype]:  # NaN too
            raise ModelLoadError(
                f"{kind} models do not compute the same through paged attention as by themselves."
            )


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """See DISTANCE_MAX; logits [rows, vocab]."""
    a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (first, second))
    return float((1 - torch.cosine_similarity(a, b, dim=-1)).median())


@torch.inference_mode()
def _own(model: Any, token_ids: list[int]) -> torch.Tensor:
    ids = torch.tensor([token_ids], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.float()


def _paged(adapted: AdaptedModel, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every row, per sequence."""
    size = adapted.spec.block_tokens
    held = -(-max(map(len, sequences)) // size)
    adapted.allocate((held * len(sequences),) * len(adapted.spec.groups))
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    try:
        computed = [0] * len(sequences)
        for number, counts in enumerate(CHUNKS):
            work = [
                (s, computed[s], min(computed[s] + count, len(sequences[s])))
                for s, count in enumerate(counts)
            ]
            work = [(s, first, last) for s, first, last in work if last > first]
            plan = _plan(number, work, sequences, held, size, len(adapted.spec.groups))
            if plan.samples:
                for sample, row in zip(plan.samples, adapted.execute(plan), strict=True):
                    rows[sample.sequence].append(row)
            for s, _, last in work:
                computed[s] = last
    finally:
        adapted.release()
    return [torch.stack(r) for r in rows]


def _plan(
    number: int,
    work: list[tuple[int, int, int]],
    sequences: list[list[int]],
    held: int,
    size: int,
    groups: int,
) -> StepPlan:
    """(sequence, first, last) rows; sequence s holds blocks s * held and the following."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, samples = [0], []
    for s, first, last in work:
        for position in range(first, last):
            row = len(token_ids)
            samples.append(SampleRow(row, s, 0, 0, SamplingParams(seed=0, max_tokens=1)))
            token_ids.append(sequences[s][position])
            positions.append(position)
            slots.append(s * held * size + position)
        starts.append(len(token_ids))
    tables = [range(s * held, (s + 1) * held) for s, _, _ in work]
    return StepPlan.of_lists(
        number,
        token_ids,
        positions,
        starts,
        lengths=[last for _, _, last in work],
        tables=[tables] * groups,
        slots=[slots] * groups,
        samples=samples,
    )
