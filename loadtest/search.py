"""The greatest rate that still meets an objective. Knows no target: it asks for one rate at a time.

Doubling finds the first rate that fails; where the very first one does, halving finds one that does
not. Bisection on a logarithmic scale narrows what lies between. It holds that a rate below one that
meets the objective meets it too; a noisy probe can therefore be wrong by its own noise, and no more
probes are spent on that.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from seams.errors import InvalidRequest

Probe = Callable[[float], Awaitable[bool]]
"""Whether a rate, sessions per second, meets the objective."""

PROBES_MAX = 64
HALVINGS_MAX = 2  # each takes twice as long as the one before


async def greatest_rate(
    probe: Probe, low_hz: float, high_hz: float, precision: float = 0.1
) -> float | None:
    """The greatest rate found up to `high_hz` that meets it, from `low_hz` on or, where that does
    not, below it; None if `low_hz` halved HALVINGS_MAX times does not either. The next one up that
    was tried and failed is at most 1 + `precision` times as large."""
    if not 0 < low_hz <= high_hz < float("inf") or not precision > 0:
        raise InvalidRequest("A search needs rates above 0, the least one first, and a precision.")
    good_hz: float = low_hz
    bad_hz: float | None = None
    while not await probe(good_hz):
        bad_hz = good_hz
        if bad_hz <= low_hz / 2**HALVINGS_MAX:
            return None
        good_hz /= 2
    for _ in range(PROBES_MAX):
        rate_hz = _next(good_hz, bad_hz, high_hz, precision)
        if rate_hz is None:
            break
        if await probe(rate_hz):
            good_hz = rate_hz
        else:
            bad_hz = rate_hz
    return good_hz


def _next(good_hz: float, bad_hz: float | None, high_hz: float, precision: float) -> float | None:
    """What to try next, None if it is known well enough."""
    if bad_hz is None:
        return min(2 * good_hz, high_hz) if good_hz < high_hz else None
    if bad_hz / good_hz <= 1 + precision:
        return None
    return math.sqrt(good_hz * bad_hz)
