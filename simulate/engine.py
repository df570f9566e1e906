"""One replica's engine, moved from event to event.

Production code: Scheduler (cells.py), PagedMemory, RadixCache, BlockPool, Forecast, WaitingQueue,
StepTimes, and, with a host tier, Promoter, TieredStore and HostTier. Modelled: how long a step
takes (steptime.py), and EngineCore's bookkeeping around it, which here counts tokens and draws
none. Where nothing but decoding happens, all steps up to the next event are one closed sum.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from kvstore.groups import GroupKind, KVGroup
from seams.errors import BanyanError, OutOfBlocks, Overloaded
from simulate.ahead import Rows, alike, timed
from simulate.cells import CellScheduler, CellTimes
from simulate.flight import Ended, Flight
from simulate.host import HostMemory
from simulate.steptime import Run, StepTime
from simulate.workload import OUTPUT_CELLS_FROM, Grain, SimRequest
from worker.config import EngineConfig
from worker.engine.block_pool import BlockPool
from worker.engine.messages import CacheOp, EngineLoad, EngineRequest
from worker.engine.paging import PagedMemory
from worker.engine.radix import RadixCache
from worker.engine.request import Request, Sequence, State
from worker.engine.sampling import SamplingParams
from worker.engine.scheduler import Scheduled

CREDIT = 1 << 30  # clients here read as fast as they can


@dataclass(frozen=True)
class Shape:
    """One replica: its device and its limits. Blocks are of the grain; budgets in real tokens."""

    blocks: int
    grain: Grain
    times: StepTime = field(default_factory=StepTime)
    step_tokens_max: int = 2048
    running_max: int = 64
    decode_slowdown_max: float = EngineConfig.decode_slowdown_max
    host_blocks: int = 0
    host_s_per_token: float = 131072 / 20e9  # 128 KiB a token over 20 GB/s

    def config(self) -> EngineConfig:
        """The production engine's, in cells."""
        return EngineConfig(
            blocks=(self.blocks,),
            step_tokens_max=max(1, self.step_tokens_max // self.grain.cell_tokens),
            running_max=self.running_max,
            decode_slowdown_max=self.decode_slowdown_max,
        )


@dataclass(slots=True)
class StepResult:
    """What finished steps made visible."""

    first_tokens: list[SimRequest] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    ops: list[CacheOp] = field(default_factory=list)


class SimEngine:
    """Submit, begin, finish: `begin` says how long the next run of steps takes, `finish` that so
    many of it are done. Requests submitted meanwhile are taken in by the next `begin`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        grain, config = shape.grain, shape.config()
        group = KVGroup(0, GroupKind.FULL, (0,), grain.block_cells * 16)
        pool = BlockPool(group, shape.blocks)
        cache = RadixCache([pool], grain.block_cells)
        self.memory = PagedMemory([pool], cache, grain.block_cells)
        self.times = CellTimes(grain.cell_tokens)
        self.host = (
            HostMemory(shape.blocks, shape.host_blocks, self.memory, self.times, grain)
            if shape.host_blocks
            else None
        )
        promoter = self.host.promoter if self.host else None
        self.scheduler = CellScheduler(self.memory, config, self.times, promoter)
        self.flights: dict[str, Flight] = {}
        self.steps = self.prompt_tokens = self.cached_tokens = 0
        self.busy_s = 0.0
        self._config = config
        self._inbox: deque[tuple[SimRequest, int, int]] = deque()
        self._scheduled: Scheduled | None = None
        self._run = Run(0.0)
        self._rows = Rows([], [])
        self._refused: list[Ended] = []
        self._stuck: list[Flight] = []
        self._arrivals = 0
        self._cells = OUTPUT_CELLS_FROM

    # --- requests ----------------------------------------------------------------------------

    def submit(self, request: SimRequest, max_tokens: int, produced: int = 0) -> None:
        """Queue a request that has `produced` tokens from elsewhere; a refusal is its end."""
        self._inbox.append((request, max_tokens, produced))

    @property
    def has_work(self) -> bool:
        """Whether `begin` would find anything."""
        return bool(self._inbox or self._refused) or self.scheduler.can_step()

    def _take_in(self) -> None:
        while self._inbox:
            request, max_tokens, produced = self._inbox.popleft()
            try:
                self._enter(request, max_tokens, produced)
            except BanyanError as error:
                self._refused.append(Ended(request, 0, 0, 0, error))

    def _enter(self, asked: SimRequest, max_tokens: int, produced: int) -> None:
        grain, scheduler = self.shape.grain, self.scheduler
        tokens = [*asked.cells, *self._new_cells(grain.cells(produced))]
        if not self.memory.fits_alone(len(tokens)):
            raise OutOfBlocks("The prompt needs more memory than the replica has.")
        if len(scheduler.waiting) >= self._config.waiting_max:
            raise Overloaded("The replica's queue is full.")
        self._arrivals += 1
        spec = EngineRequest(
            request_id=str(asked.number), token_ids=tuple(tokens), prompt_tokens=len(asked.cells),
            sampling=SamplingParams(seed=0, max_tokens=grain.cells(max_tokens) + 1),
        )  # fmt: skip
        request = Request(
            spec=spec, arrival=self._arrivals, chain=grain.chain, credit=CREDIT, cacheable=True,
            tenant=scheduler.waiting.join(spec.tenant), ends=frozenset(),
            tokens_max=len(asked.cells) + spec.sampling.max_tokens, charge=len(asked.cells),
        )  # fmt: skip
        sequence = Sequence(self._arrivals, request, 0, tokens, [[]], keys=list(asked.keys))
        request.sequences.append(sequence)
        flight = Flight(asked, sequence, produced, produced)
        flight.cell_end = grain.cells(produced) * grain.cell_tokens
        self.flights[spec.request_id] = flight
        scheduler.enter(sequence)

    def _new_cells(self, count: int) -> range:
        self._cells += count
        return range(self._cells - count, self._cells)

    # --- steps -------------------------------------------------------------------------------

    def begin(self, stretch: float = 1.0) -> Run | None:
        """Plan, and say how long the coming steps take, `stretch` times what they would alone; None
        if there is nothing to compute. What was found to be impossible ends with the next
        `finish`."""
        assert self._scheduled is None
        self._take_in()
        loaded = self.host.loaded_tokens if self.host else 0
        scheduled = self.scheduler.plan()
        for sequence in self.scheduler.take_stuck():
            flight = self.flights[sequence.request.spec.request_id]
            flight.error = OutOfBlocks("The request needs more memory than the replica has.")
            self._stuck.append(flight)
        if scheduled is None:
            return Run(0.0) if self._refused or self._stuck else None
        self._scheduled = scheduled
        loaded = self.host.loaded_tokens - loaded if self.host else 0
        self._run = self._timed(scheduled, loaded * self.shape.host_s_per_token, stretch)
        return self._run

    def _timed(self, scheduled: Scheduled, load_s: float, stretch: float) -> Run:
        shape, grain = self.shape, self.shape.grain
        self._rows = rows = Rows.of(scheduled.rows, self.flights)
        steps = 1 if load_s else alike(rows, self.memory, grain)
        run, computed = timed(rows, steps, shape.times, grain.cell_tokens)
        first_s, growth_s = stretch * (run.first_s + load_s), stretch * run.growth_s
        run = replace(run, first_s=first_s, growth_s=growth_s)
        self.times.record(run.total_s / steps, len(rows.decoding), computed // steps)
        return run

    def finish(self, steps: int) -> StepResult:
        """The first `steps` of what `begin` said are computed; the others never happen."""
        result = StepResult(ended=self._refused)
        self._refused = []
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is not None:
            assert 1 <= steps <= self._run.steps
            self.steps += steps
            self.busy_s += self._run.until_s(steps)
            for flight, count in self._rows.chunks:
                if flight.sequence.state is State.RUNNING:
                    self._commit_chunk(flight, count * steps, result)
            for flight in self._rows.decoding:
                if flight.sequence.state is State.RUNNING:
                    self._commit_decoded(flight, steps, result)
        for flight in self._stuck:
            if flight.sequence.state is not State.FINISHED:
                self._end(flight, result)
        self._stuck.clear()
        assert self.memory.cache is not None
        result.ops = self.memory.cache.take_ops()
        if self.host is not None:
            result.ops += self.host.promoter.take_ops()
        return result

    def _commit_decoded(self, flight: Flight, steps: int, result: StepResult) -> None:
        if flight.sequence.copies:
            self.memory.settle(flight.sequence)
        self._produce(flight, steps, result)

    def _commit_chunk(self, flight: Flight, count: int, result: StepResult) -> None:
        sequence = flight.sequence
        if sequence.computed_max == 0:
            self._count_prompt(flight)
        done = count == sequence.pending
        kept = count - 1 if done and sequence.generated else count  # its last cell goes on growing
        sequence.advance(kept)
        self.memory.settle(sequence)
        if not done:
            self.memory.trim(sequence)  # of steps that did not happen
            return
        sequence.inserted = True
        self.memory.share(sequence)
        if not sequence.generated:
            self._new_cell(flight)
            sequence.emitted += 1
        self._produce(flight, 1, result)

    def _count_prompt(self, flight: Flight) -> None:
        self.prompt_tokens += flight.request.prompt_tokens
        self.cached_tokens += self._cached(flight)

    def _cached(self, flight: Flight) -> int:
        cells = flight.sequence.request.cached_tokens or 0
        return min(cells * self.shape.grain.cell_tokens, flight.request.prompt_tokens - 1)

    def _produce(self, flight: Flight, tokens: int, result: StepResult) -> None:
        if flight.produced == flight.resumed:
            result.first_tokens.append(flight.request)
        flight.produced += tokens
        if flight.produced >= flight.request.output_tokens:
            self.scheduler.lengths.record(flight.sequence.generated)
            self._end(flight, result)
            return
        while flight.produced > flight.cell_end:
            flight.sequence.decoded(self._next_cell())
            flight.cell_end += self.shape.grain.cell_tokens

    def _new_cell(self, flight: Flight) -> None:
        flight.sequence.tokens.append(self._next_cell())
        flight.cell_end = self.shape.grain.cell_tokens

    def _next_cell(self) -> int:
        self._cells += 1
        return self._cells - 1

    def _end(self, flight: Flight, result: StepResult) -> None:
        sequence, cell = flight.sequence, self.shape.grain.cell_tokens
        self.scheduler.leave(sequence, keep=flight.error is None)
        self.scheduler.waiting.leave(sequence.request.spec.tenant)
        del self.flights[sequence.request.spec.request_id]
        request = sequence.request
        result.ended.append(
            Ended(
                flight.request,
                self._cached(flight),
                request.recomputed_tokens * cell,
                request.preemptions,
                flight.error,
            )
        )

    # --- questions ---------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """For heartbeats, in real tokens, as EngineCore.load."""
        scheduler, pool, cell = self.scheduler, self.memory.pools[0], self.shape.grain.cell_tokens
        pending = sum([s.pending for s in scheduler.running if s.pending > 1])
        inbox = sum(len(request.cells) for request, _, _ in self._inbox)
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox),
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_cached=self.memory.available(0) - pool.free,
            queued_prefill_tokens=(scheduler.waiting.tokens + pending + inbox) * cell,
            steps=self.steps,
            step_s=self.times.step_s,
            prefill_s_per_token=self.times.prefill_s_per_token,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )

    def snapshot(self) -> list[CacheOp]:
        """STORED of all that is cached."""
        assert self.memory.cache is not None
        below = self.host.promoter.snapshot() if self.host else ()
        return [*self.memory.cache.snapshot(), *below]

    def check_integrity(self) -> None:
        """Assert that blocks are conserved and that no request is lost. Between steps. What the
        scheduler asserts of tables does not hold: a cell under way has its block already."""
        scheduler = self.scheduler
        self.memory.check_integrity(scheduler.running)
        live = [*scheduler.running, *scheduler.waiting]
        assert sorted(s.request.spec.request_id for s in live) == sorted(self.flights)
        assert all(s.state is State.RUNNING for s in scheduler.running)
        assert all(s.state is State.WAITING and not any(s.tables) for s in scheduler.waiting)
        assert self.cached_tokens <= self.prompt_tokens
        for flight in self.flights.values():
            assert flight.produced < flight.request.output_tokens
            assert flight.sequence.generated == self.shape.grain.cells(flight.produced)
