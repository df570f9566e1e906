"""The shared tier: blocks in a Redis or Valkey server, seen by every replica of a cluster.

It knows no models and trusts nothing that comes back: the record's header and the checksum over the
whole payload decide, so parts of two writers make an OK only where they are the same bytes. It uses
GET, SET EX, EXISTS and DEL, no scripts and no scans (`clear` alone scans). A server in trouble
costs its callers half a second, then nothing until a probe finds it well (breaker.py).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvstore.tiers.base import BlockName, Status, TierStats
from kvstore.tiers.breaker import FAILURE_S, Admission, Breaker, Verdict
from kvstore.tiers.redis_admin import clear_prefix
from kvstore.tiers.redis_calls import LoadCall, StoreCall
from kvstore.tiers.redis_layout import delete_request, exists_requests, prefix, request
from kvstore.tiers.redis_link import Address, Link, LinkPool
from kvstore.tiers.redis_wire import STALL_S, Deadline, LinkFault, ServerError, Wire
from seams.clock import Clock, SystemClock

TTL_S = 24 * 3600
FORGET_S = 0.25
"""Deleting is best effort and waits no longer."""
CLEAR_S = 30.0
_FULL = frozenset({"OOM"})
_READ_ONLY = frozenset({"READONLY", "NOPERM", "MISCONF", "NOREPLICAS"})
_NO_STORES = _FULL | _READ_ONLY


class RedisTier:
    """A Tier over one server. Calls block the calling thread; at most `threads` at a time do.

    `namespace` keeps clusters apart, `representation` the ways their blocks are written; both stand
    in every key. Blocks vanish `ttl_s` seconds after they were stored, or when the server evicts.
    """

    name = "shared"

    def __init__(
        self,
        url: str,
        representation: str,
        *,
        namespace: str,
        ttl_s: int = TTL_S,
        threads: int = 2,
        stall_s: float = STALL_S,
        clock: Clock | None = None,
    ) -> None:
        """Connects at the first call, not here. Raises LaunchError if `url` is none of ours.

        `stall_s` is how long a server may show no life before the breaker opens.
        """
        assert ttl_s > 0 and stall_s > 0
        self._url = url
        self._representation, self._ttl_s = representation, ttl_s
        self._prefix = prefix(namespace, representation)
        self._clock = clock or SystemClock()
        self._stall_s = stall_s
        self._pool = LinkPool(Address(url, stall_s), self._clock, threads)
        self._breaker = Breaker(self._clock, bearable_s=stall_s)
        self._writes = Breaker(self._clock, bearable_s=0.0)  # open: the server takes no stores
        self._writes_state = "full"
        self._lock = threading.Lock()  # for the two that follow
        self._stats = TierStats()
        self._parts: dict[tuple[int, int], int] = {}  # (group, rank) -> parts of its blocks
        self._closed = False

    # -- the contract ----------------------------------------------------------------------------

    def lookup(self, names: Sequence[BlockName], deadline_s: float) -> list[bool]:
        """One round trip for all of them."""
        found = [False] * len(names)

        def ask(wire: Wire) -> int:
            wire.send([exists_requests(self._prefix, names)])
            counts = [wire.integer() for _ in names]
            found[:] = [not isinstance(count, ServerError) and count > 0 for count in counts]
            return sum(isinstance(count, ServerError) for count in counts)

        if names:
            self._converse(Deadline.within(deadline_s, self._clock), ask)
        return found

    def load(
        self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        """Parts are read straight into their place and then checked where they lie."""
        call = LoadCall(self._prefix, self._representation, names, into)
        started = self._clock.now()
        if not names:
            return []
        self._learn(call)
        deadline = Deadline.within(deadline_s, self._clock)
        left = self._converse(deadline, lambda wire: self._load(wire, call), blocked=Status.MISS)
        statuses = [status or left for status in call.statuses]
        if call.odd:
            self._forget(call.odd, deadline.left_s)
        self._count_load(call, statuses, self._clock.now() - started)
        return statuses

    def store(
        self, names: Sequence[BlockName], data: Sequence[memoryview], deadline_s: float
    ) -> list[Status]:
        """Asks first which are there, so that a block shared by many replicas is sent once."""
        call = StoreCall(self._prefix, self._representation, self._ttl_s, names, data)
        started = self._clock.now()
        if not names:
            return []
        self._learn(call)
        left = Status.DROPPED
        if not self._writes.refusing:
            deadline = Deadline.within(deadline_s, self._clock)
            left = self._converse(deadline, lambda wire: self._store(wire, call))
            if call.torn:
                self._forget(call.torn, deadline.left_s)
        statuses = [status or left for status in call.statuses]
        self._count_store(call, statuses, self._clock.now() - started)
        return statuses

    def discard(self, names: Sequence[BlockName]) -> None:
        """Waits a quarter of a second at most."""
        if names:
            self._forget(names, FORGET_S)

    def names(self) -> list[BlockName]:
        """Nothing: only the server could tell."""
        return []

    def clear(self) -> None:
        """Forget every block of this namespace and representation, whoever stored it."""
        if not self._closed and self._breaker.closed:
            clear_prefix(self._url, self._prefix, CLEAR_S)

    def stats(self) -> TierStats:
        """`blocks` and `bytes` stay 0: what a server holds, only a scan could tell
        (redis_admin.survey)."""
        with self._lock:
            stats = copy.copy(self._stats)
            stats.corrupt = self._stats.corrupt.copy()
        if not self._breaker.closed:
            stats.state = "broken"
        elif not self._writes.closed:
            stats.state = self._writes_state
        return stats

    def close(self) -> None:
        """What is in use elsewhere ends when it comes back."""
        self._closed = True
        self._pool.close()

    # -- one exchange ----------------------------------------------------------------------------

    def _converse(
        self,
        deadline: Deadline,
        talk: Callable[[Wire], int],
        blocked: Status = Status.DROPPED,
    ) -> Status:
        """Run `talk` on a connection of its own; it returns how many replies said that the server
        is in trouble. Returns what becomes of blocks it did not get to: `blocked` if there was no
        call at all."""
        started = self._clock.now()
        if deadline.at <= started:
            return Status.LATE
        call = self._admitted()
        if call is None:
            return blocked
        try:
            link = self._pool.take(deadline)
        except LinkFault as fault:
            return self._faulted(call, fault, started)
        started = self._clock.now()
        if not self._breaker.closed:  # opened while we waited for our turn
            self._pool.give(link)
            return blocked
        try:
            link.wire.begin(deadline)
            errors = talk(link.wire)
        except LinkFault as fault:
            self._pool.drop(link, fault)
            return self._faulted(call, fault, started)
        except BaseException:
            self._pool.drop(link, LinkFault("odd"))
            raise
        self._pool.give(link)
        if errors:
            self._breaker.failed(call, errors * FAILURE_S)
        else:  # whatever it found: the faults of hours must not add up
            self._breaker.succeeded(call)
        return Status.FAILED

    def _faulted(self, call: Admission, fault: LinkFault, started: float) -> Status:
        waited_s = self._clock.now() - started
        if fault.cause == "busy":
            return Status.LATE
        if fault.cause == "late":  # of a deadline too short for a healthy server, perhaps
            self._breaker.failed(call, waited_s)
            return Status.LATE
        self._breaker.failed(call, max(FAILURE_S, waited_s))
        return Status.FAILED

    def _admitted(self) -> Admission | None:
        """None: not to call at all. The probe of an open breaker is nobody's call: it has a thread
        of its own, and its callers go on without the tier."""
        if self._closed:
            return None
        call = self._breaker.admit()
        if call.verdict is Verdict.PROBE:
            self._pool.dial_aside(lambda dialling: self._probed(call, dialling))
        return call if call.verdict is Verdict.CALL else None

    def _probed(self, probe: Admission, dialling: Future[Link]) -> None:
        """Ask the new connection for a key that is not there; if it says so, all is well again."""
        if dialling.exception() is not None:
            self._breaker.failed(probe, FAILURE_S)
            return
        link = dialling.result()
        try:
            link.wire.begin(Deadline.within(self._stall_s, self._clock))
            link.wire.send([request(b"EXISTS", self._prefix + b"probe")])
            well = not isinstance(link.wire.integer(), ServerError)
        except LinkFault:
            well = False
        if well:
            self._pool.adopt(link)
            self._breaker.succeeded(probe)
        else:
            link.close()
            self._breaker.failed(probe, FAILURE_S)

    # -- load ------------------------------------------------------------------------------------

    def _load(self, wire: Wire, call: LoadCall) -> int:
        errors = 0
        for batch in call.batches():
            wire.send([call.requests(index) for index in batch])
            for index in batch:
                answer = call.read(wire, index)
                if isinstance(answer, ServerError):
                    answer, errors = Status.FAILED, errors + 1
                call.statuses[index] = answer
        return errors

    def _count_load(self, call: LoadCall, statuses: list[Status], spent_s: float) -> None:
        with self._lock:
            stats = self._stats
            stats.corrupt.update(call.faults)
            stats.hits += call.hits
            stats.misses += statuses.count(Status.MISS)
            stats.failed += statuses.count(Status.FAILED) + statuses.count(Status.LATE)
            stats.loaded_bytes += call.loaded_bytes
            stats.load_s += spent_s

    # -- store -----------------------------------------------------------------------------------

    def _store(self, wire: Wire, call: StoreCall) -> int:
        wire.send([exists_requests(self._prefix, call.names)])
        errors = 0
        for index in range(len(call.names)):
            count = wire.integer()
            if isinstance(count, ServerError):
                call.statuses[index] = Status.FAILED
                errors += 1
            elif count:
                call.statuses[index] = Status.OK
        if None not in call.statuses:
            return errors
        write = self._writes.admit()
        if write.verdict is Verdict.REFUSED:
            call.give_up()
            return errors
        for batch in call.batches():
            error = call.send(wire, batch)
            if error is not None and error.code in _NO_STORES:  # all of them, for a while
                self._writes_state = "full" if error.code in _FULL else "readonly"
                self._writes.failed(write, FAILURE_S)
                call.give_up()
                return errors
            errors += error is not None
        if call.stored:
            self._writes.succeeded(write)
        return errors

    def _forget(self, names: Sequence[BlockName], left_s: float) -> None:
        """Delete these if it can be done at once."""
        with self._lock:
            parts = [self._parts.get((name.group, name.rank), 1) for name in names]

        def delete(wire: Wire) -> int:
            pairs = zip(names, parts, strict=True)
            wire.send([b"".join(delete_request(self._prefix, n, p) for n, p in pairs)])
            replies = [wire.integer() for _ in names]
            errors = [reply for reply in replies if isinstance(reply, ServerError)]
            return sum(error.code not in _NO_STORES for error in errors)

        self._converse(Deadline.within(min(left_s, FORGET_S), self._clock), delete)

    def _learn(self, call: LoadCall | StoreCall) -> None:
        with self._lock:
            self._parts.update(call.parts)

    def _count_store(self, call: StoreCall, statuses: list[Status], spent_s: float) -> None:
        with self._lock:
            stats = self._stats
            stats.stored += call.stored
            stats.dropped += statuses.count(Status.DROPPED)
            stats.failed += statuses.count(Status.FAILED) + statuses.count(Status.LATE)
            stats.stored_bytes += call.stored_bytes
            stats.store_s += spent_s
