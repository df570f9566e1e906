"""Protobuf <-> engine messages. Pure functions: no gRPC, no asyncio, no clock of their own.

A message from outside is checked here, once: limits table, served root, vocabulary, context. What
passes is an EngineRequest that the engine may trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from banyan.v1 import common_pb2, internal_pb2
from kvstore.keys import tenant_salt, tokens_u32le
from seams.errors import BanyanError, InvalidRequest, ModelNotFound, PromptTooLong, Unauthenticated
from seams.limits import check_message
from seams.proof import matches, token_digest
from seams.trailers import retry_after_ms
from worker.engine.messages import (
    CacheOp,
    Compacted,
    Emission,
    EngineLoad,
    EngineRequest,
    RequestUsage,
)
from worker.engine.sampling import SamplingParams

DEFAULT_TENANT = "default"  # the routers' name for everyone, where there are no API keys


@dataclass(frozen=True)
class ServedRoot:
    """What a request is checked against: one (model, adapter) this replica computes."""

    root_id: bytes
    context_tokens: int
    vocab_tokens: int
    adapter: int = 0  # of ModelSpec.adapters, from 1; 0 = the base model


Roots = Mapping[bytes, ServedRoot]
"""Served roots by their id."""


def sampling_params(
    sampling: common_pb2.Sampling, seed: int, prompt_tokens: int, context_tokens: int
) -> SamplingParams:
    """Fill in what the wire leaves at 0. Raises PromptTooLong if the output cannot fit either."""
    room = context_tokens - prompt_tokens
    if room < 1 or sampling.max_tokens > room:
        raise PromptTooLong(
            f"Prompt and output do not fit the model's context of {context_tokens} tokens."
        )
    return SamplingParams(
        seed=seed,
        max_tokens=sampling.max_tokens or room,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        n=sampling.n or 1,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
        allowed_token_ids=tuple(sorted(set(sampling.allowed_token_ids))),
    )


def _root(roots: Roots, root_id: bytes) -> ServedRoot:
    root = roots.get(root_id)
    if root is None:
        raise ModelNotFound("This replica does not serve the requested root.")
    return root


def _check_tokens(
    token_ids: tuple[int, ...], prompt_tokens: int, choices: int, root: ServedRoot
) -> None:
    if not 1 <= prompt_tokens <= len(token_ids):
        raise InvalidRequest("prompt_tokens must be between 1 and the number of token ids.")
    if max(token_ids) >= root.vocab_tokens:
        raise InvalidRequest(f"A token id is outside the vocabulary of {root.vocab_tokens}.")
    if len(token_ids) > prompt_tokens and choices > 1:
        raise InvalidRequest("A stream with several choices cannot be resumed.")


def submitted(
    submit: internal_pb2.Submit, engine_id: str, roots: Roots, now_s: float
) -> EngineRequest:
    """A router's Submit, checked. `engine_id` replaces the router's id; `now_s` is the engine's.

    Raises InvalidRequest, PromptTooLong or ModelNotFound.
    """
    check_message(submit)
    root = _root(roots, submit.root_id)
    if not submit.request_id:
        raise InvalidRequest("Submit.request_id is missing.")
    if not submit.sampling.HasField("seed"):
        raise InvalidRequest("Sampling.seed is missing; the router mints one.")
    token_ids = tuple(submit.token_ids)
    _check_tokens(token_ids, submit.prompt_tokens, submit.sampling.n, root)
    sampling = sampling_params(
        submit.sampling, submit.sampling.seed, submit.prompt_tokens, root.context_tokens
    )
    return EngineRequest(
        request_id=engine_id,
        token_ids=token_ids,
        prompt_tokens=submit.prompt_tokens,
        sampling=sampling,
        tenant=submit.tenant or DEFAULT_TENANT,
        salt=submit.salt,
        private_from=submit.private_from,
        priority=submit.priority,
        deadline_s=now_s + submit.deadline_ms / 1000 if submit.deadline_ms else None,
        credit_tokens=submit.credit_tokens,
        no_cache=submit.no_cache,
        adapter=root.adapter,
        retention=submit.sampling.retention,
    )


def ticketed(
    request: internal_pb2.DirectRequest,
    ticket: internal_pb2.TicketBody,
    engine_id: str,
    roots: Roots,
    secret: bytes,
    deadline_s: float | None,
    credit_tokens: int,
) -> EngineRequest:
    """A direct client's request under an opened, unexpired ticket, checked against it.

    The ticket decides whatever the client must not: root, tenant, seed, priority; the client can
    read it, so the tenant's salt is derived here, from the cluster's `secret`. Raises
    Unauthenticated if the tokens are not the sealed ones, else as `submitted`.
    """
    check_message(request)
    token_ids = tuple(request.token_ids)
    digest = token_digest(tokens_u32le(token_ids), ticket.prompt_tokens)
    if not matches(digest, ticket.token_digest):
        raise Unauthenticated("The ticket was issued for other tokens.")
    root = _root(roots, ticket.root_id)
    given = request.sampling
    if given.HasField("seed") and given.seed != ticket.seed:
        raise InvalidRequest("Sampling.seed differs from the ticket's.")
    _check_tokens(token_ids, ticket.prompt_tokens, given.n, root)
    tenant = ticket.tenant or DEFAULT_TENANT
    sampling = sampling_params(given, ticket.seed, ticket.prompt_tokens, root.context_tokens)
    return EngineRequest(
        request_id=engine_id,
        token_ids=token_ids,
        prompt_tokens=ticket.prompt_tokens,
        sampling=sampling,
        tenant=tenant,
        salt=tenant_salt(secret, tenant),
        private_from=ticket.private_from,
        priority=ticket.priority,
        deadline_s=deadline_s,
        credit_tokens=credit_tokens,
        no_cache=request.no_cache,
        adapter=root.adapter,
        retention=given.retention,
    )


def status(error: BanyanError) -> common_pb2.Status:
    """The typed terminal status of a failed request."""
    return common_pb2.Status(
        code=int(error.status),
        message=error.message,
        retry_after_ms=retry_after_ms(error) or 0,
        error=type(error).__name__,
    )


def usage(used: RequestUsage) -> common_pb2.Usage:
    """What the request cost here; moves are the router's to count."""
    return common_pb2.Usage(
        prompt_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        computed_tokens=used.computed_tokens,
        completion_tokens=used.completion_tokens,
        recomputed_tokens=used.recomputed_tokens,
        preemptions=used.preemptions,
    )


def add_emission(frame: internal_pb2.Frame, emission: Emission, wire_id: str) -> None:
    """Append `emission` to `frame` under the id its peer knows. Mutates `frame`."""
    added = frame.emissions.add()  # fields set one by one: half the time of keyword arguments
    added.request_id = wire_id
    added.position = emission.position
    if emission.choice:
        added.choice = emission.choice
    for token_id in emission.token_ids:
        added.token_ids.append(token_id)
    if emission.last:
        added.last = True
    for logprobs in emission.logprobs:
        at = added.logprobs.add()
        at.chosen.token_id, at.chosen.logprob = logprobs.chosen
        for token_id, logprob in logprobs.top:
            at.top.add(token_id=token_id, logprob=logprob)
    if emission.finish is not None:
        added.finish = int(emission.finish)  # type: ignore[assignment]
    if emission.error is not None:
        added.error.CopyFrom(status(emission.error))
    if emission.usage is not None:
        added.usage.CopyFrom(usage(emission.usage))


def refused(wire_id: str, error: BanyanError, step: int) -> internal_pb2.Frame:
    """The one frame of a request that never reached the engine, or was ended over its head."""
    frame = internal_pb2.Frame(step=step)
    frame.emissions.add(
        request_id=wire_id,
        finish=common_pb2.FINISH_REASON_ERROR,
        error=status(error),
        last=True,
    )
    return frame


def heartbeat(
    load: EngineLoad,
    base: EngineLoad,
    draining: bool,
    stalled: bool,
    tiers: Sequence[common_pb2.TierLoad] = (),
) -> internal_pb2.Heartbeat:
    """Load for the routers. `base` is the load after warm-up: its tokens were nobody's."""
    compacted = load.compacted or Compacted()
    return internal_pb2.Heartbeat(
        draining=draining,
        load=internal_pb2.Load(
            running=load.running,
            waiting=load.waiting,
            blocks_total=load.blocks_total,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            queued_prefill_tokens=load.queued_prefill_tokens,
            steps=load.steps,
            step_s=load.step_s,
            prefill_s_per_token=load.prefill_s_per_token,
            prompt_tokens=load.prompt_tokens - base.prompt_tokens,
            cached_tokens=load.cached_tokens - base.cached_tokens,
            stalled=stalled,
            tiers=tiers,
            blocks_low=load.blocks_low,
            retention_rounds=compacted.rounds,
            retention_dropped_tokens=compacted.dropped_tokens,
            retention_freed_blocks=max(0, compacted.freed_blocks),
            retention_moved_bytes=compacted.moved_bytes,
            retention_objects_kept=compacted.objects_kept,
            retention_objects_resumed=compacted.objects_resumed,
            retention_resumed_tokens=compacted.resumed_tokens,
            kv_token_bytes=load.kv_token_bytes,
        ),
    )


def block_ops(ops: Iterable[CacheOp]) -> list[internal_pb2.BlockOp]:
    """Cache changes, order kept."""
    return [
        internal_pb2.BlockOp(
            kind=int(op.kind),  # type: ignore[arg-type]
            tier=op.tier,  # type: ignore[arg-type]
            group=op.group,
            keys=b"".join(op.keys),
        )
        for op in ops
    ]
