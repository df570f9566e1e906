"""Who serves: replicas by name, their epochs, leases and states, and the parity check at attach.

It knows hellos and heartbeats; not sockets, costs or which blocks a replica holds.

ready -> suspect (its link broke, it reports a stall and has not stepped since, or it missed half a
lease of heartbeats; ready again with the next heartbeat) -> gone (the lease is over: forgotten).
Draining is final.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from banyan.v1 import internal_pb2
from kvstore.keys import KEY_BYTES, ChainSpec, RootId, chain, root
from router.bookings import Workload
from router.estimates import ClassEstimates, Estimates, Priors
from router.events import BlockStream
from router.index import DEVICE, DISK, HOST, SHARED
from router.placement import ModelEntry
from seams.errors import Incompatible

PROTOCOL = 1
READY, SUSPECT, DRAINING = "ready", "suspect", "draining"
BLOCKS_UNKNOWN = 1 << 40  # free, where a replica has told nothing yet: no pressure
# Bytes per second into the device where a replica has not measured a tier.
TIER_BYTES_PER_S = {HOST: 8e9, DISK: 2e9, SHARED: 5e8}
TIERS = {"host": HOST, "disk": DISK, "shared": SHARED}  # as loads name them


@dataclass
class Replica:
    """One attached (replica, epoch)."""

    hello: internal_pb2.Hello
    stream: BlockStream
    estimates: Estimates
    seen_s: float
    lease_s: float
    work: Workload = field(default_factory=Workload)
    served: dict[str, internal_pb2.ServedModel] = field(default_factory=dict)
    tier_s_per_token: dict[int, float] = field(default_factory=dict)
    window_groups: list[tuple[int, int]] = field(default_factory=list)  # (group, blocks needed)
    link_up: bool = True
    draining: bool = False
    stalled_at: int | None = None  # its step count when it last reported a stall, if still that

    def __post_init__(self) -> None:
        self.greet(self.hello, self.seen_s)

    def greet(self, hello: internal_pb2.Hello, now_s: float) -> None:
        """Take over a hello of the same epoch: the served list may have changed."""
        self.hello, self.seen_s, self.link_up = hello, now_s, True
        self.served = {model.name: model for model in hello.models}
        self.window_groups = [
            (group.id, _blocks_looked_at(group, hello.block_tokens))
            for group in hello.kv_groups
            if group.id
        ]
        told = {int(c.tier): c.bytes_per_s for c in hello.capacities}
        for tier, default in TIER_BYTES_PER_S.items():
            if told.get(tier) or tier not in self.tier_s_per_token:
                self._time_tier(tier, told.get(tier) or default)

    def _time_tier(self, tier: int, bytes_per_s: float) -> None:
        block_bytes = sum(group.block_bytes for group in self.hello.kv_groups)
        self.tier_s_per_token[tier] = block_bytes / self.hello.block_tokens / bytes_per_s

    @property
    def name(self) -> str:
        """Stable across restarts."""
        return self.hello.replica

    @property
    def epoch(self) -> int:
        """Of this start."""
        return self.hello.epoch

    def state(self, now_s: float) -> str:
        """ready | suspect | draining."""
        if self.draining:
            return DRAINING
        late = now_s - self.seen_s > self.lease_s / 2
        if late or not self.link_up or self.stalled_at is not None:
            return SUSPECT
        return READY

    def report(self, load: internal_pb2.Load) -> None:
        """Its own figures arrived. A stall whose requests were taken away looks idle: only a
        further step proves that it is over. The speeds of tiers are its own too, once it has any:
        they come smoothed, and most replicas say hello before anything was ever loaded."""
        if load.stalled:
            self.stalled_at = load.steps
        elif load.steps != self.stalled_at:
            self.stalled_at = None
        for told in load.tiers:
            if told.tier in TIERS and told.load_bytes_per_s > 0:
                self._time_tier(TIERS[told.tier], told.load_bytes_per_s)
        self.work.report(load)

    def device_blocks(self) -> tuple[int, int]:
        """(free, evictable) blocks of group 0, from the last report or else the hello."""
        load = self.work.reported
        if load.blocks_total:
            return load.blocks_free, load.blocks_cached
        capacity = sum(c.blocks for c in self.hello.capacities if c.tier == DEVICE)
        return capacity or BLOCKS_UNKNOWN, 0


def _blocks_looked_at(group: internal_pb2.KVGroupInfo, block_tokens: int) -> int:
    """How many blocks before its position a further token needs of the group."""
    if group.kind == "state":
        return 1
    if not group.window_tokens:
        return 1 << 30
    return max(1, -(-(group.window_tokens - 1) // block_tokens))


class Fleet:
    """All attached replicas by name."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._classes = ClassEstimates()
        self.replicas: dict[str, Replica] = {}

    def get(self, name: str, epoch: int) -> Replica | None:
        """The replica if exactly this epoch of it is attached."""
        replica = self.replicas.get(name)
        return replica if replica is not None and replica.epoch == epoch else None

    def check(self, hello: internal_pb2.Hello, now_s: float) -> None:
        """Raise Incompatible if the replica and this router, or the fleet, disagree."""
        attached = self.replicas.get(hello.replica)
        if attached is not None and attached.epoch > hello.epoch:
            raise Incompatible(f"A newer start of replica {hello.replica} is attached already.")
        check_parity(hello)
        for other in self.replicas.values():
            if other.name != hello.replica and other.state(now_s) == READY:
                _check_agreement(hello, other)

    def add(self, hello: internal_pb2.Hello, stream: BlockStream, now_s: float) -> Replica:
        """Enter a checked replica, ready; the name must be free."""
        assert hello.replica not in self.replicas
        priors = Priors(
            hello.priors.prefill_s_per_token, hello.priors.step_s, hello.priors.step_s_per_sequence
        )
        model = hello.models[0].model_fingerprint
        estimates = self._classes.of(hello.numeric_class, model, priors)
        replica = Replica(hello, stream, estimates, now_s, self._lease_s)
        self.replicas[hello.replica] = replica
        return replica

    def remove(self, name: str) -> Replica:
        """Forget a replica and its blocks."""
        replica = self.replicas.pop(name)
        replica.stream.close()
        return replica

    def expired(self, now_s: float) -> list[Replica]:
        """Replicas whose lease is over."""
        return [r for r in self.replicas.values() if now_s - r.seen_s > self._lease_s]

    def candidates(
        self, model: str, root_id: RootId, excluded: Iterable[str], now_s: float
    ) -> list[Replica]:
        """Who may serve: the ready replicas; the suspect ones only if there is no ready one. One
        that is stalled right now never: what is sent there only waits.
        """
        out = set(excluded)
        serving: dict[str, list[Replica]] = {READY: [], SUSPECT: [], DRAINING: []}
        for replica in self.replicas.values():
            served = replica.served.get(model)
            if replica.name in out or replica.work.reported.stalled:
                continue
            if served is not None and served.root_id == root_id:
                serving[replica.state(now_s)].append(replica)
        return serving[READY] or serving[SUSPECT]

    def models(self, now_s: float) -> dict[str, ModelEntry]:
        """Served models by name. The context is the shortest any replica serves, so that a stream
        may move; `replicas` are the ready ones.
        """
        entries: dict[str, ModelEntry] = {}
        order = sorted(self.replicas.values(), key=lambda r: (r.state(now_s) != READY, r.name))
        for replica in order:
            ready = (replica.name,) if replica.state(now_s) == READY else ()
            for name, served in replica.served.items():
                known = entries.get(name)
                if known is None:
                    entries[name] = ModelEntry(served, replica.hello.block_tokens, ready)
                elif ready:
                    entries[name] = _joined(known, served, ready)
        return entries


def _joined(
    entry: ModelEntry, served: internal_pb2.ServedModel, ready: tuple[str, ...]
) -> ModelEntry:
    shorter = served.context_tokens < entry.served.context_tokens
    return ModelEntry(
        served if shorter else entry.served, entry.block_tokens, entry.replicas + ready
    )


def check_protocol(hello: internal_pb2.Hello) -> None:
    """Raises Incompatible if the replica speaks another protocol."""
    if hello.protocol != PROTOCOL:
        raise Incompatible(
            f"The replica speaks protocol {hello.protocol}, this router protocol {PROTOCOL}."
        )


def check_parity(hello: internal_pb2.Hello) -> None:
    """Compare what a replica claims with what this router computes. Raises Incompatible."""
    name = hello.replica
    check_protocol(hello)
    if not name or hello.block_tokens < 1 or not hello.models:
        raise Incompatible("The replica's hello lacks a name, a block size or a model.")
    if len({model.name for model in hello.models}) != len(hello.models):
        raise Incompatible(f"Replica {name} serves two models under one name.")
    for model in hello.models:
        expected = root(model.model_fingerprint, model.adapter_fingerprint, hello.block_tokens)
        if model.root_id != expected:
            raise Incompatible(
                f"Replica {name} starts the keys of model {model.name} from another root."
            )
    _check_probe(hello)


def _check_probe(hello: internal_pb2.Hello) -> None:
    probe = hello.probe
    if probe.root_id not in {model.root_id for model in hello.models}:
        raise Incompatible(
            f"The probe chain of replica {hello.replica} starts from no served root."
        )
    spec = ChainSpec(
        RootId(probe.root_id), hello.block_tokens, probe.salt, private_from=probe.private_from
    )
    expected = chain(spec, probe.token_ids)
    if not expected:
        raise Incompatible(f"The probe chain of replica {hello.replica} is shorter than a block.")
    if len(probe.keys) != len(expected) * KEY_BYTES or probe.keys != b"".join(expected):
        raise Incompatible(
            f"Replica {hello.replica} chains block keys differently from this router."
        )


def _check_agreement(hello: internal_pb2.Hello, other: Replica) -> None:
    for model in hello.models:
        theirs = other.served.get(model.name)
        if theirs is None:
            continue
        for what, field_name in (
            ("weights, adapter or block size", "root_id"),
            ("tokenizer", "tokenizer_fingerprint"),
            ("chat template", "template_fingerprint"),
        ):
            if getattr(model, field_name) != getattr(theirs, field_name):
                raise Incompatible(
                    f"Replica {hello.replica} serves model {model.name} with another {what} "
                    f"than replica {other.name}."
                )
