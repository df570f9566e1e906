"""Tiers as the engine sees them: blocks leave the device into them and come back into sequences.

Coming back is a way to compute: a block that is ready in host memory is copied into the sequence's
table and counts as computed. While slower tiers load a prompt's last blocks, its first ones are
computed, so many that both meet. It knows blocks and sequences; no IO, no queue, no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import wraps
from typing import Any, Protocol, TypeVar

from kvstore.fetch import Fetch, Place, Row
from kvstore.groups import GroupKind, KVGroup
from kvstore.keys import extend, parent_of_first, tokens_u32le
from kvstore.objects import Objects
from kvstore.tiered import TieredStore
from kvstore.tiers.base import BlockName
from worker.engine.messages import CacheOp, CacheOpKind
from worker.engine.paging import PagedMemory, blocks_for
from worker.engine.request import Sequence
from worker.engine.timing import StepTimes
from worker.models.base import Model

_Method = TypeVar("_Method", bound=Callable[..., Any])

AT_ONCE = 1 << 30
GAIN_MIN = 0.35  # of the loading: on two cores computing beside it makes it a third slower
COPIED_AT_ONCE = 8  # blocks in one call to the store
LOOK_AGAIN_S = 0.02  # at blocks that are waited for, if nothing came

_log = logging.getLogger(__name__)


class Failing(Protocol):
    """What goes on without the tiers where they fail."""

    faults: int

    def forget(self, sequence: Sequence) -> None:
        """It needs nothing from the tiers any more."""
        ...


def guarded(otherwise: Any) -> Callable[[_Method], _Method]:
    """A failure of ours in here costs the tiers, not the engine: it is logged and counted, and the
    sequence it was about goes on without them. Tests set Promoter.strict and see it raised."""

    def guard(method: _Method) -> _Method:
        @wraps(method)
        def guarding(self: Failing, *arguments: Any) -> Any:
            try:
                return method(self, *arguments)
            except Exception:
                if Promoter.strict:
                    raise
                self.faults += 1
                _log.exception("the tiers failed; going on without")
                if arguments and isinstance(arguments[0], Sequence):
                    self.forget(arguments[0])
                return otherwise

        return guarding  # type: ignore[return-value]

    return guard


class Promoter:
    """Moves blocks between `memory` and `store`. Every call is the engine thread's; none raises."""

    strict = False  # tests: let failures of ours through

    def __init__(
        self, model: Model, memory: PagedMemory, store: TieredStore, times: StepTimes
    ) -> None:
        self._model, self._memory, self._store, self._times = model, memory, store, times
        self._groups = [pool.group for pool in memory.pools]
        self._all_full = not any(group.window_tokens for group in self._groups)
        self._look: tuple[int, float] | None = None  # moves seen, when to look again
        self._moves = 0
        if memory.cache is not None:
            memory.cache.on_leaving(self.leaving)
        self.faults = 0  # failures of ours, each logged
        self.late_tokens = 0  # promoted after their request's prompt was counted

    # --- down --------------------------------------------------------------------------------

    @guarded(None)
    def leaving(self, going: list[tuple[BlockName, int]]) -> None:
        """The radix cache lets go of these full blocks: keep copies, of every rank."""
        names, views = [], []
        for name, block in going:
            for rank in range(self._groups[name.group].ranks):
                names.append(name._replace(rank=rank))
                views.append(self.view(name.group, block, rank))
        self._store.demote(names, views)

    def view(self, group: int, block: int, rank: int) -> memoryview:
        """A block's bytes, to be read before the next step."""
        view = self._model.block_view(group, block, rank)
        return memoryview(self._model.read_block(group, block, rank)) if view is None else view

    # --- up ----------------------------------------------------------------------------------

    @guarded(None)
    def prefetch(self, sequence: Sequence) -> None:
        """Start bringing up what the device does not have of a sequence that queues. Where a window
        lost blocks it is all behind the shorter match, as what comes is whole in every group."""
        self.forget(sequence)
        if self._memory.cache is None or not sequence.request.cacheable:
            return
        size = self._memory.block_tokens
        last = min(len(sequence.tokens) - 1, sequence.plain)
        first, end = self._memory.matched(sequence) // size, last // size
        if first >= end:
            return
        sequence.fetch = self._store.fetch(first, self._rows(sequence, first, end))

    def _rows(self, sequence: Sequence, first: int, end: int) -> list[Row]:
        chain, keys, size = sequence.request.chain, sequence.keys, self._memory.block_tokens
        keys.extend(extend(chain, keys, sequence.tokens, limit=end))
        tokens = tokens_u32le(sequence.tokens[: end * size])
        parents = [parent_of_first(chain.root), *keys]
        width = 4 * size
        rows = []
        for group in self._groups:
            names = [
                tuple(
                    BlockName(
                        keys[i], parents[i], tokens[i * width : (i + 1) * width], group.id, rank
                    )
                    for rank in range(group.ranks)
                )
                for i in range(first, end)
            ]
            window = blocks_for(group.window_tokens, size) + 1 if group.window_tokens else 0
            rows.append(Row(names, group.block_bytes, window, group.sink_blocks(size)))
        return rows

    @guarded(None)
    def admit(self, sequence: Sequence) -> None:
        """A sequence was given its match and starts to run: look again for what comes after it."""
        if sequence.fetch is None:
            self.prefetch(sequence)
        if sequence.fetch is not None:
            self._store.refresh(sequence.fetch, sequence.computed // self._memory.block_tokens)

    @guarded(False)
    def has_next(self, sequence: Sequence) -> bool:
        """Whether the whole block behind the computed ones, which end on a block edge, is ready:
        then a copy of the boundary's first tokens is not needed."""
        fetch, block = sequence.fetch, sequence.computed // self._memory.block_tokens
        return fetch is not None and self._ready_until(fetch, block, fetch.end) > block

    def held_tokens(self, sequence: Sequence, matched: int) -> int:
        """How far the tiers continue the `matched` tokens, as far as they have said so."""
        fetch, size = sequence.fetch, self._memory.block_tokens
        if fetch is None:
            return matched
        block = matched // size
        while block < fetch.end and fetch.place(0, block) >= Place.COMING:
            block += 1
        return max(matched, block * size)

    def bring(self, sequence: Sequence, blocks_max: int = AT_ONCE) -> int:
        """Copy what is ready behind the computed tokens to the device, as far as there is room;
        returns the tokens that are computed now because of it. Prompts with windows come whole or
        not at all, whatever `blocks_max`: a part would need windows that nobody kept."""
        size, computed = self._memory.block_tokens, sequence.computed
        if sequence.fetch is None or computed % size or sequence.copies:
            return 0
        came: int = self._bring(sequence, sequence.fetch, computed // size, blocks_max)
        return came * size

    @guarded(0)
    def _bring(self, sequence: Sequence, fetch: Fetch, at: int, blocks_max: int) -> int:
        size, came = self._memory.block_tokens, at
        limit = min(fetch.end, at + blocks_max) if self._all_full else fetch.end
        stop = self._ready_until(fetch, at, limit)
        if stop == at:
            return 0
        with self._store.pinned(fetch, at, stop):
            if self._all_full:
                stop = at + self._memory.room_for(sequence, stop - at)
            visible = self._visible(stop)
            firsts = [max(at, first) for first in visible]
            if stop == at or not self._memory.open_blocks(sequence, stop, firsts):
                return 0
            try:
                came = self._copy_in(sequence, fetch, at, stop, firsts)
            finally:
                if came < stop and not self._all_full:
                    came = at
                sequence.computed = came * size
                self._memory.close_blocks(sequence, visible if came == stop else [])
        fetch.front = came
        self.count(sequence, (came - at) * size)
        return came - at

    def _visible(self, stop: int) -> list[int]:
        """Per group: the first block that the token behind `stop` blocks can see."""
        size = self._memory.block_tokens
        return [
            max(0, stop * size - group.window_tokens + 1) // size if group.window_tokens else 0
            for group in self._groups
        ]

    def _ready_until(self, fetch: Fetch, at: int, limit: int) -> int:
        """The block up to which everything is ready that a sequence at block `at` needs."""
        stop = at
        full = [g.id for g in self._groups if g.kind is not GroupKind.WINDOW]
        while stop < limit and all(fetch.place(g, stop) is Place.READY for g in full):
            stop += 1
        while stop > at and not self._windows_ready(fetch, at, stop):
            stop -= 1
        return stop

    def _windows_ready(self, fetch: Fetch, at: int, stop: int) -> bool:
        return all(
            fetch.place(group.id, block) is Place.READY
            for group, first in zip(self._groups, self._visible(stop), strict=True)
            if group.window_tokens
            for block in (*self._sinks(group, at, first), *range(max(at, first), stop))
        )

    def _sinks(self, group: KVGroup, at: int, first: int) -> range:
        """Blocks of a group from `at` on that are seen although its window begins at `first`."""
        return range(at, min(group.sink_blocks(self._memory.block_tokens), first))

    def _copy_in(
        self, sequence: Sequence, fetch: Fetch, at: int, stop: int, firsts: Seq[int]
    ) -> int:
        """Fill opened blocks; returns the block at which one was not there any more."""
        for group in self._groups:
            first = firsts[group.id]
            for block, end in ((at, self._sinks(group, at, first).stop), (first, stop)):
                while block < min(end, stop):
                    until = min(end, stop, block + COPIED_AT_ONCE)
                    numbers = sequence.tables[group.id][block:until]
                    came = self._copy_blocks(fetch, group.id, block, numbers)
                    block += came
                    if came < len(numbers):
                        stop = max(at, block)
        return stop

    def _copy_blocks(self, fetch: Fetch, group: int, block: int, numbers: list[int]) -> int:
        """Blocks of a group from `block` on into these of its pool; how many leading ones came."""
        size, ranks = self._groups[group].block_bytes, range(self._groups[group].ranks)
        views = [[self._model.block_view(group, n, rank) for rank in ranks] for n in numbers]
        into = [[memoryview(bytearray(size)) if v is None else v for v in row] for row in views]
        came = self._store.promote(fetch, group, block, into)
        for number, row, filled in zip(numbers[:came], views, into, strict=False):
            for rank, view in enumerate(row):
                if view is None:  # the pool is not host memory
                    self._model.write_block(group, number, bytes(filled[rank]), rank)
        return came

    def count(self, sequence: Sequence, tokens: int) -> None:
        """Promoted prompt tokens are cached ones, unless they were computed here before."""
        request = sequence.request
        if tokens == 0 or sequence.preempted or request.forked or request.cached_tokens is None:
            return
        before = request.cached_tokens
        request.cached_tokens = min(request.spec.prompt_tokens, before + tokens)
        if sequence.computed_max:
            self.late_tokens += request.cached_tokens - before

    @guarded(AT_ONCE)
    def computable(self, sequence: Sequence) -> int:
        """Tokens that should be computed now, after `bring`; 0 = those on their way come sooner.

        Computing j of R blocks from the front while the rest loads takes as long as the longer of
        both; they meet at j = R * load / (load + compute), and save that share of the loading.
        Less than GAIN_MIN of it is not worth the steps it takes.
        """
        fetch, size = sequence.fetch, self._memory.block_tokens
        if fetch is None:
            return AT_ONCE
        behind = blocks_for(sequence.computed, size)
        fetch.front = max(fetch.front, behind)
        held = fetch.next_held(behind)
        if held is None:
            self.forget(sequence)
            return AT_ONCE
        gap = held * size - sequence.computed
        if gap > 0:
            return gap
        coming, load_s = self._store.wait_s(fetch, held)
        if coming == 0:  # ready, but no room for it, or its windows are not to be had
            return size if self._all_full else AT_ONCE
        compute_s = coming * size * self._times.prefill_s_per_token
        gain = load_s / (load_s + compute_s) if load_s else 0.0
        return round(coming * gain) * size if gain >= GAIN_MIN else 0

    def prefill_s(self, tokens: int) -> float:
        """What computing so many tokens of a prompt takes, as far as that is known."""
        return tokens * self._times.prefill_s_per_token

    def objects(self) -> Objects | None:
        """Things in the same tiers that are no chain of tokens; None for a model without them."""
        if not Objects.can_keep(self._groups):
            return None
        return Objects(self._store, self._groups, self._memory.block_tokens)

    def forget(self, sequence: Sequence) -> None:
        """It needs nothing from the tiers any more."""
        if sequence.fetch is not None:
            sequence.fetch.cancel()
            sequence.fetch = None

    # --- waiting -----------------------------------------------------------------------------

    def look(self) -> None:
        """A step is about to be planned."""
        self._look = None
        self._moves = self._store.moves

    def rest(self, now_s: float) -> None:
        """Nothing but what is on its way could run: no step before something has come, or a while
        has passed."""
        self._look = self._moves, now_s + LOOK_AGAIN_S

    def resting(self, now_s: float) -> bool:
        """Whether a step would find the same again."""
        return (
            self._look is not None and self._look[0] == self._store.moves and now_s < self._look[1]
        )

    @property
    def look_again_s(self) -> float | None:
        """When to plan again if nothing comes."""
        return None if self._look is None else self._look[1]

    def on_wake(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when something came."""
        self._store.wake = wake

    def close(self, flush_s: float) -> None:
        """What is cached goes down where something outlives us; the tiers are closed."""
        if flush_s > 0 and self._store.lower and self._memory.cache is not None:
            self._memory.cache.clear()
        self._store.close(flush_s)

    # --- saying ------------------------------------------------------------------------------

    def has_ops(self) -> bool:
        """Whether `take_ops` would have something."""
        return self._store.has_ops()

    @guarded(())
    def take_ops(self) -> list[CacheOp]:
        """What the tiers gained and lost since the last call."""
        return [
            CacheOp(
                CacheOpKind.STORED if op.stored else CacheOpKind.REMOVED,
                op.group,
                op.keys,
                int(op.level),
            )
            for op in self._store.take_ops()
        ]

    @guarded(())
    def snapshot(self) -> list[CacheOp]:
        """STORED of all that the tiers of this replica hold."""
        return [
            CacheOp(CacheOpKind.STORED, op.group, op.keys, int(op.level))
            for op in self._store.snapshot()
        ]
