"""Our engine and its peers taking turns on the same prompts; rows come out.

A peer that fails is left out from then on, and `failures` says why in one sentence; ours failing
raises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from seams.bench import Row, median
from seams.errors import LaunchError
from worker.peers.foreign import ForeignLoad
from worker.peers.process import CASE_TIMEOUT_S, START_TIMEOUT_S, Command, EngineProcess
from worker.peers.protocol import Case
from worker.peers.workloads import FLOOR, WARM_UPS, Workload, reads

REST_S = 0.25  # between turns: an engine's threads may spin so long after their last step
READS = 5


class Turns:
    """Engines, started; use it in a `with` block, which ends them."""

    def __init__(
        self,
        ours: Command,
        peers: Sequence[Command],
        rounds: int,
        start_timeout_s: float = START_TIMEOUT_S,
        case_timeout_s: float = CASE_TIMEOUT_S,
    ) -> None:
        """Nothing runs yet. Timeouts are per start and per case."""
        self.failures: list[str] = []
        self._command, self._pending = ours, list(peers)
        self._names = [peer.name for peer in peers]
        self._rounds = rounds
        self._start_timeout_s, self._case_timeout_s = start_timeout_s, case_timeout_s
        self._engines: dict[str, EngineProcess] = {}

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *raised: object) -> None:
        for engine in self._engines.values():
            engine.close()

    def start(self) -> Iterator[Row]:
        """start_ready and rss_ready. Ours starts every round, between the peers, which start once.

        Raises LaunchError if ours does not.
        """
        ours: list[float] = []
        own_bytes: list[float] = []
        values: dict[str, float] = {}
        load = ForeignLoad()
        for _ in range(max(self._rounds, len(self._pending))):
            if self._command.name in self._engines:
                self._engines.pop(self._command.name).close()
            with load:
                engine = EngineProcess(self._command, self._start_timeout_s)
            self._engines = {engine.name: engine, **self._engines}  # ours is the first, always
            ours.append(engine.start_s)
            own_bytes.append(engine.facts["own_bytes"] / 2**20)
            if self._pending:
                with load:
                    values |= self._start_peer(self._pending.pop(0))
        values[self._command.name] = median(ours)
        yield self._row("start_ready", "s", len(ours), values, load.share)
        yield Row("rss_ready", median(own_bytes), "MiB", len(own_bytes))

    def warm_up(self) -> None:
        """Short requests, so that nothing is done for the first time when it is timed."""
        for workload in WARM_UPS:
            case = workload.case(0, self._vocab_tokens)
            for name in list(self._engines):
                self._ask(name, case)

    def measure(self, workload: Workload) -> Iterator[Row]:
        """The workload's row, and behind FLOOR's that of reading the weights in between."""
        taken: dict[str, list[float]] = {}
        floor: list[float] = []
        load = ForeignLoad()
        for turn in range(workload.rounds(self._rounds)):
            case = workload.case(turn, self._vocab_tokens)
            floor += self._reads(workload)
            for name in list(self._engines):
                time.sleep(REST_S)
                with load:
                    taken.setdefault(name, []).extend(self._ask(name, case))
                if name == self._command.name:
                    floor += self._reads(workload)
        scale = 1e3 if workload.unit == "ms" else 1.0
        values = {name: median(times) * scale for name, times in taken.items() if times}
        samples = len(taken[self._command.name])
        row = self._row(workload.name, workload.unit, samples, values, load.share)
        yield row
        if floor:
            floor_ms = median(floor) * 1e3
            yield Row("memory_floor_b1", floor_ms, "ms", len(floor), row.name, row.value)

    def versions(self) -> dict[str, str]:
        """Of every engine that runs."""
        return {name: str(engine.facts["version"]) for name, engine in self._engines.items()}

    @property
    def _vocab_tokens(self) -> int:
        return int(self._engines[self._command.name].facts["vocab_tokens"])

    def _start_peer(self, command: Command) -> dict[str, float]:
        try:
            peer = EngineProcess(command, self._start_timeout_s)
        except LaunchError as error:
            self.failures.append(error.message)
            return {}
        self._engines[peer.name] = peer
        return {peer.name: peer.start_s}

    def _ask(self, name: str, case: Case) -> list[float]:
        try:
            return self._engines[name].ask(case, self._case_timeout_s)
        except LaunchError as error:
            del self._engines[name]
            if name == self._command.name:
                raise
            self.failures.append(error.message)
            return []

    def _reads(self, workload: Workload) -> list[float]:
        if workload.name != FLOOR or not self._engines[self._command.name].facts["weight_bytes"]:
            return []
        return self._ask(self._command.name, reads(READS))

    def _row(
        self, name: str, unit: str, samples: int, values: Mapping[str, float], foreign: float
    ) -> Row:
        """Against the first peer that has a value; all of them are in `others`."""
        others = {peer: values[peer] for peer in self._names if peer in values}
        first = next(iter(others), "")
        value = values[self._command.name]
        return Row(name, value, unit, samples, first, others.get(first), others, foreign)
