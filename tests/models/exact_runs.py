"""The same requests through an engine in every way that must not matter, told to the last bit."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.tiered import TieredStore
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.queue import TierQueue
from seams.clock import SystemClock
from seams.errors import Cancelled
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest, Logprobs, RequestUsage
from worker.engine.promotion import Promoter
from worker.models.base import Model

Promoter.strict = True
Token = tuple[int, Logprobs | None]  # floats compare as they are: to the bit


@dataclass
class Told:
    """What an engine emitted: tokens and logprobs per (request, choice), usage per request."""

    tokens: dict[tuple[str, int], list[Token]] = field(default_factory=dict)
    usages: dict[str, RequestUsage] = field(default_factory=dict)
    seconds: float = 0.0
    from_tiers: int = 0  # blocks

    @property
    def cached_tokens(self) -> int:
        return sum(usage.cached_tokens for usage in self.usages.values())

    @property
    def preemptions(self) -> int:
        return sum(usage.preemptions for usage in self.usages.values())


def differences(told: Told, right: Told) -> list[tuple[str, int]]:
    """(request, choice) that differ in a token or in a bit of a logprob."""
    assert told.tokens.keys() == right.tokens.keys()
    return [key for key, tokens in told.tokens.items() if tokens != right.tokens[key]]


def step(core: EngineCore, told: Told) -> None:
    output = core.step()
    for emission in output.emissions if output else ():
        assert emission.error is None or isinstance(emission.error, Cancelled), emission.error
        mine = told.tokens.setdefault((emission.request_id, emission.choice), [])
        if emission.token_ids:
            assert emission.position == len(mine)
        logprobs = emission.logprobs or (None,) * len(emission.token_ids)
        mine += zip(emission.token_ids, logprobs, strict=True)
        if emission.usage is not None:
            told.usages[emission.request_id] = emission.usage


class Ways:
    """Runs on a fresh model each (pools are made once), with freed blocks poisoned."""

    def __init__(self, make: Callable[[], Model], blocks: int, running_max: int) -> None:
        self._make = make
        self._blocks, self._running_max = blocks, running_max

    def core(self, **changes: Any) -> EngineCore:
        """Whole prompts, no cache, many at once: what `changes` does not say."""
        model = self._make()
        blocks = (changes.pop("blocks", self._blocks),) * len(model.spec.groups)
        given = {
            **{"running_max": self._running_max, "step_tokens_max": 4096, "cache": False},
            **{"poison_freed": True, "waiting_max": 1 << 20, "requests_max": 1 << 20},
            **{key: value for key, value in changes.items() if key != "tiers"},
        }
        tiers = changes.pop("tiers", None)
        store = None if tiers is None else tiers(model)
        return EngineCore(model, EngineConfig(blocks=blocks, **given), SystemClock(), tiers=store)

    def tiered(self, requests: Sequence[EngineRequest], blocks: int) -> Told:
        """From a pool far too small, over host memory and a disk, which blocks come back from."""
        stores: list[TieredStore] = []
        with tempfile.TemporaryDirectory() as folder:

            def tiers(model: Model) -> TieredStore:
                spec = model.spec
                sizes = {group.id: group.block_bytes for group in spec.groups}
                disk = NvmeTier(
                    Path(folder) / "disk", 1 << 30, spec.representation.id, sizes,
                    free_space_floor_bytes=0,
                )  # fmt: skip
                host = HostTier(sizes, 6 * blocks * max(sizes.values()) // 5, prefault=False)
                stores.append(TieredStore(host, [TierQueue(disk)]))
                return stores[0]

            core = self.core(blocks=blocks, cache=True, running_max=24, tiers=tiers)
            told = self._timed(core, lambda core, told: self._run(core, requests, told))
            told.from_tiers = sum(stores[0].loaded_blocks.values())
            core.close()
        return told

    def alone(self, requests: Sequence[EngineRequest]) -> Told:
        """One after the other, each prompt whole, nothing cached."""
        return self._timed(self.core(), lambda core, told: [self._run(core, [one], told)
                                                            for one in requests])  # fmt: skip

    def together(
        self, requests: Sequence[EngineRequest], hopeful: bool = False, **changes: Any
    ) -> Told:
        """All at once; `hopeful`: an engine that expects short answers and has to preempt."""
        core = self.core(**changes)
        for _ in range(24 if hopeful else 0):
            core.scheduler.lengths.record(2)
        return self._timed(core, lambda core, told: self._run(core, requests, told))

    def migrated(self, requests: Sequence[EngineRequest], **changes: Any) -> Told:
        """Each begins on one engine, is cut off after some tokens, and resumes on a second."""
        first, second = self.core(**changes), self.core(**changes)
        cuts = {one.request_id: 1 + i % 5 for i, one in enumerate(requests)}
        begun = Told()
        for one in requests:
            first.submit(one)
        while first.has_work():
            step(first, begun)
            for (name, _), tokens in begun.tokens.items():
                if len(tokens) >= cuts[name] and name not in begun.usages:
                    first.cancel(name)
        told = Told()
        resumed = []
        for one in requests:
            kept = begun.tokens[one.request_id, 0][: cuts[one.request_id]]
            told.tokens[one.request_id, 0] = kept
            if len(kept) < one.sampling.max_tokens:
                emitted = tuple(token for token, _ in kept)
                resumed.append(replace(one, token_ids=(*one.token_ids, *emitted)))
        return self._timed(second, lambda core, told: self._run(core, resumed, told), told)

    @staticmethod
    def _run(core: EngineCore, requests: Sequence[EngineRequest], told: Told) -> None:
        for one in requests:
            core.submit(one)
        while core.has_work() or core.scheduler.can_step():
            step(core, told)
            if not core.has_work():
                time.sleep(0.0005)  # what is waited for comes from a tier

    @staticmethod
    def _timed(
        core: EngineCore, run: Callable[[EngineCore, Told], object], told: Told | None = None
    ) -> Told:
        told = told or Told()
        begin = time.perf_counter()
        run(core, told)
        told.seconds = time.perf_counter() - begin
        core.check_integrity()
        return told


def every_way(
    ways: Ways, requests: Sequence[EngineRequest], small_pool: int
) -> dict[str, Callable[[], Told]]:
    """By name. `small_pool` holds so few blocks that the requests preempt each other; those
    that grow most come first there, so that many are let in before they do."""
    reverse = requests[::-1]
    growing = sorted(requests, key=lambda one: (-one.sampling.max_tokens, one.prompt_tokens))
    single = [one for one in requests if one.sampling.n == 1]  # several choices cannot resume
    cached = {"cache": True, "running_max": 24}
    return {
        "uncached, batched": lambda: ways.together(requests),
        "uncached, chunks of 40, backwards": lambda: ways.together(reverse, step_tokens_max=40),
        "cached": lambda: ways.together(requests, **cached),
        "cached, chunks of 48, backwards": lambda: ways.together(
            reverse, **cached, step_tokens_max=48
        ),
        "cached, twice over": lambda: ways.together(
            [*requests, *(replace(one, request_id=one.request_id + "'") for one in reverse)],
            **cached,
        ),
        "cached, preempted": lambda: ways.together(
            growing, hopeful=True, blocks=small_pool, cache=True, running_max=40
        ),
        "cached, tiered": lambda: ways.tiered(_soon_again(requests), blocks=small_pool * 2),
        "migrated": lambda: ways.migrated(single, **cached),
    }


def _soon_again(requests: Sequence[EngineRequest], apart: int = 60) -> list[EngineRequest]:
    """Every so many, and then the same again: long after they left a small pool, and before an
    endless line of others has pushed them out of the tiers too."""
    order: list[EngineRequest] = []
    for at in range(0, len(requests), apart):
        some = requests[at : at + apart]
        order += [*some, *(replace(one, request_id=one.request_id + "'") for one in some)]
    return order


def check(name: str, told: Told, right: Told) -> str:
    """Asserts no difference; one line of what was done."""
    first = {key: tokens for key, tokens in told.tokens.items() if not key[0].endswith("'")}
    again = {(key[0][:-1], key[1]): told.tokens[key] for key in told.tokens.keys() - first.keys()}
    for part in (first, again) if again else (first,):
        expected = Told({key: right.tokens[key] for key in part})
        if name != "migrated":
            assert part.keys() == right.tokens.keys()
        wrong = differences(Told(part), expected)
        assert not wrong, f"{name}: {len(wrong)} of {len(part)} differ: {wrong[:5]}"
    assert (told.cached_tokens > 0) == ("uncached" not in name), name
    assert told.preemptions > 0 or "preempted" not in name
    assert told.from_tiers > 0 or "tiered" not in name
    count = len({name for name, _ in told.tokens})
    return (
        f"{name}: {count} requests, 0 differences, {told.cached_tokens} tokens cached,"
        f" {told.from_tiers} blocks from tiers, {told.preemptions} preemptions,"
        f" {told.seconds / count * 100:.1f} s per 100 requests"
    )
