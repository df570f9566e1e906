"""RetentionPolicy: which tokens of a sequence survive in its blocks, and when it is asked. Knows
pages as numbers; knows no pool, no request and no model.

A sequence with a policy is asked exactly when a certain number of tokens is stored, whatever the
batch, the chunks and the machine: a sequence that was preempted, or came from another replica, is
computed again from its tokens, asked at the same counts, and goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from kvstore.keys import BlockKey
from kvstore.objectnames import ObjectName

Ints = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Quota:
    """How many tokens stay: `budget_tokens` after each round, `interval_tokens` more before it.

    Of the generated ones where `suffix` (then the prompt stays as it is, and the cache may share
    it), else of all, the first `sink_tokens` of which stay as they are.
    """

    budget_tokens: int
    interval_tokens: int
    suffix: bool = True
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.interval_tokens > 0
        assert self.budget_tokens > (0 if self.suffix else self.sink_tokens) >= 0

    def fixed(self, prompt_tokens: int) -> int:
        """Leading tokens of a sequence that never move and never go."""
        return prompt_tokens if self.suffix else self.sink_tokens

    def kept(self, prompt_tokens: int) -> int:
        """Tokens stored after a round."""
        return self.budget_tokens + (prompt_tokens if self.suffix else 0)

    def limit(self, prompt_tokens: int) -> int:
        """Tokens stored when a round is due; never more are."""
        return self.kept(prompt_tokens) + self.interval_tokens


@dataclass(frozen=True)
class PageView:
    """One sequence's stored tokens at a round; valid while the policy is asked. n tokens are
    stored, slot i in page i // block_tokens. Who shares a page is not told: the choice would depend
    on it, and the stream on the replica.

    Where heads hold different tokens there are R = layers * KV heads rows of positions, else R = 1.
    """

    block_tokens: int
    fixed: int  # slots before it stay
    kept: int  # how many slots are to stay, the fixed ones included
    computed: int  # logical length
    positions: Ints  # [R, n] logical position of the token in each slot
    keys: Callable[[], torch.Tensor]  # float32 [layers, KV heads, n - fixed, dim], as stored
    # Of the newest w tokens, rotated and scaled: float32 [layers, query heads, w, dim].
    queries: Callable[[int], torch.Tensor]

    @property
    def stored(self) -> int:
        """n."""
        return int(self.positions.shape[1])


class RetentionPolicy(Protocol):
    """One way to choose. Frozen: one object serves all sequences."""

    @property
    def quota(self) -> Quota:
        """Constant."""
        ...

    @property
    def reads_keys(self) -> bool:
        """Whether it calls `view.keys`, which a model must then have."""
        ...

    @property
    def resume(self) -> bool:
        """Whether the state of a sequence that ends is kept for its conversation's next turn."""
        ...

    @property
    def state_hash(self) -> str:
        """Equal only for policies that keep the same tokens."""
        ...

    def select(self, view: PageView) -> Mask:
        """[R, n], or [1, n] for all rows alike: true where a slot stays; in every row exactly
        view.kept, among them all fixed ones. Mutates nothing; the same view gives the same."""
        ...


@runtime_checkable
class Prepared(Protocol):
    """A policy of which states were made beforehand, several of one beginning: an index, kept as an
    object, says which of them a prompt goes on from."""

    def index_name(self, key: BlockKey) -> ObjectName:
        """Of a beginning whose last block has this key. Pure."""
        ...

    def choose(
        self, meta: bytes, key: BlockKey, history_tokens: int, rest: Sequence[int]
    ) -> ObjectName | None:
        """The state for a prompt of which `rest` follows that beginning of so many tokens; None if
        `meta` is no index of it. Pure."""
        ...


@dataclass(slots=True, eq=False)
class Retained:
    """The state of one sequence with a policy.

    `plain` leading tokens are, or may come to be, those of the plain chain of tokens, which caches
    know: no more are taken from a cache, nor given to one once a round has `begun`. One that
    `resumed` went on from the state of an earlier turn, and has what that one's policy fixed.
    """

    policy: RetentionPolicy
    fixed: int
    kept: int
    limit: int
    plain: int
    positions: Ints | None = None  # [R, stored at the last round]; None before the first
    begun: bool = False  # slots of dropped tokens may be overwritten
    resumed: bool = False
    lineage: int | None = None  # `fixed` with which tokens were emitted: what it goes on with

    @classmethod
    def of(cls, policy: RetentionPolicy, prompt_tokens: int) -> Retained:
        """Of a sequence with nothing computed."""
        quota = policy.quota
        limit = quota.limit(prompt_tokens)
        return cls(
            policy,
            quota.fixed(prompt_tokens),
            quota.kept(prompt_tokens),
            limit,
            prompt_tokens if quota.suffix else min(prompt_tokens, limit - 1),
        )

    def fork(self) -> Retained:
        """The same for a sequence that goes on from here."""
        return replace(self)

    def restart(self, prompt_tokens: int) -> None:
        """The sequence gave its blocks back: everything is computed, and chosen, again."""
        own = Retained.of(self.policy, prompt_tokens)
        self.fixed, self.kept, self.limit, self.plain = own.fixed, own.kept, own.limit, own.plain
        self.positions, self.begun, self.resumed = None, False, False

    def follow(self, fixed: int, plain: int) -> None:
        """The sequence, of which no more than its plain prefix is computed, is to go on from the
        state of a turn whose prompt had `fixed` tokens."""
        assert not self.begun
        quota = self.policy.quota
        self.fixed, self.kept, self.limit = fixed, quota.kept(fixed), quota.limit(fixed)
        self.plain = plain

    def positions_of(self, computed: int, stored: int) -> Ints:
        """[R, stored] logical positions when `computed` tokens are."""
        if self.positions is None:
            return np.arange(stored, dtype=np.int32)[None]
        rows, known = self.positions.shape
        new = np.arange(computed - (stored - known), computed, dtype=np.int32)
        return np.concatenate([self.positions, np.broadcast_to(new, (rows, len(new)))], axis=1)


def newest(view: PageView, count: int) -> Mask:
    """[R, n]: the fixed slots, and of the rest those with the `count` largest positions."""
    chosen = np.zeros(view.positions.shape, dtype=np.bool_)
    chosen[:, : view.fixed] = True
    chosen |= view.positions >= view.computed - count
    return chosen
