"""A seeded stateful machine over EngineCore: random requests, cancels, grants, deadlines, pressure
and faults, with the conservation law checked after every step and every output against the oracle.
With tiers, blocks also leave for a host tier of a few slots and two that lose calls, and come back.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from dict_tier import DictTier

from kvstore.fetch import Level
from kvstore.objectnames import is_part
from kvstore.tiered import TieredStore
from kvstore.tiers.host import HostTier
from kvstore.tiers.queue import TierQueue
from seams.clock import VirtualClock
from seams.errors import BanyanError, Cancelled, DeadlineExceeded, InternalError, OutOfBlocks
from worker.config import EngineConfig
from worker.engine.core import FAILED_STEPS_MAX, EngineCore
from worker.engine.forgetting import forget_cache
from worker.engine.messages import CacheOp, CacheOpKind, Emission, EngineRequest, Finish, StepOutput
from worker.engine.plan import SampleRow, StepPlan
from worker.engine.promotion import Promoter
from worker.engine.sampler import Sampled, sample
from worker.engine.sampling import SamplingParams
from worker.models.fake import FakeModel, fake_model

SHAPES = ("full", "window", "latent", "ranks", "full/inverted", "window/inverted")

Promoter.strict = True
REST_S_MAX = 60.0  # that nothing but what tiers bring is waited for


class Injected(Exception):
    """A fault of the model or the sampler."""


class FaultyModel(FakeModel):
    """A FakeModel whose next execute can be told to fail, before or after it wrote."""

    fault: str | None = None

    def execute(self, plan: StepPlan) -> torch.Tensor:
        fault, self.fault = self.fault, None
        if fault == "before":
            raise Injected
        logits = super().execute(plan)
        if fault == "memory":
            raise torch.OutOfMemoryError("injected")
        if fault == "after":
            raise Injected
        if fault == "nan" and len(plan.samples):
            logits[0] = float("nan")
        return logits


def faulty(model: FakeModel) -> FaultyModel:
    return FaultyModel(model.spec, model._mask)


def expected_tokens(
    model: FakeModel, spec: EngineRequest, choice: int, count: int
) -> tuple[int, ...]:
    """What a run of this request alone, without any cache, gives."""
    if spec.sampling.temperature == 0 and not spec.sampling.needs_history:
        ignore = spec.sampling.ignore_eos
        return tuple(model.oracle(spec.token_ids, count, ignore_eos=ignore))
    tokens, prompt = list(spec.token_ids), spec.prompt_tokens
    for _ in range(count):
        row = SampleRow(
            0,
            0,
            choice,
            len(tokens) - prompt,
            spec.sampling,
            tuple(tokens[:prompt]),
            tuple(tokens[prompt:]),
        )
        logits = model.oracle_logits(tokens).unsqueeze(0)
        tokens.append(sample(logits, [row], model.spec.eos_token_ids)[0].token_id)
    return tuple(tokens[len(spec.token_ids) :])


class Tiers:
    """A store whose host tier is far too small, over a disk and a shared tier that lose calls,
    freeze and forget. Of a chance of its own: a machine's is the same with and without."""

    def __init__(self, model: FakeModel, chance: random.Random, slots: Sequence[int]) -> None:
        self.random = chance
        sizes = {group.id: group.block_bytes for group in model.spec.groups}
        ranks = sum(group.ranks for group in model.spec.groups)
        self.host = HostTier(
            sizes, ranks * chance.choice(slots) * 4096, verify=True, prefault=False
        )
        self.lower = [
            DictTier(name, load_s=chance.choice([0.0, 2e-4]), losing=losing, seed=chance.random())
            for name, losing in (("disk", 0.3), ("shared", 0.2))
        ]
        threads = chance.choice([1, 2])
        self.store = TieredStore(self.host, [TierQueue(t, threads=threads) for t in self.lower])
        self.prefill_s_per_token = chance.choice([1e-5, 1e-3, 1e-2])
        self.mirror: set[tuple[int, bytes]] = set()  # group and key of what host memory holds

    def trouble(self) -> None:
        """One of them freezes, moves on, or loses everything."""
        tier = self.random.choice(self.lower)
        match self.random.randrange(8):
            case 0:
                tier.frozen.set()
            case 1:
                tier.clear()
            case 2 | 3:
                self.host.clear()
            case _:
                tier.frozen.clear()

    def hear(self, op: CacheOp) -> None:
        if op.tier == int(Level.HOST):
            stored = op.kind is CacheOpKind.STORED
            change = self.mirror.update if stored else self.mirror.difference_update
            change((op.group, key) for key in op.keys)

    def thaw(self) -> None:
        for tier in self.lower:
            tier.frozen.clear()

    def check_end(self) -> None:
        """Nobody holds anything any more, and nothing is on its way."""
        self.thaw()
        assert all(queue.drain(REST_S_MAX) for queue in self.store.lower.values())
        assert not self.store._coming and not self.store._filling
        assert not self.store._sinker._under_way
        assert not any(slot.pins for slot in self.host._table._slots.values())
        self.host.check_integrity()


@dataclass
class Tracked:
    """What the machine knows of a request it submitted."""

    spec: EngineRequest
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    granted: int = 0
    last: Emission | None = None


class Machine:
    """One engine and one source of chance; `run` makes it step."""

    host_slots: Sequence[int] = (4, 10, 30)  # of each rank: one of them

    def __init__(
        self, shape: str, seed: int, *, tiered: bool = False, resets: bool = False
    ) -> None:
        self.seed = seed
        self.resets = resets
        self.random = random.Random(f"{shape}/{seed}")
        self.clock = VirtualClock()
        block_tokens = self.random.choice([1, 2, 4, 4, 8, 16])
        self.model = faulty(fake_model(shape, context_tokens=160, block_tokens=block_tokens))
        total = self.random.choice([90, 150, 200, 400]) // block_tokens + 2
        self.config = EngineConfig(
            blocks=tuple(total for _ in self.model.spec.groups),
            step_tokens_max=self.random.choice([3, 16, 40, 200]),
            running_max=self.random.choice([3, 6, 12]),
            waiting_max=self.random.choice([4, 30]),
            poison_freed=True,
        )
        chance = random.Random(f"tiers/{shape}/{seed}")
        self.tiers = Tiers(self.model, chance, self.host_slots) if tiered else None
        store = self.tiers.store if self.tiers else None
        self.core = EngineCore(self.model, self.config, self.clock, self._sample, tiers=store)
        if self.tiers is not None:
            times = self.core._times
            times.record = lambda *_: None  # type: ignore[method-assign]
            times.prefill_s_per_token = self.tiers.prefill_s_per_token
        self.tracked: dict[str, Tracked] = {}
        self.live: dict[str, Tracked] = {}
        self.mirror: list[set[bytes]] = [set() for _ in self.model.spec.groups]
        self.counts: Counter[str] = Counter()
        self.sampler_fault = False
        self.expected_internal: set[str] = set()
        self.prefixes = [self._ids(self.random.randrange(1, 90)) for _ in range(4)]

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(255) for _ in range(count))

    def _sample(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], eos: Sequence[int]
    ) -> list[Sampled]:
        if self.sampler_fault:
            self.sampler_fault = False
            raise Injected
        return sample(logits, rows, eos)

    # --- operations --------------------------------------------------------------------------

    def submit(self) -> None:
        chance, name = self.random, f"r{len(self.tracked)}"
        prompt = chance.choice(self.prefixes)[: chance.randrange(0, 91)]
        prompt += self._ids(chance.choice([0, 1, 3, 20]))
        prompt = prompt or self._ids(1)
        n = chance.choice([1, 1, 1, 2, 4])
        resumed = self._ids(chance.randrange(1, 9)) if n == 1 and chance.random() < 0.1 else ()
        sampling = SamplingParams(
            seed=chance.randrange(1000),
            max_tokens=len(resumed) + chance.choice([1, 2, 10, 40]),
            temperature=0.0 if n == 1 and chance.random() < 0.8 else 1.0,
            frequency_penalty=0.5 if chance.random() < 0.1 else 0.0,
            n=n,
        )
        tenant = chance.choice(["a", "b", "c"])
        deadline_s = self.clock.now() + chance.random() * 20 if chance.random() < 0.05 else None
        spec = EngineRequest(
            request_id=name,
            token_ids=prompt + resumed,
            prompt_tokens=len(prompt),
            sampling=sampling,
            tenant=tenant,
            salt=tenant.encode() * 32,
            private_from=chance.choice([0, 0, 16, 1000]),
            priority=chance.choice([0, 0, 5, -5]),
            deadline_s=deadline_s,
            credit_tokens=chance.choice([0, 1, 5, 1000, 1000, 1000]),
            no_cache=chance.random() < 0.05,
        )
        self.tracked[name] = self.live[name] = Tracked(spec, granted=spec.credit_tokens)
        self.core.submit(spec)

    def cancel(self) -> None:
        if self.live:
            self.core.cancel(self.random.choice(sorted(self.live)))
            self.core.check_integrity()

    def grant(self) -> None:
        for name in self.random.sample(sorted(self.live), min(4, len(self.live))):
            tokens = self.random.choice([1, 7, 100])
            self.live[name].granted += tokens
            self.core.grant(name, tokens)

    def fault(self) -> None:
        kind = self.random.choice(["before", "after", "nan", "sampler", "memory", "memory"])
        due = self.sampler_fault + (self.model.fault is not None)
        if self.core._failed_steps + due + 1 >= FAILED_STEPS_MAX:
            return  # so many in a row would end the engine
        if kind == "sampler":
            self.sampler_fault = True
        else:
            self.model.fault = kind

    def evict(self) -> None:
        cache = self.core.memory.cache
        assert cache is not None
        if self.random.random() < 0.2:
            cache.clear()
        else:
            cache.evict([pool.free + 2 for pool in self.core.memory.pools])

    def reset(self) -> None:
        """The cache forgets all: what runs goes on, exact as ever."""
        forgotten = forget_cache(self.core.scheduler)
        self.core.check_integrity()
        assert not any(op.keys for op in self.core.snapshot() if not op.tier)
        self.counts["forgotten"] += forgotten.blocks
        self.counts["in use"] += forgotten.in_use

    def step(self) -> None:
        faulty_step = self.model.fault is not None or self.sampler_fault
        now = self.clock.now()
        output = self.core.step()
        self.core.check_integrity()
        if output is not None:
            self._take(output, faulty_step)
        elif self.tiers is not None:
            time.sleep(0.0002)  # for the tiers' threads
        for tracked in self.live.values():
            assert tracked.spec.deadline_s is None or tracked.spec.deadline_s > now
        self.clock.advance(0.01)

    # --- checking ----------------------------------------------------------------------------

    def _take(self, output: StepOutput, faulty_step: bool) -> None:
        for emission in output.emissions:
            self._take_emission(emission, faulty_step)
        for op in output.cache_ops:
            if op.tier:
                assert self.tiers is not None
                self.tiers.hear(op)
                continue
            keys = self.mirror[op.group]
            if op.kind is CacheOpKind.STORED:
                keys.update(op.keys)
            else:
                keys.difference_update(op.keys)

    def _take_emission(self, emission: Emission, faulty_step: bool) -> None:
        tracked = self.tracked[emission.request_id]
        assert tracked.last is None, "an emission after the last one"
        assert emission.choice not in tracked.finishes, "an emission after a choice's end"
        given = len(tracked.spec.token_ids) - tracked.spec.prompt_tokens
        output = tracked.outputs.setdefault(emission.choice, [])
        assert emission.position == given + len(output), "a token doubled or missing"
        output.extend(emission.token_ids)
        assert len(output) <= tracked.granted, "more tokens than credit"
        if emission.finish is not None:
            tracked.finishes[emission.choice] = emission.finish
        if emission.last:
            tracked.last = emission
            del self.live[emission.request_id]
            self._check_end(tracked, emission, faulty_step)

    def _check_end(self, tracked: Tracked, last: Emission, faulty_step: bool) -> None:
        spec, usage = tracked.spec, last.usage
        assert usage is not None and last.finish is not None
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        assert usage.prompt_tokens in (0, spec.prompt_tokens)
        if spec.no_cache:
            assert usage.cached_tokens == 0
        for choice, output in tracked.outputs.items():
            expected = expected_tokens(self.model, spec, choice, len(output))
            assert tuple(output) == expected, "not what an uncached run alone gives"
        self._check_reason(tracked, last.error, faulty_step)
        self.counts["preemptions"] += usage.preemptions
        self.counts["recomputed"] += usage.recomputed_tokens
        self.counts["cached"] += usage.cached_tokens
        self.counts["forked"] += len(tracked.outputs) > 1

    def _check_reason(self, tracked: Tracked, error: BanyanError | None, faulty_step: bool) -> None:
        self.counts[type(error).__name__] += 1
        if any(tracked.outputs.values()) or isinstance(error, Cancelled):
            assert set(tracked.finishes) == set(range(tracked.spec.sampling.n))
        if error is None:
            self._check_complete(tracked)
        elif isinstance(error, InternalError):
            assert faulty_step, "an internal error without a fault"
        elif isinstance(error, DeadlineExceeded):
            deadline_s = tracked.spec.deadline_s
            assert deadline_s is not None and deadline_s <= self.clock.now()
        elif isinstance(error, OutOfBlocks):
            longest = max(map(len, tracked.outputs.values()))
            tokens = len(tracked.spec.token_ids) + longest
            assert not self.core.memory.fits_alone(tokens), "it would have fitted alone"
        elif not isinstance(error, Cancelled):
            assert not any(tracked.outputs.values()), "refused after it had begun"

    def _check_complete(self, tracked: Tracked) -> None:
        spec = tracked.spec
        given = len(spec.token_ids) - spec.prompt_tokens
        assert set(tracked.finishes) == set(range(spec.sampling.n))
        for choice, output in tracked.outputs.items():
            stopped = bool(output) and output[-1] in self.model.spec.eos_token_ids
            assert tracked.finishes[choice] is (Finish.STOP if stopped else Finish.LENGTH)
            assert stopped or given + len(output) == spec.sampling.max_tokens

    def check_mirror(self) -> None:
        """What the emitted cache operations add up to is what the cache holds."""
        held: list[set[bytes]] = [set() for _ in self.mirror]
        for op in self.core.snapshot():
            if not op.tier:
                held[op.group].update(op.keys)
        for op in self.core.memory.cache.take_ops() if self.core.memory.cache else ():
            (
                self.mirror[op.group].update
                if op.kind is CacheOpKind.STORED
                else self.mirror[op.group].difference_update
            )(op.keys)
        assert held == self.mirror

    # --- running -----------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Random operations between `steps` steps, then everything is let run to its end."""
        operations = [self.submit, self.cancel, self.grant, self.evict, self.fault]
        weights = [40, 4, 10, 3, 1]
        if self.tiers is not None:
            operations.append(self.tiers.trouble)
            weights.append(1)
        if self.resets:
            operations.append(self.reset)
            weights.append(2)
        for index in range(steps):
            while self.random.random() < 0.4:
                (operation,) = self.random.choices(operations, weights)
                if operation != self.submit or len(self.live) < 40:
                    operation()
            self.step()
            if index % 100 == 0:
                self.check_mirror()
            if index % 100 == 0 and self.tiers is not None:
                self.tiers.host.check_integrity()
        self.drain()

    def drain(self) -> None:
        """Nothing new; all credit; everything must end and no block may be missing."""
        self.model.fault, self.sampler_fault = None, False
        for name in sorted(self.live):
            self.live[name].granted += 10_000
            self.core.grant(name, 10_000)
        left = sum(t.spec.sampling.n * 200 for t in self.live.values())
        if self.tiers is not None:
            self.tiers.thaw()
        while self.core.has_work() or self._rests():
            self.step()
            left -= 1
            assert left > -1000, "the engine does not come to an end"
        assert not self.live, "requests that never ended"
        memory = self.core.memory
        for group, pool in enumerate(memory.pools):
            assert memory.available(group) == pool.total, "blocks leaked"
        assert memory.cache is not None
        memory.cache.clear()
        assert all(pool.free == pool.total for pool in memory.pools)
        if self.tiers is not None:
            self._end_tiers(self.tiers)

    def _rests(self) -> bool:
        """Wait, on the tiers' time, for what is on its way; whether anything is."""
        began = time.monotonic()
        while self.live and not self.core.has_work():
            assert self.tiers is not None, "requests that wait for nothing"
            assert time.monotonic() - began < REST_S_MAX, "nothing comes of what is waited for"
            time.sleep(0.0005)
            self.clock.advance(0.001)
        return self.core.has_work()

    def _end_tiers(self, tiers: Tiers) -> None:
        tiers.check_end()
        for op in self.core._tiers.take_ops() if self.core._tiers else ():
            tiers.hear(op)
        blocks = [name for name in tiers.host.names() if not is_part(name)]
        held = {(name.group, name.key) for name in blocks if name.rank == 0}
        assert tiers.mirror == held, "told of other blocks than there are"
        for level, blocks in tiers.store.loaded_blocks.items():
            self.counts[level.name] += blocks
        self.core.close()


@contextlib.contextmanager
def replayable(test: str, case: object) -> Iterator[None]:
    """Print how to run a failing case again."""
    try:
        yield
    except BaseException:
        print(f"seed {case}; replay: python -m pytest -m '' '{test}[{case}]'")
        raise
