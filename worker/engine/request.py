"""Requests and sequences: the state of one accepted request and of its choices, values only.

A request waits, runs and ends as its sequences do; a sequence is one choice. Nothing here knows of
pools or of the scheduler's order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.keys import BlockKey, ChainSpec
from seams.errors import InvalidRequest, PromptTooLong
from worker.engine.messages import EngineRequest, Finish, RequestUsage
from worker.engine.plan import BlockCopy
from worker.engine.retention.base import Retained, RetentionPolicy
from worker.engine.sampling import SamplingParams
from worker.models.base import ModelSpec

if TYPE_CHECKING:
    from kvstore.fetch import Fetch
    from worker.engine.derived import Wanted
    from worker.engine.radix import Hold
    from worker.engine.speculation import Drafter
    from worker.engine.waiting import Tenant


CLEAN = 1 << 60  # Sequence.stale_from: no entry of its tables changed since it was last planned


class State(Enum):
    """Where a sequence is; it is in exactly one of them."""

    WAITING = "waiting"  # in its tenant's queue, without blocks
    PARKED = "parked"  # without blocks and without credit: not queued until granted
    RUNNING = "running"  # with blocks
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice. `tokens` = prompt + generated; the KV of the first `computed` is in its blocks,
    but for the `dropped` ones that its policy let go: positions count `computed` (logical), places
    in blocks `stored` (physical).

    `tables[g]` are its blocks of group g, -1 where a window has passed; it holds one reference to
    each, and to the source of each pending copy. `shared` counts leading blocks of group 0 that
    another running sequence held when it got them. `computed_max` is how far it had come before it
    was preempted. Up to position `writable_to` it may write without a look at its blocks. Whoever
    changes an entry of a table lowers `stale_from` to it; `slot` is the sequence's row in the
    PlanBuilder, which knows the entries before that.
    """

    id: int
    request: Request
    choice: int
    tokens: list[int]
    tables: list[list[int]]
    state: State = State.WAITING
    computed: int = 0
    computed_max: int = 0
    emitted: int = 0
    shared: int = 0
    preempted: bool = False
    inserted: bool = False  # the blocks of everything given are offered to the cache
    last_step: int = 0
    overtaken: int = 0  # times one behind it in its tenant's queue was admitted first
    writable_to: int = 0  # of `computed`
    dropped: int = 0
    retained: Retained | None = None  # None: all tokens stay
    slot: int = -1
    stale_from: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)  # not executed yet
    hold: Hold | None = None
    fetch: Fetch | None = None  # what the tiers have, or may have, behind its computed tokens
    wanted: Wanted | None = None  # the state of an earlier turn, while it may go on from one
    drafter: Drafter | None = None  # once it has decoded, with speculation on

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older; unique."""
        return self.request.arrival, self.choice

    @property
    def generated(self) -> int:
        """Tokens after the prompt, those given at submit included."""
        return len(self.tokens) - self.request.spec.prompt_tokens

    @property
    def stored(self) -> int:
        """Tokens whose KV is in its blocks."""
        return self.computed - self.dropped

    @property
    def plain(self) -> int:
        """How many of its leading tokens caches may give it and be given."""
        return len(self.tokens) if self.retained is None else self.retained.plain

    @property
    def left(self) -> int:
        """Tokens it may still generate."""
        return self.request.spec.sampling.max_tokens - self.generated

    @property
    def pending(self) -> int:
        """Tokens whose KV must be computed before the next token can be drawn."""
        return len(self.tokens) - self.computed

    def advance(self, count: int) -> None:
        """The KV of `count` more tokens is computed; counts those that had been before, here or
        (of a resumed request) elsewhere."""
        first, last = self.computed, self.computed + count
        spec = self.request.spec
        again = max(0, min(last, self.computed_max) - first)
        resumed = min(last, len(spec.token_ids) - 1) - max(
            first, self.computed_max, spec.prompt_tokens
        )
        self.request.recomputed_tokens += again + max(0, resumed)
        self.computed = last
        self.computed_max = max(self.computed_max, last)

    def decoded(self, token_id: int) -> None:
        """Its last token was computed, for the first time, and `token_id` follows it."""
        self.computed += 1
        self.computed_max = self.computed
        self.tokens.append(token_id)
        self.emitted += 1

    @property
    def credit(self) -> int:
        """Tokens it may emit before more is granted."""
        return self.request.credit - self.emitted


@dataclass(eq=False, slots=True)
class Request:
    """One live request. `cached_tokens` is None until its first admission, fixed from then on. A
    choice can end only with a token of `ends`, or when it has `tokens_max` with the prompt."""

    spec: EngineRequest
    arrival: int
    chain: ChainSpec
    credit: int
    cacheable: bool
    tenant: Tenant
    ends: frozenset[int]
    tokens_max: int
    charge: int  # tokens its tenant is charged with when it is first admitted
    policy: RetentionPolicy | None = None
    sequences: list[Sequence] = field(default_factory=list)
    forked: bool = False
    cached_tokens: int | None = None
    recomputed_tokens: int = 0
    preemptions: int = 0

    @property
    def unforked(self) -> int:
        """Choices that do not exist yet: they start from the prompt's last logits."""
        return 0 if self.forked else self.spec.sampling.n - 1

    @property
    def alive(self) -> list[Sequence]:
        """Choices that have not ended."""
        return [s for s in self.sequences if s.state is not State.FINISHED]

    def check_integrity(self) -> None:
        """Assert that a live request has a live choice and that its counts agree; for tests."""
        assert self.alive, "a live request without a live choice"
        spec, usage = self.spec, self.usage()
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        assert (usage.prompt_tokens == 0) == (self.cached_tokens is None)
        for sequence in self.sequences:
            assert tuple(sequence.tokens[: len(spec.token_ids)]) == spec.token_ids
            emitted = len(sequence.tokens) - len(spec.token_ids)
            assert sequence.emitted == emitted <= max(self.credit, 0)

    def usage(self) -> RequestUsage:
        """What it has cost so far; all zero for the prompt if it was never admitted."""
        prompt = 0 if self.cached_tokens is None else self.spec.prompt_tokens
        cached = self.cached_tokens or 0
        return RequestUsage(
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=prompt - cached,
            completion_tokens=sum(s.generated for s in self.sequences),
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
        )


def validate(spec: EngineRequest, model: ModelSpec) -> None:
    """Raise InvalidRequest or PromptTooLong for what the model can never serve."""
    given, prompt, sampling = len(spec.token_ids), spec.prompt_tokens, spec.sampling
    if not 1 <= prompt <= given:
        raise InvalidRequest("The prompt must have at least one token.")
    if sampling.n < 1 or sampling.max_tokens < 1:
        raise InvalidRequest("At least one choice and one output token must be asked for.")
    if given > prompt and sampling.n > 1:
        raise InvalidRequest("A request with several choices cannot be resumed.")
    if prompt + sampling.max_tokens > model.context_tokens:
        raise PromptTooLong(
            f"The prompt has {prompt} tokens and asks for {sampling.max_tokens} more, but the model"
            f" has a context of {model.context_tokens}."
        )
    if not (min(spec.token_ids) >= 0 and max(spec.token_ids) < model.vocab_tokens):
        raise InvalidRequest("A token id is outside the model's vocabulary.")
    if not 0 <= spec.adapter <= len(model.adapters):
        raise InvalidRequest("The model has no adapter of this number.")
    _validate_choice(sampling, model)


def _validate_choice(sampling: SamplingParams, model: ModelSpec) -> None:
    """That bias and allowed tokens name tokens of the model, and leave one to be chosen."""
    biased, allowed = [token for token, _ in sampling.logit_bias], sampling.allowed_token_ids
    if len(set(biased)) < len(biased):
        raise InvalidRequest("Sampling.logit_bias names a token id twice.")
    for name, ids in (("logit_bias", biased), ("allowed_token_ids", allowed)):
        if ids and not (min(ids) >= 0 and max(ids) < model.vocab_tokens):
            raise InvalidRequest(f"Sampling.{name} has an id outside the model's vocabulary.")
    ends = ends_of(sampling, model.eos_token_ids)
    if allowed and sampling.min_tokens > 0 and ends.issuperset(allowed):
        raise InvalidRequest("Sampling.min_tokens forbids all of Sampling.allowed_token_ids.")


def ends_of(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Tokens that end a choice once it has min_tokens."""
    if sampling.ignore_eos:
        return sampling.stop_token_ids
    return sampling.stop_token_ids.union(eos_token_ids)


def finish_reason(sequence: Sequence) -> Finish | None:
    """Whether the last generated token ends the choice. It must have one."""
    request, sampling = sequence.request, sequence.request.spec.sampling
    if sequence.tokens[-1] in request.ends and sampling.may_stop(sequence.generated - 1):
        return Finish.STOP
    return Finish.LENGTH if len(sequence.tokens) >= request.tokens_max else None
