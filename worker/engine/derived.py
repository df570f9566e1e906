"""Derived states: what a pruned sequence ends with is kept as an object, and the next turn of that
conversation goes on from it. It knows sequences, blocks and objects; no tier, no queue's order.

A policy asks for it (`resume`), since what a turn attends to then depends on whether the state of
an earlier one is still there. While a sequence queues, the state of its longest beginning is looked
for; its plain prefix is matched, brought or computed as ever, and behind it the state is copied
into blocks of the sequence's own. Whatever is missing on the way: it is computed as if there were
no state. Neither the radix cache nor a router hears of one.

States may also have been made beforehand (`Prepared`): then an index of a beginning is looked for,
and the state that it tells for what follows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import islice
from weakref import WeakValueDictionary

from xxhash import xxh3_128_digest

from kvstore.fetch import Place
from kvstore.keys import extend
from kvstore.objectnames import ObjectName
from kvstore.objects import Blocks, Finding, Objects
from worker.engine.derived_state import DerivedState, state_name
from worker.engine.messages import Compacted
from worker.engine.paging import PagedMemory, blocks_for
from worker.engine.promotion import Promoter, guarded
from worker.engine.request import Sequence
from worker.engine.retention.base import Prepared, Retained, RetentionPolicy
from worker.models.base import Model

EDGES_MAX = 1024  # of a prompt, the last ones, at which a state is looked for
SEEKING_MAX = 64  # sequences that are looked after in a step
MISFITS_MAX = 16  # metas that are read for a prompt in vain, each a copy on the engine's thread

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Wanted:
    """What a sequence wants of an earlier turn. Entry i of `finding` is the state of a beginning
    with first_edge + i full blocks, or until one is `chosen` the index of states made beforehand;
    those from `open` on are ruled out. Once there is a `state`, it is the entry's before that.
    `misfits` were read and are of no use."""

    finding: Finding
    first_edge: int
    open: int
    state: DerivedState | None = None
    chosen: bool = False
    misfits: int = 0


class DerivedStates:
    """Of one engine. Calls come between steps; a failure of ours costs the state, not the engine,
    and is logged and counted in `faults`. Counts what came of it in `total`."""

    def __init__(
        self,
        model: Model,
        memory: PagedMemory,
        tiers: Promoter,
        objects: Objects,
        total: Compacted,
    ) -> None:
        self._model, self._memory, self._tiers, self._total = model, memory, tiers, total
        self._groups = [pool.group for pool in memory.pools]
        self._objects = objects
        self._seeking: dict[int, Sequence] = {}  # by id: no state is settled for yet
        self._states: WeakValueDictionary[bytes, DerivedState] = WeakValueDictionary()
        self.faults = 0
        self._told = False

    # --- down --------------------------------------------------------------------------------

    @guarded(None)
    def keep(self, sequence: Sequence) -> None:
        """It is about to give its blocks back, all its slots whole: keep its state, if its policy
        asks for that and it was pruned. Copies the blocks that are no plain chain's."""
        retained, request = sequence.retained, sequence.request
        if retained is None:
            return
        if sequence.emitted and sequence.wanted is None:
            retained.lineage = retained.fixed
        edge = sequence.computed // self._memory.block_tokens
        pruned = sequence.dropped and edge and not sequence.copies
        if not (retained.policy.resume and pruned and request.cacheable):
            return
        state = self._state(sequence, retained, edge)
        meta, end = state.encode(), blocks_for(sequence.stored, self._memory.block_tokens)
        if not self._objects.fits(len(meta), end - state.plain_blocks):
            self._say_too_large(sequence.stored)  # before anything of it is copied
            return
        name = state_name(request.chain, sequence.keys[edge - 1], retained.policy.state_hash)
        blocks = [
            [
                [self._tiers.view(group.id, block, rank) for rank in range(group.ranks)]
                for block in table[state.plain_blocks : end]
            ]
            for group, table in zip(self._groups, sequence.tables, strict=True)
        ]
        self._total.objects_kept += self._objects.put(name, meta, blocks)

    def _say_too_large(self, stored: int) -> None:
        """Once: whoever asked for it would look for turns that are never kept."""
        if not self._told:
            _log.warning("a turn's %d tokens take too much of the host tier to be kept", stored)
        self._told = True

    def _state(self, sequence: Sequence, retained: Retained, edge: int) -> DerivedState:
        size, computed = self._memory.block_tokens, sequence.computed
        tokens, keys = sequence.tokens, sequence.keys
        keys.extend(extend(sequence.request.chain, keys, tokens, limit=edge))
        return DerivedState(
            computed=computed,
            fixed=retained.fixed,
            plain_blocks=retained.plain // size,
            tail=tuple(tokens[edge * size : computed]),
            positions=retained.positions_of(computed, sequence.stored),
        )

    # --- up ----------------------------------------------------------------------------------

    @guarded(None)
    def find(self, sequence: Sequence) -> None:
        """Start looking for a state, for a sequence that queues. Also for one that began before a
        reset of the cache: it has to go on with what it began with."""
        self.forget(sequence)
        retained, request = sequence.retained, sequence.request
        if retained is None or request.spec.no_cache or self._memory.cache is None:
            return
        policy, keys = retained.policy, sequence.keys
        prepared = policy if isinstance(policy, Prepared) else None
        if prepared is None and not policy.resume:
            return
        first, last = self._edges(sequence, policy)
        if first > last:
            return
        keys.extend(extend(request.chain, keys, sequence.tokens, limit=last))
        state_hash = policy.state_hash
        names = [
            prepared.index_name(keys[edge - 1])
            if prepared
            else state_name(request.chain, keys[edge - 1], state_hash)
            for edge in range(first, last + 1)
        ]
        sequence.wanted = Wanted(self._objects.find(names), first, len(names))
        self._seeking[sequence.id] = sequence
        self._seek(sequence)

    def _edges(self, sequence: Sequence, policy: RetentionPolicy) -> tuple[int, int]:
        """From how many full blocks to how many the beginnings have that are looked for."""
        size = self._memory.block_tokens
        if isinstance(policy, Prepared):  # something of the prompt, and of it alone, has to choose
            last = (sequence.request.spec.prompt_tokens - 1) // size
            return max(1, last + 1 - EDGES_MAX), last
        last = (len(sequence.tokens) - 1) // size
        # No state is of fewer tokens than the first round of the shortest prompt takes.
        return max(1, policy.quota.limit(1) // size, last + 1 - EDGES_MAX), last

    def look(self) -> None:
        """A step begins: whatever has come, have the blocks brought that go with it, also of
        sequences whose turn is far."""
        for sequence in list(islice(self._seeking.values(), SEEKING_MAX)):
            self._seek(sequence)

    @guarded(None)
    def _seek(self, sequence: Sequence) -> None:
        wanted = sequence.wanted
        assert wanted is not None
        if wanted.state is None and self._choose(sequence, wanted) is Place.ABSENT:
            self.give_up(sequence)

    @guarded(False)
    def awaited(self, sequence: Sequence) -> bool:
        """Whether a sequence, the next to run, should queue on: a state is on its way and comes
        sooner than its tokens could be computed. Once not, `sequence.wanted` is what it goes on
        from, if anything; its plain length is then that of the state."""
        wanted = sequence.wanted
        if wanted is None:
            return False
        place = self._choose(sequence, wanted) if wanted.state is None else self._place(wanted)
        if place is Place.ABSENT:
            self.give_up(sequence)
            return False
        if wanted.state is not None:
            self._follow(sequence, wanted.state)
        if place is Place.READY:
            return False
        if self._objects.wait_s(wanted.finding) <= self._tiers.prefill_s(self._saved(sequence)):
            return True
        self.give_up(sequence)
        return False

    def _choose(self, sequence: Sequence, wanted: Wanted) -> Place:
        """Settle for the longest state that fits, if all longer ones are ruled out, and have its
        blocks brought; where they are."""
        objects = self._objects
        while wanted.open:
            finding, at = wanted.finding, wanted.open - 1
            place = objects.place(finding, at)
            if place not in (Place.ABSENT, Place.READY):
                return place
            meta = objects.meta(finding, at)
            if meta is not None and self._chosen(sequence, wanted, at, meta):
                continue
            state = None if meta is None else self._fitting(sequence, wanted, at, meta)
            if state is not None:
                wanted.state = state
                self._seeking.pop(sequence.id, None)
                finding.heads.cancel()  # shorter ones are not wanted any more
                objects.let_go(finding)
                objects.bring(finding, at)
                self._follow(sequence, state)
                self._tiers.prefetch(sequence)  # no more than the plain prefix
                return self._place(wanted)
            wanted.misfits += meta is not None
            wanted.open = at if wanted.misfits < MISFITS_MAX else 0
        return Place.ABSENT

    def _chosen(self, sequence: Sequence, wanted: Wanted, at: int, meta: bytes) -> bool:
        """Whether `meta` is an index: then the state that it tells is wanted in its place."""
        assert sequence.retained is not None
        policy, edge = sequence.retained.policy, wanted.first_edge + at
        if wanted.chosen or not isinstance(policy, Prepared):
            return False
        first = edge * self._memory.block_tokens
        rest = sequence.tokens[first : sequence.request.spec.prompt_tokens]
        name = policy.choose(meta, sequence.keys[edge - 1], first, rest)
        if name is None:
            return False
        self._objects.cancel(wanted.finding)
        wanted.finding, wanted.first_edge, wanted.open = self._objects.find([name]), edge, 1
        wanted.chosen = True
        return True

    def _place(self, wanted: Wanted) -> Place:
        return self._objects.blocks_place(wanted.finding, wanted.open - 1)

    def _fitting(
        self, sequence: Sequence, wanted: Wanted, at: int, meta: bytes
    ) -> DerivedState | None:
        """The state that a meta tells, if it is one of a beginning of the sequence's tokens, as its
        policy leaves it, and fits into the pools."""
        size, retained = self._memory.block_tokens, sequence.retained
        state = self._decoded(wanted.finding.names[at], meta)
        assert retained is not None
        if state is None or state.computed // size != wanted.first_edge + at:
            return None
        quota, fixed, computed = retained.policy.quota, state.fixed, state.computed
        blocks = blocks_for(state.stored, size) - state.plain_blocks
        fits = (
            computed < len(sequence.tokens)
            and tuple(sequence.tokens[computed - len(state.tail) : computed]) == state.tail
            and retained.lineage in (None, fixed)
            and quota.fixed(fixed) == fixed
            and state.stored <= quota.limit(fixed)
            and blocks == self._objects.block_count(wanted.finding, at)
            and self._memory.fits_alone(state.stored + 1)
        )
        return state if fits else None

    def _decoded(self, name: ObjectName, meta: bytes) -> DerivedState | None:
        """The state that a meta tells: one for all sequences that queue to go on from it, since its
        table may take megabytes. The name keeps tenants apart."""
        key = name + xxh3_128_digest(meta)
        state = self._states.get(key)
        if state is None:
            state = DerivedState.decode(meta, self._memory.block_tokens)
            if state is not None:
                self._states[key] = state
        return state

    def _saved(self, sequence: Sequence) -> int:
        """Tokens that need not be computed with the longest state that is still possible."""
        wanted, size = sequence.wanted, self._memory.block_tokens
        assert wanted is not None
        last = min(len(sequence.tokens) - 1, (wanted.first_edge + wanted.open) * size - 1)
        return max(0, last - self._memory.matched(sequence))

    @staticmethod
    def _follow(sequence: Sequence, state: DerivedState) -> None:
        """It will go on from a state: no more than that one's plain prefix comes from caches. Said
        again whenever it was detached from a match."""
        assert sequence.retained is not None
        block_tokens = sequence.request.chain.block_tokens
        sequence.retained.follow(state.fixed, state.plain_blocks * block_tokens)

    # --- going on from one -------------------------------------------------------------------

    @staticmethod
    def left(sequence: Sequence) -> int:
        """Tokens of a running sequence's plain prefix that come before the state it wants."""
        assert sequence.wanted is not None and sequence.wanted.state is not None
        plain = sequence.wanted.state.plain_blocks * sequence.request.chain.block_tokens
        assert sequence.computed <= plain
        return plain - sequence.computed

    @guarded(True)
    def go_on(self, sequence: Sequence) -> bool:
        """Nothing is left of its plain prefix: give it blocks with the state it wants. False, and
        nothing changed, if the blocks are not to be had. If the state is lost, it goes on as if
        there had been none. Either way it wants nothing afterwards."""
        wanted = sequence.wanted
        assert wanted is not None and wanted.state is not None and not self.left(sequence)
        state, at = wanted.state, wanted.state.plain_blocks
        stop = blocks_for(state.stored, self._memory.block_tokens)
        came = False
        with self._objects.pinned(wanted.finding, wanted.open - 1):
            if not self._memory.open_blocks(sequence, stop, [at] * len(self._groups)):
                return False
            try:
                came = self._copy_in(sequence, wanted, at, stop)
            finally:
                if came:
                    self._settle(sequence, state)
                self._memory.close_blocks(sequence, [])
        if came:
            self.forget(sequence)
        else:
            self.give_up(sequence)
        return True

    def _copy_in(self, sequence: Sequence, wanted: Wanted, at: int, stop: int) -> bool:
        """Fill opened blocks; False if the state is not whole."""
        views = [
            [
                [self._model.block_view(group.id, block, rank) for rank in range(group.ranks)]
                for block in table[at:stop]
            ]
            for group, table in zip(self._groups, sequence.tables, strict=True)
        ]
        into: Blocks = [
            [
                [memoryview(bytearray(group.block_bytes)) if v is None else v for v in ranks]
                for ranks in blocks
            ]
            for group, blocks in zip(self._groups, views, strict=True)
        ]
        if not self._objects.load(wanted.finding, wanted.open - 1, into):
            return False
        for group, table in zip(self._groups, sequence.tables, strict=True):
            for number, ranks, filled in zip(
                table[at:stop], views[group.id], into[group.id], strict=True
            ):
                for rank, view in enumerate(ranks):
                    if view is None:  # the pool is not host memory
                        self._model.write_block(group.id, number, bytes(filled[rank]), rank)
        return True

    def _settle(self, sequence: Sequence, state: DerivedState) -> None:
        """Its blocks hold the state: so many tokens count as computed."""
        retained, before = sequence.retained, sequence.computed
        assert retained is not None and sequence.wanted is not None
        sequence.computed, sequence.dropped = state.computed, state.computed - state.stored
        retained.positions, retained.begun, retained.resumed = state.positions, True, True
        sequence.wanted.state = None  # it has what it wanted
        self._tiers.count(sequence, state.computed - before)
        self._total.objects_resumed += 1
        self._total.resumed_tokens += state.computed - before

    def give_up(self, sequence: Sequence) -> None:
        """It is computed like any other: whatever tiers have of its plain chain is wanted again."""
        followed = sequence.wanted is not None and sequence.wanted.state is not None
        self.forget(sequence)
        if followed:
            self._tiers.prefetch(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It wants no state any more."""
        wanted, sequence.wanted = sequence.wanted, None
        self._seeking.pop(sequence.id, None)
        if wanted is None:
            return
        self._objects.cancel(wanted.finding)
        if wanted.state is not None and sequence.retained is not None:
            sequence.retained.restart(sequence.request.spec.prompt_tokens)
