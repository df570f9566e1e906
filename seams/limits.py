"""The one table of limits. Every field of every request message has an entry; a test walks them.

A limit is checked where the message enters the process; texts name the field and the limit, never
the value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from seams.errors import InvalidRequest

MESSAGE_BYTES_MAX = 16 * 1024 * 1024  # gRPC receive limit on every server and client
TOKENS_MAX = 1 << 20  # of one prompt, whatever the model's context
TOKEN_ID_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Limit:
    """Bounds of one field. Numbers: low..high. Strings, bytes, lists: bytes or entries."""

    low: float | None = None
    high: float | None = None
    size_max: int | None = None
    each: Limit | None = None  # of the entries of a list
    recurse: bool = False  # a message: its own fields are in the table


NUMBER_ANY = Limit()
FLAG = Limit()
LABEL = Limit(size_max=256)
MESSAGE = Limit(recurse=True)
NONCE = Limit(size_max=64)
TOKEN_IDS = Limit(size_max=TOKENS_MAX, each=Limit(0, TOKEN_ID_MAX))

LIMITS: dict[str, Limit] = {
    # banyan.v1.Sampling
    "Sampling.temperature": Limit(0.0, 100.0),
    "Sampling.top_p": Limit(0.0, 1.0),
    "Sampling.top_k": Limit(0, 1 << 20),
    "Sampling.min_p": Limit(0.0, 1.0),
    "Sampling.repetition_penalty": Limit(0.0, 100.0),
    "Sampling.presence_penalty": Limit(-100.0, 100.0),
    "Sampling.frequency_penalty": Limit(-100.0, 100.0),
    "Sampling.max_tokens": Limit(0, TOKENS_MAX),
    "Sampling.min_tokens": Limit(0, TOKENS_MAX),
    "Sampling.stop_token_ids": Limit(size_max=256, each=Limit(0, TOKEN_ID_MAX)),
    "Sampling.ignore_eos": FLAG,
    "Sampling.seed": NUMBER_ANY,
    "Sampling.n": Limit(0, 64),
    "Sampling.logprobs": Limit(0, 20),
    "Sampling.logit_bias": Limit(size_max=1024, each=MESSAGE),
    "Sampling.retention": Limit(size_max=256),
    "Sampling.allowed_token_ids": Limit(size_max=1 << 16, each=Limit(0, TOKEN_ID_MAX)),
    "TokenBias.token_id": Limit(0, TOKEN_ID_MAX),
    "TokenBias.bias": Limit(-100.0, 100.0),
    # banyan.v1.GenerateRequest and what it holds
    "ChatMessage.role": Limit(size_max=64),
    "ChatMessage.content": Limit(size_max=4 * 1024 * 1024),
    "Chat.messages": Limit(size_max=4096, each=MESSAGE),
    "TokenIds.ids": TOKEN_IDS,
    "GenerateRequest.model": LABEL,
    "GenerateRequest.text": Limit(size_max=4 * 1024 * 1024),
    "GenerateRequest.chat": MESSAGE,
    "GenerateRequest.tokens": MESSAGE,
    "GenerateRequest.sampling": MESSAGE,
    "GenerateRequest.stop": Limit(size_max=16, each=Limit(size_max=1024)),
    "GenerateRequest.no_cache": FLAG,
    "GenerateRequest.priority": Limit(-1000, 1000),
    "GenerateRequest.session": LABEL,
    "GenerateRequest.resume": MESSAGE,
    "GenerateRequest.label": LABEL,
    "Resume.seed": NUMBER_ANY,
    "Resume.token_ids": TOKEN_IDS,
    "PickRequest.request": MESSAGE,
    "PickRequest.ticket_ttl_ms": Limit(0, 3_600_000),
    "ExplainRequest.request_id": LABEL,
    "ExplainRequest.request": MESSAGE,
    "TextFilesRequest.fingerprint": LABEL,
    "ResetCacheRequest.tiers": FLAG,
    # banyan.v1 internal: replica -> router
    "AttachUp.greeting": MESSAGE,
    "AttachUp.proof": MESSAGE,
    "AttachUp.hello": MESSAGE,
    "AttachUp.heartbeat": MESSAGE,
    "Greeting.nonce": NONCE,
    "Proof.proof": NONCE,
    "Hello.protocol": Limit(1, 1),
    "Hello.replica": LABEL,
    "Hello.epoch": NUMBER_ANY,
    "Hello.address": LABEL,
    "Hello.host": LABEL,
    "Hello.node": LABEL,
    "Hello.cache_domain": LABEL,
    "Hello.models": Limit(size_max=256, each=MESSAGE),
    "Hello.block_tokens": Limit(1, 1024),
    "Hello.kv_groups": Limit(size_max=16, each=MESSAGE),
    "Hello.representation": LABEL,
    "Hello.numeric_class": LABEL,
    "Hello.capacities": Limit(size_max=8, each=MESSAGE),
    "Hello.priors": MESSAGE,
    "Hello.probe": MESSAGE,
    "ServedModel.root_id": Limit(size_max=32),
    "ServedModel.name": LABEL,
    "ServedModel.adapter": LABEL,
    "ServedModel.context_tokens": Limit(1, TOKENS_MAX),
    "ServedModel.model_fingerprint": LABEL,
    "ServedModel.tokenizer_fingerprint": LABEL,
    "ServedModel.template_fingerprint": LABEL,
    "ServedModel.vocab_tokens": Limit(1, TOKEN_ID_MAX),
    "ServedModel.eos_token_ids": Limit(size_max=64, each=Limit(0, TOKEN_ID_MAX)),
    "ServedModel.adapter_fingerprint": LABEL,
    "KVGroupInfo.id": Limit(0, 15),
    "KVGroupInfo.kind": LABEL,
    "KVGroupInfo.layers": Limit(1, 4096),
    "KVGroupInfo.block_bytes": Limit(1, 1 << 32),
    "KVGroupInfo.window_tokens": Limit(0, TOKENS_MAX),
    "TierCapacity.tier": Limit(0, 3),
    "TierCapacity.blocks": NUMBER_ANY,
    "TierCapacity.bytes_per_s": Limit(0.0, 1e15),
    "Priors.prefill_s_per_token": Limit(0.0, 1e6),
    "Priors.step_s": Limit(0.0, 1e6),
    "Priors.step_s_per_sequence": Limit(0.0, 1e6),
    "ProbeChain.root_id": Limit(size_max=32),
    "ProbeChain.token_ids": Limit(size_max=4096, each=Limit(0, TOKEN_ID_MAX)),
    "ProbeChain.salt": NONCE,
    "ProbeChain.private_from": Limit(0, TOKENS_MAX),
    "ProbeChain.keys": Limit(size_max=65536),
    "Heartbeat.load": MESSAGE,
    "Heartbeat.draining": FLAG,
    "Load.running": NUMBER_ANY,
    "Load.waiting": NUMBER_ANY,
    "Load.blocks_total": NUMBER_ANY,
    "Load.blocks_free": NUMBER_ANY,
    "Load.blocks_cached": NUMBER_ANY,
    "Load.queued_prefill_tokens": NUMBER_ANY,
    "Load.steps": NUMBER_ANY,
    "Load.step_s": Limit(0.0, 1e6),
    "Load.prefill_s_per_token": Limit(0.0, 1e6),
    "Load.prompt_tokens": NUMBER_ANY,
    "Load.cached_tokens": NUMBER_ANY,
    "Load.stalled": FLAG,
    "Load.tiers": Limit(size_max=8, each=MESSAGE),
    "Load.blocks_low": NUMBER_ANY,
    "Load.retention_rounds": NUMBER_ANY,
    "Load.retention_dropped_tokens": NUMBER_ANY,
    "Load.retention_freed_blocks": NUMBER_ANY,
    "Load.retention_moved_bytes": NUMBER_ANY,
    "Load.retention_objects_kept": NUMBER_ANY,
    "Load.retention_objects_resumed": NUMBER_ANY,
    "Load.retention_resumed_tokens": NUMBER_ANY,
    "Load.kv_token_bytes": Limit(0.0, 1e12),
    "TierLoad.tier": LABEL,
    "TierLoad.state": LABEL,
    "TierLoad.blocks": NUMBER_ANY,
    "TierLoad.bytes": NUMBER_ANY,
    "TierLoad.bytes_max": NUMBER_ANY,
    "TierLoad.hit_tokens": NUMBER_ANY,
    "TierLoad.hit_blocks": NUMBER_ANY,
    "TierLoad.loaded_bytes": NUMBER_ANY,
    "TierLoad.stored_bytes": NUMBER_ANY,
    "TierLoad.load_bytes_per_s": Limit(0.0, 1e15),
    "TierLoad.store_bytes_per_s": Limit(0.0, 1e15),
    "TierLoad.dropped": NUMBER_ANY,
    "TierLoad.evicted": NUMBER_ANY,
    "TierLoad.failed": NUMBER_ANY,
    "TierLoad.corrupt": Limit(size_max=32, each=MESSAGE),
    "TierLoad.loads_queued": NUMBER_ANY,
    "TierLoad.stores_queued": NUMBER_ANY,
    "TierLoad.logical_bytes": NUMBER_ANY,
    "CorruptCount.cause": LABEL,
    "CorruptCount.records": NUMBER_ANY,
    "EventBatch.replica": LABEL,
    "EventBatch.epoch": NUMBER_ANY,
    "EventBatch.seq": NUMBER_ANY,
    "EventBatch.snapshot": FLAG,
    "EventBatch.snapshot_last": FLAG,
    "EventBatch.ops": Limit(size_max=65536, each=MESSAGE),
    "EventBatch.digest": Limit(size_max=16),
    "BlockOp.kind": Limit(0, 3),
    "BlockOp.tier": Limit(0, 3),
    "BlockOp.group": Limit(0, 15),
    "BlockOp.keys": Limit(size_max=8 * 1024 * 1024),
    # banyan.v1 internal: router -> replica, client -> replica
    "ExecuteUp.submit": MESSAGE,
    "ExecuteUp.cancel": MESSAGE,
    "ExecuteUp.credit": MESSAGE,
    "Submit.request_id": LABEL,
    "Submit.root_id": Limit(size_max=32),
    "Submit.token_ids": TOKEN_IDS,
    "Submit.prompt_tokens": Limit(1, TOKENS_MAX),
    "Submit.sampling": MESSAGE,
    "Submit.priority": Limit(-1000, 1000),
    "Submit.tenant": LABEL,
    "Submit.salt": NONCE,
    "Submit.private_from": Limit(0, TOKENS_MAX),
    "Submit.deadline_ms": NUMBER_ANY,
    "Submit.credit_tokens": NUMBER_ANY,
    "Submit.kv_source": LABEL,
    "Submit.no_cache": FLAG,
    "Cancel.request_id": LABEL,
    "Credit.request_id": LABEL,
    "Credit.tokens": Limit(0, TOKENS_MAX),
    "DirectRequest.ticket": Limit(size_max=4096),
    "DirectRequest.token_ids": TOKEN_IDS,
    "DirectRequest.sampling": MESSAGE,
    "DirectRequest.no_cache": FLAG,
    # the OpenAI gateway: what has no field above (router/gateway/fields.py names the rest)
    "OpenAI.prompts": Limit(size_max=64),  # of one request; each is a stream of its own
    "OpenAI.choices": Limit(1, 128),  # n times prompts
    "OpenAI.messages": Limit(size_max=4096),
    "OpenAI.members": Limit(size_max=1024),
    "OpenAI.flag": FLAG,
    "OpenAI.seed": Limit(-(1 << 63), (1 << 64) - 1),
    "OpenAI.logit_bias": Limit(size_max=1024),
    "OpenAI.content_parts": Limit(size_max=1024),
    "OpenAI.cache_salt": LABEL,
    "OpenAI.user": LABEL,
}


def _check_value(name: str, value: Any, limit: Limit) -> None:
    if limit.size_max is not None:
        size = len(value.encode()) if isinstance(value, str) else len(value)
        if size > limit.size_max:
            raise InvalidRequest(f"{name} is larger than its limit of {limit.size_max}.")
    if limit.low is not None and not value >= limit.low:  # "not >=" also catches NaN
        raise InvalidRequest(f"{name} must be at least {limit.low}.")
    if limit.high is not None and not value <= limit.high:
        raise InvalidRequest(f"{name} must be at most {limit.high}.")
    if limit.recurse:
        check_message(value)
    elif limit.each is not None:
        _check_entries(name, value, limit.each)


def _check_entries(name: str, values: Iterable[Any], limit: Limit) -> None:
    entries = list(values)
    if not entries:
        return
    if limit.recurse or limit.size_max is not None:
        for entry in entries:
            _check_value(name, entry, limit)
        return
    _check_value(name, min(entries), limit)  # numbers: two comparisons bound a long list
    _check_value(name, max(entries), limit)


def check_field(name: str, value: Any, entry: str) -> None:
    """Raise InvalidRequest, which calls the value `name`, if it is over the limit of `entry`."""
    _check_value(name, value, LIMITS[entry])


def check_message(message: Any) -> None:
    """Raise InvalidRequest for the first field of a protobuf message that is over its limit."""
    for descriptor, value in message.ListFields():
        name = f"{message.DESCRIPTOR.name}.{descriptor.name}"
        _check_value(name, value, LIMITS[name])
