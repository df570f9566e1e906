"""`python -m worker.bench_tiers --model FOLDER`: what a prefix that comes back from a tier costs.

For each tier, length and slow-down of the tier: TTFT with the engine choosing, beside loading
everything and computing everything, in turns. It must not be worse than the better of the two.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvstore.tiers.base import BlockName, Status, Tier
from seams.bench import Report, Row, median
from seams.errors import InvalidRequest

LENGTHS = (256, 1024, 1900, 7000)
SLOWNESS = (1, 4, 16, 64)
TIERS = ("host", "disk", "shared")
TAIL_TOKENS = 8  # of the prompt, that no cache has
GIB = 1 << 30


class SlowTier:
    """A tier whose loads take `factor` times as long. Everything else is `inner`'s."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self.factor = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        """See Tier.load."""
        began_s = time.monotonic()
        statuses = self._inner.load(names, into, deadline_s * self.factor)
        time.sleep((self.factor - 1) * (time.monotonic() - began_s))
        return statuses


class Bench:
    """One engine over host memory and at most one lower tier."""

    def __init__(self, model: Any, blocks: int, tier: str, stack: ExitStack) -> None:
        from kvstore.tiered import TieredStore
        from kvstore.tiers.host import HostTier
        from kvstore.tiers.queue import TierQueue
        from seams.clock import SystemClock
        from worker.config import EngineConfig
        from worker.engine.core import EngineCore

        spec = model.spec
        sizes = {group.id: group.block_bytes for group in spec.groups}
        host = SlowTier(HostTier(sizes, GIB))
        self.slow = host
        lower = []
        if tier != "host":
            self.slow = SlowTier(_lower(tier, spec.representation.id, sizes, stack))
            lower = [TierQueue(self.slow)]
        self._host, self._tier = host, tier
        self.store = TieredStore(host, lower)  # type: ignore[arg-type]
        config = EngineConfig((blocks,) * len(spec.groups), running_max=8)
        self.core = EngineCore(model, config, SystemClock(), tiers=self.store)
        self._woken = threading.Event()
        self.core.on_wake(self._woken.set)
        self._count = 0

    def ask(self, prompt: Sequence[int], *, no_cache: bool = False) -> tuple[float, int]:
        """Seconds to the first token, and how many prompt tokens were not computed."""
        from worker.engine.messages import EngineRequest
        from worker.engine.sampling import SamplingParams

        self._count += 1
        params = SamplingParams(seed=0, max_tokens=1, ignore_eos=True)
        request = EngineRequest(
            f"r{self._count}", tuple(prompt), len(prompt), params, no_cache=no_cache
        )
        began_s = time.monotonic()
        self.core.submit(request)
        while True:
            self._woken.clear()
            output = self.core.step()
            for emission in output.emissions if output else ():
                if emission.error is not None:
                    raise emission.error
                if emission.last and emission.usage is not None:
                    return time.monotonic() - began_s, emission.usage.cached_tokens
            if not self.core.has_work():
                self._woken.wait(0.02)

    def put_away(self) -> None:
        """Everything cached leaves the device, for the measured tier alone."""
        assert self.core.memory.cache is not None
        self.core.memory.cache.clear()
        if self._tier != "host":
            self.store.flush(60.0)
            self._host.clear()
        while self.core.has_work():
            self.core.step()

    def priced(self, prefill_s_per_token: float | None) -> Callable[[], None]:
        """Make the engine believe in a price of computing; returns what undoes it."""
        times = self.core.scheduler._times
        before, record = times.prefill_s_per_token, times.record
        if prefill_s_per_token is not None:
            times.prefill_s_per_token = prefill_s_per_token
            times.record = lambda *_: None  # type: ignore[method-assign]

        def undo() -> None:
            times.prefill_s_per_token = before
            times.record = record  # type: ignore[method-assign]

        return undo


def _lower(tier: str, representation: str, sizes: dict[int, int], stack: ExitStack) -> Tier:
    if tier == "disk":
        from kvstore.tiers.nvme import NvmeTier

        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix=".bench-"))
        return NvmeTier(Path(folder) / "tier", 2 * GIB, representation, sizes)
    from kvstore.tiers.embedded import EmbeddedValkey
    from kvstore.tiers.redis import RedisTier

    server = EmbeddedValkey(2 * GIB)
    stack.callback(server.close)
    return RedisTier(server.url, representation, namespace="bench", ttl_s=3600)


def rows_of(
    bench: Bench, tier: str, lengths: Sequence[int], slowness: Sequence[int], rounds: int
) -> Iterator[Row]:
    """One row per length and slow-down, against the better of the two alone."""
    vocab = bench.core._model.spec.vocab_tokens
    for length in lengths:
        prompt = [(i * 7919 + length) % (vocab // 2) + 100 for i in range(length + TAIL_TOKENS)]
        bench.slow.factor = 1
        bench.ask(prompt)
        bench.put_away()
        computed = [bench.ask(prompt, no_cache=True)[0] for _ in range(rounds)]
        for factor in slowness:
            bench.slow.factor = factor
            bench.ask(prompt)  # the engine learns how fast the tier is now
            bench.put_away()
            seen: dict[str, list[float]] = {"chosen": [], "loaded": []}
            cached = 0
            for _ in range(rounds):
                for way, price in (("chosen", None), ("loaded", 1e6)):
                    undo = bench.priced(price)
                    took_s, tokens = bench.ask(prompt)
                    undo()
                    seen[way].append(took_s)
                    cached = tokens if way == "chosen" else cached
                    bench.put_away()
            loaded_s, computed_s = median(seen["loaded"]), median(computed)
            yield Row(
                f"ttft_{tier}_{length}_x{factor}", 1e3 * median(seen["chosen"]), "ms", rounds,
                "better of both", 1e3 * min(loaded_s, computed_s),
                {"loaded": 1e3 * loaded_s, "computed": 1e3 * computed_s, "tokens cached": cached},
            )  # fmt: skip


def main() -> None:
    """Print the rows as they come, then the table."""
    parser = argparse.ArgumentParser(prog="python -m worker.bench_tiers", description=__doc__)
    parser.add_argument("--model", required=True, help="a local model folder")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--slowness", default=",".join(map(str, SLOWNESS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    tiers = options.tiers.split(",")
    if not set(tiers) <= set(TIERS):
        raise InvalidRequest(f"There are the tiers {', '.join(TIERS)}.")
    from worker.config import ReplicaConfig
    from worker.models.load import load_model

    report = Report()
    lengths = [int(x) for x in options.lengths.split(",")]
    blocks = max(lengths) // 16 + 64
    for tier in tiers:
        config = ReplicaConfig(
            "bench", str(Path(options.model).expanduser()), "bench", (), "", dtype=options.dtype,
            threads=options.threads,
        )  # fmt: skip
        with ExitStack() as stack:
            bench = Bench(load_model(config), blocks, tier, stack)
            slowness = [int(x) for x in options.slowness.split(",")]
            for row in rows_of(bench, tier, lengths, slowness, options.rounds):
                report.add(row)
                print(f"{row.name}: {row.value:.0f} ms, ratio {row.ratio:.2f}", flush=True)
            bench.core.close()
    report.show(options.json)


if __name__ == "__main__":
    main()
