"""Between the client's values and banyan.v1 messages: pure conversions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from banyan.events import (
    Candidate,
    ChoiceFinished,
    Decision,
    Delta,
    Event,
    Finished,
    FinishReason,
    Started,
    TokenLogprob,
    Usage,
)
from banyan.v1 import api_pb2, common_pb2
from seams.errors import InvalidRequest

Prompt = str | Sequence[dict[str, str]] | Sequence[int]
"""Text, chat messages ({"role", "content"}), or token ids."""


class Options(TypedDict, total=False):
    """What a generation may be given; what is absent is off, or the router's default."""

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int
    n: int
    logprobs: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    retention: str
    session: str
    label: str
    no_cache: bool
    priority: int


_REQUEST_FIELDS = ("model", "session", "label", "no_cache", "priority")


def generate_request(prompt: Prompt, **options: Unpack[Options]) -> api_pb2.GenerateRequest:
    """The request message. Raises InvalidRequest for a value of the wrong kind."""
    request = api_pb2.GenerateRequest()
    given: dict[str, Any] = dict(options)
    try:
        _set_prompt(request, prompt)
        stop = given.pop("stop", ())
        request.stop.extend([stop] if isinstance(stop, str) else stop)
        for name in _REQUEST_FIELDS:
            if name in given:
                setattr(request, name, given.pop(name))
        bias: Mapping[int, float] = given.pop("logit_bias", {})
        given["logit_bias"] = [
            common_pb2.TokenBias(token_id=token, bias=value) for token, value in bias.items()
        ]
        request.sampling.CopyFrom(common_pb2.Sampling(**given))
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"The request has a field of a wrong kind: {error}") from error
    return request


def _set_prompt(request: api_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    entries: list[Any] = list(prompt)
    if not entries:
        raise InvalidRequest("The prompt is empty.")
    if isinstance(entries[0], dict):
        messages = [api_pb2.ChatMessage(**entry) for entry in entries]
        request.chat.CopyFrom(api_pb2.Chat(messages=messages))
    else:
        request.tokens.CopyFrom(api_pb2.TokenIds(ids=entries))


def usage(message: common_pb2.Usage) -> Usage:
    """Token counts."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        computed_tokens=message.computed_tokens,
        completion_tokens=message.completion_tokens,
        recomputed_tokens=message.recomputed_tokens,
        preemptions=message.preemptions,
        moves=message.moves,
    )


def decision(message: common_pb2.Decision) -> Decision:
    """A routing decision."""
    delivered = message.delivered_tokens if message.HasField("delivered_tokens") else None
    return Decision(
        request_id=message.request_id,
        model=message.model,
        replica=message.replica,
        prompt_tokens=message.prompt_tokens,
        available_tokens=message.available_tokens,
        chosen_tokens=message.chosen_tokens,
        delivered_tokens=delivered,
        reason=message.reason,
        candidates=tuple(
            Candidate(
                c.replica,
                c.total_s,
                tuple((term.name, term.seconds) for term in c.terms),
                c.matched_tokens,
            )
            for c in message.candidates
        ),
    )


def logprobs(messages: Sequence[common_pb2.PositionLogprobs]) -> tuple[TokenLogprob, ...]:
    """One entry per token."""
    return tuple(
        TokenLogprob(
            m.chosen.token_id,
            m.chosen.logprob,
            tuple((top.token_id, top.logprob) for top in m.top),
        )
        for m in messages
    )


def event(message: api_pb2.GenerateResponse) -> Event:
    """The event a router sent."""
    kind = message.WhichOneof("event")
    if kind == "started":
        s = message.started
        return Started(s.request_id, s.seed, s.model, s.replica, s.prompt_tokens, s.label)
    if kind == "delta":
        d = message.delta
        ids = tuple(d.token_ids)
        return Delta(d.choice, d.position, ids, d.text, logprobs(d.logprobs))
    if kind == "choice_finished":
        c = message.choice_finished
        known = int(c.reason) in set(FinishReason)  # a newer router may know more
        reason = FinishReason(c.reason) if known else FinishReason.UNSPECIFIED
        return ChoiceFinished(c.choice, reason, c.text, c.stop)
    f = message.finished
    return Finished(usage(f.usage), decision(f.decision) if f.HasField("decision") else None)
