"""EpiCache: a long conversation's KV as a few small caches, one per topic, made beforehand."""
