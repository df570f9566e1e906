"""A decode step with a codec beside the same step without, on the path that a replica would take
for the codec: both compiled, or both by torch in the same dtype. Knows no text.

What is in the pages does not change a step's time, so nothing is read first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from seams.bench import Row, alternate, median
from worker.compression.base import PLAIN, Findings, Settings
from worker.compression.reading import GREEDY
from worker.compression.subject import Subject
from worker.engine.plan import SampleRow, StepPlan
from worker.models.base import Model
from worker.models.llama import LlamaModel

STEP_TOKENS_MAX = 16_384  # of all sequences of a step: what pools are made for
TOKEN_ID = 1


def measure_steps(subject: Subject, settings: Settings, found: Findings) -> None:
    """Rows `CONTEXT/CODEC/steps b=N`: steps per second, against those without a codec. Raises
    OutOfBlocks."""
    plain: dict[tuple[str, str], Model] = {}
    for codec in settings.codecs:
        model = subject.served(codec)
        path = (compute_of(model), model.spec.representation.dtype)
        if path not in plain:
            plain[path] = subject.served(PLAIN, *path)
            _allocate(plain[path])
        _allocate(model)
        for row in step_rows(codec, model, plain[path], settings):
            found.add(row)


def compute_of(model: Model) -> str:
    """What a replica is told to compute it this way."""
    return "torch" if isinstance(model, LlamaModel) else "compiled"


def step_rows(codec: str, model: Model, plain: Model, settings: Settings) -> Iterator[Row]:
    """Both models with pools for STEP_TOKENS_MAX tokens."""
    against = f"{PLAIN} on {plain.spec.numeric_class}"
    for context in settings.contexts_tokens:
        for batch in settings.batches:
            if context > model.spec.context_tokens or context * batch > STEP_TOKENS_MAX:
                continue
            measures = {codec: _step(model, context, batch), PLAIN: _step(plain, context, batch)}
            samples = alternate(measures, settings.step_rounds)
            coded_hz, plain_hz = 1 / median(samples[codec]), 1 / median(samples[PLAIN])
            name = f"{context}/{codec}/steps b={batch}"
            yield Row(name, coded_hz, "1/s", settings.step_rounds, against, plain_hz)


def _allocate(model: Model) -> None:
    blocks = -(-STEP_TOKENS_MAX // model.spec.block_tokens)
    model.allocate((blocks,) * len(model.spec.groups))


def _step(model: Model, context: int, batch: int) -> Callable[[], float]:
    """Seconds of one token for each of `batch` sequences that have `context` with it."""
    size, groups = model.spec.block_tokens, len(model.spec.groups)
    blocks = context // size
    last = blocks * size - 1
    tables = [range(s * blocks, (s + 1) * blocks) for s in range(batch)]
    slots = [s * blocks * size + last for s in range(batch)]
    plan = StepPlan.of_lists(
        1,
        [TOKEN_ID] * batch,
        [last] * batch,
        range(batch + 1),
        [last + 1] * batch,
        [tables] * groups,
        [slots] * groups,
        (),
        [SampleRow(s, s, 0, 0, GREEDY) for s in range(batch)],
    )

    def measure() -> float:
        began = time.perf_counter()
        model.execute(plan)
        return time.perf_counter() - began

    return measure
