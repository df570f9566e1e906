"""The queue of sequences without blocks: fair between tenants, first come first served inside one.

Tenants are compared by the tokens they were served (virtual token counters, Sheng et al., OSDI
2024), prompts charged whole: how much of a prompt was cached never changes another's turn. Inside a
tenant: preempted ones, then by priority, then by arrival; who among equals has more cached may be
admitted first (`overtake`). It knows no blocks and no models.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from worker.engine.request import Sequence

TENANTS_IDLE_MAX = 4096

_Key = tuple[bool, int, int, int]


def _key(sequence: Sequence) -> _Key:
    priority = -sequence.request.spec.priority
    if sequence.preempted:
        return False, 0, *sequence.age
    return True, priority, *sequence.age


@dataclass(slots=True)
class Tenant:
    """What one tenant was served, and what of it waits."""

    served: int  # tokens
    live: int = 0  # requests anywhere in the engine
    entries: list[tuple[_Key, Sequence]] = field(default_factory=list)


class WaitingQueue:
    """Sequences in state WAITING. A sequence's key must not change while it is queued."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._floor = 0  # what an idle tenant is lifted to when it comes back: no saved-up turns
        self._count = 0
        self.tokens = 0  # to be computed for all that wait, before any cache hit

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self._tenants.values():
            for _, sequence in tenant.entries:
                yield sequence

    def join(self, name: str) -> Tenant:
        """A request of this tenant entered the engine; `served` of the answer is to be raised by
        the tokens that it is served, until it leaves."""
        tenant = self._tenants.get(name)
        self._raise_floor()
        if tenant is None:
            tenant = self._tenants[name] = Tenant(self._floor)
        elif tenant.live == 0:
            tenant.served = max(tenant.served, self._floor)
        tenant.live += 1
        return tenant

    def leave(self, name: str) -> None:
        """A request of this tenant left the engine. O(1) unless it was the tenant's last."""
        tenant = self._tenants[name]
        tenant.live -= 1
        assert tenant.live >= 0
        if tenant.live == 0:
            assert not tenant.entries
            self._raise_floor(tenant.served)
            self._forget_idle()

    def _raise_floor(self, served: int = 0) -> None:
        """The least served of the active tenants is the floor, `served` if none is active."""
        active = [t.served for t in self._tenants.values() if t.live]
        self._floor = max(self._floor, min(active, default=served))

    def _forget_idle(self) -> None:
        """Drop idle tenants that nothing is remembered of, and all if there are too many."""
        idle = [name for name, t in self._tenants.items() if not t.live]
        for name in idle:
            if self._tenants[name].served <= self._floor or len(idle) > TENANTS_IDLE_MAX:
                del self._tenants[name]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its request must have joined."""
        insort(self._tenants[sequence.request.spec.tenant].entries, (_key(sequence), sequence))
        self._count += 1
        self.tokens += sequence.pending

    def remove(self, sequence: Sequence) -> None:
        """Take a queued sequence out."""
        entries = self._tenants[sequence.request.spec.tenant].entries
        at = bisect_left(entries, _key(sequence), key=lambda entry: entry[0])
        assert entries[at][1] is sequence
        del entries[at]
        self._count -= 1
        self.tokens -= sequence.pending

    def peek(self, passed: Container[Sequence] = ()) -> Sequence | None:
        """Whose turn it is: the first of the least served tenant that is not `passed` over in this
        step. Mutates nothing."""
        heads = [
            (tenant.served, sequence.age, sequence)
            for tenant in self._tenants.values()
            if (sequence := next((s for _, s in tenant.entries if s not in passed), None))
        ]
        return min(heads)[2] if heads else None

    def equals(
        self, head: Sequence, count: int, passed: Container[Sequence] = ()
    ) -> list[Sequence]:
        """`head`, and up to `count` - 1 behind it in its tenant's queue that came to it in the same
        way: of one priority, not preempted, not `passed` over."""
        if head.preempted:
            return [head]
        found: list[Sequence] = []
        priority = head.request.spec.priority
        for _, sequence in self._tenants[head.request.spec.tenant].entries:
            if sequence.preempted or sequence in passed:
                continue
            if len(found) == count or sequence.request.spec.priority < priority:
                break
            found.append(sequence)
        return found

    @staticmethod
    def overtake(passed: list[Sequence], chosen: Sequence) -> None:
        """`chosen` is admitted before those `passed`, which came before it. The tenant is charged
        in the order of its queue all the same, so that what is cached for it never changes another
        tenant's turn."""
        line = [*passed, chosen]
        charges = [sequence.request.charge for sequence in line]
        for sequence, charge in zip(line, [*charges[1:], charges[0]], strict=True):
            sequence.request.charge = charge
        for sequence in passed:
            sequence.overtaken += 1
