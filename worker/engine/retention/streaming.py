"""StreamingLLM: the first tokens and the last ones stay. Knows nothing of what they say.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (ICLR 2024). Keys
keep the rotation of their own positions, as all of our policies have it; the paper counts positions
inside the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.retention.base import Mask, PageView, Quota, newest


@dataclass(frozen=True)
class Streaming:
    """The fixed tokens (the prompt, or the sinks of a sequence) and the newest others."""

    quota: Quota
    reads_keys: bool = False
    resume: bool = False

    @property
    def state_hash(self) -> str:
        """See RetentionPolicy."""
        return f"streaming/1 {self.quota}"

    def select(self, view: PageView) -> Mask:
        """See RetentionPolicy."""
        return newest(view, view.kept - view.fixed)
