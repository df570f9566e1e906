"""Who picks the replica: ours, and others' re-written from their descriptions."""
