"""KV waste: bytes allocated that attention can never read, paged against contiguous reservation.

Real scheduler, radix cache and block pool over FakeModel, whose accounting is that of any model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from seams.clock import SystemClock
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest
from worker.engine.sampling import SamplingParams
from worker.models.fake import fake_model

LENGTH_MIN, LENGTH_MAX = 32, 1024


@dataclass(frozen=True)
class Waste:
    """Shares over all sampled steps, and how many requests ran at once in equal memory."""

    paged: float  # wasted / allocated, summed over all steps
    contiguous: float
    fit_paged: int  # most requests running at the same time
    fit_contiguous: int
    steps: int


def _requests(count: int, seed: int) -> Iterator[EngineRequest]:
    """Total lengths uniform in 32..1,024, a random share of each generated."""
    rng = random.Random(seed)
    for i in range(count):
        total = rng.randint(LENGTH_MIN, LENGTH_MAX)
        prompt = rng.randint(total // 4, total - 8)
        tokens = tuple(rng.randrange(4, 250) for _ in range(prompt))
        params = SamplingParams(seed=i, max_tokens=total - prompt, ignore_eos=True)
        yield EngineRequest(f"r{i}", tokens, prompt, params, no_cache=True)


def measure(count: int = 64, seed: int = 1, blocks: int | None = None) -> Waste:
    """Run `count` requests in `blocks` (default: 1/4 of contiguous reservation)."""
    model = fake_model("full", context_tokens=LENGTH_MAX, vocab_tokens=256)
    size = model.spec.block_tokens
    reserved = LENGTH_MAX // size  # blocks that contiguous reservation takes per request
    total = blocks or count * reserved // 4
    config = EngineConfig(blocks=(total,), step_tokens_max=512, running_max=count)
    core = EngineCore(model, config, SystemClock())
    for request in _requests(count, seed):
        core.submit(request)
    allocated = wasted = valid_all = reserved_all = fit = steps = 0
    while core.has_work():
        core.step()
        running = core.scheduler.running
        held = sum(len(sequence.tables[0]) for sequence in running) * size
        valid = sum(sequence.computed for sequence in running)
        assert valid <= held
        allocated, wasted = allocated + held, wasted + held - valid
        valid_all, reserved_all = valid_all + valid, reserved_all + len(running) * LENGTH_MAX
        fit, steps = max(fit, len(running)), steps + 1
    return Waste(
        paged=wasted / allocated,
        contiguous=1 - valid_all / reserved_all,
        fit_paged=fit,
        fit_contiguous=total // reserved,
        steps=steps,
    )
