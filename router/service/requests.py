"""GenerateRequest -> StreamSpec: everything that is checked before any replica sees a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from banyan.v1 import api_pb2, common_pb2
from kvstore.keys import RootId
from router.placement import ModelEntry
from router.stream import StreamSpec
from router.tenants import Tenant
from router.text.model import TextModel
from router.text.output import ChoiceText
from seams.errors import InvalidRequest, PromptTooLong

SEED_BITS = 63


@dataclass(frozen=True)
class Served:
    """A model as it is served now; `text` is None where it takes token ids only."""

    entry: ModelEntry
    text: TextModel | None


@dataclass(frozen=True)
class Minted:
    """What the router adds to a request."""

    request_id: str
    seed: int
    credit_tokens: int


def check_shape(request: api_pb2.GenerateRequest) -> None:
    """What can be said without the model. Raises InvalidRequest."""
    sampling, resume = request.sampling, request.resume
    if request.WhichOneof("prompt") is None:
        raise InvalidRequest("The request has no prompt: give text, chat or tokens.")
    if not all(request.stop):
        raise InvalidRequest("GenerateRequest.stop has an empty string.")
    if sampling.max_tokens and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("Sampling.min_tokens is larger than Sampling.max_tokens.")
    if request.HasField("resume"):
        if sampling.n > 1:
            raise InvalidRequest("A stream with several choices cannot be resumed.")
        if sampling.HasField("seed") and sampling.seed != resume.seed:
            raise InvalidRequest("Resume.seed differs from Sampling.seed.")


def tokenize(request: api_pb2.GenerateRequest, text: TextModel | None) -> list[int]:
    """The prompt's ids. Takes long for a long text. Raises InvalidRequest."""
    kind = request.WhichOneof("prompt")
    if kind == "tokens":
        return list(request.tokens.ids)
    if text is None:
        raise InvalidRequest("This model has no tokenizer; send token ids.")
    if kind == "text":
        return text.encode_text(request.text)
    return text.encode_chat([(m.role, m.content) for m in request.chat.messages])


def text_bytes(request: api_pb2.GenerateRequest) -> int:
    """How much there is to tokenize."""
    if request.WhichOneof("prompt") == "chat":
        return sum(len(message.content) for message in request.chat.messages)
    return len(request.text)


def _resolved(
    request: api_pb2.GenerateRequest, prompt_tokens: int, context_tokens: int, seed: int
) -> common_pb2.Sampling:
    """The sampling in force: seed, max_tokens and n filled in. Raises PromptTooLong."""
    room = context_tokens - prompt_tokens
    if room < 1 or request.sampling.max_tokens > room:
        raise PromptTooLong(
            f"Prompt and output do not fit the model's context of {context_tokens} tokens."
        )
    sampling = common_pb2.Sampling()
    sampling.CopyFrom(request.sampling)
    sampling.max_tokens = sampling.max_tokens or room
    sampling.n = max(1, sampling.n)
    if request.HasField("resume"):
        sampling.seed = request.resume.seed
    elif not sampling.HasField("seed"):
        sampling.seed = seed
    return sampling


def _new_text(
    request: api_pb2.GenerateRequest, text: TextModel | None, prompt: list[int], min_tokens: int
) -> Callable[[], ChoiceText] | None:
    if text is None:
        if request.stop:
            raise InvalidRequest("This model has no tokenizer; stop strings need one.")
        return None
    context = () if request.WhichOneof("prompt") == "chat" else tuple(prompt[-64:])
    stops = tuple(request.stop)
    return lambda: ChoiceText(text.detokenizer(context), stops, min_tokens)


def _check_choice(sampling: common_pb2.Sampling, vocab_tokens: int) -> None:
    """Raises InvalidRequest for a bias or an allowed token that the model has no token for."""
    biased = [entry.token_id for entry in sampling.logit_bias]
    if len(set(biased)) < len(biased):
        raise InvalidRequest("Sampling.logit_bias names a token id twice.")
    for name, ids in (("logit_bias", biased), ("allowed_token_ids", sampling.allowed_token_ids)):
        if ids and max(ids) >= vocab_tokens:
            raise InvalidRequest(f"Sampling.{name} has an id outside the model's vocabulary.")


def build_spec(
    request: api_pb2.GenerateRequest,
    prompt: list[int],
    served: Served,
    tenant: Tenant,
    minted: Minted,
) -> StreamSpec:
    """The stream to serve. Raises InvalidRequest, PromptTooLong."""
    model = served.entry.served
    emitted = tuple(request.resume.token_ids)
    if not prompt:
        raise InvalidRequest("The prompt is empty.")
    if max(max(prompt), max(emitted, default=0)) >= model.vocab_tokens:
        raise InvalidRequest(f"A token id is outside the vocabulary of {model.vocab_tokens}.")
    _check_choice(request.sampling, model.vocab_tokens)
    sampling = _resolved(request, len(prompt), model.context_tokens, minted.seed)
    if len(emitted) > sampling.max_tokens:
        raise InvalidRequest("Resume.token_ids has more ids than Sampling.max_tokens.")
    return StreamSpec(
        request_id=minted.request_id,
        model=model.name,
        root_id=RootId(model.root_id),
        block_tokens=served.entry.block_tokens,
        prompt=tuple(prompt),
        sampling=sampling,
        tenant=tenant.name,
        salt=tenant.salt,
        eos_token_ids=frozenset(model.eos_token_ids),
        emitted=emitted,
        new_text=_new_text(request, served.text, prompt, sampling.min_tokens),
        label=request.label,
        session=request.session,
        priority=request.priority,
        no_cache=request.no_cache,
        credit_tokens=minted.credit_tokens,
    )
