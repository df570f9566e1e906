"""Service-level objectives: `ttft:500ms,tpot:50ms`. Knows no request."""

from __future__ import annotations

import re
from collections.abc import Mapping

from seams.errors import InvalidRequest

Slo = dict[str, float]
"""Metric -> the most seconds that a request may need; all of them have to hold."""

METRICS = ("ttft", "itl", "tpot", "e2e")
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TERM = re.compile(r"(\w+):(\d+(?:\.\d+)?)(us|ms|s)")


def parse_slo(text: str) -> Slo:
    """`text` taken apart; "" is no objective. Raises InvalidRequest."""
    found: Slo = {}
    for term in filter(None, (part.strip() for part in text.split(","))):
        match = _TERM.fullmatch(term)
        limit_s = float(match[2]) * UNITS_S[match[3]] if match else 0.0
        if match is None or match[1] not in METRICS or match[1] in found or limit_s <= 0:
            known = ", ".join(METRICS)
            raise InvalidRequest(
                f"--slo: {term} is no objective such as ttft:500ms; each of {known} once at most."
            )
        found[match[1]] = limit_s
    return found


def shown(slo: Mapping[str, float]) -> str:
    """As parse_slo reads it."""
    return ",".join(f"{metric}:{limit_s * 1e3:g}ms" for metric, limit_s in slo.items())
