"""Transport: how the synchronous core hands a message to a peer, knowing no gRPC or asyncio."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from seams.clock import VirtualClock
from seams.rng import Rng

Receive = Callable[[str, bytes], None]
"""Called with (sender, payload) when a message arrives."""


class Transport(Protocol):
    """Delivers whole messages, best effort: a message may be lost when the peer is.

    The sender learns of a full queue (`send` returns False), never of a loss; whoever needs more
    numbers its messages and asks again (kvstore events do).
    """

    def send(self, peer: str, payload: bytes) -> bool:
        """Queue `payload` for `peer`; False if its bounded queue is full or it is unknown.

        Never blocks and keeps no reference to anything mutable.
        """
        ...


@dataclass(frozen=True)
class Faults:
    """Shares in [0, 1] of messages lost, sent twice, and the largest extra delay in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    delay_s_max: float = 0.0


@dataclass(order=True)
class _InFlight:
    due_s: float
    order: int
    sender: str = field(compare=False)
    peer: str = field(compare=False)
    payload: bytes = field(compare=False)


class MemoryTransport:
    """All peers of a simulated cluster in one process, with faults drawn from a seeded Rng.

    Delayed messages overtake each other, so `delay_s_max` also means reordering.
    """

    def __init__(self, clock: VirtualClock, rng: Rng, faults: Faults | None = None) -> None:
        self._clock = clock
        self._rng = rng
        self.faults = faults or Faults()
        self._receivers: dict[str, Receive] = {}
        self._queue: list[_InFlight] = []
        self._order = 0

    def bind(self, name: str, receive: Receive) -> None:
        """Register `receive` for messages addressed to `name`; replaces an earlier one."""
        self._receivers[name] = receive

    def unbind(self, name: str) -> None:
        """Drop `name`; messages on their way to it are lost."""
        self._receivers.pop(name, None)

    def sender(self, name: str) -> Transport:
        """The Transport that `name` sends with."""
        return _Endpoint(self, name)

    def post(self, sender: str, peer: str, payload: bytes) -> bool:
        """Queue one message from `sender` to `peer`, subject to the faults in force."""
        if peer not in self._receivers:
            return False
        if self._rng.random() < self.faults.loss:
            return True
        copies = 2 if self._rng.random() < self.faults.duplication else 1
        for _ in range(copies):
            due_s = self._clock.now() + self._rng.random() * self.faults.delay_s_max
            self._order += 1
            heapq.heappush(self._queue, _InFlight(due_s, self._order, sender, peer, bytes(payload)))
        return True

    def deliver(self) -> int:
        """Hand over every message that is due; returns how many arrived."""
        arrived = 0
        while self._queue and self._queue[0].due_s <= self._clock.now():
            message = heapq.heappop(self._queue)
            receive = self._receivers.get(message.peer)
            if receive is not None:
                receive(message.sender, message.payload)
                arrived += 1
        return arrived


class _Endpoint:
    def __init__(self, network: MemoryTransport, name: str) -> None:
        self._network = network
        self._name = name

    def send(self, peer: str, payload: bytes) -> bool:
        return self._network.post(self._name, peer, payload)
