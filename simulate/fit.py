"""Constants from a real run, and how far the simulation of that run is from it.

A run (banyan/recording.py) is a JSON object: "replicas", "blocks" of one of them, "block_tokens",
and "requests", each with "at_s", "token_ids", "output_tokens", "replica", "cached_tokens",
"ttft_s", "total_s" and "alone": sent when nothing else ran. From those whose replica had nothing
else to do, and from how long all took to decode beside what it did, linear equations give the
constants (least squares, none negative). Replicas that share a machine slow each other down: by how
much is tried out, and what leaves the least is kept. The simulation is then held against those not
alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from seams.bench import Row
from seams.errors import InvalidRequest
from simulate.cluster import Setup, simulate
from simulate.engine import Shape
from simulate.outcome import Record, mean
from simulate.policies.registry import OURS, policy_of
from simulate.steptime import StepTime
from simulate.workload import Grain, Workload, request_of
from worker.config import EngineConfig

Floats = npt.NDArray[np.float64]

LEAST_REQUESTS = 8
RUNS = 5  # seeds of the simulation
ROUNDS = 8  # of weighing equations anew
LEAST_S = 1e-4
BESIDE = tuple(step / 20 for step in range(41))  # what a busy neighbour adds to a step, tried out


@dataclass(frozen=True)
class Sample:
    """One request as its client saw it."""

    at_s: float
    token_ids: tuple[int, ...]
    output_tokens: int
    replica: str
    cached_tokens: int
    ttft_s: float
    total_s: float
    alone: bool

    @property
    def computed(self) -> int:
        """Prompt tokens that no cache had."""
        return len(self.token_ids) - self.cached_tokens

    @property
    def pairs(self) -> float:
        """Of a computed token and one before it."""
        return self.computed * (self.cached_tokens + self.computed / 2)

    @property
    def first_s(self) -> float:
        """When its first token came."""
        return self.at_s + self.ttft_s

    @property
    def last_s(self) -> float:
        """When its last token came."""
        return self.at_s + self.total_s


@dataclass(frozen=True)
class RealRun:
    """What a cluster did."""

    replicas: int
    blocks: int
    block_tokens: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Fitted:
    """The constants, and figures of the loaded part: name -> (simulated, real, unit)."""

    times: StepTime
    overhead_s: float
    beside: float  # added to each step, as a share of it, by each other replica that is busy
    figures: dict[str, tuple[float, float, str]]
    requests: int

    def rows(self) -> Iterator[Row]:
        """As a bench table."""
        for name in ("step_s", "sequence_s", "context_s", "prompt_s", "pair_s"):
            yield Row(f"fit_{name}", getattr(self.times, name), "s", self.requests)
        yield Row("fit_overhead_s", self.overhead_s, "s", self.requests)
        yield Row("fit_beside", self.beside, "of a step", self.requests)
        for name, (simulated, real, unit) in self.figures.items():
            yield Row(f"simulated_{name}", simulated, unit, self.requests, "real", real)


def read_run(path: Path) -> RealRun:
    """Raises InvalidRequest for a file that is none."""
    try:
        written = json.loads(path.read_text())
        samples = tuple(_sample(request) for request in written["requests"])
        run = RealRun(
            int(written["replicas"]), int(written["blocks"]), int(written["block_tokens"]), samples
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no recorded run: {error}") from error
    loaded = sum(not sample.alone for sample in samples)
    if min(loaded, len(samples) - loaded) < LEAST_REQUESTS:
        raise InvalidRequest(
            f"{path} has {len(samples) - loaded} requests that were alone and {loaded} that were "
            f"not; {LEAST_REQUESTS} of each are needed."
        )
    return run


def _sample(written: dict[str, Any]) -> Sample:
    sample = Sample(
        at_s=float(written["at_s"]),
        token_ids=tuple(int(token) for token in written["token_ids"]),
        output_tokens=int(written["output_tokens"]),
        replica=str(written["replica"]),
        cached_tokens=int(written["cached_tokens"]),
        ttft_s=float(written["ttft_s"]),
        total_s=float(written["total_s"]),
        alone=bool(written["alone"]),
    )
    if not (0 < sample.ttft_s <= sample.total_s and sample.output_tokens > 0):
        raise ValueError("a request has no answer, or its times are in no order")
    if not 0 <= sample.cached_tokens < len(sample.token_ids):
        raise ValueError("a request has more cached tokens than its prompt")
    return sample


def fit(run: RealRun) -> Fitted:
    """Constants, and the simulation of the same requests at the same times with them."""
    times, overhead_s, beside = constants(run)
    grain = Grain(run.block_tokens, 1)
    ordered = sorted(run.samples, key=lambda sample: sample.at_s)
    requests = tuple(
        request_of(grain, i, s.at_s, s.token_ids, len(s.token_ids), s.output_tokens)
        for i, s in enumerate(ordered)
    )
    workload = Workload(grain, requests, max(s.output_tokens for s in ordered))
    shape = Shape(run.blocks, grain, times, step_tokens_max=EngineConfig.step_tokens_max)
    setup = Setup(shape, run.replicas, hop_s=overhead_s / 2, beside=beside)
    loaded = {i for i, sample in enumerate(ordered) if not sample.alone}
    records = [
        record
        for seed in range(RUNS)
        for record in simulate(setup, workload, policy_of(OURS), seed).good
        if record.request.number in loaded
    ]
    real = [ordered[i] for i in sorted(loaded)]
    return Fitted(times, overhead_s, beside, _against(records, real), len(real))


Against = dict[str, tuple[float, float, str]]


def _against(records: Sequence[Record], real: Sequence[Sample]) -> Against:
    prompts = sum(len(s.token_ids) for s in real)
    simulated = sum(r.request.prompt_tokens for r in records)
    return {
        "ttft_mean": (mean(r.ttft_s for r in records), mean(s.ttft_s for s in real), "s"),
        "e2e_mean": (mean(r.e2e_s for r in records), mean(s.total_s for s in real), "s"),
        "cached_share": (
            sum(r.cached_tokens for r in records) / max(1, simulated),
            sum(s.cached_tokens for s in real) / max(1, prompts),
            "of prompt tokens",
        ),
    }


def constants(run: RealRun) -> tuple[StepTime, float, float]:
    """(step times, what the wire and the router add to a first token, what each other replica that
    is busy adds to a step, as a share of it)."""
    by_replica: dict[str, list[Sample]] = {}
    for sample in run.samples:
        by_replica.setdefault(sample.replica, []).append(sample)
    equations: list[Equation] = []
    for name, samples in by_replica.items():
        others = [_busy(there) for other, there in by_replica.items() if other != name]
        equations += [_first_token(s, others) for s in samples if _undisturbed(s, samples)]
        equations += [_decode(s, samples, others) for s in samples if s.output_tokens > 1]
    tried = [(_solved(equations, beside), beside) for beside in BESIDE]
    (_, found), beside = min(tried, key=lambda pair: pair[0][0])
    overhead, step, sequence, context, prompt, pair = found
    return StepTime(max(step, 1e-6), sequence, context, prompt, pair), overhead, beside


Equation = tuple[list[float], float, float]
"""Coefficients of (overhead, step, sequence, context, prompt, pair), the seconds they give, and how
many other replicas were busy meanwhile, on average."""


def _solved(equations: Sequence[Equation], beside: float) -> tuple[float, list[float]]:
    """(what is left, the six) if steps last longer by `beside` for each other busy replica.

    Each equation weighs as a share of what it predicts: of what was measured, slow requests would
    weigh less for being slow, and the constants come out too fast for the mean. What is left are
    squares of logarithms, to which twice and half are alike.
    """
    matrix = np.array([row for row, _, _ in equations])
    matrix[:, 1:] *= 1.0 + beside * np.array([[busy] for _, _, busy in equations])
    wanted = np.maximum(np.array([seconds for _, seconds, _ in equations]), LEAST_S)
    predicted = wanted
    for _ in range(ROUNDS):
        weights = 1.0 / predicted
        found = nonnegative(matrix * weights[:, None], wanted * weights)
        predicted = np.maximum(matrix @ found, LEAST_S)
    return float((np.log(predicted / wanted) ** 2).sum()), found.tolist()


Spans = list[tuple[float, float]]


def _busy(samples: Sequence[Sample]) -> Spans:
    """When a replica had anything to do: spans that do not overlap."""
    spans: Spans = []
    for sample in sorted(samples, key=lambda s: s.at_s):
        if spans and sample.at_s <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], sample.last_s)
        else:
            spans.append((sample.at_s, sample.last_s))
    return spans


def _busy_beside(began_s: float, ended_s: float, others: Sequence[Spans]) -> float:
    """How many of the others were busy between two moments, on average."""
    shared = (
        max(0.0, min(ended_s, end) - max(began_s, begin))
        for spans in others
        for begin, end in spans
    )
    return sum(shared) / max(ended_s - began_s, 1e-9)


def _first_token(sample: Sample, others: Sequence[Spans]) -> Equation:
    steps = -(-sample.computed // EngineConfig.step_tokens_max)
    row = [1.0, float(steps), 0.0, 0.0, float(sample.computed), sample.pairs]
    return row, sample.ttft_s, _busy_beside(sample.at_s, sample.first_s, others)


def _undisturbed(sample: Sample, there: Sequence[Sample]) -> bool:
    """Whether its replica had nothing else to do until its first token."""
    return not any(
        other.at_s < sample.first_s and sample.at_s < other.last_s
        for other in there
        if other is not sample
    )


def _decode(sample: Sample, there: Sequence[Sample], others: Sequence[Spans]) -> Equation:
    """Its steps from the first token to the last, beside the sequences that decoded with it and
    the prompts that were computed meanwhile."""
    steps, span_s = sample.output_tokens - 1, sample.last_s - sample.first_s
    sequences, context, prompt, pairs = 1.0, float(len(sample.token_ids)), 0.0, 0.0
    for other in there:
        if other is sample:
            continue
        beside = _overlap_s(sample, other.first_s, other.last_s) / span_s if span_s else 0.0
        sequences += beside
        context += beside * len(other.token_ids)
        computing_s = max(other.ttft_s, 1e-9)
        share = _overlap_s(sample, other.at_s, other.first_s) / computing_s
        prompt += share * other.computed
        pairs += share * other.pairs
    row = [0.0, float(steps), steps * sequences, steps * context, prompt, pairs]
    return row, span_s, _busy_beside(sample.first_s, sample.last_s, others)


def _overlap_s(sample: Sample, began_s: float, ended_s: float) -> float:
    return max(0.0, min(sample.last_s, ended_s) - max(sample.first_s, began_s))


def nonnegative(matrix: Floats, wanted: Floats) -> Floats:
    """Least squares in which no unknown is negative: what would be is left out, the most negative
    first. Near enough for a few unknowns that are all positive in truth."""
    kept = list(range(matrix.shape[1]))
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    while kept:
        columns = matrix[:, kept] / scale[kept]
        found = np.linalg.lstsq(columns, wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    whole = np.zeros(matrix.shape[1])
    if kept:
        whole[kept] = found / scale[kept]
    return whole
