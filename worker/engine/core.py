"""EngineCore: requests in, one step at a time, tokens out. Synchronous; knows no thread, no text.

The scheduler says what to compute, the model computes, the sampler draws; here tokens are appended,
choices fork and end, and every request gets exactly one last emission.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from kvstore.keys import ChainSpec, root
from kvstore.tiered import TieredStore
from seams.clock import Clock
from seams.errors import (
    BanyanError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutOfBlocks,
    Overloaded,
)
from worker.config import EngineConfig
from worker.engine.block_pool import BlockPool
from worker.engine.deadlines import Deadlines
from worker.engine.messages import (
    CacheOp,
    Emission,
    EngineLoad,
    EngineRequest,
    Finish,
    Logprobs,
    StepOutput,
    refusal,
)
from worker.engine.paging import PagedMemory
from worker.engine.plan import SampleRow
from worker.engine.promotion import Promoter
from worker.engine.pruning import Pruner
from worker.engine.radix import RadixCache
from worker.engine.request import Request, Sequence, State, ends_of, finish_reason, validate
from worker.engine.retention.base import RetentionPolicy
from worker.engine.retention.policies import Policies, policy_of
from worker.engine.sampler import Sampled, sample
from worker.engine.scheduler import Scheduled, Scheduler
from worker.engine.timing import StepTimes
from worker.models.base import Model

Sampler = Callable[[torch.Tensor, Seq[SampleRow], Seq[int]], list[Sampled]]

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
FAILED_STEPS_MAX = 3  # in a row: then it is the device, not the requests

_log = logging.getLogger(__name__)


class EngineCore:
    """One model, its pools and everything that runs on them. Not thread-safe.

    Allocates the model's pools (OutOfBlocks). Calls other than `step` take effect at once; what
    they have to say is part of the next StepOutput.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        clock: Clock,
        sampler: Sampler = sample,
        tiers: TieredStore | None = None,
        retention: Policies | None = None,
    ) -> None:
        spec = model.spec
        assert len(config.blocks) == len(spec.groups)
        model.allocate(config.blocks)
        on_free = model.poison if config.poison_freed else None
        pools = [BlockPool(g, n, on_free) for g, n in zip(spec.groups, config.blocks, strict=True)]
        cache = RadixCache(pools, spec.block_tokens) if config.cache else None
        self.memory = PagedMemory(pools, cache, spec.block_tokens)
        self._times = StepTimes()
        self._tiers = Promoter(model, self.memory, tiers, self._times) if tiers else None
        self.retention = retention
        self._pruner = Pruner(self.memory, model, self._tiers) if retention else None
        self.scheduler = Scheduler(self.memory, config, self._times, self._tiers, self._pruner)
        self.clock = clock
        self._model, self._config, self._sampler = model, config, sampler
        self._eos = spec.eos_token_ids
        adapters = ("", *(adapter.fingerprint for adapter in spec.adapters))
        self._roots = [root(spec.fingerprint, a, spec.block_tokens) for a in adapters]
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines(self._requests)
        self._outbox: list[Emission] = []
        self._arrivals = 0
        self._sequences = 0
        self._steps = 0  # that succeeded
        self._failed_steps = 0  # since the last that succeeded
        self._prompt_tokens = 0
        self._cached_tokens = 0

    # --- between steps -----------------------------------------------------------------------

    def submit(self, spec: EngineRequest) -> None:
        """Queue a request; a refusal is its one emission.

        Raises InvalidRequest, and harms nobody, if a live request has this id.
        """
        if spec.request_id in self._requests:
            raise InvalidRequest("A request with this id is already being served.")
        try:
            policy = self._admissible(spec)
        except BanyanError as error:
            self._outbox.append(refusal(spec, error))
            return
        self._arrivals += 1
        request = Request(
            spec=spec,
            arrival=self._arrivals,
            chain=ChainSpec(
                self._roots[spec.adapter], self.memory.block_tokens, spec.salt, spec.private_from
            ),
            credit=spec.credit_tokens,
            cacheable=self._config.cache and not spec.no_cache,
            tenant=self.scheduler.waiting.join(spec.tenant),
            ends=ends_of(spec.sampling, self._eos),
            tokens_max=spec.prompt_tokens + spec.sampling.max_tokens,
            charge=spec.prompt_tokens,
            policy=policy,
        )
        self._requests[spec.request_id] = request
        self._deadlines.add(request)
        sequence = self._new_sequence(request, 0, list(spec.token_ids))
        self.scheduler.enter(sequence)
        if sequence.generated and (finish := finish_reason(sequence)) is not None:
            self._end_choice(sequence, finish, ())

    def cancel(self, request_id: str) -> None:
        """End a request in any state; what it computed stays cached. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, Finish.CANCELLED, Cancelled("The request was cancelled."))

    def grant(self, request_id: str, tokens: int) -> None:
        """Allow every choice `tokens` more tokens. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.credit += tokens
            self.scheduler.granted(request)

    def has_work(self) -> bool:
        """Whether `step` would do anything now."""
        due = self.next_deadline_s()
        expired = due is not None and due <= self.clock.now()
        if self._outbox or expired:
            return True
        tiers = self._tiers
        if tiers is None:
            return self.scheduler.can_step()
        resting = tiers.resting(self.clock.now())
        return tiers.has_ops() or (self.scheduler.can_step() and not resting)

    def on_wake(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when there may be work again that no call brought."""
        if self._tiers is not None:
            self._tiers.on_wake(wake)

    def next_deadline_s(self) -> float | None:
        """The earliest deadline, on the clock, of any live request, or the moment to look again
        at what is waited for."""
        expiry_s = self._deadlines.next_s()
        look_s = self._tiers.look_again_s if self._tiers is not None else None
        return min([s for s in (expiry_s, look_s) if s is not None], default=None)

    def load(self) -> EngineLoad:
        """Counts for heartbeats."""
        scheduler, pool = self.scheduler, self.memory.pools[0]
        prefilling = sum([s.pending for s in scheduler.running if s.pending > 1])
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_cached=self.memory.available(0) - pool.free,
            queued_prefill_tokens=scheduler.waiting.tokens + prefilling,
            steps=self._steps,
            step_s=self._times.step_s,
            prefill_s_per_token=self._times.prefill_s_per_token,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens + (self._tiers.late_tokens if self._tiers else 0),
            blocks_low=pool.low,
            kv_token_bytes=self.memory.token_bytes(),
            compacted=replace(self._pruner.compactor.total) if self._pruner else None,
        )

    def snapshot(self) -> tuple[CacheOp, ...]:
        """STORED ops of all cached full blocks, parents first. Ops of the next StepOutput may
        repeat what is in it; applying them again changes nothing."""
        if self.memory.cache is None:
            return ()
        below = self._tiers.snapshot() if self._tiers is not None else []
        return (*self.memory.cache.snapshot(), *below)

    def close(self, flush_s: float = 0.0) -> None:
        """After the last step: what is cached goes down the tiers within `flush_s`, which end."""
        if self._tiers is not None:
            self._tiers.close(flush_s)

    # --- one step ----------------------------------------------------------------------------

    def step(self) -> StepOutput | None:
        """Expire, schedule, compute, draw, emit. None if there was nothing to do.

        A failure of the model or the sampler ends the requests of this step, no others; one for
        lack of memory is tried again with fewer tokens first. Raises what failed once
        FAILED_STEPS_MAX steps in a row have: then the engine cannot go on, and this step's requests
        are not ended.
        """
        self._expire()
        if self._tiers is not None:
            self._tiers.look()
        scheduled = self.scheduler.plan()
        if self._tiers is not None and scheduled is None and self.scheduler.waits_for_tiers:
            self._tiers.rest(self.clock.now())
        for sequence in self.scheduler.take_stuck():
            error = OutOfBlocks("The request needs more memory than the replica has.")
            if sequence.request.alive:
                self._end(sequence.request, Finish.ERROR, error)
        if self._pruner is not None and self._pruner.failed:
            self._fail(sequence.request for sequence in self._pruner.take_failed())
        if scheduled is not None:
            self._execute(scheduled)
        elif not self._outbox and not (self._tiers is not None and self._tiers.has_ops()):
            return None
        emissions, self._outbox = tuple(self._outbox), []
        ops = tuple(self.memory.cache.take_ops()) if self.memory.cache else ()
        if self._tiers is not None:
            ops += tuple(self._tiers.take_ops())
        return StepOutput(self._steps, emissions, ops, self.load())

    def _expire(self) -> None:
        now = self.clock.now()
        while (request := self._deadlines.pop_due(now)) is not None:
            error = DeadlineExceeded("The request's deadline has passed.")
            self._end(request, Finish.ERROR, error)

    def _execute(self, scheduled: Scheduled) -> None:
        started = self.clock.now()
        plan = scheduled.plan
        try:
            logits = self._model.execute(plan)
            drawn = self._sampler(logits, plan.samples, self._eos)
        except Exception as error:
            if isinstance(error, OUT_OF_MEMORY) and self.scheduler.take_back(scheduled):
                _log.warning("step %d had too little memory; again in smaller ones", plan.step)
                return  # nothing was taken over, so the same tokens are planned again
            self._failed_steps += 1
            if self._failed_steps >= FAILED_STEPS_MAX:
                raise
            _log.exception("step %d failed; its requests end", plan.step)
            self._fail(sequence.request for sequence, _ in scheduled.rows)
            return
        self._steps += 1
        self._failed_steps = 0
        self.scheduler.grow_back()
        tokens = self._commit(scheduled, drawn)
        self._record(scheduled, self.clock.now() - started, tokens)

    def _record(self, scheduled: Scheduled, elapsed_s: float, tokens: int) -> None:
        """How long a step took that emitted so many tokens; of one that drafted, what a token of a
        sequence took counts."""
        rows, drafts = scheduled.rows, scheduled.drafts
        chunks = [count for s, count in rows if count > 1 and s not in drafts]
        if not chunks:
            speculator = self.scheduler.speculator
            speculator.record(elapsed_s, len(rows), tokens, drafted=bool(drafts))
            if drafts:
                elapsed_s *= len(rows) / max(tokens, len(rows))
        self._times.record(elapsed_s, len(rows) - len(chunks), sum(chunks))

    def _fail(self, requests: Iterable[Request]) -> None:
        """End requests whose computed blocks cannot be trusted."""
        for request in dict.fromkeys(requests):
            if request.alive:  # it may have ended in this step, for another reason
                error = InternalError("The replica failed while computing the request.")
                self._end(request, Finish.ERROR, error, keep=False)

    def _commit(self, scheduled: Scheduled, drawn: list[Sampled]) -> int:
        """Take over what a step computed, row by row; a request that ended is passed over. `drawn`
        is in the rows' order. Returns how many tokens were drawn and stand."""
        at = rejected = 0
        drafts = scheduled.drafts
        for sequence, count in scheduled.rows:
            begin = at
            while at < len(drawn) and drawn[at].sequence == sequence.id:
                at += 1
            if sequence.state is not State.RUNNING:
                continue
            if drafts and sequence in drafts:
                kept = self._commit_drafted(sequence, drafts[sequence], drawn[begin:at])
                rejected += at - begin - kept
                continue
            one = count == 1 and at == begin + 1 and drawn[begin].token_id >= 0
            if one and sequence.inserted and not sequence.copies:
                self._commit_decoded(sequence, drawn[begin])
            else:
                self._commit_row(sequence, count, drawn[begin:at])
        assert at == len(drawn), "a draw that belongs to no row"
        return at - rejected

    def _commit_decoded(self, sequence: Sequence, drawn: Sampled) -> None:
        """What `_commit_row` comes to for nearly all rows, in a third of its time."""
        request, token = sequence.request, drawn.token_id
        sequence.decoded(token)
        if (
            token in request.ends
            or len(sequence.tokens) >= request.tokens_max
            or drawn.logprobs is not None
        ):
            self._emit(sequence, [drawn])
            return
        spec = request.spec
        request.tenant.served += 1
        position = len(sequence.tokens) - spec.prompt_tokens - 1
        self._outbox.append(Emission(spec.request_id, sequence.choice, position, (token,)))

    def _commit_drafted(self, sequence: Sequence, draft: list[int], drawn: list[Sampled]) -> int:
        """Append what was drawn as long as every token before is the draft's, and say so; returns
        how many. The first that differs is right too. What the other rows wrote lies beyond
        `computed`, which nobody reads; a row that failed is computed again without a draft before
        it, and fails then."""
        kept: list[Sampled] = []
        for at, one in enumerate(drawn):
            if one.token_id < 0:
                break
            kept.append(one)
            sequence.tokens.append(one.token_id)
            ended = finish_reason(sequence) is not None
            if ended or at == len(draft) or one.token_id != draft[at]:
                break
        if not kept:
            self._fail([sequence.request])
            return 0
        accepted = sum(one.token_id == token for one, token in zip(kept, draft, strict=False))
        self.scheduler.speculator.judged(sequence, len(draft), accepted)
        sequence.advance(len(kept))
        sequence.emitted += len(kept)
        self.memory.settle(sequence)
        self.memory.trim(sequence)
        self._emit(sequence, kept)
        return len(kept)

    def _commit_row(self, sequence: Sequence, count: int, drawn: list[Sampled]) -> None:
        request = sequence.request
        if any(one.token_id < 0 for one in drawn):
            self._fail([request])
            return
        if sequence.computed_max == 0:
            self._count_prompt(request)
        sequence.advance(count)
        self.memory.settle(sequence)
        if not sequence.inserted and (drawn or self.memory.windowed):
            sequence.inserted = bool(drawn)
            self.memory.share(sequence)  # before windows pass what one that branches off needs
        if not drawn:
            return
        own, *others = drawn
        assert own.choice == sequence.choice
        choices = [sequence, *(self._fork(sequence, one) for one in others)]
        request.forked = True
        sequence.tokens.append(own.token_id)
        sequence.emitted += 1
        for choice, one in zip(choices, drawn, strict=True):
            self._emit(choice, [one])

    def _count_prompt(self, request: Request) -> None:
        assert request.cached_tokens is not None
        self._prompt_tokens += request.spec.prompt_tokens
        self._cached_tokens += request.cached_tokens

    def _fork(self, parent: Sequence, drawn: Sampled) -> Sequence:
        """A further choice, which starts with its own token after the parent's prompt."""
        child = self._new_sequence(parent.request, drawn.choice, [*parent.tokens, drawn.token_id])
        child.emitted = 1
        child.computed_max = parent.computed
        child.inserted = True
        self.scheduler.fork(parent, child)
        return child

    def _new_sequence(self, request: Request, choice: int, tokens: list[int]) -> Sequence:
        self._sequences += 1
        tables: list[list[int]] = [[] for _ in self.memory.pools]
        sequence = Sequence(self._sequences, request, choice, tokens, tables)
        if self._pruner is not None:
            self._pruner.start(sequence)
        request.sequences.append(sequence)
        return sequence

    # --- emitting and ending -----------------------------------------------------------------

    def _emit(self, sequence: Sequence, drawn: Seq[Sampled]) -> None:
        """Say that tokens were appended, and end the choice if the last one was its last."""
        spec = sequence.request.spec
        sequence.request.tenant.served += len(drawn)
        token_ids = tuple([one.token_id for one in drawn])
        logprobs = tuple([one.logprobs for one in drawn if one.logprobs is not None])
        finish = finish_reason(sequence)
        if finish is not None:
            self.scheduler.lengths.record(sequence.generated)
            self._end_choice(sequence, finish, token_ids, logprobs)
            return
        position = sequence.generated - len(token_ids)
        self._outbox.append(
            Emission(spec.request_id, sequence.choice, position, token_ids, logprobs)
        )

    def _end_choice(
        self,
        sequence: Sequence,
        finish: Finish,
        token_ids: tuple[int, ...],
        logprobs: tuple[Logprobs, ...] = (),
    ) -> None:
        """A choice has come to its end, and its request too if it was the last of them."""
        request = sequence.request
        self.scheduler.leave(sequence, keep=True)
        last = not request.alive and not request.unforked
        self._outbox.append(
            Emission(
                request_id=request.spec.request_id,
                choice=sequence.choice,
                position=sequence.generated - len(token_ids),
                token_ids=token_ids,
                logprobs=logprobs,
                finish=finish,
                usage=request.usage() if last else None,
                last=last,
            )
        )
        if last:
            self._forget(request)

    def _end(
        self, request: Request, finish: Finish, error: BanyanError, *, keep: bool = True
    ) -> None:
        """End all choices of a live request that have not ended, those not forked yet too."""
        ended = request.alive
        for sequence in ended:
            self.scheduler.leave(sequence, keep=keep)
        open_choices = [(s.choice, s.generated) for s in ended]
        open_choices += [(choice, 0) for choice in range(1, 1 + request.unforked)]
        usage, request_id = request.usage(), request.spec.request_id
        for choice, position in open_choices[:-1]:
            self._outbox.append(Emission(request_id, choice, position, finish=finish))
        choice, position = open_choices[-1]
        self._outbox.append(
            Emission(
                request_id, choice, position, finish=finish, error=error, usage=usage, last=True
            )
        )
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.spec.request_id]
        self.scheduler.waiting.leave(request.spec.tenant)

    def _admissible(self, spec: EngineRequest) -> RetentionPolicy | None:
        """Its policy. Raises what it is refused with."""
        validate(spec, self._model.spec)
        policy = policy_of(spec.retention, self.retention)
        tokens = len(spec.token_ids)
        if policy is not None:
            tokens = min(tokens, policy.quota.limit(spec.prompt_tokens))
        if not self.memory.fits_alone(tokens):
            raise OutOfBlocks("The prompt needs more memory than the replica has.")
        full = ""
        if len(self.scheduler.waiting) >= self._config.waiting_max:
            full = "The replica's queue is full."
        elif len(self._requests) >= self._config.requests_max:
            full = "The replica holds as many requests as it can, paused ones included."
        if full:
            tokens = self.load().queued_prefill_tokens
            raise Overloaded(full, retry_after_s=self._times.estimate_s(tokens))
        return policy

    # --- conservation ------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert the conservation law: blocks and references, every live sequence in exactly one
        state, tokens accounted for. O(everything); for tests, between steps."""
        self.scheduler.check_integrity()
        scheduler = self.scheduler
        placed = [*scheduler.running, *scheduler.waiting, *scheduler.parked.values()]
        alive = [s for request in self._requests.values() for s in request.alive]
        assert len(placed) == len(alive) == len({s.id for s in placed} & {s.id for s in alive})
        for request in self._requests.values():
            request.check_integrity()
