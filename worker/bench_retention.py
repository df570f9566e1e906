"""`python -m worker.bench_retention --model FOLDER --text FILE`: what retention costs and frees.

A model reads the text as it would a generation: a prompt, then the rest as if it had written it
itself, pruned whenever its policy says. For each policy: perplexity of that rest, KL of the
next-token distribution to the model that keeps all, blocks freed of those that its dropped tokens
would fill, and blocks freed per MiB moved. In float32 by torch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from kernels.backends import backend_for
from kvstore.keys import ChainSpec, root
from seams.bench import Report, Row
from worker.calibration.statistics import Statistics
from worker.engine.block_pool import BlockPool
from worker.engine.messages import Compacted, EngineRequest
from worker.engine.paging import PagedMemory
from worker.engine.plan import SampleRow
from worker.engine.planning import PlanBuilder
from worker.engine.pruning import Pruner
from worker.engine.request import Request, State
from worker.engine.request import Sequence as Choice
from worker.engine.retention.base import Mask, PageView, Quota, RetentionPolicy
from worker.engine.retention.policies import Policies
from worker.engine.sampling import SamplingParams
from worker.engine.waiting import Tenant
from worker.models.fingerprint import model_fingerprint
from worker.models.llama import LlamaModel
from worker.models.opening import open_model
from worker.models.weights import load_weights

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
PLAIN = "none"
POLICIES = (
    PLAIN,
    "streaming:window={budget},interval={interval}",
    "triattention:budget={budget},interval={interval},window={window},band=0",
    "triattention:budget={budget},interval={interval},window={window},band=0.1",
    "triattention:budget={budget},interval={interval},window={window},band=0.3",
    "triattention:budget={budget},interval={interval},window={window},select=head,band=0",
    "triattention:budget={budget},interval={interval},window={window},select=head,band=0.3",
    "snapkv:budget={budget},interval={interval},window={queries}",
)


@dataclass(frozen=True)
class Read:
    """What a model made of the text behind the prompt."""

    log_probs: torch.Tensor  # float32 [tokens, vocab]
    perplexity: float
    compacted: Compacted
    in_order_bytes: float  # that would have moved if survivors kept their order


@dataclass
class _Counted:
    """A policy, and how many slots of survivors would move if they kept their order."""

    policy: RetentionPolicy
    in_order: float = 0.0  # all heads of a slot are one

    @property
    def quota(self) -> Quota:
        """The policy's."""
        return self.policy.quota

    @property
    def reads_keys(self) -> bool:
        """The policy's."""
        return self.policy.reads_keys

    @property
    def resume(self) -> bool:
        """The policy's."""
        return self.policy.resume

    @property
    def state_hash(self) -> str:
        """The policy's."""
        return self.policy.state_hash

    def select(self, view: PageView) -> Mask:
        """The policy's."""
        kept = self.policy.select(view)
        moved = kept & (np.cumsum(kept, axis=1) - 1 != np.arange(kept.shape[1]))
        self.in_order += moved.sum() / len(kept)
        return kept


class Reader:
    """Reads texts with one model; each reading has the pools to itself."""

    def __init__(self, model: LlamaModel, tokens: int) -> None:
        """Allocates blocks for so many tokens."""
        self._model = model
        self._blocks = -(-tokens // BLOCK_TOKENS)
        model.allocate((self._blocks,))

    def read(self, ids: Sequence[int], prompt_tokens: int, policy: RetentionPolicy | None) -> Read:
        """All ids, the first `prompt_tokens` of which are the prompt."""
        pool = BlockPool(self._model.spec.groups[0], self._blocks, self._model.poison)
        memory = PagedMemory([pool], None, BLOCK_TOKENS)
        pruner = Pruner(memory, self._model)
        builder = PlanBuilder(BLOCK_TOKENS, 1)
        builder.pruned = True
        counted = None if policy is None else _Counted(policy)
        sequence = _sequence(ids, prompt_tokens, counted)
        pruner.start(sequence)
        rows = []
        while sequence.computed < len(ids):
            want = min(CHUNK_TOKENS, len(ids) - sequence.computed)
            if sequence.retained is not None:
                want = pruner.room(sequence, want)
            assert want > 0 and memory.grow(sequence, want) == want
            rows.append(self._step(builder, sequence, want))
            sequence.advance(want)
        logits = torch.cat(rows)[prompt_tokens - 1 : -1]
        log_probs = logits.log_softmax(-1)
        taken = log_probs.gather(1, torch.tensor(ids[prompt_tokens:]).unsqueeze(1))
        slot_bytes = self._model.spec.groups[0].block_bytes / BLOCK_TOKENS
        in_order = 0.0 if counted is None else counted.in_order * slot_bytes
        perplexity = math.exp(-float(taken.mean()))
        return Read(log_probs, perplexity, pruner.compactor.total, in_order)

    def _step(self, builder: PlanBuilder, sequence: Choice, count: int) -> torch.Tensor:
        """float32 [count, vocab]."""
        plan = builder.build(1, [(sequence, count)], {})
        params = sequence.request.spec.sampling
        samples = [SampleRow(row, sequence.id, 0, 0, params) for row in range(count)]
        return self._model.execute(replace(plan, samples=samples)).clone()


def _sequence(ids: Sequence[int], prompt_tokens: int, policy: RetentionPolicy | None) -> Choice:
    params = SamplingParams(seed=0, max_tokens=len(ids))
    spec = EngineRequest("text", tuple(ids), prompt_tokens, params)
    request = Request(
        spec=spec,
        arrival=0,
        chain=ChainSpec(root("", "", BLOCK_TOKENS), BLOCK_TOKENS),
        credit=0,
        cacheable=False,
        tenant=Tenant(0),
        ends=frozenset(),
        tokens_max=2 * len(ids),
        charge=0,
        policy=policy,
    )
    return Choice(0, request, 0, list(ids), [[]], state=State.RUNNING)


def rows_of(name: str, read: Read, whole: Read) -> Iterator[Row]:
    """The figures of one policy, perplexity beside that of the model that keeps all."""
    count = len(read.log_probs)
    divergence = (whole.log_probs.exp() * (whole.log_probs - read.log_probs)).sum(-1).mean()
    against = ("keeping all", whole.perplexity)
    yield Row(f"{name} perplexity", read.perplexity, "", count, *against)
    yield Row(f"{name} KL", float(divergence), "nats", count)
    total = read.compacted
    if total.rounds:
        could, freed = total.dropped_tokens / BLOCK_TOKENS, float(total.freed_blocks)
        yield Row(f"{name} blocks freed", freed, "", total.rounds, "dropped tokens fill", could)
        each, other = (
            freed / (moved / 2**20) if moved else math.inf
            for moved in (total.moved_bytes, read.in_order_bytes)
        )
        yield Row(f"{name} freed per MiB", each, "blocks", total.rounds, "in order", other)


def main() -> None:
    """Print the table; `--json FILE` writes it too."""
    parser = argparse.ArgumentParser(prog="python -m worker.bench_retention", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--text", type=Path, required=True, help="what the model reads")
    parser.add_argument("--calibration", type=Path, help="of `banyan calibrate`, another text")
    parser.add_argument("--tokens", type=int, default=1536, help="of the text, from its beginning")
    parser.add_argument("--prompt", type=int, default=128, help="how many of them are the prompt")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = tokenizer.encode(options.text.read_text()).ids[: options.tokens]
    model = _load(options.model)
    known = None
    if options.calibration:
        known = Statistics.load(options.calibration, model.spec.fingerprint)
    policies = Policies(model.spec, statistics=known)
    reader = Reader(model, len(ids))
    whole = reader.read(ids, options.prompt, None)
    report = Report()
    for template in POLICIES:
        queries = min(options.window, options.interval)
        name = template.format(**vars(options), queries=queries)
        if "triattention" in name and known is None:
            continue
        read = reader.read(ids, options.prompt, policies.make(name))
        for row in rows_of(name, read, whole):
            report.add(row)
            print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
    report.show(options.json)


def _load(folder: Path) -> LlamaModel:
    config, source = open_model(folder)
    with source:
        fingerprint = model_fingerprint(source, config)
        weights = load_weights(source, config, torch.float32, CPU)
    return LlamaModel(
        config,
        weights,
        backend_for(CPU),
        name="bench",
        fingerprint=fingerprint,
        block_tokens=BLOCK_TOKENS,
        context_tokens=config.context_tokens,
    )


if __name__ == "__main__":
    main()
