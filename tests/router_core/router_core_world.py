"""Builders shared by the tests of the router's core: hellos, chains, requests, model replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from banyan.v1 import internal_pb2
from kvstore.keys import BlockKey, ChainSpec, RootId, chain, root
from router.core import RouterCore
from router.placement import PlaceRequest
from seams.clock import VirtualClock
from seams.rng import SeededRng

BLOCK = 16
MODEL = "demo"
ROOT = root("weights-1", "", BLOCK)
STORED = internal_pb2.BlockOp.KIND_STORED
REMOVED = internal_pb2.BlockOp.KIND_REMOVED
MOVED = internal_pb2.BlockOp.KIND_MOVED


def new_core(clock: VirtualClock, seed: int = 0, **options: float) -> RouterCore:
    return RouterCore(
        clock,
        SeededRng(seed),
        lease_s=options.get("lease_s", 5.0),
        decisions_kept=int(options.get("decisions_kept", 64)),
        provisional_ttl_s=options.get("provisional_ttl_s", 2.0),
    )


def served(name: str = MODEL, fingerprint: str = "weights-1") -> internal_pb2.ServedModel:
    return internal_pb2.ServedModel(
        root_id=root(fingerprint, "", BLOCK),
        name=name,
        context_tokens=8192,
        model_fingerprint=fingerprint,
        tokenizer_fingerprint="tokenizer-1",
        template_fingerprint="template-1",
        vocab_tokens=49152,
    )


def hello_of(
    replica: str,
    epoch: int = 1,
    *,
    models: Sequence[internal_pb2.ServedModel] = (),
    numeric_class: str = "cpu-fp32",
    windows: dict[int, int] | None = None,
    blocks: int = 4096,
    cache_domain: str = "",
) -> internal_pb2.Hello:
    models = models or [served()]
    probe_tokens = list(range(40, 40 + 3 * BLOCK))
    spec = ChainSpec(RootId(models[0].root_id), BLOCK, b"s" * 32, private_from=BLOCK)
    groups = [internal_pb2.KVGroupInfo(id=0, kind="full", layers=4, block_bytes=4096)]
    for group, window in (windows or {}).items():
        groups.append(
            internal_pb2.KVGroupInfo(
                id=group, kind="window", layers=4, block_bytes=4096, window_tokens=window
            )
        )
    return internal_pb2.Hello(
        protocol=1,
        replica=replica,
        epoch=epoch,
        address=f"{replica}:1",
        cache_domain=cache_domain,
        models=models,
        block_tokens=BLOCK,
        kv_groups=groups,
        numeric_class=numeric_class,
        capacities=[internal_pb2.TierCapacity(tier=internal_pb2.TIER_DEVICE, blocks=blocks)],
        priors=internal_pb2.Priors(
            prefill_s_per_token=1e-3, step_s=0.02, step_s_per_sequence=0.0005
        ),
        probe=internal_pb2.ProbeChain(
            root_id=models[0].root_id,
            token_ids=probe_tokens,
            salt=b"s" * 32,
            private_from=BLOCK,
            keys=b"".join(chain(spec, probe_tokens)),
        ),
    )


def keys_of(tokens: Sequence[int], salt: bytes = b"", root_id: RootId = ROOT) -> list[BlockKey]:
    return chain(ChainSpec(root_id, BLOCK, salt), tokens)


def prompt(seed: int, blocks: int) -> list[int]:
    """`blocks` full blocks of tokens that no other seed shares."""
    return [seed * 100_000 + position for position in range(blocks * BLOCK)]


def request_of(
    request_id: str, tokens: Sequence[int], salt: bytes = b"", **fields: object
) -> PlaceRequest:
    options: dict[str, object] = {"max_tokens": 32, **fields}
    return PlaceRequest(
        request_id=request_id,
        model=MODEL,
        root_id=ROOT,
        tokens=len(tokens),
        keys=keys_of(tokens, salt),
        **options,  # type: ignore[arg-type]
    )


def op_of(kind: int, keys: Iterable[bytes], tier: int = 0, group: int = 0) -> internal_pb2.BlockOp:
    return internal_pb2.BlockOp(kind=kind, tier=tier, group=group, keys=b"".join(keys))  # type: ignore[arg-type]


def batch_of(
    replica: str,
    seq: int,
    *ops: internal_pb2.BlockOp,
    epoch: int = 1,
    snapshot: bool = False,
    last: bool = True,
    digest: bytes = b"",
) -> internal_pb2.EventBatch:
    return internal_pb2.EventBatch(
        replica=replica,
        epoch=epoch,
        seq=seq,
        ops=ops,
        snapshot=snapshot,
        snapshot_last=snapshot and last,
        digest=digest,
    )


def snapshot_of(
    replica: str, seq: int, keys: Iterable[bytes], epoch: int = 1
) -> internal_pb2.EventBatch:
    return batch_of(replica, seq, op_of(STORED, keys), epoch=epoch, snapshot=True)


def attach_ready(core: RouterCore, *names: str, **fields: object) -> None:
    """Attach replicas with an empty snapshot at seq 0."""
    for name in names:
        core.attach(hello_of(name, **fields))  # type: ignore[arg-type]
        assert not core.events(snapshot_of(name, 0, []))


def xor_of(keys: Iterable[bytes]) -> bytes:
    total = 0
    for key in keys:
        total ^= int.from_bytes(key, "little")
    return total.to_bytes(16, "little")
