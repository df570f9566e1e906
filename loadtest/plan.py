"""What a load test is asked to do: checked, and written into its header. Knows no target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.arrivals import CLOSED, SCHEDULE, WITH_RATE, Arrivals
from loadtest.slo import Slo
from loadtest.workloads.base import Shape
from loadtest.workloads.catalog import NAMES, TRACE
from seams.errors import InvalidRequest

SESSIONS = 64  # where neither their number nor a time is given
TIMES_FASTER = 64.0  # how much more than its first rate a search tries
ROUND_MAX = 1_000_000


@dataclass(frozen=True)
class Plan:
    """Raises InvalidRequest, one sentence.

    `rates_hz` are stages, each with texts of its own, so that none finds another's in a cache. Each
    stage has `sessions` sessions, or those that come in `duration_s`; in a closed loop and on a
    schedule none begins later than that. `warmup` sessions with other texts go before the first.
    """

    workload: str
    arrivals: Arrivals
    shape: Shape = field(default_factory=Shape)
    rates_hz: tuple[float, ...] = ()
    search: bool = False
    rate_max_hz: float | None = None
    precision: float = 0.1
    slo: Slo = field(default_factory=dict)
    attainment: float = 0.9
    sessions: int | None = None
    duration_s: float | None = None
    warmup: int = 2
    seed: int = 1
    timeout_s: float = 300.0
    trace: Path | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.workload not in NAMES:
            known = ", ".join(NAMES)
            raise InvalidRequest(f"There is no workload {self.workload}; there are {known}.")
        self._check_load()
        _check_shape(self.shape)
        for name in ("attainment", "precision"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidRequest(f"--{name} must be more than 0 and at most 1.")
        for name in ("duration_s", "timeout_s", "scale"):
            _check_positive(name, getattr(self, name))
        if self.sessions is not None and not 1 <= self.sessions <= ROUND_MAX:
            raise InvalidRequest(f"--sessions must be from 1 to {ROUND_MAX}.")
        if not 0 <= self.warmup <= ROUND_MAX:
            raise InvalidRequest(f"--warmup must be from 0 to {ROUND_MAX}.")

    def _check_load(self) -> None:
        kind = self.arrivals.kind
        for rate_hz in (*self.rates_hz, self.rate_max_hz):
            _check_positive("rate", rate_hz)
        if (kind in WITH_RATE) != bool(self.rates_hz):
            raise InvalidRequest(
                f"--rate is needed with --arrivals {', '.join(WITH_RATE)} and with no other."
            )
        if kind == SCHEDULE and self.workload != TRACE:
            raise InvalidRequest("--arrivals schedule needs the workload trace.")
        if self.search and (not self.slo or len(self.rates_hz) != 1):
            raise InvalidRequest("--search needs --slo and one --rate to begin with.")

    @property
    def sessions_max(self) -> int | None:
        """Of one stage; None if time alone bounds it."""
        if self.sessions is not None:
            return self.sessions
        bounded = self.arrivals.kind == SCHEDULE or (
            self.duration_s is not None and self.arrivals.kind != CLOSED
        )
        return None if bounded else SESSIONS

    def as_json(self) -> dict[str, Any]:
        """For the header; of a trace its name alone."""
        fields = asdict(self)
        fields["trace"] = self.trace.name if self.trace is not None else None
        return fields


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise InvalidRequest(f"--{name.replace('_', '-')} must be more than 0.")


def _check_shape(shape: Shape) -> None:
    for name, least in (
        ("turns", 1), ("groups", 1), ("branches", 1), ("documents", 1),
        ("documents_per_question", 1), ("prefix_tokens", 0), ("document_tokens", 1),
        ("input_tokens", 1), ("output_tokens", 1),
    ):  # fmt: skip
        if not least <= getattr(shape, name) <= ROUND_MAX:
            said = name.replace("_", "-")
            raise InvalidRequest(f"--{said} must be from {least} to {ROUND_MAX}.")
    if not 0 <= shape.spread < 1:
        raise InvalidRequest("--spread must be at least 0 and less than 1.")
    if not 0 <= shape.skew <= 10:
        raise InvalidRequest("--skew must be from 0 to 10.")
    if not 0 <= shape.think_s < float("inf"):
        raise InvalidRequest("--think-s must be at least 0.")
