"""ClientStream: one generation from the client's point of view, as a synchronous state machine.

It is told what happens (placed, emission, replica lost, failure) and keeps what the client is to
get. However these interleave the client gets Started, Deltas without a gap or a duplicate, one
ChoiceFinished per choice, then Finished; or one error; and after that nothing. Knows no gRPC, no
asyncio, and no replica beyond its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from banyan.v1 import api_pb2, common_pb2, internal_pb2
from kvstore.keys import BlockKey, ChainSpec, RootId, extend
from router.outbox import Outbox, credit_for
from router.placement import Observed, Placement, PlaceRequest
from router.text.output import ChoiceText
from seams.clock import Clock
from seams.errors import BanyanError, OutOfBlocks, Overloaded, ReplicaLost, from_status
from seams.errors import StatusCode as Code

MOVABLE = {Code.UNAVAILABLE, Code.CANCELLED, Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND}
"""Statuses of a replica that another replica may not share."""


class Phase(Enum):
    """PLACING -> RUNNING -> (SETTLING) -> OVER; RUNNING -> PLACING when its replica is lost."""

    PLACING = "placing"  # needs a replica
    RUNNING = "running"
    SETTLING = "settling"  # the client has all text; the replica's usage is outstanding
    OVER = "over"


@dataclass(frozen=True)
class StreamSpec:
    """One validated request. `sampling` has seed, max_tokens and n resolved; `emitted` are the ids
    that the client of a resumed stream already has (n == 1). `new_text` makes the text side of one
    choice, None where the model has no tokenizer."""

    request_id: str
    model: str
    root_id: RootId
    block_tokens: int
    prompt: tuple[int, ...]
    sampling: common_pb2.Sampling
    tenant: str
    salt: bytes
    eos_token_ids: frozenset[int] = frozenset()
    emitted: tuple[int, ...] = ()
    new_text: Callable[[], ChoiceText] | None = None
    label: str = ""
    session: str = ""
    priority: int = 0
    no_cache: bool = False
    credit_tokens: int = 256


@dataclass
class _Choice:
    text: ChoiceText | None
    ids: list[int] = field(default_factory=list)  # generated so far, those of a resume included
    ended: bool = False
    consumed: int = 0  # tokens the client has taken

    def push(self, token_id: int) -> str:
        self.ids.append(token_id)
        return self.text.push(token_id) if self.text is not None else ""

    @property
    def stop(self) -> str:
        return self.text.stop if self.text is not None else ""


class ClientStream:
    """Owned by one relay. `error` is set if it ended otherwise than with Finished.

    `attempts_max` bounds placements that brought no token; each new token renews the budget.
    """

    def __init__(self, spec: StreamSpec, clock: Clock, attempts_max: int = 2) -> None:
        assert spec.sampling.n >= 1 and spec.sampling.max_tokens >= 1 and spec.prompt
        assert not spec.emitted or spec.sampling.n == 1
        self.spec = spec
        self.phase = Phase.PLACING
        self.error: BanyanError | None = None
        self.last_loss: BanyanError | None = None  # why it is being placed again
        self.outbox = Outbox()
        self.moves = 0
        self.first_token_seen = False  # of the present placement
        self._clock = clock
        self._attempts_max = attempts_max
        self._attempts = 0
        new_text = spec.new_text
        self._choices = [_Choice(new_text() if new_text else None) for _ in range(spec.sampling.n)]
        self._keys: list[BlockKey] = []
        self._placement: Placement | None = None
        self._usage = common_pb2.Usage(prompt_tokens=len(spec.prompt))
        self._usage_known = False
        self._started = False
        self._credit = credit_for(spec.sampling.n, self._logprobs, spec.credit_tokens)
        self._limit = 0  # tokens of each choice that the replica may emit, resumed ones included
        self._times = (0.0, 0.0, 0.0)  # submit, first token, last token
        self._replay()

    @property
    def _logprobs(self) -> int | None:
        sampling = self.spec.sampling
        return sampling.logprobs if sampling.HasField("logprobs") else None

    @property
    def placement(self) -> Placement | None:
        """Where it runs or ran last."""
        return self._placement

    # ---- placing ---------------------------------------------------------------------------------

    def place_request(self, excluded: frozenset[str], numeric_class: str = "") -> PlaceRequest:
        """What to ask the core for: the prompt and everything generated so far."""
        assert self.phase is Phase.PLACING
        spec, tokens = self.spec, self._all_tokens()
        if not spec.no_cache:
            chain = ChainSpec(spec.root_id, spec.block_tokens, spec.salt)
            self._keys += extend(chain, self._keys, tokens)
        return PlaceRequest(
            request_id=spec.request_id,
            model=spec.model,
            root_id=spec.root_id,
            tokens=len(tokens),
            keys=self._keys,
            max_tokens=spec.sampling.max_tokens - (len(tokens) - len(spec.prompt)),
            choices=spec.sampling.n,
            session=spec.session,
            tenant=spec.tenant,
            no_cache=spec.no_cache,
            excluded=excluded,
            numeric_class=numeric_class,
        )

    def placed(self, placement: Placement, remaining_s: float | None) -> internal_pb2.Submit:
        """A replica was found; returns what to submit there. `remaining_s` of the client's time."""
        assert self.phase is Phase.PLACING
        if self._placement is not None:
            self.moves += 1
        self._placement = placement
        self.phase = Phase.RUNNING
        self.first_token_seen = False
        now_s = self._clock.now()
        self._times = (now_s, 0.0, 0.0)
        self._start(placement.replica)
        return self._submit(remaining_s)

    def _submit(self, remaining_s: float | None) -> internal_pb2.Submit:
        spec, tokens = self.spec, self._all_tokens()
        had = len(tokens) - len(spec.prompt)
        waiting = had - self._choices[0].consumed if had else 0
        credit = max(1, self._credit - waiting)
        self._limit = had + credit
        return internal_pb2.Submit(
            request_id=spec.request_id,
            root_id=spec.root_id,
            token_ids=tokens,
            prompt_tokens=len(spec.prompt),
            sampling=spec.sampling,
            priority=spec.priority,
            tenant=spec.tenant,
            salt=spec.salt,
            deadline_ms=_milliseconds(remaining_s),
            credit_tokens=credit,
            no_cache=spec.no_cache,
        )

    def _all_tokens(self) -> list[int]:
        """The prompt and, of a single choice, what it has generated (several never move)."""
        tokens = list(self.spec.prompt)
        return tokens + self._choices[0].ids if len(self._choices) == 1 else tokens

    # ---- what the replica sends ------------------------------------------------------------------

    def receive(self, emission: internal_pb2.Emission) -> bool:
        """Take one emission of the present replica. True: cancel the request there."""
        if self.phase not in (Phase.RUNNING, Phase.SETTLING):
            return False
        if emission.HasField("usage"):
            self._add_usage(emission.usage)
        if self.phase is Phase.SETTLING:
            if emission.last:
                self._finish()
            return False
        if emission.HasField("error"):
            self._replica_failed(emission.error)
            return False
        if not self._take(emission):
            self.lost(ReplicaLost("The replica's answer had a gap and could not be continued."))
            return not emission.last
        return self._after(emission.last)

    def _after(self, last: bool) -> bool:
        """Decide what follows once an emission's tokens are in."""
        if self.outbox.overfull:
            self.fail(Overloaded("The client reads too slowly for what may wait for it."))
            return not last
        ended = all(choice.ended for choice in self._choices)
        if not last and ended:
            self.phase = Phase.SETTLING
            return True
        if last and ended:
            self._finish()
        elif last:
            self.lost(ReplicaLost("The replica ended the stream early."))
        return False

    def _take(self, emission: internal_pb2.Emission) -> bool:
        """The emission's new tokens, and its choice's end. False if something is missing."""
        if emission.choice >= len(self._choices):
            return False
        choice = self._choices[emission.choice]
        if choice.ended:  # after a stop string; the other choices go on, and so must this one
            choice.consumed = max(choice.consumed, emission.position + len(emission.token_ids))
            return True
        seen = len(choice.ids) - emission.position
        if seen < 0:
            return False
        ids, logprobs = emission.token_ids[seen:], emission.logprobs[seen:]
        if ids:
            self._add_tokens(emission.choice, choice, ids, logprobs)
        if choice.stop:
            self._end_choice(emission.choice, common_pb2.FINISH_REASON_STOP_STRING)
        elif emission.finish in (
            common_pb2.FINISH_REASON_STOP,
            common_pb2.FINISH_REASON_LENGTH,
        ):
            self._end_choice(emission.choice, emission.finish)
        elif emission.finish != common_pb2.FINISH_REASON_UNSPECIFIED:
            return False  # cancelled over our heads, or failed without saying why
        return True

    def _add_tokens(
        self,
        index: int,
        choice: _Choice,
        ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
    ) -> None:
        position, text = len(choice.ids), ""
        for token_id in ids:
            text += choice.push(token_id)
            if choice.stop:
                break
        new = choice.ids[position:]
        self.outbox.put_delta(index, position, new, text, logprobs[: len(new)])
        self._attempts = 0
        now_s = self._clock.now()
        first_s = self._times[1] if self.first_token_seen else now_s
        self._times = (self._times[0], first_s, now_s)
        self.first_token_seen = True

    def _end_choice(self, index: int, reason: common_pb2.FinishReason) -> None:
        choice = self._choices[index]
        rest = choice.text.flush() if choice.text is not None and not choice.stop else ""
        if choice.stop:
            reason = common_pb2.FINISH_REASON_STOP_STRING
        choice.ended = True
        finished = api_pb2.ChoiceFinished(choice=index, reason=reason, text=rest, stop=choice.stop)
        self.outbox.put(api_pb2.GenerateResponse(choice_finished=finished))

    def _replica_failed(self, status: common_pb2.Status) -> None:
        retry_after_s = status.retry_after_ms / 1000 or None
        error = from_status(status.code, status.message, retry_after_s, status.error)
        if isinstance(error, OutOfBlocks):
            error.retry_after_s = None  # it will not fit later either, only perhaps elsewhere
        if status.code in MOVABLE:
            self.lost(error)
        else:
            self.fail(error)

    # ---- what else happens -----------------------------------------------------------------------

    def lost(self, error: BanyanError) -> None:
        """The present placement is dead: place again, or end if that cannot be exact."""
        if self.phase is Phase.SETTLING:
            self._finish()
        if self.phase is not Phase.RUNNING:
            return
        self.last_loss = error
        self._attempts += 1
        if len(self._choices) > 1 and any(choice.ids for choice in self._choices):
            self.fail(ReplicaLost("The replica was lost; several choices cannot be moved."))
        elif self._attempts >= self._attempts_max:
            self.fail(error)
        elif not self._end_if_complete():
            self.phase = Phase.PLACING

    def fail(self, error: BanyanError) -> None:
        """End with an error, unless the stream is over. Tokens that wait still go out first."""
        if self.phase is not Phase.OVER:
            self.phase = Phase.OVER
            self.error = error

    def settle(self) -> None:
        """The replica's usage did not come in time; the client need not wait for it."""
        if self.phase is Phase.SETTLING:
            self._finish()

    def consumed(self, responses: Sequence[api_pb2.GenerateResponse]) -> None:
        """The client has taken these."""
        for response in responses:
            if response.HasField("delta"):
                self._choices[response.delta.choice].consumed += len(response.delta.token_ids)

    def credit_due(self) -> int:
        """Tokens to grant each choice at the replica now, often 0; counted as granted.

        The furthest choice counts: one that waits for blocks must not hold back another that would
        free some.
        """
        if self.phase is not Phase.RUNNING:
            return 0
        target = max(choice.consumed for choice in self._choices) + self._credit
        grant = target - self._limit
        if grant < max(1, self._credit // 2):
            return 0
        self._limit = target
        return grant

    # ---- beginning and end -----------------------------------------------------------------------

    def _start(self, replica: str) -> None:
        if self._started:
            return
        self._started = True
        started = api_pb2.Started(
            request_id=self.spec.request_id,
            seed=self.spec.sampling.seed,
            model=self.spec.model,
            replica=replica,
            prompt_tokens=len(self.spec.prompt),
            label=self.spec.label,
        )
        self.outbox.put(api_pb2.GenerateResponse(started=started))

    def _replay(self) -> None:
        """Bring the text side to where the broken stream was; what that gave out is not repeated.

        The tokens may already be all there are: only the broken stream's end got lost.
        """
        choice = self._choices[0]
        for token_id in self.spec.emitted:
            choice.push(token_id)
            choice.consumed += 1
            if choice.stop:
                break
        if self.spec.emitted:
            self._end_if_complete()

    def _end_if_complete(self) -> bool:
        """Finish if the tokens so far end the only choice; True if so."""
        choice, sampling = self._choices[0], self.spec.sampling
        if len(self._choices) > 1 or not choice.ids:
            return False
        if choice.stop:
            reason = common_pb2.FINISH_REASON_STOP_STRING
        elif self._is_end(choice.ids[-1]) and len(choice.ids) > sampling.min_tokens:
            reason = common_pb2.FINISH_REASON_STOP
        elif len(choice.ids) >= sampling.max_tokens:
            reason = common_pb2.FINISH_REASON_LENGTH
        else:
            return False
        self._start("")
        self._end_choice(0, reason)
        self._finish()
        return True

    def _is_end(self, token_id: int) -> bool:
        sampling = self.spec.sampling
        if token_id in sampling.stop_token_ids:
            return True
        return token_id in self.spec.eos_token_ids and not sampling.ignore_eos

    def _add_usage(self, usage: common_pb2.Usage) -> None:
        """The first report says what the prompt cost; later ones add only what came on top."""
        if not self._usage_known:
            self._usage_known = True
            self._usage.cached_tokens = min(usage.cached_tokens, self._usage.prompt_tokens)
        self._usage.recomputed_tokens += usage.recomputed_tokens
        self._usage.preemptions += usage.preemptions

    def _finish(self) -> None:
        assert self.phase is not Phase.OVER and all(choice.ended for choice in self._choices)
        self.phase = Phase.OVER
        usage = self._usage
        usage.computed_tokens = usage.prompt_tokens - usage.cached_tokens
        usage.completion_tokens = sum(len(choice.ids) for choice in self._choices)
        usage.moves = self.moves
        finished = api_pb2.Finished(usage=usage)
        if self._placement is not None:
            finished.decision.CopyFrom(self._placement.decision)
            if self._usage_known:
                finished.decision.delivered_tokens = usage.cached_tokens
        self.outbox.put(api_pb2.GenerateResponse(finished=finished))

    @property
    def usage(self) -> common_pb2.Usage:
        """Final once the phase is OVER and there is no error."""
        return self._usage

    @property
    def delivered_tokens(self) -> int | None:
        """Of the prompt: what the replica read from its cache; None if it has not told."""
        return self._usage.cached_tokens if self._usage_known else None

    def observed(self) -> Observed:
        """What this stream taught about its replica; nothing if it moved or never reported."""
        submitted_s, first_s, last_s = self._times
        if self.moves or not self._usage_known or not self.first_token_seen:
            return Observed()
        new = sum(len(choice.ids) for choice in self._choices) - len(self.spec.emitted)
        each = -(-new // len(self._choices))
        return Observed(
            computed_tokens=self._usage.computed_tokens + len(self.spec.emitted),
            prefill_s=first_s - submitted_s,
            decode_tokens=max(0, each - 1),
            decode_s=last_s - first_s,
        )


def _milliseconds(remaining_s: float | None) -> int:
    """For deadline_ms, where 0 means none."""
    return 0 if remaining_s is None else max(1, min(int(remaining_s * 1000), (1 << 32) - 1))
