"""How much of the machine's CPU time others took while something of ours was measured."""

from __future__ import annotations

import os
import time

import psutil


class ForeignLoad:
    """Sums over all `with` blocks; what this process and its descendants used is not foreign."""

    def __init__(self) -> None:
        self._foreign_s = self._wall_s = 0.0
        self._begin = (0.0, 0.0, 0.0)

    def __enter__(self) -> ForeignLoad:
        self._begin = (time.perf_counter(), _busy_s(), _own_s())
        return self

    def __exit__(self, *raised: object) -> None:
        begin, busy, own = self._begin
        self._wall_s += time.perf_counter() - begin
        self._foreign_s += (_busy_s() - busy) - (_own_s() - own)

    @property
    def share(self) -> float:
        """Of all cores' time, 0 to 1; the kernel counts in hundredths of a second."""
        if self._wall_s == 0:
            return 0.0
        cores = os.cpu_count() or 1
        return min(1.0, max(0.0, self._foreign_s / (self._wall_s * cores)))


def _busy_s() -> float:
    """Of all cores since boot; time that a hypervisor gave to others is theirs too."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _own_s() -> float:
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue  # ended meanwhile: its time is its parent's from then on
        total += times.user + times.system + times.children_user + times.children_system
    return total
