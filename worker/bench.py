"""`python -m worker.bench`: the engine end to end on a real model, beside what the memory allows.

Rows: decode_b{1,8,32} (one step), prefill_512, ttft_cached_1892, start_ready, overhead_b{1,32} (the
engine around a model that costs nothing), kv_waste and requests_fit (paged against contiguous).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch

from seams.bench import Report, Row, median
from seams.clock import SystemClock
from seams.errors import BanyanError
from worker import waste
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest
from worker.engine.sampling import SamplingParams
from worker.models.base import Model
from worker.models.load import load_model, plan_blocks

READ_BYTES = 256 << 20  # about what one step of the demo model reads

_names = count()


def _prompts(tokens: int, seed: int) -> Iterator[tuple[int, ...]]:
    rng = random.Random(seed)
    while True:
        yield tuple(rng.randrange(1000, 40000) for _ in range(tokens))


def _submit(core: EngineCore, prompt: tuple[int, ...], output: int) -> None:
    params = SamplingParams(seed=0, max_tokens=output, ignore_eos=True)
    core.submit(EngineRequest(f"bench-{next(_names)}", prompt, len(prompt), params))


def _drain(core: EngineCore) -> list[float]:
    """Seconds of every step until nothing is left."""
    times = []
    while core.has_work():
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    return times


def _read_times(reads: int = 5) -> list[float]:
    """Seconds of reading READ_BYTES with torch's threads, as a decode step reads its weights."""
    source = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    times = []
    for _ in range(reads):
        begin = time.perf_counter()
        source.sum()
        times.append(time.perf_counter() - begin)
    return times


def decode_row(core: EngineCore, batch: int, steps: int, weight_bytes: int) -> Row:
    """One decode step of `batch` short sequences, against one read of the weights.

    The memory is timed right before and right after the steps: both medians are of one moment.
    """
    prompts = _prompts(24, seed=batch)
    for _ in range(batch):
        _submit(core, next(prompts), steps + 1)
    reads = _read_times()
    times = _drain(core)[-steps:]
    reads += _read_times()
    floor_s = median(reads) * weight_bytes / READ_BYTES
    return Row(f"decode_b{batch}", median(times) * 1e3, "ms", len(times), "read weights once",
               floor_s * 1e3)  # fmt: skip


def prefill_rows(core: EngineCore, rounds: int) -> list[Row]:
    """512 new tokens; and 108 new ones behind 1,892 cached, against computing all 2,000."""
    fresh = _prompts(512, seed=512)
    whole: list[float] = []
    for _ in range(rounds):
        _submit(core, next(fresh), 1)
        whole.append(sum(_drain(core)))
    prefix, tails, others = next(_prompts(1892, seed=3)), _prompts(108, seed=4), _prompts(2000, 5)
    _submit(core, prefix, 1)
    _drain(core)
    cached, cold = [], []
    for _ in range(rounds):
        _submit(core, (*prefix, *next(tails)), 1)
        cached.append(sum(_drain(core)))
        _submit(core, next(others), 1)
        cold.append(sum(_drain(core)))
    return [
        Row("prefill_512", median(whole) * 1e3, "ms", rounds),
        Row("ttft_cached_1892", median(cached) * 1e3, "ms", rounds, "all 2000 computed",
            median(cold) * 1e3),
    ]  # fmt: skip


def overhead_row(batch: int, steps: int) -> Row:
    """CPU time of a step around FakeModel: scheduling, plan, sampling, and FakeModel's own work."""
    from worker.models.fake import fake_model

    core = EngineCore(
        fake_model("full", context_tokens=4096),
        EngineConfig(blocks=(batch * 64,), running_max=batch),
        SystemClock(),
    )
    prompts = _prompts(16, seed=batch)
    for _ in range(batch):
        _submit(core, tuple(t % 60 for t in next(prompts)), steps)
    times = []
    while core.has_work():
        begin = time.process_time()
        core.step()
        times.append(time.process_time() - begin)
    return Row(f"overhead_b{batch}", median(times) * 1e6, "us", len(times))


def waste_rows() -> list[Row]:
    """KV waste of 64 requests of 32-1,024 tokens, and how many run at once in equal memory."""
    seen = waste.measure()
    return [
        Row("kv_waste", seen.paged, "of allocated", seen.steps, "contiguous", seen.contiguous),
        Row("requests_fit", seen.fit_paged, "requests", 1, "contiguous", seen.fit_contiguous),
    ]


def model_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Everything that needs the real model; minutes on a CPU. Raises ModelLoadError."""
    begin = time.perf_counter()
    config = ReplicaConfig("bench", options.model, "bench", (), "", dtype=options.dtype)
    model: Model = load_model(config)
    engine = EngineConfig(blocks=plan_blocks(config, model.spec), step_tokens_max=2048)
    core = EngineCore(model, engine, SystemClock())
    started = time.perf_counter() - begin
    stored = sum(p.stat().st_size for p in Path(options.model).glob("*.safetensors"))
    wider = 2 if model.spec.representation.dtype == "fp32" else 1  # checkpoints are 16 bits wide
    yield Row("start_ready", started, "s", 1)
    yield from (decode_row(core, batch, options.steps, stored * wider) for batch in (1, 8, 32))
    yield from prefill_rows(core, options.rounds)


def _all_rows(options: argparse.Namespace) -> Iterator[Row]:
    yield from waste_rows()
    yield from (overhead_row(batch, options.steps) for batch in (1, 32))
    if options.model:
        yield from model_rows(options)


def main() -> None:
    """Print the table; `--json FILE` writes it too; without `--model` only what needs no model."""
    parser = argparse.ArgumentParser(prog="python -m worker.bench", description=__doc__)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--dtype", default="bf16", help="of the real model; default %(default)s")
    parser.add_argument("--steps", type=int, default=32, help="decode steps a row")
    parser.add_argument("--rounds", type=int, default=3, help="repeats of a prefill row")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    report = Report()
    try:
        for row in _all_rows(options):
            report.add(row)
            print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
    except BanyanError as error:
        sys.exit(f"error: {error.message}")
    report.show(options.json)


if __name__ == "__main__":
    main()
