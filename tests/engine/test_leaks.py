"""Ten thousand requests of every fate: no block is missing afterwards, and memory does not grow."""

import gc
import random
from collections import Counter
from pathlib import Path

from seams.clock import VirtualClock
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest
from worker.engine.sampling import SamplingParams
from worker.models.fake import fake_model

REQUESTS = 10_000
WAVE = 40  # alive at the same time
GROWTH_MAX_BYTES = 3 << 20  # in the second half: 600 bytes a request would be seen


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def any_request(chance: random.Random, number: int, now_s: float) -> EngineRequest:
    prompt = tuple(chance.randrange(255) for _ in range(chance.choice([1, 3, 17])))
    if chance.random() < 0.5:
        prompt = tuple(range(chance.randrange(1, 40))) + prompt
    n = chance.choice([1, 1, 1, 2, 3])
    sampling = SamplingParams(
        seed=number,
        max_tokens=chance.choice([1, 2, 5, 12]),
        temperature=1.0 if n > 1 or chance.random() < 0.2 else 0.0,
        stop_token_ids=frozenset(chance.sample(range(256), 30)),
        frequency_penalty=chance.choice([0.0, 0.0, 0.5]),
        logprobs=chance.choice([None, None, 1]),
        n=n,
    )
    return EngineRequest(
        f"r{number}",
        prompt,
        len(prompt),
        sampling,
        tenant=f"t{number % 700}",
        salt=bytes([number % 3]) * 32,
        priority=chance.choice([0, 0, 1]),
        deadline_s=now_s + chance.choice([0.02, 5.0]) if chance.random() < 0.1 else None,
        credit_tokens=chance.choice([0, 2, 100, 100]),
        no_cache=chance.random() < 0.1,
    )


class Crowd:
    """Keeps WAVE requests alive in one small engine, cancelling some and granting late."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = VirtualClock()
        model = fake_model("window", context_tokens=128, block_tokens=4)
        self.core = EngineCore(model, EngineConfig((60, 60), 64, 12), self.clock)
        self.fates: Counter[str] = Counter()
        self.alive: list[str] = []
        self.submitted = 0

    def run_to(self, requests: int) -> None:
        """Submit until so many have been, and let all end."""
        while self.submitted < requests or self.alive:
            while len(self.alive) < WAVE and self.submitted < requests:
                spec = any_request(self.chance, self.submitted, self.clock.now())
                self.submitted += 1
                self.alive.append(spec.request_id)
                self.core.submit(spec)
            self.meddle()
            self.step()

    def meddle(self) -> None:
        if self.chance.random() < 0.15:
            self.core.cancel(self.chance.choice(self.alive))
        for name in self.chance.sample(self.alive, min(3, len(self.alive))):
            self.core.grant(name, 50)

    def step(self) -> None:
        output = self.core.step()
        self.clock.advance(0.001)
        for emission in output.emissions if output else ():
            self.fates[f"tokens of choice {min(emission.choice, 1)}"] += len(emission.token_ids)
            if emission.last:
                assert emission.usage is not None
                self.alive.remove(emission.request_id)
                self.fates[type(emission.error).__name__] += 1
                self.fates[f"finish {emission.finish}"] += 1
                self.fates["preemptions"] += emission.usage.preemptions
                self.fates["cached"] += emission.usage.cached_tokens


def test_nothing_is_left_of_ten_thousand_requests() -> None:
    crowd = Crowd(seed=11)
    for _ in range(24):
        crowd.core.scheduler.lengths.record(1)  # hopeful: too many are admitted, some preempted
    crowd.run_to(REQUESTS // 2)
    before = resident_bytes()
    crowd.run_to(REQUESTS)
    grown = resident_bytes() - before
    print(f"seed 11: {grown / 1024:.0f} KiB more after the second half; {dict(crowd.fates)}")
    for fate in ("NoneType", "Cancelled", "DeadlineExceeded", "preemptions", "cached"):
        assert crowd.fates[fate] > 50, f"the crowd had no {fate}"
    assert crowd.fates["finish 1"] > 50 and crowd.fates["finish 3"] > 50
    assert grown < GROWTH_MAX_BYTES
    core = crowd.core
    core.check_integrity()
    assert not core._requests and not core.has_work() and core.next_deadline_s() is None
    assert not core.scheduler.running and not core.scheduler.parked and not core.scheduler.waiting
    memory = core.memory
    assert memory.cache is not None
    memory.cache.clear()
    assert [pool.free for pool in memory.pools] == [60, 60]
