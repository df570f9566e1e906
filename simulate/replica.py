"""A replica as routers see it: its hello, its heartbeats and its numbered block events.

Production code: EventLog and Cursor, and the heartbeat's conversion. Modelled: the network, which
is a delay (simulate/cluster.py). It knows no policy.
"""

from __future__ import annotations

from banyan.v1 import internal_pb2
from kvstore.keys import ChainSpec, chain
from simulate.engine import Shape, SimEngine, StepResult
from simulate.steptime import StepTime
from simulate.workload import FINGERPRINT, Grain
from worker.engine.messages import EngineLoad
from worker.service.convert import heartbeat
from worker.service.event_log import Cursor, EventLog

PROTOCOL = 1
MODEL = "simulated"
NUMERIC_CLASS = "simulated"
KV_BYTES_PER_TOKEN = 131072
MARK_EVERY = 64  # batches: a digest rides along
TYPICAL_SEQUENCES = 16
TYPICAL_CONTEXT_TOKENS = 8192


class Replica:
    """One (name, epoch)."""

    def __init__(self, name: str, epoch: int, shape: Shape, routers: int) -> None:
        self.name, self.epoch, self.shape = name, epoch, shape
        self.engine = SimEngine(shape)
        self.alive = True
        self.version = 0  # of the planned end of those; an older end is void
        self.windows: dict[int, float] = {}  # index of a window of time -> busy seconds
        self._log = EventLog(name, epoch)
        self._cursors = [Cursor(self._log) for _ in range(routers)]

    def hello(self) -> internal_pb2.Hello:
        """What it says of itself: a new message each time."""
        grain, host = self.shape.grain, self.shape.host_blocks
        tiers = [internal_pb2.TierCapacity(tier=internal_pb2.TIER_DEVICE, blocks=self.shape.blocks)]
        if host:
            tiers.append(
                internal_pb2.TierCapacity(
                    tier=internal_pb2.TIER_HOST,
                    blocks=host,
                    bytes_per_s=KV_BYTES_PER_TOKEN / self.shape.host_s_per_token,
                )
            )
        group = internal_pb2.KVGroupInfo(
            id=0, kind="full", layers=32, block_bytes=KV_BYTES_PER_TOKEN * grain.block_tokens
        )
        return internal_pb2.Hello(
            protocol=PROTOCOL, replica=self.name, epoch=self.epoch, address=f"{self.name}:0",
            host=self.name, node=self.name, models=[_served(grain)],
            block_tokens=grain.block_tokens, kv_groups=[group], representation="simulated",
            numeric_class=NUMERIC_CLASS, capacities=tiers, probe=_probe(grain),
            priors=_priors(self.shape.times),
        )  # fmt: skip

    def heartbeat(self) -> internal_pb2.Heartbeat:
        """Its load now."""
        return heartbeat(self.engine.load(), EngineLoad(), False, False)

    def snapshot(self, router: int) -> None:
        """A router asks to start over."""
        self._cursors[router].want_snapshot()

    def log(self, result: StepResult) -> None:
        """Number what a step changed."""
        before = self._log.seq
        self._log.append(result.ops)
        if self._log.seq // MARK_EVERY != before // MARK_EVERY:
            self._log.mark()

    def unsent(self, router: int) -> list[internal_pb2.EventBatch]:
        """The batches that this router has not been sent yet; they count as sent now."""
        cursor = self._cursors[router]
        if cursor.wants_snapshot:
            cursor.begin(self.engine.snapshot())
        batches = []
        while (batch := cursor.take()) is not None:
            batches.append(batch)
        return batches

    def note_busy(self, began_s: float, ended_s: float, window_s: float) -> None:
        """Count a busy stretch into its windows."""
        at = int(began_s / window_s)
        while began_s < ended_s:
            end_s = min(ended_s, (at + 1) * window_s)
            self.windows[at] = self.windows.get(at, 0.0) + max(0.0, end_s - began_s)
            began_s, at = end_s, at + 1


def _served(grain: Grain) -> internal_pb2.ServedModel:
    return internal_pb2.ServedModel(
        root_id=grain.root, name=MODEL, context_tokens=1 << 20, model_fingerprint=FINGERPRINT,
        vocab_tokens=1 << 31,
    )  # fmt: skip


def _probe(grain: Grain) -> internal_pb2.ProbeChain:
    tokens = list(range(grain.block_tokens + 1))
    keys = chain(ChainSpec(grain.root, grain.block_tokens), tokens)
    return internal_pb2.ProbeChain(root_id=grain.root, token_ids=tokens, keys=b"".join(keys))


def _priors(times: StepTime) -> internal_pb2.Priors:
    """What a warm-up would have measured: a prompt alone, and a step with typical contexts."""
    tokens = TYPICAL_CONTEXT_TOKENS
    return internal_pb2.Priors(
        prefill_s_per_token=times.prompt_extra_s(tokens, 0) / tokens,
        step_s=times.decode_s(1, tokens),
        step_s_per_sequence=times.sequence_s + tokens * times.context_s,
    )
