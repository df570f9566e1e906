"""One EngineCore on a recording FakeModel, and what came out of it."""

import torch

from seams.clock import VirtualClock
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import Emission, EngineRequest, RequestUsage, StepOutput
from worker.engine.plan import StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.fake import FakeModel, fake_model

BLOCK = 4


def tokens(count: int, salt: int = 0) -> tuple[int, ...]:
    """Distinct-looking prompt ids; the same for the same arguments."""
    return tuple((7 * i + 31 * salt + i * i // 5) % 250 for i in range(count))


def request(
    name: str, prompt: tuple[int, ...], max_tokens: int = 8, **fields: object
) -> EngineRequest:
    """A greedy request; `fields` go to EngineRequest, or to SamplingParams if they are its."""
    ours = {k: v for k, v in fields.items() if k in SamplingParams.__dataclass_fields__}
    rest = {k: v for k, v in fields.items() if k not in ours}
    ours = {"seed": 1, "ignore_eos": True, **ours}
    sampling = SamplingParams(max_tokens=max_tokens, **ours)  # type: ignore[arg-type]
    given = {"prompt_tokens": len(prompt), **rest}
    return EngineRequest(name, prompt, sampling=sampling, **given)  # type: ignore[arg-type]


class Recorder(FakeModel):
    """A FakeModel that keeps its plans and can fail in a step."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model.spec, model._mask)
        self.plans: list[StepPlan] = []
        self.fail_at: int | None = None
        self.broken = False

    def execute(self, plan: StepPlan) -> torch.Tensor:
        self.plans.append(plan)
        logits = super().execute(plan)
        if self.broken or self.fail_at == len(self.plans):
            raise RuntimeError("the device fell off the bus")
        return logits


class Rig:
    """Submits, steps with the conservation law checked, collects."""

    def __init__(
        self, shape: str = "full", *, blocks: int = 64, block_tokens: int = BLOCK, **config: object
    ) -> None:
        self.model = Recorder(fake_model(shape, context_tokens=512, block_tokens=block_tokens))
        self.clock = VirtualClock()
        given = {"poison_freed": True, **config}
        counts = tuple(blocks for _ in self.model.spec.groups)
        self.config = EngineConfig(blocks=counts, **given)  # type: ignore[arg-type]
        self.core = EngineCore(self.model, self.config, self.clock)
        self.emissions: list[Emission] = []
        self.requests: dict[str, EngineRequest] = {}

    def submit(self, *requests: EngineRequest) -> None:
        for one in requests:
            self.requests[one.request_id] = one
            self.core.submit(one)

    def step(self, count: int = 1) -> StepOutput | None:
        output = None
        for _ in range(count):
            output = self.core.step()
            self.core.check_integrity()
            if output is not None:
                self.emissions += output.emissions
            self.clock.advance(0.001)
        return output

    def run(self, steps_max: int = 3000) -> None:
        """Until there is no work."""
        while self.core.has_work():
            self.step()
            steps_max -= 1
            assert steps_max > 0, "no end"

    def cancel(self, name: str) -> None:
        self.core.cancel(name)
        self.core.check_integrity()

    def output(self, name: str, choice: int = 0) -> list[int]:
        mine = [e for e in self.emissions if e.request_id == name and e.choice == choice]
        return [token for e in mine for token in e.token_ids]

    def lasts(self, name: str) -> list[Emission]:
        return [e for e in self.emissions if e.request_id == name and e.last]

    def last(self, name: str) -> Emission:
        (only,) = self.lasts(name)
        return only

    def usage(self, name: str) -> RequestUsage:
        usage = self.last(name).usage
        assert usage is not None
        return usage

    def assert_exact(self, *names: str) -> None:
        """Greedy outputs so far are the oracle's."""
        for name in names or self.requests:
            one, out = self.requests[name], self.output(name)
            assert out == self.model.oracle(one.token_ids, len(out), ignore_eos=True), name

    def rows(self) -> list[list[int]]:
        """Per plan: the tokens of each of its sequences."""
        return [
            [b - a for a, b in zip(p.starts, p.starts[1:], strict=False)] for p in self.model.plans
        ]

    def free(self) -> int:
        return self.core.memory.pools[0].free

    def reclaimable(self) -> bool:
        """Every block of every group is free or only cached."""
        memory = self.core.memory
        return all(memory.available(g) == p.total for g, p in enumerate(memory.pools))
