"""What a run came to: a record of every request, and the figures made of them.

Latencies are a client's: they count the delays to the router's side of a replica. It knows no
policy and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from banyan.v1 import internal_pb2
from seams.errors import BanyanError
from simulate.replica import Replica
from simulate.workload import Grain, SimRequest


@dataclass(eq=False, slots=True)
class Record:
    """One request from its arrival on. Moments in seconds of the run; None = never came."""

    request: SimRequest
    router: int
    arrived_s: float
    replica: str = ""
    submitted_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    produced: int = 0  # before it was moved
    left: list[str] = field(default_factory=list)  # replicas that failed it
    error: BanyanError | None = None

    @property
    def open(self) -> bool:
        """Whether it has not ended yet."""
        return self.last_s is None and self.error is None

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; it must have one."""
        assert self.first_s is not None
        return self.first_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        """Arrival to last token; it must have ended well."""
        assert self.last_s is not None
        return self.last_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens; 0 for a single one."""
        assert self.last_s is not None and self.first_s is not None
        gaps = self.request.output_tokens - 1
        return (self.last_s - self.first_s) / gaps if gaps else 0.0


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as good: time to first token, mean time between tokens."""

    ttft_s: float = 5.0
    itl_s: float = 0.05


class Outcome:
    """One finished run."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.records: list[Record] = []
        self.busy_s: list[float] = []
        self.windows: list[dict[int, float]] = []  # per replica: window -> busy seconds
        self.host_tokens = self.steps = 0
        self.used_share_max = 0.0
        self._used_sum, self._samples = 0.0, 0

    def sample(self, load: internal_pb2.Load) -> None:
        """A heartbeat passed: blocks that running requests hold."""
        used = 1.0 - (load.blocks_free + load.blocks_cached) / load.blocks_total
        self.used_share_max = max(self.used_share_max, used)
        self._used_sum += used
        self._samples += 1

    def close(self, records: list[Record], replicas: Sequence[Replica], grain: Grain) -> None:
        """The run is over."""
        self.records = records
        for replica in replicas:
            engine = replica.engine
            self.busy_s.append(engine.busy_s)
            self.windows.append(replica.windows)
            self.steps += engine.steps
            self.host_tokens += engine.host.loaded_tokens if engine.host else 0

    @property
    def good(self) -> list[Record]:
        """Requests that ended well."""
        return [record for record in self.records if record.last_s is not None]

    @property
    def span_s(self) -> float:
        """First arrival to last token."""
        return max((r.last_s for r in self.records if r.last_s is not None), default=0.0)

    @property
    def used_share(self) -> float:
        """Mean share of the blocks that running requests hold."""
        return self._used_sum / self._samples if self._samples else 0.0

    def imbalance(self) -> float:
        """The busiest replica's busy time by the mean."""
        mean = sum(self.busy_s) / max(1, len(self.busy_s))
        return max(self.busy_s, default=0.0) / mean if mean else 1.0

    def window_imbalance(self) -> float:
        """The same per window, averaged over windows by what was done in them. The mean is over
        all replicas, so one that idles while others work counts."""
        total = weighted = 0.0
        for window in sorted({window for replica in self.windows for window in replica}):
            busy = [replica.get(window, 0.0) for replica in self.windows]
            total += sum(busy)
            weighted += max(busy) * len(busy)
        return weighted / total if total else 1.0

    def figures(self, slo: Slo) -> dict[str, tuple[float, str]]:
        """name -> (value, unit)."""
        good = self.good
        ttft = [record.ttft_s for record in good]
        e2e = [record.e2e_s for record in good]
        itl = [record.itl_s for record in good if record.request.output_tokens > 1]
        prompt = max(1, sum(record.request.prompt_tokens for record in good))
        cached = sum(record.cached_tokens for record in good)
        kept = sum(r.ttft_s <= slo.ttft_s and r.itl_s <= slo.itl_s for r in good)
        return {
            "goodput": (kept / self.span_s if self.span_s else 0.0, "requests/s"),
            "kept_share": (kept / max(1, len(self.records)), "of requests"),
            "ttft_mean": (mean(ttft), "s"),
            "ttft_p50": (percentile(ttft, 0.5), "s"),
            "ttft_p99": (percentile(ttft, 0.99), "s"),
            "e2e_mean": (mean(e2e), "s"),
            "e2e_p50": (percentile(e2e, 0.5), "s"),
            "e2e_p99": (percentile(e2e, 0.99), "s"),
            "itl_mean": (mean(itl), "s"),
            "itl_p99": (percentile(itl, 0.99), "s"),
            "cached_share": (cached / prompt, "of prompt tokens"),
            "device_share": (max(0, cached - self.host_tokens) / prompt, "of prompt tokens"),
            "host_share": (self.host_tokens / prompt, "of prompt tokens"),
            "imbalance": (self.imbalance(), "max / mean"),
            "imbalance_window": (self.window_imbalance(), "max / mean"),
            "blocks_used": (self.used_share, "of blocks"),
            "blocks_used_max": (self.used_share_max, "of blocks"),
            "preemptions": (float(sum(r.preemptions for r in self.records)), "times"),
            "recomputed": (float(sum(r.recomputed_tokens for r in self.records)), "tokens"),
            "moved": (float(sum(bool(r.left) for r in self.records)), "requests"),
            "failed": (float(len(self.records) - len(good)), "requests"),
        }


def mean(values: Iterable[float]) -> float:
    """Of the values; 0 for none."""
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that so many are not above; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
