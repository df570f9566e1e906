"""The cluster under a virtual clock: arrivals, routers, replicas and the delays between them.

Nothing happens between two events, so time jumps from one to the next. Events of one moment happen
in the order in which they were planned; chance is one seeded generator, so a seed says everything.
It knows no policy's insides and no engine's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from router.placement import Observed, PlaceRequest
from seams.clock import VirtualClock
from seams.errors import BanyanError, NoReplica
from seams.rng import SeededRng
from simulate.engine import Shape
from simulate.flight import Ended
from simulate.outcome import Outcome, Record
from simulate.policies.base import MakePolicy, Place, Policy
from simulate.replica import MODEL, Replica
from simulate.steptime import Run
from simulate.workload import SimRequest, Workload

TICK_S = 0.5
PLACE_AGAIN_S = 0.1
PLACE_S_MAX = 30.0  # that a request waits for any replica
MOVES_MAX = 5


@dataclass(frozen=True)
class Setup:
    """The cluster. Delays in seconds, one way. `deaths` are (when, number of the replica), `joins`
    when one more comes, empty; both counted from the first arrival. `in_flight_max` closes the
    loop: a request arrives when another has ended, whatever its time says. Each other replica that
    is busy makes a step longer by `beside` of it: they share a machine."""

    shape: Shape
    replicas: int
    routers: int = 1
    hop_s: float = 0.0005
    events_s: float = 0.002
    heartbeat_s: float = 0.5
    window_s: float = 10.0
    deaths: tuple[tuple[float, int], ...] = ()
    joins: tuple[float, ...] = ()
    in_flight_max: int | None = None
    beside: float = 0.0


@dataclass(slots=True)
class _Under:
    """The steps under way on one replica."""

    run: Run
    began_s: float
    steps: int  # planned to happen


class Cluster:
    """One run. Made for one workload and one seed; `run` once."""

    def __init__(self, setup: Setup, workload: Workload, make: MakePolicy, seed: int) -> None:
        self.clock = VirtualClock()
        self.replicas: dict[str, Replica] = {}
        self.dead: list[Replica] = []
        self.policies: list[Policy] = []
        self._setup, self._workload, self._make = setup, workload, make
        self._rng = SeededRng(seed)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._under: dict[Replica, _Under] = {}
        self._live: dict[str, dict[int, Record]] = {}  # by the replica they are placed on
        self._records: list[Record] = []
        self._next = self._ended = self._made = 0
        self._outcome = Outcome(setup.window_s)

    def run(self) -> Outcome:
        """Serve the whole workload."""
        setup, requests = self._setup, self._workload.requests
        self._start()
        while self._ended < len(requests):
            at_s, _, what, arguments = heapq.heappop(self._queue)
            self.clock.advance(at_s - self.clock.now())
            what(*arguments)
        everyone = [*self.dead, *self.replicas.values()]
        self._outcome.close(self._records, everyone, setup.shape.grain)
        for replica in everyone:
            if replica.engine.host is not None:
                replica.engine.host.close()
        return self._outcome

    def _start(self) -> None:
        setup = self._setup
        for _ in range(setup.routers):
            place = Place(self.clock, SeededRng(self._rng.bits(64)))
            self.policies.append(self._make(place))
        for _ in range(setup.replicas):
            self._join()
        self._at(TICK_S, self._tick)
        for at_s, number in setup.deaths:
            self._at(at_s, self._die, number)
        for at_s in setup.joins:
            self._at(at_s, self._join)
        for _ in range(setup.in_flight_max or 1):
            self._plan_arrival()

    def _at(self, at_s: float, what: Callable[..., None], *arguments: Any) -> None:
        now_s = self.clock.now()
        heapq.heappush(self._queue, (max(at_s, now_s), next(self._order), what, arguments))

    def _in(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        self._at(self.clock.now() + seconds, what, *arguments)

    # --- requests ----------------------------------------------------------------------------

    def _plan_arrival(self) -> None:
        requests = self._workload.requests
        if self._next < len(requests):
            request = requests[self._next]
            self._next += 1
            closed = self._setup.in_flight_max is not None
            at_s = self.clock.now() if closed else request.at_s - requests[0].at_s
            self._at(at_s, self._arrive, request)

    def _arrive(self, request: SimRequest) -> None:
        router = int(self._rng.random() * len(self.policies))
        record = Record(request, router, self.clock.now())
        self._records.append(record)
        if self._setup.in_flight_max is None:
            self._plan_arrival()
        self._place(record, self.clock.now() + PLACE_S_MAX)

    def _place(self, record: Record, until_s: float) -> None:
        request, grain = record.request, self._workload.grain
        asked = PlaceRequest(
            request_id=str(request.number), model=MODEL, root_id=grain.root,
            tokens=request.prompt_tokens + record.produced, keys=request.keys,
            max_tokens=self._workload.max_tokens, session=request.session,
            excluded=frozenset(record.left),
        )  # fmt: skip
        try:
            name = self.policies[record.router].place(asked)
        except NoReplica as error:
            if self.clock.now() >= until_s:
                self._close(record, error)
            else:
                self._in(PLACE_AGAIN_S, self._place, record, until_s)
            return
        record.replica, record.submitted_s = name, self.clock.now()
        self._live[name][request.number] = record
        self._in(self._setup.hop_s, self._submit, record, name)

    def _submit(self, record: Record, name: str) -> None:
        if self._live[name].get(record.request.number) is not record:
            return  # moved before it got there
        replica = self.replicas.get(name)
        if replica is None:
            self._lose(record, name)
            return
        replica.engine.submit(record.request, self._workload.max_tokens, record.produced)
        self._poke(replica)

    def _first(self, record: Record, name: str) -> None:
        if record.replica == name:
            if record.first_s is None:
                record.first_s = self.clock.now()
            self.policies[record.router].first_token(str(record.request.number))

    def _over(self, record: Record, ended: Ended, name: str) -> None:
        if record.replica != name:
            return
        policy, request_id = self.policies[record.router], str(record.request.number)
        del self._live[name][record.request.number]
        record.preemptions += ended.preemptions
        record.recomputed_tokens += ended.recomputed_tokens
        if ended.error is not None:
            policy.failed(request_id)
            self._again(record, name, ended.error)
            return
        record.cached_tokens = ended.cached_tokens
        record.last_s = self.clock.now()
        policy.finished(request_id, ended.cached_tokens, self._observed(record, ended))
        self._close(record, None)

    @staticmethod
    def _observed(record: Record, ended: Ended) -> Observed:
        if record.left or record.first_s is None or record.last_s is None:
            return Observed()
        return Observed(
            computed_tokens=record.request.prompt_tokens - ended.cached_tokens,
            prefill_s=record.first_s - record.submitted_s,
            decode_tokens=record.request.output_tokens - 1,
            decode_s=record.last_s - record.first_s,
        )

    def _again(self, record: Record, name: str, error: BanyanError) -> None:
        """It goes on at another replica, as a router's streams do."""
        record.left.append(name)
        if len(record.left) > MOVES_MAX or all(n in record.left for n in self.replicas):
            self._close(record, error)
        else:
            self._place(record, self.clock.now() + PLACE_S_MAX)

    def _close(self, record: Record, error: BanyanError | None) -> None:
        record.error = error
        self._ended += 1
        if self._setup.in_flight_max is not None:
            self._plan_arrival()

    # --- steps -------------------------------------------------------------------------------

    def _poke(self, replica: Replica) -> None:
        """It was given something: begin, or let the step under way be the last of its run."""
        under = self._under.get(replica)
        if under is None:
            self._begin(replica)
            if self._setup.beside:
                self._poke_others(replica)
            return
        steps = under.run.steps_by(self.clock.now() - under.began_s)
        if steps < under.steps:
            under.steps = steps
            replica.version += 1
            self._at(under.began_s + under.run.until_s(steps), self._step, replica, replica.version)

    def _poke_others(self, replica: Replica) -> None:
        """It began or ended to slow them down."""
        for other in [other for other in self._under if other is not replica]:
            self._poke(other)

    def _begin(self, replica: Replica) -> None:
        beside = self._setup.beside
        run = replica.engine.begin(1.0 + beside * len(self._under))
        if run is None:
            return
        self._under[replica] = _Under(run, self.clock.now(), run.steps)
        replica.version += 1
        self._in(run.total_s, self._step, replica, replica.version)

    def _step(self, replica: Replica, version: int) -> None:
        if version != replica.version or not replica.alive:
            return
        self._settle(replica, self._under[replica].steps)
        self._send(replica)
        self._begin(replica)
        if self._setup.beside and replica not in self._under:
            self._poke_others(replica)

    def _settle(self, replica: Replica, steps: int) -> None:
        """So many of the steps under way are done: what they made visible is on its way."""
        under = self._under.pop(replica)
        result = replica.engine.finish(steps)
        replica.note_busy(under.began_s, self.clock.now(), self._setup.window_s)
        live, hop_s, name = self._live[replica.name], self._setup.hop_s, replica.name
        for request in result.first_tokens:
            self._in(hop_s, self._first, live[request.number], name)
        for ended in result.ended:
            self._in(hop_s, self._over, live[ended.request.number], ended, name)
        replica.log(result)

    def _send(self, replica: Replica) -> None:
        for router in range(len(self.policies)):
            batches = replica.unsent(router)
            if batches:
                self._in(self._setup.events_s, self._deliver, router, replica, batches)

    def _deliver(self, router: int, replica: Replica, batches: list[Any]) -> None:
        policy = self.policies[router]
        asked = [policy.events(batch) for batch in batches]
        if any(asked) and replica.alive:
            replica.snapshot(router)
            again = replica.unsent(router)
            self._in(self._setup.events_s, self._deliver, router, replica, again)

    # --- replicas ----------------------------------------------------------------------------

    def _join(self) -> None:
        setup = self._setup
        replica = Replica(f"replica-{self._made}", 1, setup.shape, setup.routers)
        self._made += 1
        self.replicas[replica.name] = replica
        self._live[replica.name] = {}
        for policy in self.policies:
            policy.attach(replica.hello())
        self._send(replica)
        self._in(self._rng.random() * setup.heartbeat_s, self._beat, replica)

    def _beat(self, replica: Replica) -> None:
        if not replica.alive:
            return
        beat = replica.heartbeat()
        for policy in self.policies:
            policy.heartbeat(replica.name, replica.epoch, beat)
        self._outcome.sample(beat.load)
        self._in(self._setup.heartbeat_s, self._beat, replica)

    def _tick(self) -> None:
        for policy in self.policies:
            policy.tick()
        self._in(TICK_S, self._tick)

    def _die(self, number: int) -> None:
        replica = self.replicas.pop(f"replica-{number}", None)
        if replica is None:
            return
        replica.alive = False
        self.dead.append(replica)
        under = self._under.get(replica)
        if under is not None:  # tokens of whole steps have left it; the step under way is lost
            done = min(under.steps, under.run.steps_done(self.clock.now() - under.began_s))
            if done:
                self._settle(replica, done)
            else:
                del self._under[replica]
        for record in self._live[replica.name].values():
            flight = replica.engine.flights.get(str(record.request.number))
            if flight is not None:
                record.produced = flight.produced
        self._in(self._setup.hop_s, self._broken, replica)

    def _broken(self, replica: Replica) -> None:
        """Every router sees the connection end; each request goes on elsewhere."""
        for policy in self.policies:
            policy.lost(replica.name, replica.epoch)
        for record in list(self._live[replica.name].values()):
            self._lose(record, replica.name)

    def _lose(self, record: Record, name: str) -> None:
        del self._live[name][record.request.number]
        self.policies[record.router].failed(str(record.request.number))
        self._again(record, name, NoReplica("The replica died."))

    # --- conservation ------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that every request that arrived is in one place, and the replicas' own laws."""
        placed = sum(len(live) for live in self._live.values())
        waiting = sum(record.open for record in self._records) - placed
        assert waiting >= 0 and self._ended == sum(not record.open for record in self._records)
        for replica in self.replicas.values():
            if replica not in self._under:
                replica.engine.check_integrity()


def simulate(setup: Setup, workload: Workload, make: MakePolicy, seed: int) -> Outcome:
    """One run from empty replicas on."""
    return Cluster(setup, workload, make, seed).run()
