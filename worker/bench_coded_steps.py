"""`python -m worker.bench_coded_steps --model FOLDER`: a compiled decode step over pages in
each KV codec, beside the same step over pages in the model's dtype, in turns.

Contexts are made of random tokens, computed once; the sequences of a batch have copies of the same
blocks, so each reads pages of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kernels.codecs.choose import make_codec
from kernels.codecs.names import MODEL, parse_codec
from seams.bench import Report, Row, alternate, median
from worker.engine.plan import BlockCopy, SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.compiled import CompiledModel
from worker.models.config import ModelConfig
from worker.models.opening import open_model
from worker.models.weights import FLOATS, Weights, load_weights

CODECS = (MODEL, "fp8", "turboquant:k8v4", "turboquant:k4v4", "turboquant:k3v3", "turboquant:k2v2")
BATCHES = (1, 8)
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
SEED = 0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Coded:
    """One model over pages in one codec, `batch` sequences of `tokens` tokens in them."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        weights: Weights,
        tokens: int,
        batch: int,
        threads: int,
    ) -> None:
        self.tokens, self.batch = tokens, batch
        self.model = CompiledModel(
            config,
            weights,
            name=name,
            fingerprint="bench",
            block_tokens=BLOCK_TOKENS,
            context_tokens=tokens + 1,
            threads=threads,
        )
        parsed = parse_codec(name)
        assert parsed is not None, name
        codec = make_codec(parsed, config.layers, config.head_dim, weights.embedding.dtype)
        if codec is not None:
            self.model.recode(codec)
        self._blocks = tokens // BLOCK_TOKENS + 1
        self._groups = len(self.model.spec.groups)
        self.model.allocate((self._blocks * batch,) * self._groups)
        generator = torch.Generator().manual_seed(SEED)
        self._ids = torch.randint(config.vocab_tokens, (tokens + 1,), generator=generator).tolist()
        self._fill()

    def _table(self, sequence: int) -> list[int]:
        return list(range(sequence * self._blocks, (sequence + 1) * self._blocks))

    def _fill(self) -> None:
        """The first sequence's context in chunks, the others' as copies of its blocks."""
        for first in range(0, self.tokens, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, self.tokens - first)
            self.model.execute(self._plan(first, count, [0], []))
        copies = [
            BlockCopy(group, block, sequence * self._blocks + block, BLOCK_TOKENS)
            for group in range(self._groups)
            for sequence in range(1, self.batch)
            for block in range(self._blocks)
        ]
        self.model.execute(self._plan(self.tokens, 1, [0], copies))

    def _plan(
        self, first: int, count: int, sequences: list[int], copies: list[BlockCopy]
    ) -> StepPlan:
        """`count` tokens from `first` on of each of the sequences, a sample of each one's last."""
        places = list(range(first, first + count))
        tables = [self._table(sequence) for sequence in sequences]
        slots = [
            table[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS
            for table in tables
            for place in places
        ]
        rows, greedy = len(sequences), SamplingParams(0, 1)
        return StepPlan.of_lists(
            1,
            self._ids[first : first + count] * rows,
            places * rows,
            [count * row for row in range(rows + 1)],
            [first + count] * rows,
            [tables] * self._groups,
            [slots] * self._groups,
            copies,
            [SampleRow(count * (row + 1) - 1, row, 0, first, greedy) for row in range(rows)],
        )

    def step(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Milliseconds, by the clock's seconds, of one more token for every sequence."""
        plan = self._plan(self.tokens, 1, list(range(self.batch)), [])

        def measure() -> float:
            began = clock()
            self.model.execute(plan)
            return (clock() - began) * 1e3

        return measure


def rows(config: ModelConfig, weights: Weights, options: argparse.Namespace) -> Iterator[Row]:
    """A decode step of each codec and batch; all codecs of a batch take turns."""
    for batch in options.batches:
        made = {
            name: Coded(name, config, weights, options.tokens, batch, options.threads)
            for name in options.codecs.split()
        }
        steps = {name: each.step(CLOCKS[options.clock]) for name, each in made.items()}
        samples = alternate(steps, options.rounds)
        plain = median(samples[MODEL]) if MODEL in samples else None
        for name, found in samples.items():
            yield Row(f"{name}/step b{batch}", median(found), "ms", options.rounds, MODEL, plain)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.bench_coded_steps", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--tokens", type=int, default=2000, help="of each context")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--codecs", default=" ".join(CODECS), help="names, by spaces")
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's number")
    parser.add_argument(
        "--clock", default="wall", choices=CLOCKS, help="cpu: of one thread on a busy machine"
    )
    parser.add_argument("--rounds", type=int, default=15, help="decode steps of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    return parser.parse_args()


def main() -> None:
    """Print the table; `--json FILE` writes it too."""
    options = _options()
    [dtype] = [dtype for dtype, name in FLOATS.items() if name == options.dtype]
    config, source = open_model(options.model)
    with source:
        weights = load_weights(source, config, dtype, torch.device("cpu"))
    report = Report()
    for row in rows(config, weights, options):
        report.add(row)
        print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
    report.show(options.json)


if __name__ == "__main__":
    main()
