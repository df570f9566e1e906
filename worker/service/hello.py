"""The hello: what a replica says of itself when it attaches. Pure; knows no network."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from banyan.v1 import internal_pb2
from kvstore.groups import KVGroup
from kvstore.keys import ChainSpec, RootId, chain, root
from seams.rng import Rng
from seams.textfiles import template_fingerprint, tokenizer_fingerprint
from worker.config import ReplicaConfig
from worker.models.base import AdapterSpec, ModelSpec
from worker.service.convert import ServedRoot

PROTOCOL = 1
PROBE_BLOCKS = 3
SALT_BYTES = 32


def served_roots(spec: ModelSpec, context_tokens: int) -> tuple[ServedRoot, ...]:
    """The base model and its adapters in order, as requests name them; `context_tokens` 0 means
    the model's own. Adapters of the same weights have one root, so only the first of them counts.
    """
    fingerprints = ("", *(adapter.fingerprint for adapter in spec.adapters))
    return tuple(
        ServedRoot(
            root_id=root(spec.fingerprint, fingerprint, spec.block_tokens),
            context_tokens=min(context_tokens or spec.context_tokens, spec.context_tokens),
            vocab_tokens=spec.vocab_tokens,
            adapter=fingerprints.index(fingerprint),
        )
        for fingerprint in fingerprints
    )


def _model(
    config: ReplicaConfig, spec: ModelSpec, served: ServedRoot, adapter: AdapterSpec | None
) -> internal_pb2.ServedModel:
    """The base model, or BASE:ADAPTER; without the fingerprints of its text files."""
    return internal_pb2.ServedModel(
        root_id=served.root_id,
        name=f"{config.served_name}:{adapter.name}" if adapter else config.served_name,
        adapter=adapter.name if adapter else "",
        adapter_fingerprint=adapter.fingerprint if adapter else "",
        context_tokens=served.context_tokens,
        model_fingerprint=spec.fingerprint,
        vocab_tokens=spec.vocab_tokens,
        eos_token_ids=spec.eos_token_ids,
    )


def probe_chain(
    root_id: bytes, block_tokens: int, vocab_tokens: int, rng: Rng
) -> internal_pb2.ProbeChain:
    """Random tokens whose chain has a public block, a salted one, one that inherits, and a rest."""
    tokens = [rng.bits(31) % vocab_tokens for _ in range(PROBE_BLOCKS * block_tokens + 1)]
    salt = rng.bits(8 * SALT_BYTES).to_bytes(SALT_BYTES, "little")
    private_from = block_tokens + block_tokens // 2
    spec = ChainSpec(RootId(root_id), block_tokens, salt, private_from)
    return internal_pb2.ProbeChain(
        root_id=root_id,
        token_ids=tokens,
        salt=salt,
        private_from=private_from,
        keys=b"".join(chain(spec, tokens)),
    )


def _group(group: KVGroup) -> internal_pb2.KVGroupInfo:
    return internal_pb2.KVGroupInfo(
        id=group.id,
        kind=group.kind.value,
        layers=len(group.layers),
        block_bytes=group.block_bytes * group.ranks,
        window_tokens=group.window_tokens,
    )


def build_hello(
    config: ReplicaConfig,
    spec: ModelSpec,
    served: Sequence[ServedRoot],
    blocks: tuple[int, ...],
    text_files: Mapping[str, bytes],
    *,
    epoch: int,
    address: str,
    priors: internal_pb2.Priors,
    rng: Rng,
    tiers: Sequence[internal_pb2.TierCapacity] = (),
) -> internal_pb2.Hello:
    """Everything a router must know before it sends the first request.

    The failure group is (host, node): BANYAN_NODE names the machine where the host name is only a
    container's. Replicas with one Redis namespace share what lies there.
    """
    device = internal_pb2.TierCapacity(tier=internal_pb2.TIER_DEVICE, blocks=blocks[0])
    host = socket.gethostname()
    named = zip(served, (None, *spec.adapters), strict=True)
    models = [_model(config, spec, served_root, adapter) for served_root, adapter in named]
    for model in models:
        model.tokenizer_fingerprint = tokenizer_fingerprint(text_files)
        model.template_fingerprint = template_fingerprint(text_files)
    return internal_pb2.Hello(
        protocol=PROTOCOL,
        replica=config.replica,
        epoch=epoch,
        address=address,
        host=host,
        node=os.environ.get("BANYAN_NODE", host),
        cache_domain=config.cache_domain or (config.namespace if config.redis else ""),
        models=models,
        block_tokens=spec.block_tokens,
        kv_groups=[_group(group) for group in spec.groups],
        representation=spec.representation.id,
        numeric_class=spec.numeric_class,
        capacities=[device, *tiers],
        priors=priors,
        probe=probe_chain(served[0].root_id, spec.block_tokens, spec.vocab_tokens, rng),
    )
