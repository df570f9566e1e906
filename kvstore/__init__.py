"""Block identity, KV groups and representations; later the tiers."""
