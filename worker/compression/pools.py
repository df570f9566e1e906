"""Long generations in a small pool of equal bytes: how many run at once, with every codec and
policy, and what happens when the pool is full at the moment of compaction. A real engine, step by
step; knows no network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from seams.bench import Row
from seams.clock import SystemClock
from worker.compression.base import KEEP_ALL, PLAIN, Findings, Point, Settings
from worker.compression.subject import Subject
from worker.compression.texts import Text
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import Compacted, EngineRequest
from worker.engine.retention.options import REQUESTS
from worker.engine.retention.policies import Policies
from worker.engine.sampling import SamplingParams
from worker.models.base import Model

PROMPT_TOKENS = 16


@dataclass
class Run:
    """What became of the generations of one run."""

    asked: int = 0
    together: int = 0  # most that ran at the same time
    refused: int = 0  # ended with an error
    preemptions: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    free_at_round: int | None = None  # fewest blocks to be had as a round began; None: no round
    compacted: Compacted = field(default_factory=Compacted)
    running: list[Point] = field(default_factory=list)  # after each step
    free: list[Point] = field(default_factory=list)


def measure_pools(
    subject: Subject, texts: Sequence[Text], settings: Settings, found: Findings
) -> None:
    """Rows `pool/CODEC + POLICY/...`: the same bytes for all, just enough for all generations at
    their policy's limit. Raises OutOfBlocks."""
    prompts = _prompts(subject, texts, settings.generations)
    pool_bytes = 0
    plain: Run | None = None
    for codec in settings.pool_codecs:
        for policy in _policies(subject, settings):
            model = subject.served(codec)
            if not pool_bytes:
                pool_bytes = _pool_bytes(model, settings)
            blocks = pool_bytes // sum(group.block_bytes for group in model.spec.groups)
            run = generate(model, subject, prompts, policy, settings.generated_tokens, blocks)
            plain = plain or run
            name = f"{codec} + {policy.partition(':')[0]}"
            for row in pool_rows(f"pool/{name}", run, plain, blocks):
                found.add(row)
            found.draw(f"running/{name}", run.running)
            found.draw(f"free/{name}", run.free)


def _policies(subject: Subject, settings: Settings) -> list[str]:
    """Without retention first. Budgets are a sixth of what is generated, or less."""
    if not subject.prunable:
        return [KEEP_ALL]
    budget, interval = _quota(settings)
    made = [KEEP_ALL, f"streaming:window={budget},interval={interval}"]
    if subject.statistics is not None:
        window = budget // 4
        made.append(f"triattention:budget={budget},interval={interval},window={window}")
    return made


def _quota(settings: Settings) -> tuple[int, int]:
    """Budget and interval in tokens, whole blocks of 16."""
    blocks = settings.generated_tokens // 16
    return max(1, blocks // 6) * 16, max(1, blocks // 12) * 16


def _pool_bytes(model: Model, settings: Settings) -> int:
    """Room for all generations at their limit, and not a block more."""
    size = model.spec.block_tokens
    budget, interval = _quota(settings)
    limit = -(-(PROMPT_TOKENS + budget + interval) // size)
    return settings.generations * limit * sum(group.block_bytes for group in model.spec.groups)


def _prompts(subject: Subject, texts: Sequence[Text], count: int) -> list[tuple[int, ...]]:
    """Passages of the texts, none twice."""
    ids = [i for text in texts for i in subject.tokenizer.encode(text.text[:100_000]).ids]
    stride = max(PROMPT_TOKENS, len(ids) // count)
    return [tuple(ids[n * stride : n * stride + PROMPT_TOKENS]) for n in range(count)]


def generate(
    model: Model,
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    policy: str,
    tokens: int,
    blocks: int,
) -> Run:
    """Let an engine with so many blocks of each group generate `tokens` behind each prompt, all
    asked for at once. Allocates the model's pools."""
    spec = model.spec
    policies = None
    if policy != KEEP_ALL:
        policies = Policies(spec, REQUESTS, subject.statistics)
    config = EngineConfig(blocks=(blocks,) * len(spec.groups), running_max=2 * len(prompts),
                          cache=False)  # fmt: skip
    core = EngineCore(model, config, SystemClock(), retention=policies)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(seed=number, max_tokens=tokens, ignore_eos=True)
        chosen = policy if policies is not None else ""
        core.submit(EngineRequest(str(number), prompt, len(prompt), sampling, retention=chosen))
    run, began = Run(asked=len(prompts)), time.perf_counter()
    while core.has_work():
        _step(core, run)
    run.elapsed_s = time.perf_counter() - began
    run.compacted = core.load().compacted or Compacted()
    return run


def _step(core: EngineCore, run: Run) -> None:
    before, available = core.load().compacted, core.memory.available(0)
    output = core.step()
    if output is None:
        return
    for emission in output.emissions:
        run.tokens += len(emission.token_ids)
        if emission.last and emission.usage is not None:
            run.refused += emission.error is not None
            run.preemptions += emission.usage.preemptions
    after = output.load.compacted
    if before is not None and after is not None and after.rounds > before.rounds:
        fewest = available if run.free_at_round is None else run.free_at_round
        run.free_at_round = min(fewest, available)
    run.together = max(run.together, output.load.running)
    step = float(output.step)
    run.running.append((step, float(output.load.running)))
    run.free.append((step, float(core.memory.available(0))))


def pool_rows(start: str, run: Run, plain: Run, blocks: int) -> Iterator[Row]:
    """Of one run, beside that without codec and policy."""
    nothing = f"{PLAIN} + {KEEP_ALL}"
    asked = run.asked
    yield Row(f"{start}/blocks", blocks, "blocks", 1)
    yield Row(
        f"{start}/together", run.together, f"of {asked} generations", 1, nothing, plain.together
    )
    yield Row(f"{start}/refused", run.refused, "requests", asked)
    yield Row(f"{start}/preempted", run.preemptions, "times", asked)
    hz, plain_hz = run.tokens / run.elapsed_s, plain.tokens / plain.elapsed_s
    yield Row(f"{start}/throughput", hz, "tokens/s", run.tokens, nothing, plain_hz)
    rounds = run.compacted.rounds
    if run.free_at_round is not None:
        yield Row(f"{start}/free as a round began", run.free_at_round, "blocks", rounds)
        yield Row(f"{start}/blocks freed", run.compacted.freed_blocks, "blocks", rounds)
        yield Row(f"{start}/rounds that waited", run.compacted.waited, "rounds", rounds)
