"""`python -m worker.bench_codecs --model FOLDER --text FILE`: what KV codecs cost and save.

For each: bytes of a token over all layers, of as many tokens as the text has; KL of the next-token
distribution to the model without a codec, over the text; how often the likeliest token is another;
perplexity beside the model's own; and a decode step at the text's length, in turns. In float32 by
torch, so that the codec is all that rounds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kernels.backends import backend_for
from kernels.codecs.base import KVCodec, LayerCodec
from kernels.codecs.choose import make_codec
from kernels.codecs.names import parse_codec
from kernels.codecs.oscar import BITS, LayerRotations, oscar
from kernels.codecs.turboquant import TurboVectors
from kernels.codecs.uniform import UniformVectors
from kernels.hybrid import Reach
from kvstore.groups import KVGroup
from seams.bench import Report, Row, alternate, median
from seams.errors import InvalidRequest
from worker.calibration.statistics import Statistics
from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.config import ModelConfig
from worker.models.fingerprint import model_fingerprint
from worker.models.llama import LlamaModel
from worker.models.opening import open_model
from worker.models.weights import Weights, load_weights

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
PLAIN = "model"
CODECS = (
    PLAIN,
    "fp8",
    "turboquant:k8v4",
    "turboquant:k4v4",
    "turboquant:k4v4,boundary=2",
    "turboquant:k4v3",
    "turboquant:k3v4",
    "turboquant:k3v3",
    "turboquant:k2v2",
    "k4+minmax4",
    "k4+minmax3",
)
# What makes up OSCAR, each part left out: sinks, recent tokens, both, the calibrated basis, a basis
# at all with clipping. A window of one is a token's own key and value.
ABLATION = (
    "oscar",
    "oscar:sinks=0",
    "oscar:window=1",
    "oscar:sinks=0,window=1",
    "oscar2",
    "unclipped2:sinks=64",
    "hadamard2:sinks=64",
    "hadamard2",
    "naive2:sinks=64",
    "naive2",
)
_TWO_BITS = ("oscar", "oscar2", "unclipped2", "hadamard2", "naive2")


@dataclass(frozen=True)
class Read:
    """What a model made of the text: float32 [tokens - 1, vocab], and of the text itself."""

    log_probs: torch.Tensor
    perplexity: float


class Bench:
    """One model's weights, under any codec, and a text as its token ids."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ids: list[int],
        statistics: Statistics | None = None,
    ) -> None:
        """`statistics`: of `banyan calibrate`, for OSCAR."""
        self._config, self._weights, self._ids = config, weights, ids
        self._statistics = statistics

    def codec(self, name: str) -> KVCodec | None:
        """By an option's name; kA+minmaxB is TurboQuant's keys and values that are rounded to equal
        steps between their least and largest number, without turning them. `oscar2` is OSCAR's
        codec; `unclipped2` cuts no number, `hadamard2` turns by Hadamard's matrix instead, `naive2`
        does neither and turns nothing."""
        layers, dim = self._config.layers, self._config.head_dim
        if "+minmax" in name:
            keys, values = TurboVectors(dim, int(name[1])), UniformVectors(dim, int(name[-1]))
            return KVCodec(name, (LayerCodec(keys, values),) * layers)
        basis = name.partition(":")[0]
        if basis == "naive2":
            naive = UniformVectors(dim, BITS)
            return KVCodec(name, (LayerCodec(naive, naive),) * layers)
        if basis in _TWO_BITS:
            every = [self._rotations(layer, basis != "hadamard2") for layer in range(layers)]
            return self._unclipped(every) if basis == "unclipped2" else oscar(every)
        parsed = parse_codec(name)
        if parsed is None:
            raise InvalidRequest(f"There is no codec {name}.")
        return make_codec(parsed, layers, dim, torch.float32)

    def _unclipped(self, rotations: list[LayerRotations]) -> KVCodec:
        dim = self._config.head_dim
        layers = [
            LayerCodec(*(UniformVectors(dim, BITS, rotation=r) for r in (one.keys, one.values)))
            for one in rotations
        ]
        return KVCodec("unclipped2", tuple(layers))

    def reach(self, name: str) -> Reach | None:
        """What is read exactly beside codes: of `oscar` what it serves with, of other bases nothing
        unless the name says sinks or window."""
        basis, _, options = name.partition(":")
        if basis not in _TWO_BITS or (basis != "oscar" and not options):
            return None
        parsed = parse_codec(f"oscar:{options}" if options else "oscar")
        if parsed is None or parsed.sink_tokens % BLOCK_TOKENS:
            raise InvalidRequest(f"There is no codec {name}.")
        return Reach(parsed.sink_tokens, parsed.window_tokens)

    def _rotations(self, layer: int, fitted: bool) -> LayerRotations:
        """Of one layer. Raises InvalidRequest without a calibration."""
        if not fitted:
            plain = TurboVectors(self._config.head_dim, BITS).rotation
            every = plain.expand(self._config.kv_heads, -1, -1)
            return LayerRotations(every, every)
        if self._statistics is None:
            raise InvalidRequest("OSCAR needs --calibration.")
        known = self._statistics
        return LayerRotations(known.key_rotation[layer], known.value_rotation[layer])

    def model(self, name: str) -> LlamaModel:
        """With room for the text and some tokens after it."""
        made = LlamaModel(
            self._config,
            self._weights,
            backend_for(CPU),
            name=name,
            fingerprint="bench",
            block_tokens=BLOCK_TOKENS,
            context_tokens=self._config.context_tokens,
        )
        codec, reach = self.codec(name), self.reach(name)
        if codec is not None and reach is not None:
            made.recode_behind(codec, reach)
        elif codec is not None:
            made.recode(codec)
        made.allocate((self._blocks,) * len(made.spec.groups))
        return made

    @property
    def _blocks(self) -> int:
        return len(self._ids) // BLOCK_TOKENS + 2

    def plan(self, first: int, count: int, samples: int, groups: int) -> StepPlan:
        """A step of the one sequence; logits of its last `samples` rows."""
        ids = [self._ids[place % len(self._ids)] for place in range(first, first + count)]
        places, table = list(range(first, first + count)), [list(range(self._blocks))]
        greedy = SamplingParams(0, 1)
        rows = [SampleRow(row, 0, 0, row, greedy) for row in range(count - samples, count)]
        tables, slots = [table] * groups, [places] * groups
        lengths = [first + count]
        return StepPlan.of_lists(1, ids, places, [0, count], lengths, tables, slots, (), rows)

    def read(self, model: LlamaModel) -> Read:
        """The whole text in one step."""
        count = len(self._ids)
        logits = model.execute(self.plan(0, count, count, len(model.spec.groups)))
        log_probs = logits[:-1].log_softmax(-1)
        told = log_probs.gather(1, torch.tensor(self._ids[1:]).unsqueeze(1))
        return Read(log_probs, math.exp(-float(told.mean())))

    def step(self, model: LlamaModel) -> Callable[[], float]:
        """Milliseconds of one token after the text."""
        plan = self.plan(len(self._ids), 1, 1, len(model.spec.groups))

        def measure() -> float:
            began = time.perf_counter()
            model.execute(plan)
            return (time.perf_counter() - began) * 1e3

        return measure


def rows(bench: Bench, names: list[str], rounds: int) -> Iterator[Row]:
    """All figures; the model without a codec is read first."""
    plain = bench.model(PLAIN)
    exact = bench.read(plain)
    tokens = len(exact.log_probs)
    plain_bytes = token_bytes(plain.spec.groups, tokens + 1)
    for name in names:
        model = plain if name == PLAIN else bench.model(name)
        found = bench.read(model)
        size = token_bytes(model.spec.groups, tokens + 1)
        yield Row(f"{name}/token", size, "bytes", 1, PLAIN, plain_bytes)
        yield Row(f"{name}/kl", _kl(exact.log_probs, found.log_probs), "nats", tokens)
        differ = exact.log_probs.argmax(-1) != found.log_probs.argmax(-1)
        yield Row(f"{name}/other first token", float(differ.float().mean()), "of tokens", tokens)
        ratio = found.perplexity / exact.perplexity - 1
        yield Row(f"{name}/perplexity", 100 * ratio, "% more", tokens)
        del found
        samples = alternate({"coded": bench.step(model), PLAIN: bench.step(plain)}, rounds)
        step_ms = median(samples["coded"])
        yield Row(f"{name}/step", step_ms, "ms", rounds, PLAIN, median(samples[PLAIN]))


def token_bytes(groups: Sequence[KVGroup], tokens: int) -> float:
    """Of a token where there are so many, over all groups; windows hold what they see."""
    seen = ((g, g.window_tokens + g.sink_tokens if g.window_tokens else tokens) for g in groups)
    return sum(g.block_bytes / BLOCK_TOKENS * min(tokens, held) for g, held in seen) / tokens


def _kl(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Mean over rows of KL(exact || found)."""
    total = 0.0
    for first in range(0, len(exact), 64):
        e, f = exact[first : first + 64], found[first : first + 64]
        total += float((e.exp() * (e - f)).sum())
    return total / len(exact)


def main() -> None:
    """Print the table; `--json FILE` writes it too."""
    parser = argparse.ArgumentParser(prog="python -m worker.bench_codecs", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--text", type=Path, required=True, help="what the model reads")
    parser.add_argument("--tokens", type=int, default=768, help="of the text, from its beginning")
    parser.add_argument(
        "--codecs", default=" ".join(CODECS), help='names, by spaces; "ablation": OSCAR\'s parts'
    )
    parser.add_argument("--calibration", type=Path, help="a file of `banyan calibrate`, for OSCAR")
    parser.add_argument("--rounds", type=int, default=5, help="decode steps of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = tokenizer.encode(options.text.read_text()).ids[: options.tokens]
    config, source = open_model(options.model)
    with source:
        weights = load_weights(source, config, torch.float32, CPU)
        known = None
        if options.calibration is not None:
            known = Statistics.load(options.calibration, model_fingerprint(source, config))
    report = Report()
    names = list(ABLATION) if options.codecs == "ablation" else options.codecs.split()
    for row in rows(Bench(config, weights, ids, known), names, options.rounds):
        report.add(row)
        print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
    report.show(options.json)


if __name__ == "__main__":
    main()
