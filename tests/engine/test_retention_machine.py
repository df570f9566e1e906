"""Random requests, cancels, grants, deadlines, pressure and faults, on an engine that prunes:
blocks conserved, every stream what its policy gives alone, rounds that fail among them."""

from collections import Counter

import pytest
import torch
from engine_machine import FaultyModel, Injected, Machine, Tracked, replayable
from pruned_oracle import PrunedOracle, Scattered

from kernels.slots import Longs
from worker.engine.core import EngineCore
from worker.engine.messages import Emission, EngineRequest
from worker.engine.plan import SampleRow
from worker.engine.retention.base import Quota, RetentionPolicy
from worker.engine.retention.policies import Policies
from worker.engine.retention.streaming import Streaming
from worker.engine.sampler import sample
from worker.models.fake import FakeModel, fake_model

SHAPES = ("full", "latent", "ranks", "full/inverted")
CI = [(SHAPES[seed % len(SHAPES)], seed) for seed in range(6)]
TURNS = [(SHAPES[seed % len(SHAPES)], seed) for seed in (11, 15)]
TURNS_SOAK = [(SHAPES[seed % len(SHAPES)], seed) for seed in range(2000, 2040)]
SOAK = [(SHAPES[seed % len(SHAPES)], seed) for seed in range(1000, 1100)]


class FailingMoves(FaultyModel):
    """A FaultyModel whose next move can be told to fail when half of it is done."""

    move_fault = False

    def move_slots(
        self, group: int, sources: Longs, targets: Longs, rows: Longs | None = None
    ) -> None:
        if self.move_fault:
            self.move_fault = False
            half = len(sources) // 2
            super().move_slots(group, sources[:half], targets[:half])
            raise Injected
        super().move_slots(group, sources, targets, rows)


def pruned_tokens(
    model: FakeModel, policy: RetentionPolicy, spec: EngineRequest, choice: int, count: int
) -> tuple[int, ...]:
    """What a run of this request alone gives."""
    oracle = PrunedOracle(model, policy, spec.prompt_tokens)
    for token in spec.token_ids:
        oracle.append(token)
    tokens, prompt = list(spec.token_ids), spec.prompt_tokens
    history = spec.token_ids[:prompt]
    for left in range(count, 0, -1):
        output = tuple(tokens[prompt:])
        row = SampleRow(0, 0, choice, len(tokens) - prompt, spec.sampling, history, output)
        logits = torch.from_numpy(oracle.logits()).unsqueeze(0)
        tokens.append(sample(logits, [row], model.spec.eos_token_ids)[0].token_id)
        if left > 1:
            oracle.append(tokens[-1])
    return tuple(tokens[len(spec.token_ids) :])


class PrunedMachine(Machine):
    """A Machine whose engine has one policy, which every request is served with."""

    def __init__(self, shape: str, seed: int, *, tiered: bool = False) -> None:
        super().__init__(shape, seed, tiered=tiered)
        size = self.model.spec.block_tokens
        spec = fake_model(shape, context_tokens=160, block_tokens=size).spec
        self.model = self.moves = FailingMoves(spec, self.model._mask)
        self.due = False  # a move would fail in this step
        budget, interval = self.random.choice([3, 8, 17]), self.random.choice([2, 4, 11])
        quota = Quota(budget, interval)
        if self.random.random() < 0.4:
            quota = Quota(
                budget + 6, interval, suffix=False, sink_tokens=self.random.choice([0, 5])
            )
        kind = Scattered if self.random.random() < 0.6 else Streaming
        policies = Policies(self.model.spec)
        # With tiers, preempted sequences go on from what they left there.
        self.policy = policies.default = kind(quota, resume=tiered)
        store = self.tiers.store if self.tiers else None
        self.core = EngineCore(
            self.model, self.config, self.clock, self._sample, tiers=store, retention=policies
        )
        if self.tiers is not None:
            self.core._times.record = lambda *_: None  # type: ignore[method-assign]
            self.core._times.prefill_s_per_token = self.tiers.prefill_s_per_token
        self.move_faults = 0

    def fault(self) -> None:
        if self.random.random() < 0.4:
            self.moves.move_fault = True
        else:
            super().fault()

    def step(self) -> None:
        self.due = self.moves.move_fault
        super().step()
        self.move_faults += self.due and not self.moves.move_fault

    def drain(self) -> None:
        self.moves.move_fault = False
        super().drain()

    def _check_end(self, tracked: Tracked, last: Emission, faulty_step: bool) -> None:
        spec, usage = tracked.spec, last.usage
        assert usage is not None and last.finish is not None
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        for choice, output in tracked.outputs.items():
            expected = pruned_tokens(self.model, self.policy, spec, choice, len(output))
            assert tuple(output) == expected, "not what the policy gives alone"
        failed = self.due and not self.moves.move_fault
        self._check_reason(tracked, last.error, faulty_step or failed)
        self.counts["preemptions"] += usage.preemptions
        self.counts["cached"] += usage.cached_tokens
        self.counts["forked"] += len(tracked.outputs) > 1

    def finish(self) -> None:
        """Add what rounds came to."""
        found = self.core.load().compacted
        assert found is not None
        self.counts["rounds"] += found.rounds
        self.counts["waited"] += found.waited
        self.counts["moved"] += found.moved_bytes
        self.counts["move_faults"] += self.move_faults
        self.counts["kept"] += found.objects_kept
        self.counts["resumed"] += found.objects_resumed


class TurnMachine(PrunedMachine):
    """A PrunedMachine over tiers that hold what is preempted."""

    host_slots = (60, 200, 400)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="worker.engine")  # injected faults are logged


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize(("shape", "seed"), CI, ids=str)
def test_conservation_while_pruning(shape: str, seed: int, totals: Counter[str]) -> None:
    test = "tests/engine/test_retention_machine.py::test_conservation_while_pruning"
    with replayable(test, f"{shape}-{seed}"):
        machine = PrunedMachine(shape, seed)
        machine.run(120)
        machine.finish()
        totals.update(machine.counts)


def test_the_machine_pruned_everywhere(totals: Counter[str]) -> None:
    """Runs after the cases above."""
    print(totals)
    for what in ("rounds", "preemptions", "cached", "forked", "moved"):
        assert totals[what] > 20, what
    for what in ("waited", "move_faults", "NoneType", "Cancelled", "InternalError"):
        assert totals[what] > 0, what


@pytest.mark.parametrize(("shape", "seed"), TURNS, ids=str)
def test_conservation_while_states_are_kept(shape: str, seed: int) -> None:
    """What is preempted goes on from its own state, as if nothing had happened."""
    test = "tests/engine/test_retention_machine.py::test_conservation_while_states_are_kept"
    with replayable(test, f"{shape}-{seed}"):
        machine = TurnMachine(shape, seed, tiered=True)
        machine.run(250)
        machine.finish()
        print({what: machine.counts[what] for what in ("preemptions", "kept", "resumed")})


@pytest.mark.soak
@pytest.mark.parametrize(("shape", "seed"), TURNS_SOAK, ids=str)
def test_conservation_while_states_are_kept_full(shape: str, seed: int) -> None:
    test = "tests/engine/test_retention_machine.py::test_conservation_while_states_are_kept_full"
    with replayable(test, f"{shape}-{seed}"):
        TurnMachine(shape, seed, tiered=True).run(3_000)


@pytest.mark.soak
@pytest.mark.parametrize(("shape", "seed"), SOAK, ids=str)
def test_conservation_while_pruning_full(shape: str, seed: int) -> None:
    test = "tests/engine/test_retention_machine.py::test_conservation_while_pruning_full"
    with replayable(test, f"{shape}-{seed}"):
        PrunedMachine(shape, seed, tiered=seed % 2 == 1).run(5_000)
