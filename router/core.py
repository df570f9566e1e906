"""RouterCore: what the router knows and decides, as plain synchronous code over a Clock and an Rng.

It joins fleet, events, index, bookings and costs, and knows none of their insides; nor text,
sockets, or how a stream is carried. The contract is router/placement.py's `Core`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Sequence

from banyan.v1 import api_pb2, common_pb2, internal_pb2
from kvstore.keys import KEY_BYTES, BlockKey
from router.bookings import Booking
from router.cost import TERMS, Candidate, Cost, predict, ranked, reason, usual_line
from router.estimates import LogEwma
from router.events import BlockStream
from router.fleet import Fleet, Replica
from router.index import DISK, HOST, SHARDS, SHARED, Depths, PrefixIndex, prefixes
from router.placement import ModelEntry, Observed, Placement, PlaceRequest, ReplicaLoad
from router.provisional import Provisional
from seams.clock import Clock
from seams.errors import NoReplica
from seams.rng import Rng

OUTPUT_TOKENS_PRIOR = 128.0
SESSIONS_MAX = 1 << 16
CANDIDATES_KEPT = 8  # of one decision: the cheapest, and the longest holder
SWEEP_BLOCKS = 1 << 15  # per tick, about: some milliseconds
PREFILL_SLACK = 2.0  # provisional entries live for the predicted prefill times this, and the TTL
PREFILL_S_MAX = 60.0
_NOTHING = Depths(0, 0, 0)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A decision and what booking it needs."""

    replica: Replica
    decision: common_pb2.Decision
    at: Candidate
    cost: Cost
    left_numeric_class: bool


class RouterCore:
    """Implements router.placement.Core. One thread; every method returns at once."""

    def __init__(
        self,
        clock: Clock,
        rng: Rng,
        *,
        lease_s: float,
        decisions_kept: int,
        provisional_ttl_s: float = 2.0,
    ) -> None:
        assert lease_s > 0 and decisions_kept > 0 and provisional_ttl_s > 0
        self._clock, self._rng = clock, rng
        self._ttl_s, self._decisions_kept = provisional_ttl_s, decisions_kept
        self._index = PrefixIndex()
        self._provisional = Provisional(self._index)
        self._fleet = Fleet(lease_s)
        self._bookings: dict[str, Booking] = {}
        self._decisions: OrderedDict[str, common_pb2.Decision] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self._outputs: dict[str, LogEwma] = {}
        self._past_events: Counter[str] = Counter()  # of streams that are closed

    # ---- Fleet ----

    def attach(self, hello: internal_pb2.Hello) -> list[str]:
        """See Core. A newer epoch takes the name over: bookings and blocks of the old one go."""
        now_s = self._clock.now()
        self._fleet.check(hello, now_s)
        attached = self._fleet.replicas.get(hello.replica)
        if attached is not None and attached.epoch == hello.epoch:
            attached.greet(hello, now_s)
            return []
        void = []
        if attached is not None:
            self._forget(attached)
            void = [attached.name]
        self._fleet.add(hello, BlockStream(self._index, self._provisional), now_s)
        return void

    def _forget(self, replica: Replica) -> None:
        self._count_events(replica, self._past_events)
        self._fleet.remove(replica.name)

    def heartbeat(self, replica: str, epoch: int, beat: internal_pb2.Heartbeat) -> None:
        """See Core."""
        attached = self._fleet.get(replica, epoch)
        if attached is None:
            return
        attached.seen_s, attached.link_up = self._clock.now(), True
        attached.draining = attached.draining or beat.draining
        load = beat.load
        if load.steps != attached.work.reported.steps:  # an idle replica repeats old figures
            attached.estimates.learn_prefill_rate(load.prefill_s_per_token)
            attached.estimates.learn_step(load.step_s, load.running)
        attached.report(load)

    def link_lost(self, replica: str, epoch: int) -> None:
        """See Core."""
        attached = self._fleet.get(replica, epoch)
        if attached is not None:
            attached.link_up = False

    def tick(self) -> list[tuple[str, int]]:
        """See Core. Also sweeps a part of the index; call it a few times a second."""
        now_s = self._clock.now()
        gone = self._fleet.expired(now_s)
        for replica in gone:
            self._forget(replica)
        self._provisional.expire(now_s)
        self._index.sweep(SHARDS * SWEEP_BLOCKS // (len(self._index) + 1) + 1)
        return [(replica.name, replica.epoch) for replica in gone]

    def events(self, batch: internal_pb2.EventBatch) -> bool:
        """See Core. An older epoch's batches are ignored; a replica that is not attached, or not
        yet in this epoch, has to send a snapshot once it is.
        """
        attached = self._fleet.replicas.get(batch.replica)
        if attached is None or attached.epoch < batch.epoch:
            return True
        if attached.epoch > batch.epoch:
            return False
        return attached.stream.receive(batch, self._clock.now())

    # ---- Placing ----

    def place(self, request: PlaceRequest) -> Placement:
        """See Core. A request that is still booked is moved: its old booking counts as failed."""
        if request.request_id in self._bookings:
            self.failed(request.request_id)
        choice = self._choose(request)
        self._book(request, choice)
        self._keep(choice.decision)
        return Placement(
            request_id=request.request_id,
            replica=choice.replica.name,
            epoch=choice.replica.epoch,
            address=choice.replica.hello.address,
            left_numeric_class=choice.left_numeric_class,
            decision=choice.decision,
        )

    def preview(self, request: PlaceRequest) -> common_pb2.Decision:
        """See Core."""
        return self._choose(request).decision

    def _choose(self, request: PlaceRequest) -> _Choice:
        now_s = self._clock.now()
        replicas = self._fleet.candidates(request.model, request.root_id, request.excluded, now_s)
        if not replicas:
            raise NoReplica(f"No replica can serve model {request.model} now.")
        same = [r for r in replicas if r.hello.numeric_class == request.numeric_class]
        left = bool(request.numeric_class) and not same
        if request.numeric_class and same:
            replicas = same
        depths = {} if request.no_cache else self._index.match(request.keys)
        session = self._sessions.get((request.tenant, request.session))
        output = self._expected_output(request)
        found = {
            replica.name: self._candidate(request, replica, depths, session, output, now_s)
            for replica in replicas
        }
        line = usual_line([at.prompts for at in found.values()])
        costs = [predict(at, request.tokens, output, line) for at in found.values()]
        order = ranked(costs, self._rng)
        picked = order[0]
        decision = _decision(request, order, left)
        replica = self._fleet.replicas[picked.replica]
        return _Choice(replica, decision, found[picked.replica], picked, left)

    def _expected_output(self, request: PlaceRequest) -> float:
        usual = self._outputs.get(request.model)
        expected = usual.value if usual is not None else OUTPUT_TOKENS_PRIOR
        return min(expected, float(request.max_tokens)) if request.max_tokens else expected

    def _candidate(
        self,
        request: PlaceRequest,
        replica: Replica,
        depths: dict[int, Depths],
        session: tuple[str, int] | None,
        output: float,
        now_s: float,
    ) -> Candidate:
        size = replica.hello.block_tokens
        depth = self._limited(request.keys, replica, depths.get(replica.stream.slot, _NOTHING))
        shared = depth.disk
        if self._index.shared_seen and not request.no_cache:
            shared = self._shared_depth(request.keys, replica, depth.disk)
        work, rate = replica.work, replica.estimates.prefill_s_per_token
        free, evictable = replica.device_blocks()
        needed = -(-(request.tokens + int(output) * request.choices) // size) - depth.device
        tiers = replica.tier_s_per_token
        line = work.line(request.tokens, max(1, request.tokens - shared * size), rate, now_s)
        return Candidate(
            replica=replica.name,
            device_tokens=depth.device * size,
            host_tokens=depth.host * size,
            disk_tokens=depth.disk * size,
            shared_tokens=shared * size,
            booked_prefill_s=line.before_s,
            prefill_s_per_token=rate,
            overhead_s=replica.estimates.overhead_s,
            decoding=work.decoding + work.foreign_sequences,
            passed=line.passed,
            prompts=line.prompts,
            step_s=replica.estimates.step_s(work.batch + request.choices),
            blocks_needed=needed,
            blocks_free=free - work.fresh_blocks,
            blocks_evictable=max(0, evictable - depth.device),
            block_tokens=size,
            host_s_per_token=tiers[HOST],
            disk_s_per_token=tiers[DISK],
            shared_s_per_token=tiers[SHARED],
            off_session=session is not None and session != (replica.name, replica.epoch),
        )

    def _limited(self, keys: Sequence[BlockKey], replica: Replica, depth: Depths) -> Depths:
        """Cut the match of group 0 to where the other groups hold what attention looks back at."""
        end = depth.disk
        if not (end and replica.window_groups):
            return depth
        before = -1
        while end and end != before:  # each group may shorten the others'
            before = end
            for group, blocks in replica.window_groups:
                end = self._index.usable_depth(keys, replica.stream.slot, end, group, blocks)
        return Depths(min(depth.device, end), min(depth.host, end), end)

    def _shared_depth(self, keys: Sequence[BlockKey], replica: Replica, depth: int) -> int:
        domain = replica.hello.cache_domain
        slots = [
            other.stream.slot
            for other in self._fleet.replicas.values()
            if other is replica or (domain and other.hello.cache_domain == domain)
        ]
        return self._index.shared_depth(keys, depth, slots)

    def _book(self, request: PlaceRequest, choice: _Choice) -> None:
        now_s, at, replica = self._clock.now(), choice.at, choice.replica
        booking = Booking(
            request_id=request.request_id,
            replica=replica.name,
            epoch=replica.epoch,
            model=request.model,
            placed_s=now_s,
            prompt_tokens=request.tokens,
            prefill_tokens=request.tokens - choice.cost.matched_tokens,
            queued_s=at.booked_prefill_s,
            blocks=max(0, at.blocks_needed),
            choices=request.choices,
            decision=choice.decision,
        )
        self._bookings[request.request_id] = booking
        replica.work.add(booking)
        if not request.no_cache and request.keys:
            prefill_s = at.booked_prefill_s + booking.prefill_tokens * at.prefill_s_per_token
            expires_s = now_s + self._ttl_s + min(PREFILL_SLACK * prefill_s, PREFILL_S_MAX)
            packed = b"".join(request.keys)
            held = at.disk_tokens // at.block_tokens * KEY_BYTES
            others = [
                name
                for group, _ in replica.window_groups
                for name in prefixes(packed[held:], group)
            ]
            slot = replica.stream.slot
            self._provisional.book(request.request_id, slot, prefixes(packed), others, expires_s)
        if request.session:
            self._sessions[request.tenant, request.session] = (replica.name, replica.epoch)
            self._sessions.move_to_end((request.tenant, request.session))
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)

    def _keep(self, decision: common_pb2.Decision) -> None:
        self._decisions.pop(decision.request_id, None)
        self._decisions[decision.request_id] = decision
        while len(self._decisions) > self._decisions_kept:
            self._decisions.popitem(last=False)

    # ---- The life of a request ----

    def first_token(self, request_id: str) -> None:
        """See Core. Its provisional entries get the TTL from now: events are on their way."""
        booking = self._bookings.get(request_id)
        replica = self._holder(booking)
        if booking is not None and replica is not None:
            now_s = self._clock.now()
            replica.work.end_prefill(booking, now_s)
            self._provisional.expire_at(request_id, now_s + self._ttl_s)

    def finished(self, request_id: str, delivered_tokens: int | None, observed: Observed) -> None:
        """See Core. Ignored for requests that are not booked (any more)."""
        booking = self._bookings.get(request_id)
        if booking is None:
            return
        if delivered_tokens is not None:
            booking.decision.delivered_tokens = delivered_tokens
        replica = self._holder(booking)
        if replica is not None:
            now_s = self._clock.now()
            self._provisional.expire_at(request_id, now_s + self._ttl_s)
            self._learn(replica, booking, observed)
        self._end(booking)

    def _learn(self, replica: Replica, booking: Booking, observed: Observed) -> None:
        estimates = replica.estimates
        estimates.learn_prefill(observed.computed_tokens, observed.prefill_s, booking.queued_s)
        if observed.decode_tokens < 1:
            return
        if observed.decode_s > 0 and not replica.work.reported.step_s:
            per_token_s = observed.decode_s / observed.decode_tokens
            estimates.learn_step(per_token_s, replica.work.batch)
        if booking.model not in self._outputs:
            self._outputs[booking.model] = LogEwma(OUTPUT_TOKENS_PRIOR)
        self._outputs[booking.model].add(float(observed.decode_tokens + 1))

    def failed(self, request_id: str) -> None:
        """See Core. Ignored for requests that are not booked (any more)."""
        booking = self._bookings.get(request_id)
        if booking is not None:
            self._provisional.drop(request_id)
            self._end(booking)

    def _end(self, booking: Booking) -> None:
        replica = self._holder(booking)
        if replica is not None:
            replica.work.remove(booking, self._clock.now())
        del self._bookings[booking.request_id]

    def _holder(self, booking: Booking | None) -> Replica | None:
        """Its replica, unless that is gone; one that came back knows nothing of it."""
        if booking is None:
            return None
        replica = self._fleet.get(booking.replica, booking.epoch)
        if replica is None or replica.work.bookings.get(booking.request_id) is not booking:
            return None
        return replica

    # ---- Questions ----

    def explain(self, request_id: str) -> common_pb2.Decision | None:
        """See Core. The recorded object itself: not to be changed."""
        return self._decisions.get(request_id)

    def models(self) -> dict[str, ModelEntry]:
        """See Core."""
        return self._fleet.models(self._clock.now())

    def state(self) -> list[api_pb2.ReplicaState]:
        """See Core."""
        now_s = self._clock.now()
        return [_state(replica, self._index, now_s) for replica in self._fleet.replicas.values()]

    def loads(self) -> list[ReplicaLoad]:
        """See Core."""
        now_s = self._clock.now()
        return [_load(replica, now_s) for replica in self._fleet.replicas.values()]

    @property
    def index_blocks(self) -> int:
        """Distinct blocks known, of all replicas, KV groups and tiers, booked ones too."""
        return len(self._index)

    def event_counts(self) -> dict[str, int]:
        """See Core; by the names of EventCounts."""
        total = Counter(self._past_events)
        for replica in self._fleet.replicas.values():
            self._count_events(replica, total)
        return dict(total)

    @staticmethod
    def _count_events(replica: Replica, into: Counter[str]) -> None:
        into.update(dataclasses.asdict(replica.stream.counts))

    def held_blocks(self, replica: str) -> dict[int, int]:
        """What the index has for a replica, block -> lanes. Scans: for tests."""
        return self._index.held(self._fleet.replicas[replica].stream.slot)

    def check_integrity(self) -> None:
        """Assert every part's laws and that they agree. Scans: for tests."""
        self._index.check_integrity()
        self._provisional.check_integrity()
        booked: set[str] = set()
        for replica in self._fleet.replicas.values():
            replica.work.check_integrity()
            booked |= set(replica.work.bookings)
        for request_id, booking in self._bookings.items():
            assert (request_id in booked) == (self._holder(booking) is not None)
        assert booked <= set(self._bookings)
        assert len(self._decisions) <= self._decisions_kept


def _decision(request: PlaceRequest, order: list[Cost], left_class: bool) -> common_pb2.Decision:
    picked = order[0]
    longest = max(order, key=lambda cost: cost.matched_tokens)
    shown = order[:CANDIDATES_KEPT]
    if longest not in shown:
        shown[-1] = longest
    why = reason(picked, order, request.tokens)
    if left_class:
        why = f"{why[:-1]}; no replica of the stream's numeric class was left."
    return common_pb2.Decision(
        request_id=request.request_id,
        model=request.model,
        replica=picked.replica,
        prompt_tokens=request.tokens,
        available_tokens=longest.matched_tokens,
        chosen_tokens=picked.matched_tokens,
        reason=why,
        candidates=[_candidate_cost(cost) for cost in shown],
    )


def _candidate_cost(cost: Cost) -> common_pb2.CandidateCost:
    return common_pb2.CandidateCost(
        replica=cost.replica,
        total_s=cost.total_s,
        terms=[
            common_pb2.CostTerm(name=name, seconds=seconds)
            for name, seconds in zip(TERMS, cost.terms, strict=True)
        ],
        matched_tokens=cost.matched_tokens,
    )


def _load(replica: Replica, now_s: float) -> ReplicaLoad:
    load = replica.work.reported if replica.work.reports else None
    return ReplicaLoad(replica.name, replica.state(now_s), now_s - replica.seen_s, load)


def _state(replica: Replica, index: PrefixIndex, now_s: float) -> api_pb2.ReplicaState:
    load = replica.work.reported
    return api_pb2.ReplicaState(
        replica=replica.name,
        epoch=replica.epoch,
        state=replica.state(now_s),
        address=replica.hello.address,
        models=list(replica.served),
        running=load.running,
        waiting=load.waiting,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        kv_token_bytes=load.kv_token_bytes,
        blocks_indexed=index.stored(replica.stream.slot),
        hit_share=load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0,
        heartbeat_age_s=now_s - replica.seen_s,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        steps=load.steps,
        numeric_class=replica.hello.numeric_class,
        representation=replica.hello.representation,
        tiers=load.tiers,
    )
