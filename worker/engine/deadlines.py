"""Deadlines: which live request expires next. It reads no clock."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from worker.engine.request import Request


class Deadlines:
    """Of the requests in `live`, by id; those that left it are forgotten on the way."""

    def __init__(self, live: Mapping[str, Request]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, str]] = []

    def add(self, request: Request) -> None:
        """Remember a request's deadline, if it has one."""
        spec = request.spec
        if spec.deadline_s is not None:
            heapq.heappush(self._heap, (spec.deadline_s, request.arrival, spec.request_id))

    def next_s(self) -> float | None:
        """The earliest deadline of a live request."""
        while self._heap:
            deadline_s, arrival, request_id = self._heap[0]
            request = self._live.get(request_id)
            if request is not None and request.arrival == arrival:
                return deadline_s
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_s: float) -> Request | None:
        """A live request whose deadline has passed, which is forgotten here."""
        deadline_s = self.next_s()
        if deadline_s is None or deadline_s > now_s:
            return None
        return self._live[heapq.heappop(self._heap)[2]]
