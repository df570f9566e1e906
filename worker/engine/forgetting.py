"""Forgetting the prefix cache at once, under running requests. It knows blocks and sequences; no
text, no tier, no clock.

What runs goes on with the blocks that it holds, and leaves nothing in the cache any more: so
nothing computed before is found by a request that is matched afterwards. What waits computes its
prompt anew, and is cached as ever.
"""

from __future__ import annotations

from worker.engine.messages import Forgotten
from worker.engine.scheduler import Scheduler


def forget_cache(scheduler: Scheduler) -> Forgotten:
    """Empty the cache between two steps, without copies for the tiers; blocks that nobody else
    holds are free. The REMOVED ops are among the cache's next ones. O(nodes and their blocks)."""
    memory, cache = scheduler.memory, scheduler.memory.cache
    for sequence in scheduler.running:
        sequence.request.cacheable = False
        memory.unlock(sequence)
    if cache is None:
        return Forgotten(0, 0)
    known = list(cache.holders()[0])
    cache.forget()
    pool = memory.pools[0]
    return Forgotten(len(known), sum(pool.references(block) > 0 for block in known))
