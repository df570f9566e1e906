"""What crosses the EngineClient seam: plain frozen values, no shared objects, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from seams.errors import BanyanError
from worker.engine.sampling import SamplingParams


class Finish(IntEnum):
    """Why a choice ended; the numbers are banyan.v1.FinishReason's."""

    STOP = 1
    LENGTH = 3
    CANCELLED = 4
    ERROR = 5


@dataclass(frozen=True)
class EngineRequest:
    """One accepted request. `token_ids` = prompt, then `len - prompt_tokens` already emitted ids.

    Emitted ids (a resumed or moved stream) need n == 1. `deadline_s` is on the engine's Clock, None
    = none. `credit_tokens` bounds how many tokens each choice may emit before `grant` adds more.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    tenant: str = "default"
    salt: bytes = b""
    private_from: int = 0
    priority: int = 0
    deadline_s: float | None = None
    credit_tokens: int = 1 << 30
    no_cache: bool = False
    adapter: int = 0  # of ModelSpec.adapters, from 1; 0 = the base model
    retention: str = ""  # a policy (worker/engine/retention/policies.py); "" = the replica's


@dataclass(frozen=True)
class RequestUsage:
    """cached + computed == prompt tokens, always; recomputed is apart from both."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    recomputed_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Logprobs:
    """Of one emitted token: (id, logprob) of the chosen one, and the top k, most likely first."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # frozen takes five times as long, and one is made per token
class Emission:
    """New tokens of one choice in one step. `position` is the first id's, from 0 at the first
    generated token (ids given at submit count). `last` is set once per request, exactly once, on
    its final emission; `error` then says why it failed, if it did; `usage` comes with `last`.
    Never changed once made.
    """

    request_id: str
    choice: int
    position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish: Finish | None = None
    error: BanyanError | None = None
    usage: RequestUsage | None = None
    last: bool = False


def refusal(spec: EngineRequest, error: BanyanError) -> Emission:
    """The one emission of a request that never gets in."""
    position = max(0, len(spec.token_ids) - spec.prompt_tokens)
    usage = RequestUsage(0, 0, 0, position)
    return Emission(
        spec.request_id, 0, position, finish=Finish.ERROR, error=error, usage=usage, last=True
    )


class CacheOpKind(IntEnum):
    """Numbers of banyan.v1.BlockOp.Kind."""

    STORED = 1
    REMOVED = 2


@dataclass(frozen=True)
class CacheOp:
    """A tier (0 = the device: the radix cache) gained or lost full blocks of a group; keys parent
    first. The numbers of tiers are banyan.v1.Tier's."""

    kind: CacheOpKind
    group: int
    keys: tuple[bytes, ...]
    tier: int = 0


@dataclass(frozen=True)
class Forgotten:
    """What a reset of the prefix cache came to, in blocks of group 0: those that the cache had, and
    how many of them running requests go on using."""

    blocks: int
    in_use: int


@dataclass
class Compacted:
    """What retention came to, since the start."""

    rounds: int = 0
    dropped_tokens: int = 0
    freed_blocks: int = 0  # net of those taken, over all groups
    moved_bytes: int = 0
    waited: int = 0  # rounds that found no block to copy shared ones into, and came later
    objects_kept: int = 0  # states of sequences that ended, put into the tiers
    objects_resumed: int = 0  # times a sequence went on from one
    resumed_tokens: int = 0  # tokens that were not computed because of it


@dataclass(frozen=True)
class EngineLoad:
    """A snapshot for heartbeats. Blocks are of group 0; times are smoothed, 0 = not measured.
    `waiting` and `queued_prefill_tokens` leave out what waits for credit. `blocks_cached` are
    those eviction could free. `blocks_low` is the least that ever was free or could be freed.
    `compacted` is None without retention. `stalled`: the engine failed for good. `kv_token_bytes`:
    bytes of all groups' blocks in use, per position that those of group 0 have; 0 = none is.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    queued_prefill_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    prefill_s_per_token: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stalled: bool = False
    blocks_low: int = 0
    compacted: Compacted | None = None
    kv_token_bytes: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """What one step of the engine made visible: tokens and cache changes, in order."""

    step: int
    emissions: tuple[Emission, ...] = ()
    cache_ops: tuple[CacheOp, ...] = ()
    load: EngineLoad = field(default_factory=EngineLoad)
