"""EpiCache: a sequence whose prompt begins with a conversation that was clustered before goes on
from the episode that its question is about. It knows ids and names; no tier and no pool.

Source: Kim et al., "EpiCache" (arXiv:2509.17396); worker/episodes makes the episodes. Nothing is
pruned while a sequence runs: a prompt of which no episode is there is computed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.keys import BlockKey
from kvstore.objectnames import ObjectName
from worker.engine.retention.base import Mask, PageView, Quota
from worker.episodes.base import EpisodeOptions
from worker.episodes.outline import nearest
from worker.episodes.record import decode_index, episode_name, index_name


@dataclass(frozen=True)
class EpiCache:
    """Implements RetentionPolicy, and Prepared. `quota` is one that no sequence reaches. What it
    fixes is the prompt of a sequence that is computed whole, and of an episode its sinks: the two
    are told apart by it, so that a stream goes on as it began (Retained.lineage)."""

    options: EpisodeOptions
    quota: Quota
    reads_keys: bool = False
    resume: bool = False

    @classmethod
    def of(cls, options: EpisodeOptions, context_tokens: int) -> EpiCache:
        """Of a model with this context."""
        return cls(options, Quota(context_tokens, interval_tokens=1))

    @property
    def state_hash(self) -> str:
        """See RetentionPolicy."""
        return self.options.state_hash

    def select(self, view: PageView) -> Mask:
        """Never asked: no sequence is as long."""
        raise AssertionError("a sequence longer than the model's context")

    def index_name(self, key: BlockKey) -> ObjectName:
        """See Prepared."""
        return index_name(key, self.options)

    def choose(
        self, meta: bytes, key: BlockKey, history_tokens: int, rest: Sequence[int]
    ) -> ObjectName | None:
        """See Prepared."""
        index = decode_index(meta)
        if index is None or index.history_tokens != history_tokens:
            return None
        return episode_name(key, self.options, nearest(index, rest))
