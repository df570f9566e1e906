"""`python -m loadtest.mooncake`: a trace of prompts, scaled down; what tiers hit beside a device
without end.

Real engine, real tiers, FakeModel; it knows no cluster and no network. A hash id, which stands for
512 tokens of the original, is one block here. Two things are set, since FakeModel is no model: a
step takes as long as a device would that is busy with it, without the interpreter, so that the
tiers' threads run; and the engine is charged far more for it, so that waiting for a tier nearly
always pays. What is measured is what the hierarchy keeps and finds, not load or compute.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from kvstore.benches.nvme import capacity_bytes
from kvstore.fetch import Level
from kvstore.tiered import TieredStore
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.queue import TierQueue
from kvstore.tiers.redis import RedisTier
from seams import traces
from seams.bench import Report, Row
from seams.clock import Clock, SystemClock
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest, StepOutput
from worker.engine.plan import StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.base import ModelSpec
from worker.models.fake import FakeModel, fake_model

TRACE = Path(__file__).parent / "traces" / "mooncake_conversation_1000.jsonl.gz"
BLOCK_TOKENS = 4
CONTEXT_TOKENS = 2048
VOCAB_TOKENS = 4096
LIVE_MAX = 8  # requests at a time
STEP_S = 0.0002  # per token: what a step takes
CHARGED_S = 0.1  # per token: what the engine is told
STALL_S = 10.0  # a busy machine is no broken server here
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.1, 0.2, 0.5  # of the working set; the shared tier has all
SHARED_BYTES = 1 << 30
_HOST_SLOT_BYTES = 4096
_DIRTY_MAX_SHARE = 0.5  # of host memory, before the next request waits
_WAIT_S = 0.01
_WAIT_S_MAX = 10.0


class TraceRequest(NamedTuple):
    """One request of a trace, scaled down."""

    prompt: tuple[int, ...]
    output_tokens: int


class Sizes(NamedTuple):
    """Blocks that the device and the tiers hold, every tier or none; the shared one holds all."""

    device: int
    host: int = 0
    disk: int = 0


@dataclass
class Replayed:
    """What a replay came to."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0  # of the prompts: on the device or brought back
    came_tokens: dict[Level, int] = field(default_factory=dict)  # brought back, by where they were
    lost_blocks: int = 0  # left host memory before a lower tier had them
    late_blocks: int = 0  # that a tier had and did not give, or give in time
    failed: int = 0
    wrong: int = 0  # answers that are not the oracle's
    waited_s: float = 0.0  # for the tiers to take what the device had pushed out
    wall_s: float = 0.0


def read_trace(path: Path = TRACE, requests_max: int | None = None) -> list[TraceRequest]:
    """The first requests of a trace, gzipped or not."""
    return [_scaled(recorded) for recorded in traces.read_trace(path, requests_max)]


def _scaled(recorded: traces.Recorded) -> TraceRequest:
    """Every id a block, the last one as full as it was."""
    scale = traces.HASHED_TOKENS // BLOCK_TOKENS
    tokens = [token for hash_id in recorded.hash_ids for token in _block(hash_id)]
    prompt = tuple(tokens[: -(-recorded.input_tokens // scale)])
    return TraceRequest(prompt, max(1, recorded.output_tokens // scale))


def _block(hash_id: int) -> tuple[int, ...]:
    """Its digits below the end token, the lowest first: siblings differ in their first token, or a
    cache that matches to the token would find more than the trace has."""
    base = VOCAB_TOKENS - 1
    return tuple(hash_id // base**place % base for place in range(BLOCK_TOKENS))


def working_set(requests: Sequence[TraceRequest]) -> int:
    """Different blocks of all prompts; a block is what is in it and all before it."""
    seen: set[int] = set()
    for request in requests:
        before = 0
        for at in range(0, len(request.prompt), BLOCK_TOKENS):
            before = hash((before, request.prompt[at : at + BLOCK_TOKENS]))
            seen.add(before)
    return len(seen)


def endless(requests: Sequence[TraceRequest]) -> Sizes:
    """A device that never has to let go of anything."""
    blocks = [-(-(len(r.prompt) + r.output_tokens) // BLOCK_TOKENS) + 1 for r in requests]
    return Sizes(sum(blocks))


def scaled_down(requests: Sequence[TraceRequest]) -> Sizes:
    """A device and tiers far too small for all but the last."""
    blocks = working_set(requests)
    return Sizes(*(int(share * blocks) for share in (DEVICE_SHARE, HOST_SHARE, DISK_SHARE)))


class _ChargedClock:
    """The machine's clock, ahead by what was charged."""

    def __init__(self) -> None:
        self._clock: Clock = SystemClock()
        self.charged_s = 0.0

    def now(self) -> float:
        return self._clock.now() + self.charged_s


class _BusyModel(FakeModel):
    """A FakeModel on a device that takes `step_s` seconds per token."""

    def __init__(self, clock: _ChargedClock, step_s: float) -> None:
        made = fake_model(
            "full",
            context_tokens=CONTEXT_TOKENS, vocab_tokens=VOCAB_TOKENS, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        super().__init__(made.spec)
        self._clock, self._step_s = clock, step_s

    def execute(self, plan: StepPlan) -> torch.Tensor:
        time.sleep(self._step_s * len(plan.token_ids))
        self._clock.charged_s += CHARGED_S * len(plan.token_ids)
        return super().execute(plan)


@contextmanager
def _tiers(sizes: Sizes, spec: ModelSpec, directory: Path) -> Iterator[TieredStore | None]:
    """Host memory, a disk tier in `directory` and an embedded server of this replay alone."""
    if not sizes.host:
        yield None
        return
    (group,) = spec.groups
    bytes_of = {group.id: group.block_bytes}
    with EmbeddedValkey(SHARED_BYTES) as server, tempfile.TemporaryDirectory(dir=directory) as made:
        disk = NvmeTier(
            Path(made), capacity_bytes(sizes.disk, group.block_bytes), spec.representation.id,
            bytes_of, free_space_floor_bytes=0,
        )  # fmt: skip
        shared = RedisTier(server.url, spec.representation.id, namespace="replay", stall_s=STALL_S)
        host = HostTier(bytes_of, sizes.host * _HOST_SLOT_BYTES)
        store = TieredStore(host, [TierQueue(disk), TierQueue(shared)])
        try:
            yield store
        finally:
            store.close()


class _Replay:
    """A closed loop: LIVE_MAX requests in the engine, in the trace's order."""

    def __init__(
        self, requests: Sequence[TraceRequest], sizes: Sizes, store: TieredStore | None,
        model: _BusyModel, clock: _ChargedClock,
    ) -> None:  # fmt: skip
        self._requests, self._store, self._model = requests, store, model
        config = EngineConfig(blocks=(sizes.device,))
        self._core = EngineCore(model, config, clock, tiers=store)
        self._woken = threading.Event()
        self._core.on_wake(self._woken.set)
        self._next = self._live = 0
        self._answers: dict[str, list[int]] = {}
        self._found = Replayed(requests=len(requests))

    def run(self) -> Replayed:
        """All of it, then every answer beside the oracle's."""
        began_s = time.monotonic()
        while self._live or self._next < len(self._requests):
            self._submit()
            self._woken.clear()
            if not self._core.has_work():
                self._woken.wait(_WAIT_S)
            elif (output := self._core.step()) is not None:
                self._take(output)
        found = self._found
        found.wall_s = time.monotonic() - began_s
        if self._store is not None:
            blocks = self._store.loaded_blocks
            found.came_tokens = {level: BLOCK_TOKENS * blocks[level] for level in Level}
            found.lost_blocks = self._store.host.lost
            found.late_blocks = sum(stats.failed for stats in self._store.stats().values())
        found.wrong = sum(map(self._is_wrong, range(len(self._requests))))
        return found

    def _submit(self) -> None:
        while self._live < LIVE_MAX and self._next < len(self._requests):
            self._await_tiers()
            request = self._requests[self._next]
            sampling = SamplingParams(max_tokens=request.output_tokens, seed=1, ignore_eos=True)
            spec = EngineRequest(
                str(self._next), request.prompt,
                prompt_tokens=len(request.prompt), sampling=sampling,
            )  # fmt: skip
            self._core.submit(spec)
            self._answers[spec.request_id] = []
            self._next += 1
            self._live += 1

    def _await_tiers(self) -> None:
        """The trace's users leave ten times as much time between their requests: a machine whose
        tiers cannot keep up with the hurry waits for them, up to a point."""
        if self._store is None:
            return
        host, began_s = self._store.host, time.monotonic()
        spent_s = 0.0
        while host.dirty_bytes > _DIRTY_MAX_SHARE * len(host.arena) and spent_s < _WAIT_S_MAX:
            self._store.flush(_WAIT_S)
            spent_s = time.monotonic() - began_s
        self._found.waited_s += spent_s

    def _take(self, output: StepOutput) -> None:
        for emission in output.emissions:
            self._answers[emission.request_id] += emission.token_ids
            if emission.last:
                self._live -= 1
                self._found.failed += emission.error is not None
                if emission.usage is not None:
                    self._found.prompt_tokens += emission.usage.prompt_tokens
                    self._found.hit_tokens += emission.usage.cached_tokens

    def _is_wrong(self, number: int) -> bool:
        answer, request = self._answers[str(number)], self._requests[number]
        return answer != self._model.oracle(request.prompt, len(answer), ignore_eos=True)


def replay(requests: Sequence[TraceRequest], sizes: Sizes, directory: Path) -> Replayed:
    """One engine from empty on; its disk tier is made in `directory` and removed."""
    clock = _ChargedClock()
    model = _BusyModel(clock, STEP_S if sizes.host else 0.0)
    with _tiers(sizes, model.spec, directory) as store:
        return _Replay(requests, sizes, store, model, clock).run()


def rows(requests: Sequence[TraceRequest], directory: Path) -> list[Row]:
    """An endless device, one of a tenth of the working set alone, and that one over tiers."""
    small, most = scaled_down(requests), replay(requests, endless(requests), directory)
    alone = replay(requests, Sizes(small.device), directory)
    tiered = replay(requests, small, directory)
    count, hit = len(requests), most.hit_tokens
    faulty = sum(found.wrong + found.failed for found in (most, alone, tiered))
    return [
        Row("mooncake_prompt_tokens", tiered.prompt_tokens, "tokens", count),
        Row("mooncake_hit_alone", alone.hit_tokens, "tokens", count, "endless device", hit),
        Row("mooncake_hit_tiered", tiered.hit_tokens, "tokens", count, "endless device", hit),
        *(
            Row(f"mooncake_from_{level.name.lower()}", came, "tokens", count)
            for level, came in tiered.came_tokens.items()
        ),
        Row("mooncake_lost_blocks", tiered.lost_blocks, "blocks", count),
        Row("mooncake_late_blocks", tiered.late_blocks, "blocks", count),
        Row("mooncake_faulty", faulty, "requests", count),
        Row("mooncake_waited", tiered.waited_s, "s", count),
        Row("mooncake_wall", tiered.wall_s, "s", count),
    ]


def main() -> None:
    """Print the table; `--json FILE` writes it too."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.mooncake", description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help=".jsonl or .jsonl.gz")
    parser.add_argument("--requests", type=int, help="only so many of it")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="the disk tier's")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report()
    for row in rows(read_trace(options.trace, options.requests), options.dir):
        report.add(row)
    report.show(options.json)


if __name__ == "__main__":
    main()
