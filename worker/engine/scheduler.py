"""The scheduler: which tokens of which sequences the next step computes, and in whose blocks.

One token budget a step: decode rows first, then prefill in chunks within what decoding may be
slowed down by, then admission by predicted peak. Where a block cannot be found even by eviction,
younger sequences are preempted (to be recomputed later); the oldest that may run always gets what
it needs, so nothing livelocks. It knows token ids and blocks, no model and no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from worker.config import EngineConfig
from worker.engine.admission import Forecast, LengthHistory
from worker.engine.paging import PagedMemory, blocks_for
from worker.engine.plan import StepPlan
from worker.engine.planning import Drafts, PlanBuilder, StepDraft
from worker.engine.promotion import AT_ONCE, Promoter
from worker.engine.pruning import Pruner
from worker.engine.request import Request, Sequence, State
from worker.engine.speculation import Speculator
from worker.engine.timing import StepTimes
from worker.engine.waiting import WaitingQueue

TAKEN_BACK_MAX = 3
PREFILL_MIN = 4  # tokens of a step, however slow they seem
PASSED_MAX = 16  # in the queue that cannot begin now, before nobody behind them is looked at
LOOK_AHEAD = 8  # of a tenant's queue, for who has most cached
OVERTAKEN_MAX = 8  # times
BROUGHT_MAX = 64  # blocks copied up for one prompt in a step beside decoders


@dataclass(frozen=True)
class Scheduled:
    """A plan and, in its order, the sequences with how many tokens each computes, among them those
    of `drafts`, which come after the sequence's own."""

    plan: StepPlan
    rows: tuple[tuple[Sequence, int], ...]
    drafts: Drafts = field(default_factory=dict)


class Scheduler:
    """Owns every live sequence's state. Calls come between steps, one after the other."""

    def __init__(
        self,
        memory: PagedMemory,
        config: EngineConfig,
        times: StepTimes,
        tiers: Promoter | None = None,
        pruner: Pruner | None = None,
    ) -> None:
        assert config.step_tokens_max > 0 and config.running_max > 0
        self.memory = memory
        self.tiers = tiers
        self.waits_for_tiers = False  # the last plan left out a prompt whose blocks are coming
        self.pruner = pruner
        self.builder = PlanBuilder(memory.block_tokens, len(memory.pools))
        self.builder.pruned = pruner is not None
        self._derived = pruner.derived if pruner is not None else None
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by age
        self.parked: dict[int, Sequence] = {}  # by id: without blocks, without credit
        self.lengths = LengthHistory()
        self.speculator = Speculator(config.speculate)
        self._forecast = Forecast(memory, self.lengths)
        self._times = times
        self._config = config
        self._budget = config.step_tokens_max
        self._taken_back = 0  # plans in a row
        # The head that did not fit beside so many active ones; forgotten when a sequence stops.
        self._blocked: tuple[Sequence, int] | None = None
        self._stuck: list[Sequence] = []
        self._step = 0

    # --- entering and leaving ----------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """Queue a sequence without blocks, or park it if it has no credit."""
        if sequence.credit > 0:
            sequence.state = State.WAITING
            self.waiting.add(sequence)
            if self._derived is not None:
                self._derived.find(sequence)
            if self.tiers is not None and sequence.request.cacheable:
                self.tiers.prefetch(sequence)
        else:
            sequence.state = State.PARKED
            self.parked[sequence.id] = sequence

    def granted(self, request: Request) -> None:
        """A request has more credit: its parked sequences queue again."""
        for sequence in request.sequences:
            if sequence.state is State.PARKED:
                del self.parked[sequence.id]
                self.enter(sequence)

    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        """End a live sequence in any state; `keep` offers what it computed to the cache."""
        if sequence.state is State.RUNNING:
            self._stop_running(sequence, keep=keep)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            assert sequence.state is State.PARKED
            del self.parked[sequence.id]
        self._blocked = None
        if self.tiers is not None:
            self.tiers.forget(sequence)
        if self._derived is not None:
            self._derived.forget(sequence)
        sequence.state = State.FINISHED

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on from the parent's computed prompt; without a free place it waits."""
        if len(self.running) >= self._config.running_max:
            child.preempted = True
            if child.retained is not None and parent.retained is not None:
                child.retained.lineage = parent.retained.fixed
            self.enter(child)
            return
        self.memory.fork(parent, child)
        self._start_running(child)

    def take_stuck(self) -> list[Sequence]:
        """Sequences found unable to go on in the whole pool, since the last call; still running."""
        stuck, self._stuck = self._stuck, []
        return stuck

    def _start_running(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=lambda s: s.age)

    def _stop_running(self, sequence: Sequence, *, keep: bool) -> None:
        at = bisect_left(self.running, sequence.age, key=lambda s: s.age)
        assert self.running[at] is sequence
        del self.running[at]
        if self.tiers is not None:
            self.tiers.forget(sequence)
        if self.pruner is not None:
            self.pruner.stop(sequence, keep=keep)
        self.memory.release(sequence, keep=keep)
        self.builder.drop(sequence)
        sequence.inserted = False
        self._blocked = None

    # --- one step ----------------------------------------------------------------------------

    def can_step(self) -> bool:
        """Whether `plan` would find something to compute."""
        return len(self.waiting) > 0 or any(s.credit > 0 for s in self.running)

    def plan(self) -> Scheduled | None:
        """The next step, None if nothing can run; its blocks are allocated, copies pending.

        The caller executes it and then advances `computed` and settles the copies of every row's
        sequence, lets those sequences leave, or takes the plan back.
        """
        self._step += 1
        self.waits_for_tiers = False
        if self.pruner is not None:
            self.pruner.prune(self.running)
        draft = StepDraft(self._budget, self._budget)
        runnable = [s for s in self.running if s.request.credit > s.emitted]
        decoding = self._decoding(runnable)
        if len(decoding) <= draft.budget:  # most have a block to write into
            draft.add_decodes([s for s in decoding if s.computed < s.writable_to])
        for sequence in [s for s in decoding if s not in draft.rows]:
            self._schedule(draft, sequence)
        if len(decoding) < len(runnable) or self.waiting:
            prompts = [s for s in runnable if s.pending > 1 and s.state is State.RUNNING]
            draft.prefill = self._prefill_share(len(decoding), len(prompts))
            self._prefill(draft, prompts)
        if not draft.rows:
            return None
        drafts = self._speculate(draft) if self.speculator.most else {}
        rows = tuple(draft.rows.items())
        for sequence, _ in rows:
            sequence.last_step = self._step
        return Scheduled(self.builder.build(self._step, rows, drafts), rows, drafts)

    def take_back(self, scheduled: Scheduled) -> bool:
        """A plan was too large for the device: the next ones have at most half its tokens, growing
        back as they succeed. False, and nothing done, if a single token was too much repeatedly."""
        tokens = len(scheduled.plan.token_ids)
        self._taken_back += 1
        if tokens == 1 and self._taken_back >= TAKEN_BACK_MAX:
            self._taken_back = 0
            return False
        self._budget = max(1, tokens // 2)
        for sequence, _ in scheduled.rows:
            self.memory.trim(sequence)
        return True

    def grow_back(self) -> None:
        """A step succeeded."""
        self._taken_back = 0
        self._budget = min(self._config.step_tokens_max, 2 * self._budget)

    def _decoding(self, runnable: list[Sequence]) -> list[Sequence]:
        """Those with one token to compute; in turn if there are more than the budget allows."""
        decoding = [s for s in runnable if len(s.tokens) - s.computed == 1]
        if len(decoding) > self._budget:
            decoding.sort(key=lambda s: s.last_step)
        return decoding

    def _prefill_share(self, decoding: int, prompts: int) -> int:
        """Tokens of prompts in a step beside so many that decode. Each prompt, running or waiting,
        may slow decoding down by `decode_slowdown_max`: one beside many decoders is held back, a
        burst is not, since its last would wait for all before it. Never nothing, so that prompts
        go on."""
        slowdown = self._config.decode_slowdown_max
        if not decoding or slowdown == 0:
            return self._budget
        allowed = 1.0 + (slowdown - 1.0) * max(1, prompts + len(self.waiting))
        tokens = self._times.prefill_within(decoding, allowed)
        return int(min(self._budget, max(PREFILL_MIN, tokens)))

    def _prefill(self, draft: StepDraft, prompts: list[Sequence]) -> None:
        """Chunks for prompts, oldest first, then admission. A prompt that takes more than the share
        leaves half of it to shorter ones, running or waiting: they would wait for many steps."""
        oldest = prompts[0] if prompts else None
        if (
            oldest is not None
            and oldest.pending > draft.room
            and (len(prompts) > 1 or self.waiting)
        ):
            half = draft.prefill // 2
            draft.prefill -= half
            self._schedule(draft, oldest, prefill=True)
            draft.prefill += half
            shorter = [s for s in prompts if s.pending < oldest.pending]
            for sequence in sorted(shorter, key=lambda s: s.pending):
                self._schedule(draft, sequence, prefill=True)
            self._admit(draft, shorter_than=oldest.pending)
        for sequence in prompts:
            self._schedule(draft, sequence, prefill=True)
        self._admit(draft)

    def _speculate(self, draft: StepDraft) -> Drafts:
        """Drafts for sequences that decode, from what budget and free blocks all others left."""
        decoding = [
            s
            for s, count in draft.rows.items()
            if count == 1 and s.inserted and s.computed + 1 == len(s.tokens) and not s.retained
        ]
        drafts: dict[Sequence, list[int]] = {}
        if not decoding or not self.speculator.pays(len(decoding)):
            return drafts
        for sequence in decoding:
            tokens = self.speculator.propose(sequence, draft.budget)
            if tokens and (count := self.memory.grow_spare(sequence, 1 + len(tokens))) > 1:
                drafts[sequence] = tokens[: count - 1]
                draft.rows[sequence] = count
                draft.budget -= count - 1
        return drafts

    def _schedule(self, draft: StepDraft, sequence: Sequence, *, prefill: bool = False) -> None:
        """Give a running sequence rows of this step, or more of them, preempting others for it
        where allowed."""
        if sequence.state is not State.RUNNING:
            return  # preempted for another of this step: it queues, and may have a fetch again
        computable = self._bring(sequence, draft) if sequence.fetch is not None else AT_ONCE
        if sequence.wanted is not None:
            computable = min(computable, self._go_on(sequence, draft))
        while sequence.state is State.RUNNING:
            had = draft.rows.get(sequence, 0)
            room = draft.room if prefill else draft.budget
            want = min(had + room, sequence.pending, computable)
            if want <= had:
                return
            if self.pruner is not None and sequence.retained is not None:
                if self.pruner.postponed(sequence):
                    return
                want = self.pruner.room(sequence, want)
                if 0 < want <= had or sequence in self.pruner.failed:
                    return
            count = self.memory.grow(sequence, want) if want else 0
            if count:
                draft.add(sequence, count - had, prefill=prefill)
                return
            victim = self._victim(sequence)
            if victim is not None:
                self._preempt(draft, victim)
            elif not self._is_first(sequence):
                return  # it keeps its blocks and waits for older ones
            elif not self.memory.forget_cached(sequence):
                self._stuck.append(sequence)
                return

    def _bring(self, sequence: Sequence, draft: StepDraft) -> int:
        """Let a sequence have what the tiers have ready, beside decoders no more than what prefill
        might take of the step; how many tokens it should compute itself now."""
        assert self.tiers is not None
        if sequence not in draft.rows:
            most = BROUGHT_MAX if any(n == 1 for n in draft.rows.values()) else AT_ONCE
            if self.tiers.bring(sequence, most) >= most * self.memory.block_tokens:
                return 0  # the rest in the next step
        computable = self.tiers.computable(sequence)
        self.waits_for_tiers = self.waits_for_tiers or computable == 0
        return computable

    def _go_on(self, sequence: Sequence, draft: StepDraft) -> int:
        """Let a sequence have the earlier turn's state that it wants, once all before is computed,
        preempting others for the blocks as ever; how many tokens it should compute now."""
        derived = self._derived
        assert derived is not None
        while sequence.state is State.RUNNING and sequence.wanted is not None:
            left = derived.left(sequence)
            if left or derived.go_on(sequence):
                return left or AT_ONCE
            victim = self._victim(sequence)
            if victim is not None:
                self._preempt(draft, victim)
            elif not self._is_first(sequence):
                return 0
            elif not self.memory.forget_cached(sequence):
                derived.give_up(sequence)
        return AT_ONCE

    def _is_first(self, sequence: Sequence) -> bool:
        """Whether it is the oldest that may run."""
        return next(s for s in self.running if s.credit > 0) is sequence

    def _victim(self, asker: Sequence) -> Sequence | None:
        """Whom `asker` may preempt: those that wait for credit, then those younger than itself;
        of these the least computed, the youngest of equals."""
        allowed = [
            s
            for s in self.running
            if s is not asker and (s.credit <= 0 or s.age > asker.age) and any(s.tables)
        ]
        if not allowed:
            return None
        return min(allowed, key=lambda s: (s.credit > 0, s.computed, -s.age[0], -s.age[1]))

    def _preempt(self, draft: StepDraft, victim: Sequence) -> None:
        """Back to the head of its tenant's queue; what it computed goes to the cache."""
        draft.drop(victim)
        draft.preempted = draft.preempted or victim.credit > 0
        self._stop_running(victim, keep=True)
        victim.preempted = True
        victim.request.preemptions += 1
        self.enter(victim)

    # --- admission ---------------------------------------------------------------------------

    def _admit(self, draft: StepDraft, shorter_than: int | None = None) -> None:
        """Let waiting sequences run while they fit, in the queue's order; nobody overtakes one that
        does not fit.

        Passed over, in this step, are those that wait for a prefix being computed, and those not
        `shorter_than` a bound. Of a tenant's equals, who has most cached comes first, a bounded
        number of times.
        """
        passed: set[Sequence] = set()
        while draft.room > 0 and not draft.preempted and not self._stuck:
            first = self.waiting.peek(passed)
            if first is None or len(passed) == PASSED_MAX:
                return
            if shorter_than is not None and len(first.tokens) >= shorter_than:
                passed.add(first)
                continue
            if not self._make_place(draft, first):
                return
            active = sum([s.request.credit > s.emitted for s in self.running])
            if active and self._blocked == (first, active):
                return
            line = self._line(first, passed)
            head = line[-1]
            if self._derived is not None and self._derived.awaited(head):
                self.waits_for_tiers = True
                passed.add(head)
                continue
            match = self.memory.match(head)
            if match is not None and self._will_be_cached(head, self._held(head, match.tokens)):
                passed.add(head)
                continue
            self.memory.attach(head, match)
            if active and not self._forecast.fits(self.running, head):
                self.memory.detach(head)
                self._blocked = first, active
                return
            self.waiting.overtake(line[:-1], head)
            self._start(head)
            self._schedule(draft, head, prefill=True)
            if head not in draft.rows and head.fetch is None:
                return

    def _line(self, first: Sequence, passed: set[Sequence]) -> list[Sequence]:
        """Who comes next, last, after those it overtakes: of the first few equals of the queue the
        one with most cached, unless the first was overtaken too often."""
        if first.overtaken >= OVERTAKEN_MAX:
            return [first]
        equals = self.waiting.equals(first, LOOK_AHEAD, passed)
        choices = 1 + first.request.unforked  # a place was made for so many
        equals = [s for s in equals if 1 + s.request.unforked <= choices]
        if len(equals) == 1:
            return equals
        cached = [self.memory.matched(sequence) for sequence in equals]
        return equals[: cached.index(max(cached)) + 1]

    def _held(self, head: Sequence, matched: int) -> int:
        """How far the cache, which has `matched`, and the tiers behind it have its tokens."""
        return matched if self.tiers is None else self.tiers.held_tokens(head, matched)

    def _will_be_cached(self, head: Sequence, matched: int) -> bool:
        """Whether a prompt that is being computed will bring `head` a block more than is `matched`
        now: then it is worth the wait (SGLang's in-batch prefix caching)."""
        stop = (matched // self.memory.block_tokens + 1) * self.memory.block_tokens
        if stop >= len(head.tokens) or stop > head.plain:
            return False
        return any(
            not s.inserted
            and s.request.cacheable
            and s.credit > 0
            and len(s.tokens) >= stop
            and s.request.chain == head.request.chain
            and s.tokens[:stop] == head.tokens[:stop]
            and s.plain >= stop
            for s in self.running
        )

    def _start(self, head: Sequence) -> None:
        """The head of the queue, attached to its match, runs from here on."""
        attached, head.computed = head.computed, 0  # as the queue counted it
        self.waiting.remove(head)
        head.computed = attached
        if self.tiers is not None and head.request.cacheable:
            self.tiers.admit(head)
        next_block = self.tiers is not None and self.tiers.has_next(head)
        if next_block and not self.memory.has_hole(head):
            self.memory.skip_boundary(head)
        else:
            self.memory.attach_boundary(head)
        self._start_running(head)
        request = head.request
        if request.cached_tokens is None:
            request.cached_tokens = min(head.computed, request.spec.prompt_tokens)
            request.tenant.served += request.charge

    def _make_place(self, draft: StepDraft, head: Sequence) -> bool:
        """Whether it and the choices it will fork into are within running_max, once those that
        wait for credit have made room."""
        running_max, new = self._config.running_max, 1 + head.request.unforked
        places = new + sum([1 + s.request.unforked for s in self.running])
        if places <= running_max:
            return True
        paused = [s for s in self.running if s.credit <= 0]
        while paused and places > running_max:
            places -= 1
            self._preempt(draft, paused.pop())
        return not self.running or places <= running_max

    # --- conservation ------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that every sequence is in the one place its state names, with the blocks it should
        have, and that the memory is conserved. O(everything)."""
        size = self.memory.block_tokens
        assert [s.age for s in self.running] == sorted({s.age for s in self.running})
        for sequence in self.running:
            assert sequence.state is State.RUNNING
            assert 0 <= sequence.computed < len(sequence.tokens)
            for table in sequence.tables:
                assert len(table) == blocks_for(sequence.stored, size)
        queued = list(self.waiting)
        assert len(queued) == len(self.waiting) == len({s.id for s in queued})
        assert sum(s.pending for s in queued) == self.waiting.tokens
        for sequence in queued:
            assert sequence.state is State.WAITING and sequence.credit > 0
        for sequence in self.parked.values():
            assert sequence.state is State.PARKED and sequence.credit <= 0
        for sequence in (*queued, *self.parked.values()):
            assert sequence.computed == sequence.dropped == 0 and not any(sequence.tables)
            assert sequence.hold is None and not sequence.copies
        self.memory.check_integrity(self.running)
        self.builder.check_integrity(self.running)
        for sequence in (*queued, *self.parked.values()):
            assert sequence.slot < 0
